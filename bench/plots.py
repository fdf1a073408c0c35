"""Plots of records: time over size of kernels and of cycles beside other libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_replay.console.figures import GREY, PALETTE, panels, save
from gpu_replay.console.markdown import number

from .operations import KERNELS, OURS, short
from .peers import PEERS
from .records import Record

# suite, operation and batch of the plot that has one panel
IN_SHORT = ("peers", "cycle", 256)
_INK, _FAINT = "0.15", "0.85"
# the first is this package's
_COLORS = (*PALETTE[1:], PALETTE[0], GREY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Plot kernels, cycles and calls that were measured at several sizes, a PNG each; the files.

    Those of several devices or ways of timing go into folders of their own below `folder`.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.suite in ("kernels", "scale") or record.operation in ("cycle", "frame-cycle"):
            groups.setdefault((record.environment.device, record.timing), []).append(record)
    files = []
    for (device, clock), group in groups.items():
        place = folder if len(groups) == 1 else folder / f"{device}-{clock}".lower().replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        for operation in dict.fromkeys(record.operation for record in group):
            chosen = [record for record in group if record.operation == operation]
            if len({(record.capacity, record.batch) for record in chosen}) > 1:
                files.append(_sizes(chosen, place / f"{operation}.png"))
            # the picture of README.md
            shown = [record for record in chosen if (record.suite, record.operation, record.batch) == IN_SHORT]
            if len({record.capacity for record in shown}) > 1:
                files.append(_sizes(shown, place / f"{operation}-{IN_SHORT[2]}.png"))
    return files


class _Panel(NamedTuple):
    """Records over one of their sizes."""

    records: list[Record]
    size: Callable[[Record], int]
    label: str
    title: str = ""


_SLOTS, _BATCH = (lambda record: record.capacity), (lambda record: record.batch)


def _panels(records: Sequence[Record]) -> list[_Panel]:
    """Over N, one panel for each B, or over B where N never changes; calls that grow both ways: one of each."""
    if records[0].unit == "bytes":
        return [_Panel(list(records), lambda record: record.bytes, "bytes of fields")]
    slots, batches = (Counter(size(record) for record in records) for size in (_SLOTS, _BATCH))
    if records[0].suite == "scale":
        slot, batch = slots.most_common(1)[0][0], batches.most_common(1)[0][0]
        over = _Panel([r for r in records if r.batch == batch], _SLOTS, f"capacity, N; B = {batch:,}")
        return [over, _Panel([r for r in records if r.capacity == slot], _BATCH, f"batch size, B; N = {short(slot)}")]
    if len(slots) == 1:
        return [_Panel(list(records), _BATCH, "batch size, B")]
    each = [(batch, [r for r in records if r.batch == batch]) for batch in sorted(batches)]
    # two points are left to the tables, where other batches have more
    least = min(3, max(len({_SLOTS(r) for r in some}) for _, some in each))
    each = [(batch, some) for batch, some in each if len({_SLOTS(r) for r in some}) >= least]
    return [_Panel(some, _SLOTS, "capacity, N", f"B = {batch:,}" if len(each) > 1 else "") for batch, some in each]


def _sizes(records: Sequence[Record], file: Path) -> Path:
    """Time over sizes, or resident bytes over those of the fields."""
    operation, shown, held = records[0].operation, _panels(records), records[0].unit == "bytes"
    names = sorted(dict.fromkeys(record.implementation for record in records), key=lambda name: name != OURS)
    width = 6.4 if len(shown) == 1 else max(8.4, 2.2 + 2.7 * len(shown))
    alike = shown[0].size is shown[-1].size
    figure, ((*axes,),) = panels(1, len(shown), width, 4.2, sharey=True, sharex=alike)
    for axis, panel in zip(axes, shown, strict=True):
        for name in names:
            found = sorted((r for r in panel.records if r.implementation == name), key=panel.size)
            # the place decides the colour, also where some have no records
            _curve(axis, found, panel.size, names.index(name), held)
        axis.set_xlabel(panel.label)
        axis.set_title(panel.title, fontsize=9, color=_INK)
        _axes(axis, map(panel.size, records if alike else panel.records), linear=held)
    timed = "cycle" if operation in ("cycle", "frame-cycle") else "call"
    axes[0].set_ylabel("resident bytes over those of the fields" if held else f"time of one {timed}, µs")
    rows = f"{records[0].batch:,}" if len({record.batch for record in records}) == 1 else "B"
    what = "steps of Atari" if operation == "frame-cycle" else "transitions"
    cycle = f"add {records[0].added} {what}, sample {rows}, update {rows} priorities"
    about = KERNELS[operation].about if operation in KERNELS else cycle
    about = "a full buffer of transitions" if held else "B rows" if records[0].suite == "scale" else about
    if len(shown) == 1 and not held:
        _label_ends(axes[0])
    return _finish(figure, f"{operation}: {about}", records, file)


def _curve(axis: Any, records: Sequence[Record], size: Callable[[Record], int], place: int, held: bool) -> None:
    """Medians, and a band from p10 to p90; of bytes over those of the fields."""
    if not records:
        return
    name = records[0].implementation
    uniform = name in PEERS and PEERS[name].uniform
    color, label = (GREY, f"{name}, no priorities") if uniform else (_COLORS[place % len(_COLORS)], name)
    look = {"marker": _MARKERS[place % len(_MARKERS)], "markersize": 4, "linewidth": 2.2 if name == OURS else 1.4}
    x = [size(record) for record in records]
    low, middle, high = ([r.quantiles[q] / (r.bytes if held else 1) for r in records] for q in ("p10", "p50", "p90"))
    axis.plot(x, middle, "-" if name == OURS else "--", color=color, label=label, **look)
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _label_ends(axis: Any) -> None:
    """Name each line at its right end, with its last value; names keep a distance from each other."""
    axis.figure.draw_without_rendering()
    last = float("-inf")
    for line in sorted(axis.get_lines(), key=lambda line: float(line.get_ydata()[-1])):
        x, y = (float(values[-1]) for values in line.get_data())
        at = axis.transData.transform((x, y))[1] * 72 / axis.figure.dpi
        last = max(at, last + 13.5)
        look = {"textcoords": "offset points", "color": line.get_color(), "va": "center", "annotation_clip": False}
        axis.annotate(f"{line.get_label()}: {number(y)} µs", (x, y), (10, last - at), fontsize=9, **look)


def _axes(axis: Any, sizes: Iterable[int], *, linear: bool = False) -> None:
    """Make axes logarithmic, with ticks at these sizes, and enough vertical ones to read a value.

    linear: whether the vertical one is not.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log")
    axis.minorticks_off()
    ticks = sorted(set(sizes))
    # of two that are close, the larger: their labels would overlap
    ticks = [size for size, after in zip(ticks, [*ticks[1:], float("inf")], strict=True) if after > 2.5 * size]
    axis.set_xticks(ticks, [short(size) for size in ticks])
    if not linear:
        axis.set_yscale("log")
        axis.minorticks_off()
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
    axis.grid(visible=True, which="major", color=_FAINT, linewidth=0.6)
    axis.tick_params(labelsize=8, colors=_INK)
    axis.spines[["top", "right"]].set_visible(False)


def _finish(figure: Any, title: str, records: Sequence[Record], file: Path) -> Path:
    """Title, machine, and one legend below the panels, unless the lines of the only one are named there."""
    environment = records[0].environment
    machine = environment.cpu if environment.device == "cpu" else environment.device
    trial = ", QUICK RUN" if any(record.quick for record in records) else ""
    threads = f"{environment.threads} thread{'s' * (environment.threads > 1)}"
    clock = {"host": threads, "events": "by CUDA events", "graph": "in replayed CUDA graphs"}[records[0].timing]
    about = f"median, band from p10 to p90; lower is better\n{machine}, {clock}, {environment.date[:10]}{trial}"
    figure.suptitle(f"{title}\n{about}", fontsize=9, color=_INK)
    # each name once, whichever panels it is in
    found = {label: each for axis in figure.axes for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if not figure.axes[0].texts:
        look = {"loc": "outside lower center", "ncols": min(3, len(found)), "fontsize": 8, "frameon": False}
        figure.legend(list(found.values()), list(found), **look)
    return save(figure, file)
