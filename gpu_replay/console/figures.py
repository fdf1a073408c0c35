"""Figures without pyplot, which would look for a display and keep global state, and the palette of all programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_replay.checkpoint.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart
PALETTE = ("#000000", "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
GREY = "#8A8A8A"


def panels(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Figure, Any]:
    """A figure and its (rows, columns) axes; width and height of the figure in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG and return the path."""
    return replace_file(path, lambda partial: figure.savefig(partial, format="png", metadata={"Software": None}))
