"""The table of training runs against a run written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from gpu_replay.bench import runs


def folder(root: Path, rows: list[str]) -> Path:
    """A recorded run of Pong with these rows of step, seconds and mean return."""
    path = root / "pong-somewhere" / "seed-7"
    path.mkdir(parents=True)
    (path / "progress.csv").write_text("step,seconds,return_mean\n" + "\n".join(rows) + "\n")
    (path / "settings.json").write_text(json.dumps({"return_window": 30}))
    summary = {
        "device_name": "Some CPU",
        "eval_return_mean": 17.25,
        "eval_return_std": 2.0,
        "steps_per_second": 1234.5,
        "updates_per_second": 99.4,
        "replay_share": 0.0456,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_marks_are_those_that_were_passed_first(tmp_path: Path) -> None:
    path = folder(tmp_path, ["5000,60,nan", "700000,1200,0", "720000,1230,0.5", "800000,1300,-1", "900000,1500,15.5"])
    text = runs.section(runs.run_folders(tmp_path))
    (line,) = [line for line in text.splitlines() if line.startswith("| pong-somewhere/seed-7")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    # exactly 0 is not above 0
    assert cells == ["20.5 min, 0.72M", "25.0 min, 0.90M", "not reached", "15.5", "17.2 ± 2.0", "1,234", "99", "4.6%"]
    assert "last 30 finished training episodes" in text
    assert "Some CPU" in text
    assert runs.run_folders(tmp_path) == [path]


def test_without_runs_the_table_says_so(tmp_path: Path) -> None:
    assert runs.section(runs.run_folders(tmp_path)).startswith("Not measured yet")
