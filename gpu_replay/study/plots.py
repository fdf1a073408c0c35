"""The plots of the study: curves over episodes in small multiples, and scatter plots with one point per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_replay.console.figures import GREY, PALETTE, panels, save
from gpu_replay.study.analysis import LAST, PREDICTORS, Correlation, Floats, mean_over_seeds
from gpu_replay.study.settings import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

COLOURS = dict(zip(METHODS, PALETTE, strict=False))
_SPINES = {"axes.spines.top": False, "axes.spines.right": False}
_GRID = {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.7}
_TEXT = {"axes.titlesize": "medium", "figure.titlesize": "medium", "axes.formatter.useoffset": False}
STYLE: Any = {**_SPINES, **_GRID, **_TEXT}
SHADE: Any = {"alpha": 0.18, "linewidth": 0}
WINDOW = 20
CURVES = f"trailing mean over {WINDOW} episodes; line: mean over seeds, band: ± one standard error"
# the baseline method
BASELINE = "uniform"
# inches that a figure's title and legend need
LEAST_WIDTH = 8.3
# smallest range of an axis of returns
LEAST_SPAN = 4.0
# values that differ by more than this factor are plotted on a logarithmic axis
WIDE = 20.0
# lines that differ by a smaller share than this cannot be told apart
FLAT = 0.01


def draw_all(folder: Path, episodes: DataFrame, points: DataFrame, found: Sequence[Correlation]) -> list[Path]:
    """Write every plot of a study; returns the paths."""
    from matplotlib import rc_context

    td_errors = {f"td_{name}": f"{name} |TD error|" for name in ("mean", "median", "max", "std")}
    q_values = {"q_mean": "mean Q", "q_max": "max Q"}
    pairs = "Correlated pairs of states in a batch, |r| > 0.8"
    with rc_context(STYLE):
        figures = {
            "final-returns": _final_returns(points),
            "explained": _explained(points, found),
            "durations": _over_episodes(episodes, "Episode durations", {"duration": "duration (steps)"}, zero=True),
            "td-errors": _over_episodes(episodes, "TD errors of the sampled batches", td_errors),
            "correlated-pairs": _over_episodes(episodes, pairs, {"correlated_pairs": "pairs per batch"}, zero=True),
            "q-values": _over_episodes(episodes, "Q values of the sampled batches", q_values),
        }
        return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def mean_and_error(lines: DataFrame) -> tuple[Series, Series]:
    """Mean and standard error over runs of their trailing means; the error of a single run is 0.

    lines: one row per episode, one column per run. A trailing mean covers an episode and up to `WINDOW - 1` before
           it; NaN counts as absent.
    """
    smooth = lines.rolling(WINDOW, min_periods=1).mean()
    return smooth.mean(axis=1, skipna=False), smooth.sem(axis=1, skipna=False).fillna(0)


def _over_episodes(episodes: DataFrame, title: str, columns: dict[str, str], zero: bool = False) -> Figure:
    """One panel per environment and column, one line per method."""
    environments, methods = _names(episodes, "environment"), _names(episodes, "method")
    height = (2.2 if len(columns) > 1 else 3.0) * len(columns) + 1.1
    figure, grid = panels(len(columns), len(environments), max(LEAST_WIDTH, 3.9 * len(environments) + 0.4), height)
    for row, (column, label) in zip(grid, columns.items(), strict=True):
        for axes, environment in zip(row, environments, strict=True):
            here = episodes[episodes["environment"] == environment]
            runs = here.pivot(index="episode", columns=["method", "seed"], values=column)
            means = []
            for method in methods:
                mean, error = mean_and_error(runs[method])
                axes.plot(runs.index, mean, color=COLOURS[method], linewidth=1.6)
                axes.fill_between(runs.index, mean - error, mean + error, color=COLOURS[method], **SHADE)
                means.append(mean)
            values = np.stack(means)
            _name_if_flat(axes, values)
            if zero:
                axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
            else:
                _log_if_wide(axes, values, "y")
        row[0].set_ylabel(label)
    for top, bottom, environment in zip(grid[0], grid[-1], environments, strict=True):
        # each step is rewarded with 1, or costs 1
        longer = episodes.loc[episodes["environment"] == environment, "return"].mean() > 0
        better = f": {'longer' if longer else 'shorter'} is better" if "duration" in columns else ""
        top.set_title(environment + better)
        bottom.set_xlabel("episode")
    _legend(figure, methods, linewidth=2.5)
    figure.suptitle(f"{title}\n{_of_seeds(CURVES, episodes)}")
    return figure


def _final_returns(points: DataFrame) -> Figure:
    """One panel per environment: every run as a dot, the mean of each method with its interval."""
    environments, methods = _names(points, "environment"), _names(points, "method")
    finals = points.set_index(["environment", "method"])["final"]
    width, height = max(LEAST_WIDTH, 3.7 * len(environments) + 0.8), 0.42 * len(methods) + 1.7
    figure, grid = panels(1, len(environments), width, height, sharey=True)
    for axes, environment in zip(grid[0], environments, strict=True):
        for height, method in enumerate(reversed(methods)):
            runs = finals.loc[[(environment, method)]]
            mean, colour = mean_over_seeds(runs), COLOURS[method]
            if method == BASELINE and len(methods) > 1:
                axes.axvline(mean.value, color=colour, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
            axes.scatter(runs, [height - 0.27] * len(runs), color=colour, s=16, alpha=0.6, linewidth=0)
            axes.plot([mean.value], [height], marker="D", markersize=6, color=colour)
            axes.plot([mean.low, mean.high], [height, height], color=colour, linewidth=2)
        axes.set_yticks(range(len(methods)), [METHODS[method].name for method in reversed(methods)])
        axes.set(title=environment, xlabel="mean return of an episode", ylim=(-0.6, len(methods) - 0.4))
        axes.set_xlim(_widened(*axes.get_xlim()))
        axes.locator_params(axis="x", nbins=5)
    figure.suptitle(
        f"Final performance: last {LAST} episodes of each run\n"
        + _of_seeds("dots: runs; diamond and bar: mean over seeds and 95% bootstrap interval; ", points)
        + f"dashed: {BASELINE} replay"
    )
    return figure


def _explained(points: DataFrame, found: Sequence[Correlation]) -> Figure:
    """Final return over each predictor, one row per environment, with Spearman's correlation above each panel."""
    environments = _names(points, "environment")
    figure, grid = panels(len(environments), len(PREDICTORS), 12.5, 2.5 * len(environments) + 1.1)
    known = {(each.place, each.predictor): each for each in found}
    for row, environment in zip(grid, environments, strict=True):
        here = points[points["environment"] == environment]
        for axes, predictor in zip(row, PREDICTORS, strict=True):
            shades = [COLOURS[method] for method in here["method"]]
            axes.scatter(here[predictor], here["final"], c=shades, s=26, alpha=0.85, linewidth=0)
            _log_if_wide(axes, here[predictor].to_numpy(), "x")
            axes.set_ylim(_widened(*axes.get_ylim()))
            rho = known[environment, predictor].overall
            # a correlation of a few points tells nothing
            told = (
                f"ρ = {rho.value:+.2f}  [{rho.low:+.2f}, {rho.high:+.2f}]"
                if rho.bounded
                else "too few different runs for ρ"
            )
            axes.set_title("ρ undefined" if np.isnan(rho.value) else told, fontsize="small")
        row[0].set_ylabel(f"{environment}\nfinal return")
    for axes, label in zip(grid[-1], PREDICTORS.values(), strict=True):
        axes.set_xlabel(label)
    _legend(figure, _names(points, "method"), linestyle="", marker="o", markersize=6)
    title = "Final return of each run over what might explain it"
    about = "\nabove each panel: Spearman's ρ over runs, 95% interval" if any(e.overall.bounded for e in found) else ""
    figure.suptitle(title + about)
    return figure


def _names(table: DataFrame, column: str) -> list[str]:
    """The environments or methods, in the order of the tables."""
    return list(table[column].cat.categories)


def _of_seeds(text: str, runs: DataFrame) -> str:
    """The text with the number of seeds."""
    count = runs["seed"].nunique()
    return text.replace("mean over seeds", f"mean over {count} seed{'s' * (count > 1)}")


def _legend(figure: Figure, methods: Sequence[str], **look: Any) -> None:
    """A legend in one row below the panels, where it covers nothing."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=METHODS[name].name, color=COLOURS[name], **look) for name in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _name_if_flat(axes: Axes, values: Floats) -> None:
    """Write the value where all lines coincide, so that one line is not taken for one method."""
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    if len(values) > 1 and 0 <= high - low <= FLAT * abs(low):
        text = f"all methods: about {np.nanmean(values):.4g}"
        axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY)


def _log_if_wide(axes: Axes, values: Floats, which: str) -> None:
    """Make the axis logarithmic if all values are positive and far apart."""
    from matplotlib.ticker import NullFormatter

    present = values[~np.isnan(values)]
    if len(present) and present.min() > 0 and present.max() > WIDE * present.min():
        axes.set(**{f"{which}scale": "log"})
        getattr(axes, f"{which}axis").set_minor_formatter(NullFormatter())


def _widened(low: float, high: float) -> tuple[float, float]:
    """Limits wide enough that nearly equal returns lie on one line and the ticks are whole numbers."""
    extra = max(0.0, LEAST_SPAN - (high - low)) / 2
    return low - extra, high + extra
