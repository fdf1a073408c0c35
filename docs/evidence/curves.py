"""Returns of several groups of runs in one picture, over steps and over minutes, and a table of when they were solved.

    python docs/evidence/curves.py FILE.png "proportional=bench/results/pong-cpu/seed-*" "rank=runs/rank/*"

A run is a folder of `gpu-replay train`, one of RL Baselines3 Zoo, or a file of `dqn_atari.py` (seconds, steps, return
of each episode). A line is the median of a group's runs, whose number is in brackets; its band reaches from the lowest
to the highest. A run that has ended keeps its last value. The title begins with the first word of FILE.
"""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpu_replay.console.figures import GREY, PALETTE, panels, save
from gpu_replay.console.markdown import table

# episodes of a mean, as `gpu-replay train pong` reports it
WINDOW = 30
# one for each group
COLORS = (*PALETTE, GREY, "#882255", "#999933", "#332288")


class Run(NamedTuple):
    """Steps, minutes and mean return of the last episodes, a row each; when it was solved, if it was."""

    curve: pd.DataFrame
    solved: bool


def read(path: Path) -> Run:
    """A run by its folder or file."""
    if path.is_dir() and (path / "summary.json").is_file():
        rows = pd.read_csv(path / "progress.csv")
        curve = pd.DataFrame({"step": rows.step, "minutes": rows.seconds / 60, "return": rows.return_mean}).dropna()
        summary = json.loads((path / "summary.json").read_text())
        # evaluations at the end take time, and need no steps
        curve.iloc[-1, curve.columns.get_loc("minutes")] = summary["wall_seconds"] / 60
        return Run(curve, bool(summary["solved"]))
    if path.is_dir():
        # a file for each environment, of which four frames are a step
        rows = pd.concat([pd.read_csv(file, skiprows=1) for file in path.glob("*monitor.csv")]).sort_values("t")
        rows = pd.DataFrame({"seconds": rows.t, "step": rows.l.cumsum() / 4, "return": rows.r})
    else:
        rows = pd.read_csv(path)
    if rows.empty:
        sys.exit(f"{path}: no episode has ended")
    means = rows["return"].rolling(WINDOW, min_periods=1).mean()
    return Run(pd.DataFrame({"step": rows.step, "minutes": rows.seconds / 60, "return": means}), False)


def spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "–"
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main(output: str, *groups: str) -> None:
    """Plot, and print the table."""
    figure, ((*axes,),) = panels(1, 2, 10.0, 4.4, sharey=True)
    rows = []
    for place, (name, _, pattern) in enumerate(group.partition("=") for group in groups):
        color = COLORS[place]
        runs = [read(Path(path)) for path in sorted(glob.glob(pattern))]
        for axis, column, scale in zip(axes, ("step", "minutes"), (1e6, 1), strict=True):
            ends = np.linspace(0, max(run.curve[column].max() for run in runs), 300)
            found = np.array([np.interp(ends, run.curve[column], run.curve["return"]) for run in runs])
            axis.plot(ends / scale, np.median(found, axis=0), color=color, label=f"{name} ({len(runs)})")
            axis.fill_between(ends / scale, found.min(axis=0), found.max(axis=0), color=color, alpha=0.15, linewidth=0)
        solved = [run.curve.iloc[-1] for run in runs if run.solved]
        steps, minutes = ([float(end[column]) for end in solved] for column in ("step", "minutes"))
        last = [float(run.curve["return"].iloc[-1]) for run in runs]
        cells = [spread([each / 1e3 for each in steps], ".0f"), spread(minutes, ".1f"), spread(last, ".1f")]
        rows.append([name, f"{len(solved)} of {len(runs)}", *cells])
    axes[0].set(xlabel="steps, millions", ylabel=f"mean return of the last {WINDOW} episodes")
    axes[1].set(xlabel="minutes")
    about = "median of the runs, whose number is in brackets, and band from the lowest to the highest"
    figure.suptitle(f"{Path(output).stem.partition('-')[0].capitalize()}: {about}", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, Path(output))
    print(table(["", "solved", "thousand steps", "minutes", "last mean return"], rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
