"""The pictures in which a run is a point: final returns by method, and final returns over what might explain them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from gpu_replay.study.analysis import LAST, PREDICTORS, Connection, Point, mean_over_seeds
from gpu_replay.study.results import ENVIRONMENTS, METHODS, label
from gpu_replay.study.style import colours, method_legend, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "correlated_pairs": "correlated pairs per batch",
    "td_mean": "mean |TD error|",
    "td_max": "max |TD error| of a batch",
    "td_std": "std of |TD error| in a batch",
}
# the ordinary replay, which the others are held against
BASELINE = "uniform"
# of the axis of returns
LEAST_SPAN = 4.0
# values that differ by more than this factor are drawn on a logarithmic axis
WIDE = 20.0


def draw_final_returns(found: Sequence[Point], path: Path) -> Path:
    """One panel per environment: every run as a dot, the mean of each method with its interval."""
    from matplotlib.ticker import MaxNLocator

    environments, methods = _names(found)
    figure, grid = panels(1, len(environments), 3.7 * len(environments) + 0.8, 0.42 * len(methods) + 1.7)
    palette = colours(methods)
    for axes, environment in zip(grid[0], environments, strict=True):
        for height, method in enumerate(reversed(methods)):
            finals = [p.final for p in found if (p.environment, p.method) == (environment, method)]
            if not finals:
                continue
            mean = mean_over_seeds(finals)
            if method == BASELINE and len(methods) > 1:
                axes.axvline(mean.value, color=palette[method], linewidth=1, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
            below = [height - 0.27] * len(finals)
            axes.scatter(finals, below, color=palette[method], s=16, alpha=0.6, linewidth=0)
            axes.plot([mean.value], [height], marker="D", markersize=6, color=palette[method])
            if mean.bounded:
                axes.plot([mean.low, mean.high], [height, height], color=palette[method], linewidth=2)
        axes.set_yticks(range(len(methods)), [label(method) for method in reversed(methods)])
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_title(environment, fontsize="medium")
        axes.set_xlabel("mean return of an episode")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _widen(axes, "x")
        if axes is not grid[0][0]:
            axes.tick_params(labelleft=False)
    figure.suptitle(
        f"Final performance: last {LAST} episodes (all, if fewer)\n"
        f"dots: runs; diamond and bar: mean over seeds and 95% bootstrap interval; dashed: {label(BASELINE)} replay",
        fontsize="medium",
    )
    return save(figure, path)


def draw_explained(found: Sequence[Point], connections: Sequence[Connection], path: Path) -> Path:
    """Final return over each predictor, one row per environment, with Spearman's correlation above each panel."""
    from matplotlib.ticker import NullFormatter

    environments, methods = _names(found)
    figure, grid = panels(
        len(environments), len(PREDICTORS), 3.0 * len(PREDICTORS) + 0.5, 2.5 * len(environments) + 1.1
    )
    palette = colours(methods)
    known = {(each.place, each.predictor): each for each in connections}
    for row, environment in zip(grid, environments, strict=True):
        here = [point for point in found if point.environment == environment]
        for axes, predictor in zip(row, PREDICTORS, strict=True):
            x = np.array([point.means[predictor] for point in here])
            shades = [palette[point.method] for point in here]
            axes.scatter(x, [point.final for point in here], c=shades, s=26, alpha=0.85, linewidth=0)
            present = x[~np.isnan(x)]
            if len(present) and present.min() > 0 and present.max() > WIDE * present.min():
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter(NullFormatter())
            _widen(axes, "y")
            axes.set_title(_rho(known[environment, predictor]), fontsize="small")
            if row is grid[-1]:
                axes.set_xlabel(AXES[predictor])
        row[0].set_ylabel(f"{environment}\nfinal return", fontsize="medium")
    method_legend(figure, methods, {"linestyle": "", "marker": "o", "markersize": 6})
    figure.suptitle(
        "Final return of each run over what might explain it\nabove each panel: Spearman's ρ over runs, 95% interval",
        fontsize="medium",
    )
    return save(figure, path)


def _widen(axes: Axes, which: Literal["x", "y"]) -> None:
    """Let equal or nearly equal returns lie on one line of this axis, with whole numbers beside it."""
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if high - low < LEAST_SPAN:
        middle = (low + high) / 2
        place = axes.set_xlim if which == "x" else axes.set_ylim
        place(middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2)
    axes.ticklabel_format(axis=which, useOffset=False)


def _rho(connection: Connection) -> str:
    found = connection.overall
    if connection.why_not:
        return "ρ undefined"
    return f"ρ = {found.value:+.2f}" + (f"  [{found.low:+.2f}, {found.high:+.2f}]" if found.bounded else "")


def _names(found: Sequence[Point]) -> tuple[list[str], list[str]]:
    environments = {point.environment for point in found}
    methods = {point.method for point in found}
    return (
        [*[name for name in ENVIRONMENTS if name in environments], *sorted(environments - set(ENVIRONMENTS))],
        [*[name for name in METHODS if name in methods], *sorted(methods - set(METHODS))],
    )
