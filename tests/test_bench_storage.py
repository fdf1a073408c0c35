"""The timing of storage layouts: every layout keeps what it should, and the table says what the records say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench_records import Capture, Patch, quicker

from gpu_replay.bench import main as commands
from gpu_replay.bench import mapped, storage
from gpu_replay.bench.layouts import LAYOUTS, Fields, Layout, ListRing
from gpu_replay.bench.results import read
from gpu_replay.bench.rows import make_rows
from gpu_replay.bench.runner import Refused


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_keeps_the_last_rows_whole(name: str) -> None:
    storage.check(name, LAYOUTS[name])
    # a block that wraps lands at both ends
    layout, rows = LAYOUTS[name](10), make_rows(15, np.random.default_rng(0))
    for begin in (0, 7):
        layout.extend(layout.block({field: values[begin : begin + 7] for field, values in rows.items()}))
    layout.append(layout.single(rows, 14))
    stored = np.sort(layout.batch(10)["obs"].numpy()[:, 0])
    assert np.array_equal(stored, np.sort(rows["obs"][5:, 0]))


class _Mixed(ListRing):
    """Gives rewards of other rows."""

    def batch(self, size: int) -> Fields:
        found = super().batch(size)
        return {**found, "reward": found["reward"].flip(0)}


class _Forgetful(ListRing):
    """Stores only every second row of a block."""

    def extend(self, block: list[tuple[np.ndarray, int, float, np.ndarray, bool]]) -> None:
        super().extend(block[::2])


@pytest.mark.parametrize(("broken", "wrong"), [(_Mixed, "reward"), (_Forgetful, "which rows are kept")])
def test_a_broken_layout_is_not_measured(broken: Callable[[int], Layout], wrong: str) -> None:
    with pytest.raises(Refused, match=wrong):
        storage.check("broken", broken)


def test_the_command_records_every_part_of_every_layout(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(storage, "QUICK", storage.Sizes(capacity=100, insertions=256, chunk=128, batches=4, batch=5))
    quicker(monkeypatch)
    output = tmp_path / "storage.jsonl"
    assert commands.main(["storage", "--quick", "--output", str(output)]) == 0
    records = read(output)
    assert [record.implementation for record in records] == [name for name in LAYOUTS for _ in range(3)]
    calls = {record.operation: (record.batch, record.repetitions) for record in records}
    assert calls == {"storage-one": (1, 256), "storage-blocks": (64, 4), "storage-batches": (5, 4)}
    assert all(record.seconds is not None and record.seconds > 0 for record in records)
    printed = capsys.readouterr().out
    for heading in ("256 one at a time, s", "256 in blocks of 64, s", "4 batches of 5, s"):
        assert heading in printed


def test_only_chooses_layouts_by_name() -> None:
    assert storage.chosen("NumPy") == ["NumPy array per field", "NumPy array of records"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits its memory as Linux does")
def test_a_ring_in_a_file_is_timed_beside_one_in_memory(tmp_path: Path, capsys: Capture) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    mapped.main(["--folder", str(tmp_path), "--gb", "0.01", "--batches", "2"])
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ring of 354 rows, 0.01 GB; own memory limited to ")
    assert [line.split(":")[0] for line in printed[1:]] == [
        "add of 64, first lap",
        "add of 64, later",
        "sample of 256 and update, cached",
        "sample of 256 and update, not cached",
        "plain reads of 256 rows one after the other, not cached",
    ]
