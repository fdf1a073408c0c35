"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_curve(
    path: Path,
    title: str,
    rows: Sequence[dict[str, float]],
    evaluations: Sequence[tuple[int, float, float]],
    threshold: float | None,
) -> None:
    """Return and episode length over environment steps, one above the other, as a PNG.

    rows:        of progress.csv.
    evaluations: (step, mean return, mean length) of the greedy policy.
    threshold:   the return at which the environment counts as solved, or None.
    """
    # the figure is made without pyplot, which would look for a display and keep global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    returns, lengths = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in rows]
    panels = ((returns, "return_mean", 1, "return of an episode"), (lengths, "length_mean", 2, "steps in an episode"))
    for axes, column, position, label in panels:
        axes.plot(steps, [row[column] for row in rows], color="tab:blue", label="training, mean of the last episodes")
        if evaluations:
            axes.plot(
                [each[0] for each in evaluations],
                [each[position] for each in evaluations],
                color="tab:orange",
                marker="o",
                markersize=4,
                linewidth=1,
                label="evaluation, greedy",
            )
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    if threshold is not None:
        returns.axhline(threshold, color="tab:green", linestyle="--", linewidth=1, label=f"solved at {threshold:g}")
    returns.set_title(title)
    returns.legend(loc="best", fontsize="small")
    lengths.set_xlabel("environment steps")
    lengths.xaxis.set_major_formatter(EngFormatter())
    canvas.print_png(path)
