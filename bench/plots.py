"""Plots of records: time over size of kernels and of cycles beside other libraries, and a roofline of kernels.

No operation can move bytes faster than a plain copy, nor take less time than an empty launch. In GB/s the first bound
is flat and the second rises with the bytes. Both come from the same run as the points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_replay.console.figures import GREY, PALETTE, panels, save

from .cases import OURS, short
from .kernels import KERNELS
from .peers_suite import PEERS
from .records import Record

_INK, _FAINT = "0.15", "0.85"
# the first is this package's
_COLORS = (*PALETTE[1:], GREY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Plot each operation that was measured at several sizes as one PNG, and the roofline; returns the files.

    Those of several devices or ways of timing go into folders of their own below `folder`.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.environment.device, record.clock), []).append(record)
    files = []
    for (device, clock), group in groups.items():
        place = folder if len(groups) == 1 else folder / f"{device}-{clock}".lower().replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        for operation in dict.fromkeys(record.operation for record in group):
            chosen = [record for record in group if record.operation == operation]
            if chosen[0].suite == "scale":
                files.append(_scaling(chosen, place / f"{operation}.png"))
            elif len({(record.capacity, record.batch) for record in chosen}) > 1:
                files.append(_times(chosen, place / f"{operation}.png"))
        if any(record.suite == "kernels" and record.implementation == OURS and record.bytes for record in group):
            files.append(_roofline(group, place / "roofline.png"))
    return files


def _times(records: Sequence[Record], file: Path) -> Path:
    """Time over N, one panel for each B; over B where N never changes."""
    operation = records[0].operation
    over_slots = len({record.capacity for record in records}) > 1
    batches = sorted({record.batch for record in records}) if over_slots else [0]
    names = sorted(dict.fromkeys(record.implementation for record in records), key=lambda name: name != OURS)
    width = 2.2 + 2.7 * len(batches) if len(batches) > 1 else 6.4
    figure, ((*axes,),) = panels(1, len(batches), width, 4.6, sharex=True, sharey=True)
    for axis, batch in zip(axes, batches, strict=True):
        for place, name in enumerate(names):
            shown = [r for r in records if r.implementation == name and (not over_slots or r.batch == batch)]
            shown.sort(key=lambda r: (r.capacity, r.batch))
            if shown:
                _curve(axis, shown, over_slots, place)
        axis.set_xlabel("slots, N" if over_slots else "batch, B")
        if len(batches) > 1:
            axis.set_title(f"B = {batch:,}", fontsize=9, color=_INK)
        _log_axes(axis, (r.capacity if over_slots else r.batch for r in records))
    axes[0].set_ylabel("time of a call, µs")
    about = KERNELS[operation].about if operation in KERNELS else f"add {records[0].added}, sample B, update B"
    return _finish(figure, f"{operation}: {about}", records, file)


def _scaling(records: Sequence[Record], file: Path) -> Path:
    """Time over N at the batch with most sizes of N, and over B at the N with most batches."""
    names = sorted(dict.fromkeys(record.implementation for record in records), key=lambda name: name != OURS)
    sizes = {(record.capacity, record.batch) for record in records}
    (slots, _), (batch, _) = (Counter(values).most_common(1)[0] for values in zip(*sizes, strict=True))
    figure, (axes,) = panels(1, 2, 8.4, 4.6, sharey=True)
    for axis, over_slots in zip(axes, (True, False), strict=True):
        shown = [r for r in records if (r.batch == batch if over_slots else r.capacity == slots)]
        shown.sort(key=lambda r: (r.capacity, r.batch))
        for place, name in enumerate(names):
            _curve(axis, [r for r in shown if r.implementation == name], over_slots, place)
        axis.set_xlabel(f"slots, N; B = {batch:,}" if over_slots else f"batch, B; N = {short(slots)}")
        _log_axes(axis, (r.capacity if over_slots else r.batch for r in shown))
    axes[0].set_ylabel("time of a call, µs")
    return _finish(figure, f"{records[0].operation}: B rows, one thread", records, file)


def _curve(axis: Any, records: Sequence[Record], over_slots: bool, place: int) -> None:
    """Medians, and a band from p10 to p90."""
    name, color, marker = records[0].implementation, _COLORS[place % len(_COLORS)], _MARKERS[place % len(_MARKERS)]
    x = [record.capacity if over_slots else record.batch for record in records]
    look = {"marker": marker, "markersize": 4, "linewidth": 1.4, "color": color}
    look["label"] = f"{name} (uniform)" if name in PEERS and PEERS[name].uniform else name
    axis.plot(x, [r.median for r in records], "-" if name == OURS else "--", **look)
    low, high = ([record.quantiles[each] for record in records] for each in ("p10", "p90"))
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _roofline(records: Sequence[Record], file: Path) -> Path:
    """Bytes a second over bytes of this package's operations, below the two bounds."""
    ours = [record for record in records if record.implementation == OURS and record.bytes]
    figure, ((axis,),) = panels(1, 1, 8.4, 5.2)
    for place, operation in enumerate(dict.fromkeys(record.operation for record in ours)):
        shown = sorted((r for r in ours if r.operation == operation), key=lambda r: (r.bytes, r.capacity))
        look = {"marker": _MARKERS[place % len(_MARKERS)], "color": _COLORS[place % len(_COLORS)], "markersize": 5}
        rates = [record.bytes / record.median / 1e3 for record in shown]
        axis.plot([record.bytes for record in shown], rates, linestyle="none", alpha=0.8, label=operation, **look)
    smallest, largest = min(r.bytes for r in ours) / 2, max(r.bytes for r in ours) * 2
    copy = sorted(record.copy_bandwidth for record in ours)[len(ours) // 2] / 1e9
    empty = [record.median for record in records if record.operation == "empty" and record.implementation == OURS]
    # GB/s are bytes a nanosecond; where both bounds meet, a copy takes as long as an empty call
    launch = empty[0] * 1e3 if empty else 0.0
    edges = sorted({smallest, min(max(copy * launch, smallest), largest), largest})
    roof = f"plain copy, {copy:,.1f} GB/s" + (f", and an empty call, {empty[0]:.2g} µs" if empty else "")
    bound = [min(copy, edge / launch) if launch else copy for edge in edges]
    axis.plot(edges, bound, "-", color=_INK, linewidth=1.2, label=roof)
    axis.set(xlabel="bytes that must move", ylabel="GB/s")
    _log_axes(axis)
    return _finish(figure, "bandwidth of each operation, all sizes", records, file)


def _log_axes(axis: Any, sizes: Iterable[int] = ()) -> None:
    """Make axes logarithmic, with ticks at these sizes if given, and enough vertical ones to read a value."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.minorticks_off()
    ticks = sorted(set(sizes))
    if ticks:
        axis.set_xticks(ticks, [short(size) for size in ticks])
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
    axis.grid(visible=True, which="major", color=_FAINT, linewidth=0.6)
    axis.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _finish(figure: Any, title: str, records: Sequence[Record], file: Path) -> Path:
    """Title, machine, and one legend below the panels."""
    environment = records[0].environment
    machine = environment.cpu if environment.device == "cpu" else environment.device
    trial = ", QUICK RUN" if any(record.quick for record in records) else ""
    clock = {"host": "host's clock", "events": "CUDA events", "graph": "replayed graphs"}[records[0].clock]
    figure.suptitle(f"{title}\n{machine}, {environment.date[:10]}, {clock}{trial}", fontsize=9, color=_INK)
    # each name once, whichever panels it is in
    found = {label: each for axis in figure.axes for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = min(3, len(found))
    figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
    return save(figure, file)
