"""The cost of calls as they grow: the C program keeps rows and draws by priority; the table and the pictures."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_records import Capture, Patch, quicker

from gpu_replay.bench import lower_bound
from gpu_replay.bench import main as commands
from gpu_replay.bench.records import CannotMeasure, read

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_the_c_program_draws_by_priority_and_weighs() -> None:
    slots, batch = 1000, 4096
    bound = lower_bound.make(slots)
    bound.add(next(bound.stream(slots + 24, 1)))
    assert bound.wrong(bound.sample(256)) == []
    random = np.random.default_rng(1)
    priority = torch.from_numpy(random.uniform(0.5, 2.0, slots).astype(np.float32))
    places = np.arange(slots)
    bound.update(((([places.ctypes.data]), slots),), priority)
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


def test_the_command_compares_and_draws(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    quicker(monkeypatch)
    monkeypatch.setattr("gpu_replay.bench.scale.PEER", "python_sum_tree")
    output = tmp_path / "scale.jsonl"
    assert commands.main(["scale", "--quick", "--output", str(output)]) == 0
    records = read(output)
    assert {record.implementation for record in records} == {"gpu_replay", "python_sum_tree", lower_bound.NAME}
    assert {record.operation for record in records} == {"add", "sample", "update"}
    assert "gpu_replay / C" in capsys.readouterr().out
    assert commands.main(["plot", str(output)]) == 0
    assert sorted(path.name for path in (tmp_path / "scale").iterdir()) == ["add.png", "sample.png", "update.png"]


def test_without_a_compiler_the_others_are_measured(monkeypatch: Patch) -> None:
    lower_bound.compiled.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CannotMeasure, match="no C compiler"):
        lower_bound.make(10)
    lower_bound.compiled.cache_clear()
