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

from .results import recorded_folder

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
    rows, devices, commands = [], [], []
    for folder in folders:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        with (folder / "progress.csv").open(newline="") as file:
            progress = list(csv.DictReader(file))
        # the thresholds are those of Pong
        reached = [_reached(first_above(progress, each), str(summary["stopped_by"])) for each in THRESHOLDS]
        ending = str(summary["stopped_by"])
        devices.append(str(summary["device_name"]))
        commands.append(f"`gpu-replay train {summary['env']} --seed N`")
        rows.append(
            [
                f"{folder.parent.name}/{folder.name}",
                *(reached if "pong" in summary["env"] else [""] * len(reached)),
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
    machines, reproduce = (", ".join(dict.fromkeys(each)) for each in (devices, commands))
    return f"{table(header, rows)}\n\n{note} {machines}. Reproduce: {reproduce}."


def _reached(found: tuple[float, int] | None, ending: str) -> str:
    if found is None:
        return "ended before" if ending == "solved" else "not reached"
    return _minutes(*found)


def _minutes(seconds: float, steps: int) -> str:
    return f"{seconds / 60:.1f} min, {steps / 1e6:.2f}M"
