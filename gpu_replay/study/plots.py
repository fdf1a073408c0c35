"""The pictures of the study over episodes: durations, TD errors, correlated pairs and Q values, in small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_replay.study.results import Study, label
from gpu_replay.study.smoothing import WINDOW, Band, over_runs, trailing_mean
from gpu_replay.study.style import BAND, QUIET, colours, method_legend, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED = f"trailing mean over {WINDOW} episodes"
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
STATISTICS = {
    "td_mean": "mean |TD error|",
    "td_median": "median |TD error|",
    "td_max": "max |TD error|",
    "td_std": "std of |TD error|",
}
# lines that differ by a smaller share than this cannot be told apart in a picture that begins at 0
FLAT = 0.01
# lines that differ by more than this factor are drawn on a logarithmic axis
WIDE = 20.0


def band_words(study: Study) -> str:
    """What lines and bands of the pictures are."""
    seeds = {len(study.of(environment, method)) for environment in study.environments for method in study.methods}
    if max(seeds, default=0) < 2:
        return f"{SMOOTHED}; one seed"
    return f"{SMOOTHED}; line: mean over seeds, band: ± one standard error"


def draw_durations(study: Study, path: Path) -> Path:
    """Episode lengths: one panel per environment, one line per method."""
    return _by_environment(study, path, "Episode durations", {"duration": "duration (steps)"}, from_zero=True)


def draw_td_errors(study: Study, path: Path) -> Path:
    """Four statistics of the TD errors of the batches, one row each."""
    return _by_environment(study, path, "TD errors of the sampled batches", STATISTICS)


def draw_pairs(study: Study, path: Path) -> Path:
    """Correlated pairs of states in a batch."""
    title = "Correlated pairs of states in a batch, |r| > 0.8"
    return _by_environment(study, path, title, {"correlated_pairs": "pairs"}, from_zero=True)


def draw_q_values(study: Study, path: Path) -> Path:
    """Mean and largest Q value of the batches."""
    return _by_environment(study, path, "Q values of the sampled batches", {"q_mean": "mean Q", "q_max": "max Q"})


def draw_durations_by_method(study: Study, path: Path) -> Path:
    """Episode lengths: one panel per method, one line per environment, all on one scale."""
    from matplotlib.lines import Line2D

    methods, environments = study.methods, study.environments
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    figure, grid = panels(rows, columns, 3.6 * columns + 0.4, 2.6 * rows + 1.1)
    flat = [axes for row in grid for axes in row]
    found = colours(methods)
    top = 0.0
    for axes, method in zip(flat, methods, strict=False):
        axes.set_title(label(method), fontsize="medium", color=found[method])
        for environment, style in zip(environments, STYLES * len(environments), strict=False):
            band = _band(study, environment, method, "duration")
            if band is not None:
                top = max(top, _line(axes, band, found[method], style))
    for i, axes in enumerate(flat):
        axes.set_ylim(0, top * 1.05 or 1)
        if i >= len(methods):
            axes.set_visible(False)
        if i % columns == 0:
            axes.set_ylabel("duration (steps)")
        if i + columns >= len(methods):
            axes.set_xlabel("episode")
    styles = zip(environments, STYLES * len(environments), strict=False)
    handles = [Line2D([], [], color=QUIET, linestyle=style, linewidth=2, label=name) for name, style in styles]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"Episode durations by method\n{band_words(study)}", fontsize="medium")
    return save(figure, path)


def _by_environment(study: Study, path: Path, title: str, columns: dict[str, str], *, from_zero: bool = False) -> Path:
    from matplotlib.ticker import NullFormatter

    environments, methods = study.environments, study.methods
    figure, grid = panels(
        len(columns),
        len(environments),
        3.9 * len(environments) + 0.4,
        (2.2 if len(columns) > 1 else 3.0) * len(columns) + 1.1,
    )
    found = colours(methods)
    for row, (column, name) in zip(grid, columns.items(), strict=True):
        for axes, environment in zip(row, environments, strict=True):
            bands = []
            top = 0.0
            for method in methods:
                band = _band(study, environment, method, column)
                if band is not None:
                    bands.append(band)
                    top = max(top, _line(axes, band, found[method], "-"))
            _say_if_flat(axes, bands)
            if from_zero and top > 0:
                axes.set_ylim(0, top * 1.06)
            elif _is_wide(bands):
                axes.set_yscale("log")
                axes.yaxis.set_minor_formatter(NullFormatter())
            if row is grid[0]:
                axes.set_title(environment, fontsize="medium")
            if row is grid[-1]:
                axes.set_xlabel("episode")
        row[0].set_ylabel(name)
    method_legend(figure, methods)
    figure.suptitle(f"{title}\n{band_words(study)}", fontsize="medium")
    return save(figure, path)


def _band(study: Study, environment: str, method: str, column: str) -> Band | None:
    lines = [trailing_mean(run.columns[column]) for run in study.of(environment, method)]
    return over_runs(lines) if lines else None


def _line(axes: Axes, band: Band, colour: str, style: Any) -> float:
    """Draw it and return its highest point, the band included."""
    episodes = np.arange(1, len(band.mean) + 1)
    axes.plot(episodes, band.mean, color=colour, linestyle=style, linewidth=1.6)
    high = band.mean
    if band.error is not None:
        high = band.mean + band.error
        axes.fill_between(episodes, band.mean - band.error, high, color=colour, alpha=BAND, linewidth=0)
    return float(np.nanmax(high)) if not np.isnan(high).all() else 0.0


def _say_if_flat(axes: Axes, bands: Sequence[Band]) -> None:
    """Name the value where all lines lie on one another, so that one line is not taken for one method."""
    values = np.concatenate([band.mean[~np.isnan(band.mean)] for band in bands]) if bands else np.array([])
    if len(bands) > 1 and len(values) and np.ptp(values) <= FLAT * abs(values.mean()):
        about = "about " if np.ptp(values) > 0 else ""
        axes.annotate(
            f"all methods: {about}{values.mean():.4g}", (0.5, 0.5), xycoords="axes fraction", ha="center", color=QUIET
        )


def _is_wide(bands: Sequence[Band]) -> bool:
    """Whether the lines are all positive and far apart."""
    values = np.concatenate([band.mean[~np.isnan(band.mean)] for band in bands]) if bands else np.array([])
    return bool(len(values) and values.min() > 0 and values.max() > WIDE * values.min())
