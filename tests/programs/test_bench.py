"""The bench folder: what it records, how it counts, and what its commands do with cases that work and that do not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bench_records import ENVIRONMENT, GPU, Capture, Patch, quicker, record
from fake_cuda import FakeCuda
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay.bench import checkpoint, host_time, lower_bound, memory, peers_suite, plots, report, scale, storage
from gpu_replay.bench import main as commands
from gpu_replay.bench import measure as measuring
from gpu_replay.bench.main import Work
from gpu_replay.bench.measure import CALLS_PER_GRAPH, Plan, Run, Timing, captured, check, fill, flush_bytes, measure
from gpu_replay.bench.operations import Case, chosen, cycle_cases
from gpu_replay.bench.records import CannotMeasure, Record, read, write
from gpu_replay.bench.storage import CHUNK, LAYOUTS
from gpu_replay.bench.subjects import FRAME_BYTES, ROW_BYTES, Sampled, replay
from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.progress import Progress

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

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


# timing on a GPU: graphs of calls, what is done where one cannot be captured, and empty caches


def fixed_clock(monkeypatch: Patch, nanoseconds: int) -> None:
    """Every call takes the same time."""

    def clock(call: Callable[[], object], prepare: Callable[[], object], repetitions: int) -> np.ndarray:
        for _ in range(repetitions):
            prepare()
            call()
        return np.full(repetitions, nanoseconds, dtype=np.int64)

    monkeypatch.setattr(measuring, "clock_for", lambda device: clock)
    # a collection of the whole heap takes longer than the test
    monkeypatch.setattr(measuring.gc, "collect", int)


def timed(bound: dict[str, Any], way: measuring.How, rounds: int = 1, flush: int = 0) -> dict[str, Record]:
    """The records of one case timed in one way."""
    plan = Plan(warmup=0, seconds=0, fewest=3, most=3)
    run = Run("gpu", CUDA, plan, GPU, 1e9, False, versions={}, rounds=rounds, way=way)
    with Progress(1, "test") as progress:
        records = run.timed(Case("sample", 1000, 32), bound, progress, flush)
        return {each.implementation: each for each in records}


@pytest.mark.parametrize("refuses", [False, True])
def test_a_call_is_replayed_or_else_timed_by_events(refuses: bool, monkeypatch: Patch, capsys: Capture) -> None:
    cuda = FakeCuda().install(monkeypatch)
    cuda.refusal = "operation not permitted when stream is capturing\nand more that is not shown" if refuses else None
    fixed_clock(monkeypatch, 250_000)

    def call() -> None:
        cuda.work("call")

    def prepare() -> None:
        assert not cuda.is_current_stream_capturing()
        cuda.work("prepare")

    found = timed({"ours": (call, prepare)}, "graph")["ours"]
    log = [name for name, _ in cuda.done]
    assert log[0] == "prepare"
    assert log.count("call") >= CALLS_PER_GRAPH
    assert found.repetitions == 3
    # a capture that failed leaves nothing behind
    assert (cuda.is_clean(), cuda.current) == (True, cuda.default)
    if refuses:
        # a call that is no graph does its work once, and is prepared each time
        assert ((found.timing, found.median), log[-2:]) == (("events", 250.0), ["prepare", "call"])
        assert "ours is timed by events, since it cannot be captured: operation not" in capsys.readouterr().err
    else:
        # nothing is prepared any more, since a graph works on what stays; each replay is queued behind a sleep
        assert ((found.timing, found.median), log.count("prepare")) == (("graph", 250.0 / CALLS_PER_GRAPH), 1)
        assert log[-1 - CALLS_PER_GRAPH :] == ["sleep"] + ["call replayed"] * CALLS_PER_GRAPH
        # caches cannot be flushed between the calls of one graph
        monkeypatch.setattr(measuring.torch, "empty", lambda size, **where: torch.zeros(size))
        assert timed({"ours": (call, prepare)}, "graph", flush=4096)["ours"].median == 250.0


def test_a_flush_is_twice_the_last_cache(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    assert flush_bytes(CUDA) == 100 * 2**20
    assert flush_bytes(CPU) >= 2**16


def test_a_flush_ends_with_a_read_so_that_nothing_is_written_back_during_the_call() -> None:
    log: list[str] = []

    class Logged(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(func.overloadpacket.__name__)
            assert log[-1] == "empty" or args[0].nbytes == 4096
            return func(*args, **(kwargs or {}))

    with Logged():
        measure(
            lambda: log.append("call"),
            prepare=lambda: log.append("prepare"),
            plan=Plan(0, 0, fewest=2, most=2, flush=4096),
            device=CPU,
        )
    assert log == ["empty"] + ["prepare", "zero_", "sum", "call"] * 3


def test_several_implementations_are_interleaved(monkeypatch: Patch) -> None:
    log: list[str] = []

    def watched(call: Callable[[], object], *, plan: Plan, **arguments: Any) -> Timing:
        assert plan.fewest == 1
        call()
        return Timing(np.array([1000]), 1)

    monkeypatch.setattr(measuring, "measure", watched)
    found = timed({name: ((lambda name=name: log.append(name)), int) for name in ("a", "b")}, "events", rounds=3)
    assert log == ["a", "b"] * 3
    assert {(each.repetitions, each.warmup, each.timing) for each in found.values()} == {(3, 3, "events")}


# on a GPU


@pytest.mark.gpu
def test_a_graph_of_calls_does_them_all() -> None:
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    replay, before = captured(lambda: count.add_(1), CUDA, 5), int(count)
    replay()
    assert int(count) == before + 5


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


# the command


def test_a_document_with_wrong_marks_is_refused() -> None:
    for text, message in (("cpu -->\n", "not closed"), ("cpus --><!-- /bench:cpus -->", "no table is called 'cpus'")):
        with pytest.raises(UserError, match=message):
            report.updated(f"<!-- bench:{text}", [record()])


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
        first, *_, last = document.read_text().split("\n\ntext\n\n")
        assert ("| cycle/N=10k" in first, "\nold\n" in first) == (True, False)
        assert "Not measured yet: `gpu-replay bench gpu`." in last
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


def test_a_run_that_cannot_be_made_says_why_and_a_mistake_has_a_traceback(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (("report none.jsonl", "none.jsonl"), ("gpu", "bench gpu needs a CUDA or ROCm device")):
        assert main(["bench", *arguments.split()]) == 1
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert message in error

    mistaken = mock.Mock(side_effect=ValueError("a table of ours"))
    monkeypatch.setitem(commands.SUITES, "cpu", (mistaken, "nothing"))
    with pytest.raises(ValueError, match="a table of ours"):
        main(["bench", "cpu"])


# suites with work of their own: storage layouts, checkpoints, the cost of calls as they grow, beside plain C

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def measured(tmp_path: Path, monkeypatch: Patch, suite: str, *options: str) -> list[Record]:
    quicker(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert commands.main([suite, "--quick", "--output", f"{suite}.jsonl", *options]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{suite}.jsonl"]
    return read(tmp_path / f"{suite}.jsonl")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_keeps_the_last_rows_whole(name: str) -> None:
    layout = LAYOUTS[name](100)
    blocks, singles = (next(layout.stream(count, 1)) for count in (64, 1))
    # blocks that wrap land at both ends; both streams give the same rows
    layout.add(blocks)
    layout.add(singles[:70])
    found = layout.sample(100)[1]
    assert layout.wrong(found) == []
    assert layout.wrong({**found, "reward": found["reward"].roll(1)})
    everything = LAYOUTS[name](CHUNK)
    everything.add(singles)
    rows = everything.sample(CHUNK)[1]["obs"][:, 0]
    # the first 70 of the stream, and the 30 that were the last before
    assert len({*found["obs"][:, 0].tolist()} & {*rows.tolist()}) == 100


def test_every_part_of_every_layout_is_recorded(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(storage, "QUICK", (500, 2))
    records = measured(tmp_path, monkeypatch, "storage")
    assert [each.implementation for each in records] == 3 * list(LAYOUTS)
    calls = {each.operation: (each.batch, each.repetitions) for each in records}
    assert calls == {"storage-one": (1, 3200), "storage-blocks": (64, 50), "storage-batches": (50, 16)}
    # of all calls together
    assert all(each.seconds * 1e6 >= each.quantiles["p10"] * each.repetitions * 0.99 for each in records)
    assert "3,200 one at a time, s" in capsys.readouterr().out


def test_a_round_of_checkpoints_is_recorded(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(checkpoint, "QUICK_BYTES", 300 * FRAME_BYTES)
    found = measured(tmp_path, monkeypatch, "checkpoint")
    moved = {(each.operation, each.implementation): each.bytes for each in found}
    for operation in ("checkpoint-save", "checkpoint-load"):
        assert moved[operation, "plain file"] == moved[operation, "gpu_replay"] == 300 * FRAME_BYTES
    # all frames are in one piece
    assert 300 * FRAME_BYTES < moved["checkpoint-again", "gpu_replay"] < 301 * FRAME_BYTES + 10_000
    assert "| plain sequential read " in capsys.readouterr().out


def test_what_a_call_costs_the_host_does_not_count_waits(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    plain, waits = host_time.buffer_calls, {"a wait": lambda: time.sleep(0.05)}
    monkeypatch.setattr(host_time, "buffer_calls", lambda case, device: {**waits, **plain(case, device)})
    found = {each.implementation: each for each in measured(tmp_path, monkeypatch, "host", "--device", "cpu")}
    calls = ("add", "sample", "update_priorities", "add, trajectories", "sample, trajectories")
    assert list(found) == [host_time.UNIT, *waits, *calls]
    assert all(each.median > 0 for each in found.values())
    assert found["a wait"].median < 25_000
    assert "| over add_(1) |" in capsys.readouterr().out


@needs_cc
def test_the_c_program_draws_by_priority_and_weighs() -> None:
    slots, batch = 1000, 4096
    bound = lower_bound.make(slots)
    bound.add(next(bound.stream(slots + 24, 1)))
    check(bound, "C")
    random = np.random.default_rng(1)
    priority = torch.from_numpy(random.uniform(0.5, 2.0, slots).astype(np.float32))
    places = np.arange(slots)
    bound.update(([places.ctypes.data], slots), priority)
    counts = np.zeros(slots)
    for _ in range(200):
        (found, _), fields = bound.sample(batch)
        drawn = np.ctypeslib.as_array((lower_bound.ctypes.c_int64 * batch).from_address(found[0]))
        counts += np.bincount(drawn, minlength=slots)
    mass = (priority.numpy() + lower_bound.EPS) ** lower_bound.ALPHA
    expected = mass / mass.sum()
    # a stratum wider than a row keeps every row within two draws of a batch
    assert np.abs(counts / 200 - batch * expected).max() < 0.3
    weight = (slots * expected[drawn]) ** -lower_bound.BETA
    assert np.allclose(fields["weight"].numpy(), weight / weight.max(), rtol=1e-4)


@needs_cc
def test_scale_compares_times_and_bytes_and_plots_them(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scale, "PEER", "python_sum_tree")
    monkeypatch.setattr(commands, "available", lambda names, device: ["stable_baselines3", "python_sum_tree"])
    # in a process of its own elsewhere
    monkeypatch.setattr(memory, "measured", lambda make, capacity, width: capacity * (8 * width + 20))
    found = measured(tmp_path, monkeypatch, "scale")
    timed = {each.implementation for each in found if each.unit == "us"}
    assert timed == {"gpu_replay", "python_sum_tree", lower_bound.NAME}
    # rows by the size of their fields, also of a library without a tree
    held = [(each.implementation, each.bytes) for each in found if each.unit == "bytes"]
    assert held == [(name, size) for size in (45, 2061) for name in ("gpu_replay", "stable_baselines3")]
    assert "gpu_replay / C" in capsys.readouterr().out
    files = plots.draw(found, tmp_path / "scale")
    assert [path.name for path in files] == ["add.png", "sample.png", "update.png", "bytes.png"]


def test_bytes_are_counted_of_rows_of_any_width() -> None:
    for make in (replay, partial(memory.of_peer, "python_sum_tree")):
        subject = make(200, width=7)
        subject.add(next(subject.stream(memory.ADDED, 1)))
        assert subject.sample(8)[1]["next_obs"].shape == (8, 7)
        assert subject.wrong(subject.sample(256)[1]) == []
