"""Suites with work of their own: storage layouts, checkpoints, and the cost of calls as they grow, beside plain C."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_records import Capture, Patch, quicker

from gpu_replay.bench import checkpoint, host_time, lower_bound, memory, plots, scale, storage
from gpu_replay.bench import main as commands
from gpu_replay.bench.measure import check
from gpu_replay.bench.records import Record, read
from gpu_replay.bench.storage import CHUNK, LAYOUTS
from gpu_replay.bench.subjects import FRAME_BYTES

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
    plain = host_time.torch_calls
    waits = {"a wait": lambda: time.sleep(0.05)}
    monkeypatch.setattr(host_time, "torch_calls", lambda device: {**plain(device), **waits})
    found = {each.implementation: each for each in measured(tmp_path, monkeypatch, "host", "--device", "cpu")}
    calls = ("add", "sample", "update_priorities", "add, trajectories", "sample, trajectories")
    assert list(found) == [host_time.UNIT, "torch.empty", *waits, *calls]
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
    for make in (memory.ours, partial(memory.of_peer, "python_sum_tree")):
        subject = make(200, 7)
        subject.add(next(subject.stream(memory.ADDED, 1)))
        assert subject.sample(8)[1]["next_obs"].shape == (8, 7)
        assert subject.wrong(subject.sample(256)[1]) == []
