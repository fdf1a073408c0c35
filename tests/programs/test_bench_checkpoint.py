"""The benchmark of checkpoints: its records are of what was moved, and its table says how that compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_replay.bench import checkpoint
from gpu_replay.bench.main import main
from gpu_replay.bench.rows import FRAME_BYTES


def test_a_round_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "QUICK_BYTES", 300 * FRAME_BYTES)
    assert main(["checkpoint", "--quick", "--output", "found.jsonl"]) == 0
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    moved = {(record["operation"], record["implementation"]): record["bytes"] for record in found}
    for operation in ("checkpoint-save", "checkpoint-load"):
        assert moved[operation, "plain file"] == moved[operation, "gpu_replay"] == 300 * FRAME_BYTES
    # all frames are in one piece
    assert 300 * FRAME_BYTES < moved["checkpoint-again", "gpu_replay"] < 301 * FRAME_BYTES + 10_000
    page = capsys.readouterr().out
    assert "| plain sequential read " in page
    assert "| `load` " in page
    assert "Peak of resident memory beyond the buffer's own: `save`" in page
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]
