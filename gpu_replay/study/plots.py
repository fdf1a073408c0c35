"""The pictures of the study: curves over episodes in small multiples, and scatter plots with one point per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_replay.console.atomic_files import replace
from gpu_replay.study.analysis import LAST, PREDICTORS, Correlation, Point, mean_over_seeds
from gpu_replay.study.results import Floats, Study
from gpu_replay.study.settings import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = dict(zip(METHODS, ("#000000", "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7"), strict=True))
_SPINES = {"axes.spines.top": False, "axes.spines.right": False}
_GRID = {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.7}
_TEXT = {"axes.titlesize": "medium", "figure.titlesize": "medium", "axes.formatter.useoffset": False}
STYLE: Any = {**_SPINES, **_GRID, **_TEXT}
GREY = "#8A8A8A"
BAND = 0.18
WINDOW = 20
CURVES = f"trailing mean over {WINDOW} episodes; line: mean over seeds, band: ± one standard error"
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))
# the ordinary replay, with which the others are compared
BASELINE = "uniform"
# narrowest axis of returns
LEAST_SPAN = 4.0
# values that differ by more than this factor are drawn on a logarithmic axis
WIDE = 20.0
# lines that differ by a smaller share than this cannot be told apart
FLAT = 0.01


def draw_all(folder: Path, study: Study, points: Sequence[Point], found: Sequence[Correlation]) -> list[Path]:
    """Draw every picture of a study; returns the paths."""
    from matplotlib import rc_context

    td_errors = {f"td_{name}": f"{name} |TD error|" for name in ("mean", "median", "max", "std")}
    q_values = {"q_mean": "mean Q", "q_max": "max Q"}
    pairs = "Correlated pairs of states in a batch, |r| > 0.8"
    with rc_context(STYLE):
        figures = {
            "final-returns": _final_returns(study, points),
            "explained": _explained(study, points, found),
            "durations": _over_episodes(study, "Episode durations", {"duration": "duration (steps)"}, from_zero=True),
            "durations-by-method": _durations_by_method(study),
            "td-errors": _over_episodes(study, "TD errors of the sampled batches", td_errors),
            "correlated-pairs": _over_episodes(study, pairs, {"correlated_pairs": "pairs per batch"}, from_zero=True),
            "q-values": _over_episodes(study, "Q values of the sampled batches", q_values),
        }
        return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def panels(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Figure, Any]:
    """A figure and its (rows, columns) axes; width and height in inches of the whole."""
    # the figure is made without pyplot, which would look for a display and keep global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(figure: Figure, path: Path) -> Path:
    """Write it as a PNG and return the path."""
    return replace(path, lambda partial: figure.savefig(partial, format="png", metadata={"Software": None}))


def trailing_mean(values: Floats, window: int = WINDOW) -> Floats:
    """(n,) the mean of each value and the `window - 1` before it, of all so far at the start; NaN counts as absent."""
    present = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(present)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - window, 0)
    with np.errstate(invalid="ignore"):
        return (sums[stop] - sums[start]) / (counts[stop] - counts[start])


def mean_and_error(lines: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Mean and standard error over runs of (n,) lines, point by point; the error of a single run is 0."""
    table = np.stack(lines)
    if len(lines) == 1:
        return table[0], np.zeros_like(table[0])
    return table.mean(axis=0), table.std(axis=0, ddof=1) / np.sqrt(len(lines))


def _curve(axes: Axes, study: Study, environment: str, method: str, column: str, style: Any = "-") -> Floats:
    """Draw mean and standard error over the runs, and return the mean."""
    mean, error = mean_and_error([trailing_mean(values) for values in study.column(environment, method, column)])
    episodes = np.arange(1, len(mean) + 1)
    axes.plot(episodes, mean, color=COLOURS[method], linestyle=style, linewidth=1.6)
    axes.fill_between(episodes, mean - error, mean + error, color=COLOURS[method], alpha=BAND, linewidth=0)
    return mean


def _over_episodes(study: Study, title: str, columns: dict[str, str], from_zero: bool = False) -> Figure:
    """One panel per environment and column, one line per method."""
    environments = study.environments
    height = (2.2 if len(columns) > 1 else 3.0) * len(columns) + 1.1
    figure, grid = panels(len(columns), len(environments), 3.9 * len(environments) + 0.4, height)
    for row, (column, label) in zip(grid, columns.items(), strict=True):
        for axes, environment in zip(row, environments, strict=True):
            values = np.stack([_curve(axes, study, environment, method, column) for method in study.methods])
            _name_if_flat(axes, values)
            if from_zero:
                axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
            else:
                _log_if_wide(axes, values, "y")
        row[0].set_ylabel(label)
    for top, bottom, environment in zip(grid[0], grid[-1], environments, strict=True):
        top.set_title(environment)
        bottom.set_xlabel("episode")
    _legend(figure, _by_colour(study), linewidth=2.5)
    figure.suptitle(f"{title}\n{CURVES}")
    return figure


def _durations_by_method(study: Study) -> Figure:
    """Episode lengths: one panel per method, one line per environment, all on one scale."""
    methods, environments = study.methods, dict(zip(study.environments, STYLES, strict=False))
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    figure, grid = panels(rows, columns, 3.6 * columns + 0.4, 2.6 * rows + 1.1, sharex=True, sharey=True)
    for axes, method in zip(grid.flat, methods, strict=False):
        axes.set(xlabel="episode", ylabel="duration (steps)")
        axes.set_title(METHODS[method].name, color=COLOURS[method])
        for name, style in environments.items():
            _curve(axes, study, name, method, "duration", style)
        axes.set_ylim(0)
        axes.label_outer()
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    _legend(figure, {name: {"linestyle": style} for name, style in environments.items()}, color=GREY, linewidth=2)
    figure.suptitle(f"Episode durations by method\n{CURVES}")
    return figure


def _final_returns(study: Study, points: Sequence[Point]) -> Figure:
    """One panel per environment: every run as a dot, the mean of each method with its interval."""
    environments, methods = study.environments, study.methods
    figure, grid = panels(1, len(environments), 3.7 * len(environments) + 0.8, 0.42 * len(methods) + 1.7, sharey=True)
    for axes, environment in zip(grid[0], environments, strict=True):
        for height, method in enumerate(reversed(methods)):
            finals = [point.final for point in points if (point.environment, point.method) == (environment, method)]
            mean, colour = mean_over_seeds(finals), COLOURS[method]
            if method == BASELINE and len(methods) > 1:
                axes.axvline(mean.value, color=colour, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
            axes.scatter(finals, [height - 0.27] * len(finals), color=colour, s=16, alpha=0.6, linewidth=0)
            axes.plot([mean.value], [height], marker="D", markersize=6, color=colour)
            axes.plot([mean.low, mean.high], [height, height], color=colour, linewidth=2)
        axes.set_yticks(range(len(methods)), [METHODS[method].name for method in reversed(methods)])
        axes.set(title=environment, xlabel="mean return of an episode", ylim=(-0.6, len(methods) - 0.4))
        axes.set_xlim(_widened(*axes.get_xlim()))
        axes.locator_params(axis="x", nbins=5)
    figure.suptitle(
        f"Final performance: last {LAST} episodes of each run\n"
        f"dots: runs; diamond and bar: mean over seeds and 95% bootstrap interval; dashed: {BASELINE} replay"
    )
    return figure


def _explained(study: Study, points: Sequence[Point], found: Sequence[Correlation]) -> Figure:
    """Final return over each predictor, one row per environment, with Spearman's correlation above each panel."""
    environments = study.environments
    figure, grid = panels(len(environments), len(PREDICTORS), 12.5, 2.5 * len(environments) + 1.1)
    known = {(each.place, each.predictor): each for each in found}
    for row, environment in zip(grid, environments, strict=True):
        here = [point for point in points if point.environment == environment]
        for axes, predictor in zip(row, PREDICTORS, strict=True):
            x = np.array([point.means[predictor] for point in here])
            shades = [COLOURS[point.method] for point in here]
            axes.scatter(x, [point.final for point in here], c=shades, s=26, alpha=0.85, linewidth=0)
            _log_if_wide(axes, x, "x")
            axes.set_ylim(_widened(*axes.get_ylim()))
            rho = known[environment, predictor].overall
            bounds = f"  [{rho.low:+.2f}, {rho.high:+.2f}]" if rho.bounded else ""
            axes.set_title("ρ undefined" if np.isnan(rho.value) else f"ρ = {rho.value:+.2f}{bounds}", fontsize="small")
        row[0].set_ylabel(f"{environment}\nfinal return")
    for axes, label in zip(grid[-1], PREDICTORS.values(), strict=True):
        axes.set_xlabel(label)
    _legend(figure, _by_colour(study), linestyle="", marker="o", markersize=6)
    title = "Final return of each run over what might explain it"
    figure.suptitle(f"{title}\nabove each panel: Spearman's ρ over runs, 95% interval")
    return figure


def _legend(figure: Figure, entries: Mapping[str, Mapping[str, Any]], **look: Any) -> None:
    """One row below the panels, where it covers nothing."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **entry, **look) for name, entry in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _by_colour(study: Study) -> dict[str, dict[str, Any]]:
    return {METHODS[method].name: {"color": COLOURS[method]} for method in study.methods}


def _name_if_flat(axes: Axes, values: Floats) -> None:
    """Write the value where all lines coincide, so that one line is not taken for one method."""
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    if len(values) > 1 and 0 <= high - low <= FLAT * abs(low):
        text = f"all methods: about {np.nanmean(values):.4g}"
        axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY)


def _log_if_wide(axes: Axes, values: Floats, which: str) -> None:
    """A logarithmic axis where all values are positive and far apart."""
    from matplotlib.ticker import NullFormatter

    present = values[~np.isnan(values)]
    if len(present) and present.min() > 0 and present.max() > WIDE * present.min():
        axes.set(**{f"{which}scale": "log"})
        getattr(axes, f"{which}axis").set_minor_formatter(NullFormatter())


def _widened(low: float, high: float) -> tuple[float, float]:
    """Limits in which nearly equal returns lie on one line, with whole numbers beside it."""
    extra = max(0.0, LEAST_SPAN - (high - low)) / 2
    return low - extra, high + extra
