"""The bench folder: what it records, how it counts, and what its commands do with cases that work and that do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_records import ENVIRONMENT, GPU, Capture, Patch, quicker, record

from gpu_replay.bench import main as commands
from gpu_replay.bench import peers_suite, report
from gpu_replay.bench.main import Work
from gpu_replay.bench.measure import Plan, Run, check, fill, measure
from gpu_replay.bench.operations import Case, chosen, cycle_cases
from gpu_replay.bench.records import CannotMeasure, Record, read, write
from gpu_replay.bench.subjects import ROW_BYTES, Sampled, replay
from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.progress import Progress

CPU = torch.device("cpu")

# records


def test_a_record_survives_its_line_and_another_line_is_refused(tmp_path: Path) -> None:
    line, file = record().line(), tmp_path / "cpu.jsonl"
    assert "\n" not in line
    assert Record.parse(line) == record()
    for other in ("not json", '{"schema": 1}', line.replace('a": 1', 'a": 99')):
        file.write_text(f"{line}\n{other}\n")
        with pytest.raises(UserError, match=r"cpu\.jsonl, line 2: not a benchmark record"):
            read(file)


def test_writing_renews_the_same_case_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cpu.jsonl"
    write(file, [record("cycle/N=1M/B=32", 1.0), record(median=2.0)])
    other = replace(ENVIRONMENT, cpu="Other CPU")
    write(file, [record("cycle/N=1M/B=32", 3.0), record(median=4.0, environment=other)])
    assert [r.median for r in read(file)] == [2.0, 3.0, 4.0]
    assert [path.name for path in file.parent.iterdir()] == ["cpu.jsonl"]
    # the same case timed in two ways is two records
    events, graph = (record(environment=GPU, timing=way) for way in ("events", "graph"))
    assert events.identity != graph.identity


# timing and cases


def test_the_call_is_measured_and_its_preparation_is_not() -> None:
    log: list[str] = []

    def call() -> None:
        log.append("call")
        time.sleep(0.002)

    def prepare() -> None:
        log.append("prepare")
        time.sleep(0.02)

    timing = measure(call, prepare=prepare, plan=Plan(0, 0, fewest=4, most=9, flush=4096), device=CPU)
    assert timing.nanoseconds.size == 4
    assert 2000 <= np.quantile(timing.nanoseconds, 0.1) / 1000 <= np.median(timing.nanoseconds) / 1000 < 20_000
    assert log == ["prepare", "call"] * (timing.nanoseconds.size + timing.warmup)
    assert measure(int, prepare=int, plan=Plan(0, 10, fewest=1, most=7), device=CPU).nanoseconds.size == 7


def test_bytes_that_must_move_by_hand() -> None:
    row = 4 * 4 + 8 + 4 + 4 * 4 + 1
    assert row == ROW_BYTES
    add, update = 8 * (2 * row + 8 + 8), 32 * (8 + 4 + 8 + 8)
    sample, frame = 32 * (2 * row + 8 + 8 + 4 + 4), 84 * 84
    expected = {
        Case("cycle", 1000, 32, 8): add + sample + update,
        Case("frame-cycle", 1000, 32, 8): 2 * 32 * 2 * 4 * frame + 2 * 8 * frame,
        Case("storage-blocks", 1000, 64, 64): 64 * (2 * row + 8),
        Case("prefix-sum", 1000, 0): 1000 * (8 + 8),
        Case("draw-update", 1000, 32): 32 * (8 + 8) + update,
        Case("row-gather", 1000, 32): 32 * (8 + row + row),
        Case("frame-gather-bf16", 1000, 32): 32 * (8 + 2 * 4 * (frame + 2 * frame)),
    }
    assert {case: case.bytes for case in expected} == expected


def test_a_pattern_chooses_cases() -> None:
    for pattern, skipped, count in (
        ("N=10k", [], 3),
        ("cycle/*", ["*N=1M*"], 6),
        ("cycle/*", ["N=1M"], 6),
        ("N=10k", ["32", "B=2"], 1),
        ("*N=1M/B=32", [], 1),
        ("0k", [], 6),
    ):
        assert len(chosen(cycle_cases(), pattern, skipped)) == count
    with pytest.raises(UserError, match="'B=7' matches no case.*cycle/N=10k/B=32"):
        chosen(cycle_cases(), "B=7")


def test_a_subject_that_gives_wrong_answers_is_not_measured() -> None:
    right = replay(300)
    fill(right, 300, CPU, rounds=2)
    check(right, "right")

    def mixed(batch: int) -> Sampled:
        keys, found = right.sample(batch)
        wrong = {"reward": found["reward"].roll(1), "next_obs": found["obs"], "weight": found["weight"] * 0}
        return keys, {**found, **wrong}

    with pytest.raises(CannotMeasure, match=r"sampled 'reward' .*; sampled 'next_obs' .*; the weights"):
        check(replace(right, sample=mixed), "wrong")


# tables


def test_the_best_baseline_is_the_fastest_on_the_same_machine() -> None:
    fast = record(median=250.0, implementation="b", suite="peers")
    others = [
        fast,
        record(median=300.0, implementation="a"),
        record(median=10.0),
        # which does less work: without priorities, or a part of it
        record(median=1.0, implementation="stable_baselines3"),
        record(median=1.0, implementation="part alone"),
        record(median=1.0, implementation="a", quick=True),
        record(median=1.0, implementation="a", environment=replace(ENVIRONMENT, cpu="Other CPU")),
        record(median=1.0, implementation="a", timing="events"),
        record("cycle/N=1M/B=32", 1.0, "a"),
    ]
    assert report.best_baseline(record(), others) == fast
    assert report.best_baseline(record("sample/N=1M/B=256"), others) is None


DOCUMENT = "# T\n\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\n\ntext\n\n<!-- bench:gpu --><!-- /bench:gpu -->\nend\n"


def test_marked_places_are_renewed_and_nothing_else() -> None:
    once = report.updated(DOCUMENT, [record()])
    assert "old" not in once
    assert "| cycle/N=1M" in once
    assert "Not measured yet: `gpu-replay bench gpu`." in once
    assert report.updated(once, [record()]) == once
    with pytest.raises(UserError, match="not closed"):
        report.updated("<!-- bench:cpu -->\n", [record()])
    with pytest.raises(UserError, match="no table is called 'cpus'"):
        report.updated("<!-- bench:cpus --><!-- /bench:cpus -->", [record()])


# the command


def test_bench_cpu_measures_records_and_prints(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    quicker(monkeypatch)
    file, document = tmp_path / "cpu.jsonl", tmp_path / "PAGE.md"
    threads = torch.get_num_threads()
    assert (commands.main(["cpu", "--quick", "--output", str(file)]), torch.get_num_threads()) == (0, threads)
    records = read(file)
    assert {r.operation for r in records} == {"add", "sample", "update", "cycle"}
    for each in records:
        assert each.quick
        assert (each.environment.threads, each.environment.versions["torch"]) == (1, torch.__version__)
        assert 1e8 < each.copy_bandwidth < 1e13
        assert 0 < each.quantiles["p10"] <= each.quantiles["p50"] <= each.quantiles["p90"]
        implied = each.bytes / (each.median / 1e6) / each.copy_bandwidth
        assert each.copy_share == pytest.approx(implied, rel=1e-2, abs=1e-5)
    printed = capsys.readouterr().out
    assert all(each.case in printed for each in records)
    document.write_text(DOCUMENT)
    for outcome in ("renewed", "already as recorded"):
        assert commands.main(["report", str(file), "--update", str(document)]) == 0
        assert f"{document}: {outcome}" in capsys.readouterr().out
        assert "| cycle/N=10k" in document.read_text()
    assert commands.main(["report", str(file)]) == 0
    printed = capsys.readouterr().out
    assert ("## cpu" in printed, "QUICK RUN, not to be quoted" in printed) == (True, True)


def test_bench_peers_measures_those_there_are(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    quicker(monkeypatch)
    sizes = peers_suite.Sizes((1_000,), 300, batches=(32,), many=(), stepped=100, slots=300)
    monkeypatch.setattr(peers_suite, "QUICK", sizes)
    file = tmp_path / "peers.jsonl"
    flags = ["--quick", "--only", "B=32", "--peer", "python_sum_tree", "--output", str(file)]
    assert commands.main(["peers", *flags]) == 0
    both, found = ["gpu_replay", "python_sum_tree"], read(file)
    compared = {"cycle": both, "uniform-cycle": both[:1], "frame-cycle": both}
    compared["ratio-rank"] = ["Proportional", "RankBased"]
    assert [(r.operation, r.implementation) for r in found] == [(of, name) for of in compared for name in compared[of]]
    assert "python_sum_tree" in capsys.readouterr().out


def test_each_record_is_written_as_soon_as_it_is_there(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "cpu.jsonl"
    cases = [Case("cycle", 10**6, batch, 8) for batch in (32, 256, 4096)]

    def measured(run: Run, given: list[Case], progress: Progress) -> Iterator[Record]:
        for count, case in enumerate(given[:2], 1):
            yield record(case.name)
            assert len(read(file)) == count
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.SUITES, "cpu", (lambda options: Work([(cases, measured)]), "nothing"))
    assert commands.main(["cpu", "--quick", "--output", str(file)]) == 130
    assert len(read(file)) == 2


def test_a_run_that_cannot_be_made_says_why_and_a_mistake_of_ours_has_a_traceback(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (("report none.jsonl", "none.jsonl"), ("gpu", "bench gpu needs a CUDA or ROCm device")):
        assert main(["bench", *arguments.split()]) == 1
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert message in error

    def mistaken(options: object) -> Work:
        raise ValueError("a table of ours")

    monkeypatch.setitem(commands.SUITES, "cpu", (mistaken, "nothing"))
    with pytest.raises(ValueError, match="a table of ours"):
        main(["bench", "cpu"])


@pytest.mark.gpu
def test_bench_gpu_measures_and_records(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    assert commands.main(["gpu", "--quick", "--output", str(file)]) == 0
    records = read(file)
    assert {r.operation for r in records} == {"add", "sample", "update", "cycle", "frames", "frame-add", "frame-cycle"}
    assert {r.timing for r in records} == {"events", "graph"}
    assert all(r.environment.device == torch.cuda.get_device_name() for r in records)
