"""The timing of storage layouts: every layout keeps what it should, and the table says what the records say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_records import Capture, Patch, quicker

from gpu_replay.bench import main as commands
from gpu_replay.bench import storage
from gpu_replay.bench.records import CannotMeasure, read
from gpu_replay.bench.rows import make_rows
from gpu_replay.bench.storage import LAYOUTS, Layout, list_ring


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


def forgetful(capacity: int) -> Layout:
    """Stores only every second row of a block."""
    layout = list_ring(capacity)
    return layout._replace(extend=lambda block: layout.extend(block[::2]))


def test_a_broken_layout_is_not_measured() -> None:
    with pytest.raises(CannotMeasure, match="which rows are kept"):
        storage.check("broken", forgetful)


def test_the_command_records_every_part_of_every_layout(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(storage, "QUICK", storage.Sizes(capacity=100, insertions=256, chunk=128, batches=4, batch=5))
    quicker(monkeypatch)
    output = tmp_path / "storage.jsonl"
    assert commands.main(["storage", "--quick", "--output", str(output)]) == 0
    records = read(output)
    assert [record.implementation for record in records] == 3 * list(LAYOUTS)
    calls = {record.operation: (record.batch, record.repetitions) for record in records}
    assert calls == {"storage-one": (1, 256), "storage-blocks": (64, 4), "storage-batches": (5, 4)}
    assert all(record.seconds is not None and record.seconds > 0 for record in records)
    printed = capsys.readouterr().out
    for heading in ("256 one at a time, s", "256 in blocks of 64, s", "4 batches of 5, s"):
        assert heading in printed
