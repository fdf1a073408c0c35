"""How the pictures look: one colour for a method everywhere, and figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_replay.study.results import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too
COLOURS = {
    "none": "#000000",
    "uniform": "#0072B2",
    "proportional": "#D55E00",
    "rank": "#E69F00",
    "combined": "#009E73",
    "hindsight": "#CC79A7",
}
SPARE = ("#56B4E9", "#8C564B", "#7F7F7F", "#B8A800")
DOTS_PER_INCH = 130
GRID = "#DDDDDD"
QUIET = "#8A8A8A"
BAND = 0.18


def colours(methods: Sequence[str]) -> dict[str, str]:
    """A colour for every method; one that is not known gets a spare one."""
    unknown = [method for method in methods if method not in COLOURS]
    return {**COLOURS, **{method: SPARE[i % len(SPARE)] for i, method in enumerate(unknown)}}


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure of equal panels; width and height in inches of the whole."""
    # the figure is made without pyplot, which would look for a display and keep global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, [list(row) for row in grid]


def method_legend(figure: Figure, methods: Sequence[str], marker: Mapping[str, Any] | None = None) -> None:
    """One row below the panels, where it covers nothing."""
    from matplotlib.lines import Line2D

    found = colours(methods)
    look = dict(marker or {"linewidth": 2.5})
    handles = [Line2D([], [], color=found[method], label=label(method), **look) for method in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False)


def save(figure: Figure, path: Path) -> Path:
    """Write it as a PNG and return the path."""
    figure.savefig(path, format="png", metadata={"Software": None})
    return path
