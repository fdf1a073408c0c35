"""The bench folder: what it records, how it counts and compares, and that tables come from records alone."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_replay.bench import main as commands
from gpu_replay.bench import peers_suite, report, subjects
from gpu_replay.bench.cases import Case, chosen, cycle_cases, index_cases, short, step_cases
from gpu_replay.bench.environment import current_environment
from gpu_replay.bench.index_subject import IndexSubject
from gpu_replay.bench.peers_table import best_peer
from gpu_replay.bench.record import SCHEMA, Environment, Record
from gpu_replay.bench.results import read, write
from gpu_replay.bench.rows import ROW_BYTES, make_rows, mismatches
from gpu_replay.bench.runner import Refused, check, fill
from gpu_replay.bench.subjects import MissingPeer, Peer, ReplaySubject, Task, make_peer
from gpu_replay.bench.timing import Plan, Timing, copy_bandwidth, measure, quantiles

CPU = torch.device("cpu")
ENVIRONMENT = Environment(
    device="cpu",
    cpu="Test CPU",
    cores=2,
    threads=1,
    load=0.5,
    versions={"python": "3.11.7", "torch": "2.13.0", "triton": None},
    commit="0123456789ab",
    date="2026-01-02T03:04:05+00:00",
)


def record(case: str = "cycle/N=1M/B=256", median: float = 100.0, **changes: Any) -> Record:
    operation, capacity, batch = case.split("/")
    values: dict[str, Any] = {
        "suite": "cpu",
        "case": case,
        "operation": operation,
        "implementation": "gpu_replay",
        "capacity": {"N=10k": 10_000, "N=1M": 1_000_000}[capacity],
        "batch": int(batch.removeprefix("B=")),
        "added": 8,
        "fields": {"obs": ["float32", [4]]},
        "unit": "us",
        "quantiles": {"p10": median / 2, "p50": median, "p90": median * 2},
        "repetitions": 100,
        "warmup": 3,
        "bytes": 37_000,
        "copy_bandwidth": 10e9,
        "copy_share": 0.037,
        "quick": False,
        "environment": ENVIRONMENT,
    }
    return Record(**{**values, **changes})


# records


def test_a_record_survives_its_line() -> None:
    original = record()
    line = original.line()
    assert "\n" not in line
    assert Record.parse(line) == original


def test_a_line_carries_what_a_reader_needs_to_repeat_it() -> None:
    values = json.loads(record().line())
    assert values["schema"] == SCHEMA
    assert set(values["quantiles"]) == {"p10", "p50", "p90"}
    for name in ("case", "capacity", "batch", "fields", "bytes", "copy_bandwidth", "copy_share", "repetitions"):
        assert name in values
    assert set(values["environment"]) >= {"device", "cpu", "threads", "versions", "commit", "date"}


@pytest.mark.parametrize(
    "line",
    ["not json", "[1, 2]", '{"schema": 1}', record().line().replace(f'"schema": {SCHEMA}', '"schema": 99')],
    ids=["text", "list", "fields missing", "another schema"],
)
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a benchmark record"):
        Record.parse(line)


def test_a_figure_that_is_no_number_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record(median=float("nan")).line()


def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "cpu.jsonl"
    file.write_text(record().line() + "\n{}\n")
    with pytest.raises(ValueError, match=r"cpu\.jsonl, line 2"):
        read(file)


def test_writing_renews_the_same_case_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cpu.jsonl"
    write(file, [record("cycle/N=1M/B=32", 1.0), record("cycle/N=1M/B=256", 2.0)])
    write(file, [record("cycle/N=1M/B=32", 3.0)])
    assert {(r.case, r.median) for r in read(file)} == {("cycle/N=1M/B=32", 3.0), ("cycle/N=1M/B=256", 2.0)}
    assert [path.name for path in file.parent.iterdir()] == ["cpu.jsonl"]


def test_another_machine_does_not_replace_a_record(tmp_path: Path) -> None:
    file = tmp_path / "cpu.jsonl"
    write(file, [record()])
    write(file, [record(environment=dataclasses.replace(ENVIRONMENT, cpu="Other CPU"))])
    assert len(read(file)) == 2


def test_the_environment_names_versions_and_machine() -> None:
    found = current_environment(CPU)
    assert found.device == "cpu"
    assert found.cpu
    assert found.cores >= 1
    assert found.versions["torch"] == torch.__version__
    assert found.versions["numpy"] == np.__version__
    assert found.versions["gpu_replay"]


# timing


def test_quantiles_by_hand() -> None:
    # eleven values: the quantiles are the second, the sixth and the tenth
    values = np.array([10, 0, 30, 20, 40, 50, 60, 70, 80, 90, 100.0])
    assert quantiles(values) == {"p10": 10.0, "p50": 50.0, "p90": 90.0}
    assert quantiles(np.array([7.0])) == {"p10": 7.0, "p50": 7.0, "p90": 7.0}
    with pytest.raises(ValueError, match="at least one"):
        quantiles(np.array([]))


def test_a_timing_is_in_microseconds_and_parts_join() -> None:
    joined = Timing.joined([Timing(np.array([1000, 3000]), 2), Timing(np.array([2000]), 5)])
    assert joined.microseconds()["p50"] == 2.0
    assert (joined.repetitions, joined.warmup) == (3, 7)


def test_preparation_is_outside_the_measured_time() -> None:
    plan = Plan(warmup=0, seconds=0, fewest=5, most=5)
    timing = measure(lambda: None, prepare=lambda: time.sleep(0.01), plan=plan, device=CPU)
    assert timing.repetitions == 5
    assert timing.microseconds()["p50"] < 5000


def test_the_call_is_inside_the_measured_time_and_prepared_each_time() -> None:
    prepared = 0

    def prepare() -> None:
        nonlocal prepared
        prepared += 1

    plan = Plan(warmup=0, seconds=0, fewest=4, most=9, flush=4096)
    timing = measure(lambda: time.sleep(0.005), prepare=prepare, plan=plan, device=CPU)
    assert timing.microseconds()["p10"] >= 5000
    assert timing.repetitions == 4
    assert prepared == timing.repetitions + timing.warmup


def test_repetitions_stay_within_the_plan() -> None:
    plan = Plan(warmup=0, seconds=10, fewest=1, most=7)
    assert measure(lambda: None, prepare=lambda: None, plan=plan, device=CPU).repetitions == 7


def test_copy_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < copy_bandwidth(CPU, nbytes=2**22, repetitions=3) < 1e13


# cases


def test_bytes_that_must_move_by_hand() -> None:
    row = 4 * 4 + 8 + 4 + 4 * 4 + 1
    assert row == ROW_BYTES
    add = 8 * (2 * row + 8 + 8)
    sample = 32 * (2 * row + 8 + 8 + 4 + 4)
    update = 32 * (8 + 4 + 8 + 8)
    assert Case("add", 1000, 8, 8).bytes == add
    assert Case("sample", 1000, 32, 0).bytes == sample
    assert Case("update", 1000, 32, 0).bytes == update
    assert Case("cycle", 1000, 32, 8).bytes == add + sample + update
    assert Case("index", 1000, 32, 0).bytes == 32 * (8 + 8) + update


def test_the_registry_covers_the_sizes_that_are_to_be_beaten() -> None:
    names = [case.name for case in step_cases() + index_cases()]
    assert len(names) == len(set(names))
    compared = {case.name for part in peers_suite.parts(peers_suite.Sizes(), CPU) for case in part.cases}
    # what is measured alone has its baseline among the peers
    assert {name for name in names if name.startswith("cycle/")} <= compared
    for operation in ("sample", "update", "cycle"):
        for capacity in ("10k", "100k", "1M"):
            for batch in (32, 256, 4096):
                assert f"{operation}/N={capacity}/B={batch}" in names


@pytest.mark.parametrize("count, text", [(97, "97"), (10_000, "10k"), (1_500, "1500"), (10_000_000, "10M")])
def test_short_sizes(count: int, text: str) -> None:
    assert short(count) == text


@pytest.mark.parametrize(
    "pattern, count",
    [(None, 9), ("N=10k", 3), ("B=256", 3), ("cycle/*", 9), ("*N=1M/B=32", 1), ("cycle/N=100k/B=4096", 1), ("0k", 6)],
)
def test_a_pattern_chooses_cases(pattern: str | None, count: int) -> None:
    assert len(chosen(cycle_cases(), pattern)) == count


def test_a_pattern_without_a_case_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="'B=7' matches no case.*cycle/N=10k/B=32"):
        chosen(cycle_cases(), "B=7")


# what is measured must work


def test_mixed_up_rows_are_noticed() -> None:
    rows = {name: torch.from_numpy(values) for name, values in make_rows(64, np.random.default_rng(3)).items()}
    assert mismatches(rows) == []
    assert mismatches({**rows, "reward": rows["reward"].roll(1)}) == ["reward"]
    assert mismatches({**rows, "next_obs": rows["obs"]}) == ["next_obs"]
    assert mismatches({**rows, "next_obs": rows["obs"]}, has_next_obs=False) == []


class WrongRows(ReplaySubject):
    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        found = dict(super().fields(sampled))
        return {**found, "action": found["action"] + 1, "weight": found["weight"] * 0}


def test_a_subject_that_gives_wrong_answers_is_not_measured() -> None:
    right, wrong = ReplaySubject(1000, CPU), WrongRows(1000, CPU)
    for subject in (right, wrong):
        fill(subject, 1000, CPU, rounds=2)
    check(right, "right")
    with pytest.raises(Refused, match=r"wrong is not measured: sampled 'action' .*; the weights"):
        check(wrong, "wrong")


def test_the_index_alone_keeps_its_total_exact() -> None:
    subject = IndexSubject(1000)
    fill(subject, 1000, CPU, rounds=8)
    assert subject.wrong() == []
    slots, masses = subject.sample(64)
    assert slots.min() >= 0
    assert slots.max() < 1000
    assert masses.min() >= 1


def test_a_missing_peer_is_skipped_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(subjects.PEERS, "absent", Peer("absent_buffer", "absent-library"))
    with pytest.raises(MissingPeer, match=r"absent skipped: .*pip install absent-library"):
        make_peer("absent", Task(100, 8))


# comparison and tables


def test_the_best_baseline_is_a_peer_measured_on_the_same_cpu() -> None:
    case = "cycle/N=1M/B=256"
    slow, fast = (record(suite="peers", implementation=name, median=m) for name, m in (("a", 300.0), ("b", 250.0)))
    ours, trial = record(suite="peers", median=10.0), record(median=1.0, suite="peers", implementation="a", quick=True)
    assert best_peer(case, [slow, fast, ours, trial], "Test CPU") == fast
    assert best_peer(case, [slow, fast], "Other CPU") is None
    assert best_peer("sample/N=10k/B=32", [slow, fast], "Test CPU") is None


def test_a_table_is_aligned_markdown() -> None:
    assert report.table(["case", "µs"], [["a", "1,234"], ["longer", "5"]]) == (
        "| case   |    µs |\n| ------ | ----: |\n| a      | 1,234 |\n| longer |     5 |"
    )


@pytest.mark.parametrize("value, text", [(0.1234, "0.12"), (9.876, "9.88"), (12.34, "12.3"), (1234.5, "1,234")])
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_cycle_table_gives_the_speedup_over_the_best_peer() -> None:
    ours = [record("cycle/N=1M/B=32", 126.0), record("cycle/N=1M/B=256", 104.5)]
    peers = [record(case.case, 63.0, suite="peers", implementation="a") for case in ours]
    assert report.cycle_table(ours, peers).splitlines()[2] == "| N = 1M         | 126 (0.50x) | 104 (0.60x) |"
    assert report.cycle_table(ours).splitlines()[2] == "| N = 1M         |    126 |     104 |"


def test_the_peers_table_compares_with_the_best_other_one() -> None:
    records = [
        record(suite="peers", implementation=n, median=m) for n, m in (("ours", 50.0), ("a", 200.0), ("b", 100.0))
    ]
    line = report.peers_table(records).splitlines()[2]
    assert line.replace(" ", "") == "|cycle,N=1M,B=256|50.0|200|100|2.00x|"


def test_a_table_states_its_conditions_and_its_command() -> None:
    text = report.section("cpu", [record()])
    for part in ("Test CPU (2 cores, 1 thread)", "torch 2.13.0", "0123456789ab", "2026-01-02", "10.0 GB/s"):
        assert part in text
    assert text.endswith("Reproduce: `gpu-replay bench cpu`.")
    assert "QUICK RUN" in report.section("cpu", [record(quick=True)])


def test_machines_do_not_share_a_table() -> None:
    other = record(median=50.0, environment=dataclasses.replace(ENVIRONMENT, cpu="Other CPU"))
    text = report.section("cpu", [record(), other])
    assert text.count("| N = 1M") == 2
    assert text.index("Test CPU") < text.index("Other CPU")


DOCUMENT = (
    "# Title\n\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\n\ntext\n\n<!-- bench:gpu --><!-- /bench:gpu -->\nend\n"
)


def test_marked_places_are_renewed_and_nothing_else() -> None:
    once = report.updated(DOCUMENT, [record()])
    assert "old" not in once
    assert "| N = 1M" in once
    assert "Not measured yet: `gpu-replay bench gpu`." in once
    assert once.startswith("# Title\n\n<!-- bench:cpu -->\n")
    assert once.endswith("<!-- /bench:gpu -->\nend\n")
    assert "\n\ntext\n\n" in once
    assert report.updated(once, [record()]) == once


def test_a_wrong_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="not closed"):
        report.updated("<!-- bench:cpu -->\n", [record()])
    with pytest.raises(KeyError, match="no table is called 'cpus'"):
        report.updated("<!-- bench:cpus --><!-- /bench:cpus -->", [record()])


# the command


def test_bench_cpu_measures_records_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, document = tmp_path / "cpu.jsonl", tmp_path / "PAGE.md"
    threads = torch.get_num_threads()
    assert commands.main(["cpu", "--quick", "--output", str(file)]) == 0
    assert torch.get_num_threads() == threads
    records = read(file)
    assert {r.operation for r in records} == {"add", "sample", "update", "cycle", "index", "memory"}
    for each in records:
        assert each.quick
        assert each.environment.threads == 1
        assert 0 < each.quantiles["p10"] <= each.quantiles["p50"] <= each.quantiles["p90"]
        if each.unit == "us":
            implied = each.bytes / (each.median / 1e6) / each.copy_bandwidth
            assert each.copy_share == pytest.approx(implied, rel=1e-2, abs=1e-5)
    (memory,) = (r for r in records if r.operation == "memory")
    assert memory.counted is not None
    assert memory.bytes < 0.95 * memory.counted < memory.median < 1.5 * memory.counted
    printed = capsys.readouterr().out
    assert all(each.case in printed for each in records)

    assert commands.main(["cpu", "--quick", "--only", "cycle/N=10k/B=32", "--output", str(file)]) == 0
    assert len(read(file)) == len(records)

    document.write_text(DOCUMENT)
    assert commands.main(["report", str(file), "--update", str(document)]) == 0
    renewed = document.read_text()
    assert "| N = 10k" in renewed
    assert commands.main(["report", str(file), "--update", str(document)]) == 0
    assert document.read_text() == renewed
    assert commands.main(["report", str(file)]) == 0
    assert "## memory" in capsys.readouterr().out


def test_bench_peers_measures_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers.jsonl"
    arguments = ["peers", "--quick", "--only", "B=32", "--peer", "python_sum_tree", "--output", str(file)]
    assert commands.main(arguments) == 0
    both, ours = ["gpu_replay", "python_sum_tree"], ["gpu_replay"]
    found = read(file)
    assert [r.operation for r in found] == ["cycle", "cycle", "frame-cycle", "frame-cycle", "index"]
    assert [r.implementation for r in found] == [*both, *both, *ours]
    assert "python_sum_tree" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["cpu", "--only", "B=7"], 2, "matches no case"),
        (["report", "nothing-here.jsonl"], 1, "nothing-here.jsonl"),
    ],
)
def test_a_run_that_cannot_be_made_says_why_in_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(arguments) == status
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["cpu", "--nonsense"], ["peers", "--peer", "nobody"]])
def test_bad_arguments_end_with_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(arguments)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_bench_gpu_without_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["gpu", "--quick"]) == 1
    assert "needs a CUDA or ROCm device" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_gpu_measures_and_records(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    assert commands.main(["gpu", "--quick", "--output", str(file)]) == 0
    records = read(file)
    assert {r.operation for r in records} == {"add", "sample", "update", "cycle", "frames", "frame-add", "frame-cycle"}
    assert {r.timing for r in records} == {"events", "graph"}
    assert all(r.environment.device == torch.cuda.get_device_name() for r in records)
