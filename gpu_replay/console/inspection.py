"""Plots the contents and the sampling distribution of a buffer in memory, or of a checkpoint on disk, as one figure.

Of a checkpoint it reads the priorities and counts of all rows, but only the few rows of fields that it shows as images.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.checkpoint import CheckpointError
from gpu_replay.checkpoint.format import Checkpoint
from gpu_replay.checkpoint.shards import Part
from gpu_replay.checkpoint.state import BufferCheckpoint, field_from, sampler_from
from gpu_replay.fields import Field
from gpu_replay.ops.ranks import cumulative_masses
from gpu_replay.stats import chance_distribution
from gpu_replay.validation import check_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# pictures in each row of the contact sheet, groups of ages, and characters in a line of words
_SHOWN, _GROUPS, _WIDTH = 12, 60, 84
_SHOWN_SETTINGS = ("num_envs", "stack", "n_step", "gamma", "autoreset")
# of the files, by which `inspect` knows them
TITLE = "contents of a gpu_replay buffer"
_GREY, _BLUE, _RED = "#8A8A8A", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class BufferReport:
    """The data of the figure: settings, and the live rows from the newest to the oldest.

    settings:    of a trajectory buffer.
    fields:      with the bytes that each takes.
    priority:    (n,) float64, 0 of rows that cannot be sampled; None without priorities.
    probability: (n,) float64, of each row, in one sample of one row.
    sampled:     (n,) how often each was sampled.
    keys:        (n,) int64.
    rows:        gives rows of a field by their slots.
    """

    name: str
    capacity: int
    added: int
    sampler: Any
    settings: dict[str, Any]
    fields: dict[str, Field]
    priority: np.ndarray | None
    probability: np.ndarray
    sampled: np.ndarray
    keys: np.ndarray
    counters: dict[str, int]
    rows: Callable[[str, np.ndarray], Tensor]

    @property
    def eligible(self) -> int:
        """Rows that can be sampled."""
        return int((self.probability > 0).sum())

    @property
    def unit(self) -> str:
        """What a row is."""
        return "steps" if "num_envs" in self.settings else "transitions"

    def lines(self) -> list[str]:
        """Text of the figure: what is stored and how it is sampled."""
        size, spread = len(self.keys), chance_distribution(self.probability)
        sizes = {name: self.capacity * field.row_bytes for name, field in self.fields.items()}
        return [
            f"{self.name}: {size:,} of {self.capacity:,} {self.unit}, {self.added:,} added",
            f"{self.sampler}",
            *([", ".join(f"{name}={value}" for name, value in self.settings.items())] if self.settings else []),
            *(
                f"  {name}: {list(field.shape)} {str(field.dtype).removeprefix('torch.')}, {_bytes(sizes[name])}"
                for name, field in self.fields.items()
            ),
            f"ages 0 to {self.added - 1 - int(self.keys.min(initial=self.added - 1)):,} {self.unit}",
            f"{self.eligible:,} can be sampled; effective sample size {spread.effective_sample_size:,.0f}",
            f"entropy {spread.entropy:.2f} nats; with all equally likely {math.log(max(self.eligible, 1)):.2f}",
            f"sampled {self.sampled.mean() if size else 0:.2f} times on average, "
            f"at most {self.sampled.max(initial=0):,}",
            f"stale updates {self.counters['STALE']:,}, rejected priorities {self.counters['REJECTED']:,}, "
            f"saturated priorities {self.counters['SATURATED']:,}",
        ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


def of_buffer(state: Mapping[str, Any]) -> BufferReport:
    """The contents of a buffer in memory, given what its `state_dict` returns."""
    views = state["tensors"]

    def rows(name: str, slots: np.ndarray) -> Tensor:
        stored = views[name]
        return stored[torch.from_numpy(slots).to(stored.device)].cpu()

    return _report(state["settings"], state["counters"], views, rows)


def of_checkpoint(path: str | os.PathLike[str]) -> BufferReport:
    """The contents of a checkpoint, or of the newest one of a run.

    Raises CheckpointError for anything else.
    """
    folder = check_path("path", path)
    if not (folder / "manifest.json").is_file():
        for part in sorted(folder.glob("save-*/rank0")):
            raise CheckpointError(f"{path} holds the checkpoints of several ranks; give that of one, such as {part}.")
        manifests = sorted(folder.glob("checkpoint/*/replay/manifest.json"))
        if not manifests:
            raise CheckpointError(f"{path} holds neither a checkpoint of a buffer nor a run with one.")
        folder = manifests[-1].parent
    saved = BufferCheckpoint(folder)
    with saved.refusing("the manifest is not of a replay buffer"):
        stored = saved.checkpoint
        return _report(saved.config, saved.counters, stored.shapes, partial(_stored_rows, stored))


def _stored_rows(stored: Checkpoint, name: str, slots: np.ndarray) -> Tensor:
    """The rows of a tensor at these slots; only the files that hold some are read."""
    chosen = torch.from_numpy(slots)
    dtype, shape = stored.shape_of(name)
    out = torch.empty((len(slots), *shape[1:]), dtype=dtype, device="cpu")

    def inside(part: Part) -> Tensor:
        return (part.start <= chosen) & (chosen < part.stop)

    def use(part: Part, rows: Tensor) -> None:
        here = inside(part)
        out[here] = rows[chosen[here] - part.start]

    stored.read_parts(lambda part: part.name == name and bool(inside(part).any()), Part.empty, use)
    return out


def _report(
    config: Mapping[str, Any],
    counters: dict[str, int],
    names: Collection[str],
    rows: Callable[[str, np.ndarray], Tensor],
) -> BufferReport:
    """
    names: of the tensors that are stored.
    rows:  (name of a tensor, slots) -> its rows there, in host memory.
    """
    sampler = sampler_from(config["sampler"])
    base, capacity, added = sampler.base, config["capacity"], counters["ADDED"]
    first = max(counters["FIRST"], added - capacity)
    keys = np.arange(added - 1, first - 1, -1)

    def column(name: str) -> np.ndarray:
        return rows(name, keys % capacity).numpy()

    weights = np.ones(len(keys), dtype=np.int64)
    priority = None
    if base.prioritized:
        weights = column("masses")
        rule = base.rule(capacity)
        priority = np.where(weights > 0, rule.priorities(np.maximum(weights, 1)), 0.0)
        if not base.summed:
            # the largest code first, among equal ones the smallest key
            order = np.lexsort((keys, -weights))[: int((weights > 0).sum())]
            weights = np.zeros(len(keys), dtype=np.int64)
            weights[order] = np.diff(cumulative_masses(max(1, len(order)), base.alpha), prepend=0)[: len(order)]
        elif rule.alpha == 0:
            priority = None
    elif "marks" in names:
        weights = column("marks")
    total = weights.sum(dtype=np.float64)
    return BufferReport(
        name=config["kind"],
        capacity=capacity,
        added=added,
        sampler=sampler,
        settings={name: config[name] for name in _SHOWN_SETTINGS if name in config},
        fields={name: field_from(described) for name, described in config["fields"].items()},
        priority=priority,
        probability=weights / total if total else weights * 0.0,
        sampled=column("times_sampled"),
        keys=keys,
        counters=counters,
        rows=lambda name, chosen: rows(f"fields.{name}", chosen % capacity),
    )


def render(report: BufferReport, path: str | os.PathLike[str]) -> None:
    """Plot the report into a file: .png, .pdf or .svg. Raises ImportError without matplotlib."""
    file = check_path("path", path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a picture of a buffer needs matplotlib: pip install matplotlib ({error}).") from error
    pictures = _pictures(report)
    # fixed margins in inches: finding them took as long as all the rest
    width, height, row_height = 11.0, 7.0, 1.25
    full_height = height + row_height * len(pictures)
    figure = Figure(figsize=(width, full_height))
    sides = {"left": 0.7 / width, "right": 1 - 0.15 / width}
    low, high = (full_height - height + 0.55) / full_height, 1 - 0.35 / full_height
    grid = figure.add_gridspec(2, 2, bottom=low, top=high, hspace=0.36, wspace=0.16, **sides)
    text = figure.add_subplot(grid[0, 0])
    text.axis("off")
    lines = [part for line in report.lines() for part in textwrap.wrap(line, _WIDTH, subsequent_indent="    ")]
    text.text(-0.1, 1.05, "\n".join(lines), va="top", family="monospace", fontsize=7)
    _plot_priorities(figure.add_subplot(grid[0, 1]), report)
    share = report.probability * report.eligible
    by_age = partial(_plot_by_age, unit=report.unit)
    by_age(figure.add_subplot(grid[1, 0]), share, "probability of being sampled, by age", "relative to uniform")
    by_age(figure.add_subplot(grid[1, 1]), report.sampled, "times sampled so far, by age", "times sampled")
    for row, (title, image) in enumerate(reversed(pictures.items())):
        box = (0.15 / width, (row_height * row + 0.05) / full_height, 1 - 0.3 / width, (row_height - 0.3) / full_height)
        axes = figure.add_axes(box, anchor="W")
        axes.imshow(image, cmap="gray" if image.ndim == 2 else None, vmin=0, vmax=255)
        axes.set_title(title, loc="left", fontsize=8)
        axes.axis("off")
    figure.savefig(file, dpi=110, metadata={"Title": TITLE})


def _titled(axes: Axes, title: str, across: str, up: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.tick_params(labelsize=8)


def _plot_priorities(axes: Axes, report: BufferReport) -> None:
    from matplotlib.ticker import LogFormatter

    if report.priority is None:
        axes.axis("off")
        axes.text(0.5, 0.5, "this sampler has no priorities", ha="center", color=_GREY)
        return
    priorities = report.priority[report.priority > 0]
    if priorities.size:
        # the last edge just above the largest, or well above where all are alike
        high = priorities.max() * (1.1 if priorities.min() == priorities.max() else 1 + 1e-9)
        axes.hist(priorities, bins=np.geomspace(priorities.min(), high, 60).tolist(), color=_BLUE)
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        # the parser of powers of ten would keep the frames that called it, and with them a buffer that is dropped
        axis.set_major_formatter(LogFormatter())
    _titled(axes, f"priorities of {report.unit} that can be sampled", "priority", report.unit)


def _plot_by_age(axes: Axes, values: np.ndarray, title: str, label: str, unit: str) -> None:
    """Plot the mean and the 10th to 90th percentile of rows, grouped by age."""
    from matplotlib.ticker import EngFormatter

    _titled(axes, title, f"age in {unit} (the newest is 0)", label)
    if not len(values):
        return
    groups = np.array_split(values.astype(np.float64), min(_GROUPS, len(values)))
    ages = np.cumsum([len(group) for group in groups]) - 1
    low, high = (np.array([np.quantile(group, share) for group in groups]) for share in (0.1, 0.9))
    axes.fill_between(ages, low, high, color=_BLUE, alpha=0.2, linewidth=0, label=f"10% to 90% of {unit}")
    axes.plot(ages, [group.mean() for group in groups], color=_BLUE, label="mean")
    if "uniform" in label:
        axes.axhline(1, color=_RED, linewidth=0.8, linestyle="--", label="uniform")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize=7, frameon=False, loc="upper left" if "uniform" not in label else "upper right")


def _pictures(report: BufferReport) -> dict[str, np.ndarray]:
    """Strips of the first image field, if any: the sampled rows with the largest priorities, and random rows."""
    names = [name for name, field in report.fields.items() if _is_image(field)]
    if not names or not len(report.keys):
        return {}
    chosen = {f"random {report.unit}": np.random.default_rng(0).permutation(len(report.keys))[:_SHOWN]}
    # new rows enter with the largest priority; only sampled rows have one that was learned
    sampled = np.flatnonzero((report.probability > 0) & (report.sampled > 0))
    if report.priority is not None and sampled.size:
        largest = sampled[np.argsort(-report.priority[sampled], kind="stable")[:_SHOWN]]
        high, low = report.priority[largest[[0, -1]]]
        chosen = {f"sampled {report.unit} with the largest priorities, {high:.3g} to {low:.3g}": largest, **chosen}
    return {
        f"{names[0]} of {title}": _strip(report.rows(names[0], report.keys[places]).numpy())
        for title, places in chosen.items()
    }


def _is_image(field: Field) -> bool:
    return field.dtype == torch.uint8 and len(field.shape) in (2, 3) and min(sorted(field.shape)[-2:]) >= 8


def _strip(frames: np.ndarray) -> np.ndarray:
    """The frames side by side, separated by white; dark frames are brightened."""
    peak = int(frames.max(initial=0))
    if 0 < peak < 128:
        frames = (frames.astype(np.uint16) * 255 // peak).astype(np.uint8)
    images = [_as_image(frame) for frame in frames]
    gap = np.full((images[0].shape[0], max(1, images[0].shape[1] // 20), *images[0].shape[2:]), 255, np.uint8)
    return np.concatenate([part for image in images for part in (image, gap)][:-1], axis=1)


def _as_image(frame: np.ndarray) -> np.ndarray:
    """(height, width), or (height, width, 3), of a frame with its channels first or last."""
    if frame.ndim == 2:
        return frame
    if frame.shape[0] < frame.shape[2]:
        frame = frame.transpose(1, 2, 0)
    return frame if frame.shape[2] == 3 else frame[..., -1]
