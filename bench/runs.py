"""The table of training runs: what their own records say, when the return passed which mark, and at what speed.

A run's folder is what `gpu-replay train` leaves: progress.csv with a row every few seconds, settings.json and
summary.json.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_replay.console.markdown import table

from .results import recorded_folder

MARKS = (0.0, 15.0, 18.0)


def run_folders(root: Path | None = None) -> list[Path]:
    """The recorded runs of Pong, below `pong-*` of the results; none outside of a checkout."""
    folder = recorded_folder() if root is None else root
    return [] if folder is None else sorted(path.parent for path in folder.glob("pong-*/*/summary.json"))


def passed(rows: Sequence[dict[str, str]], mark: float) -> tuple[float, int] | None:
    """Seconds and steps when the mean return of training first lay above a mark, or None if it never did."""
    for row in rows:
        # not-a-number before the first episode ends, which is above nothing
        if float(row["return_mean"]) > mark:
            return float(row["seconds"]), int(float(row["step"]))
    return None


def highest(rows: Sequence[dict[str, str]]) -> float:
    """The highest mean return of training; not-a-number before the first episode ended."""
    means = [mean for mean in (float(row["return_mean"]) for row in rows) if not math.isnan(mean)]
    return max(means, default=math.nan)


def section(folders: Sequence[Path]) -> str:
    """One line a run: its marks in minutes and steps, its last evaluation, its speed."""
    if not folders:
        return "Not measured yet: `gpu-replay train pong`."
    header = [
        "run",
        *[f"mean return > {mark:.0f}" for mark in MARKS],
        "highest",
        "evaluation",
        "steps/s",
        "updates/s",
        "replay",
    ]
    rows, devices = [], []
    for folder in folders:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        with (folder / "progress.csv").open(newline="") as file:
            progress = list(csv.DictReader(file))
        devices.append(str(summary["device_name"]))
        rows.append(
            [
                f"{folder.parent.name}/{folder.name}",
                *[_mark(passed(progress, mark)) for mark in MARKS],
                f"{highest(progress):.1f}",
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
        "fresh games."
    )
    machines = ", ".join(dict.fromkeys(devices))
    return f"{table(header, rows)}\n\n{note} {machines}. Reproduce: `gpu-replay train pong --seed N`."


def _mark(found: tuple[float, int] | None) -> str:
    return "not reached" if found is None else f"{found[0] / 60:.1f} min, {found[1] / 1e6:.2f}M"
