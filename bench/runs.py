"""The table of training runs: when the mean return passed each threshold, and at what speed.

A run's folder is what `gpu-replay train` leaves: progress.csv with a row every few seconds, settings.json and
summary.json.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_replay.console.markdown import table

from .records import recorded_folder

THRESHOLDS = (0.0, 15.0)
ENDINGS = {"max_seconds": "time was up", "steps": "all steps done"}


def run_folders(root: Path | None = None) -> list[Path]:
    """The recorded runs of Pong, below `*pong-*` of the results; none outside of a checkout."""
    folder = recorded_folder() if root is None else root
    return [] if folder is None else sorted(path.parent for path in folder.glob("*pong-*/*/summary.json"))


def first_above(rows: Sequence[dict[str, str]], threshold: float) -> tuple[float, int] | None:
    """Seconds and steps when the mean return of training first exceeded a threshold; None if it never did."""
    for row in rows:
        # NaN before the first episode ends, which exceeds nothing
        if float(row["return_mean"]) > threshold:
            return float(row["seconds"]), int(float(row["step"]))
    return None


def section(folders: Sequence[Path]) -> str:
    """One line a run: minutes and steps to each threshold and to its end, its last evaluation, its speed."""
    if not folders:
        return "Not measured yet: `gpu-replay train pong`."
    columns = [f"mean return > {threshold:.0f}" for threshold in THRESHOLDS]
    header = ["run", *columns, "ended", "evaluation", "steps/s", "updates/s", "replay"]
    rows, devices, commands = [], {}, {}
    for folder in folders:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        env, ending = str(summary["env"]), str(summary["stopped_by"])
        devices[str(summary["device_name"])] = commands[f"`gpu-replay train {env} --seed N`"] = True
        # the thresholds are those of Pong
        reached = _reached(folder, ending) if "pong" in env else [""] * len(THRESHOLDS)
        rows.append(
            [
                f"{folder.parent.name}/{folder.name}",
                *reached,
                f"{_minutes(summary['wall_seconds'], summary['steps'])}, {ENDINGS.get(ending, ending)}",
                f"{summary['eval_return_mean']:.1f} ± {summary['eval_return_std']:.1f}",
                f"{summary['steps_per_second']:,.0f}",
                f"{summary['updates_per_second']:,.0f}",
                f"{summary['replay_share']:.1%}",
            ]
        )
    window = json.loads((folders[0] / "settings.json").read_text())["return_window"]
    note = (
        f"Mean over the last {window} finished training episodes, exploration included; minutes of wall clock from the "
        "start of the run, evaluations included, and environment steps; the evaluation is that of the best network on "
        "fresh games, by which a run also ends (solved)."
    )
    return f"{table(header, rows)}\n\n{note} {', '.join(devices)}. Reproduce: {', '.join(commands)}."


def _reached(folder: Path, ending: str) -> list[str]:
    """When each threshold was first exceeded."""
    with (folder / "progress.csv").open(newline="") as file:
        progress = list(csv.DictReader(file))
    missed = "ended before" if ending == "solved" else "not reached"
    found = [first_above(progress, threshold) for threshold in THRESHOLDS]
    return [_minutes(*each) if each else missed for each in found]


def _minutes(seconds: float, steps: int) -> str:
    return f"{seconds / 60:.1f} min, {steps / 1e6:.2f}M"
