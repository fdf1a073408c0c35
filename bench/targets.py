"""Targets for a GPU, and the table that compares records with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_replay.console.markdown import table

from .cases import OURS, Chosen
from .records import Record

NOT_MEASURED = "not measured yet"
_TORCH = "cumsum + searchsorted + scatter"


class Target(NamedTuple):
    """One line of the table.

    case:  of this package.
    asked: of its time, of its share of the copy bandwidth ("%"), or of a ratio of times ("x").
    other: case and implementation of the time that the ratio compares with.
    over:  whether the ratio is the other time over this package's; else it is the other way round.
    """

    case: str
    asked: str
    other: tuple[str, str] | None = None
    over: bool = False


def _index(slots: str) -> str:
    return f"draw-update/N={slots}/B=256"


_LEAST = {"1M": 3, "10M": 10, "100M": 50}
_GATHERS = [f"row-gather/N=1M/B={batch}" for batch in (4096, 65_536)]
TARGETS = (
    *[Target(_index(n), f"≥ {least}x torch", (_index(n), _TORCH), True) for n, least in _LEAST.items()],
    Target("frame-gather-bf16/N=1M/B=4096", "≥ 85% of copy bandwidth"),
    Target("prefix-sum/N=10M", "≥ 85% of copy bandwidth"),
    Target("prefix-sum/N=100M", "≥ 85% of copy bandwidth"),
    Target("tree-build/N=100M", "≥ 70% of copy bandwidth"),
    *[Target(case, "≤ 1.3x index_select", (case, "index_select of packed rows alone")) for case in _GATHERS],
    Target(_index("1M"), "≤ 4x empty kernel", ("empty", OURS)),
    Target(_index("100M"), "< 3x that of N = 10k", (_index("10k"), OURS)),
    Target("update/N=1M/B=4096", "≥ 10x TorchRL", ("update/N=1M/B=4096", "torchrl"), True),
    # one step of 128 environments of Atari
    Target("frame-cycle/N=1024k/B=512", "< 100 µs"),
)


def targets_first(cases: Sequence[Chosen]) -> list[Chosen]:
    """The cases that targets are about, then the others, both in their order."""
    named = {name for each in TARGETS for name in (each.case, each.other[0] if each.other else "")}
    return sorted(cases, key=lambda case: case.name not in named and case.operation != "frame-cycle")


def targets_table(records: Sequence[Record]) -> str:
    """Targets down; what records of a GPU say."""
    found: dict[tuple[str, str], Record] = {}
    # the newest one, and replayed graphs rather than single launches
    for record in sorted(records, key=lambda record: (record.clock == "graph", record.environment.date)):
        if record.environment.device != "cpu":
            found[record.case, record.implementation] = record
    rows = [[each.case, each.asked, _measured(each, found) or NOT_MEASURED] for each in TARGETS]
    return table(["case", "target", "measured"], rows)


def _measured(each: Target, found: dict[tuple[str, str], Record]) -> str | None:
    mine = found.get((each.case, OURS))
    if mine is None:
        return None
    time = f"{mine.median:.1f} µs"
    if each.other is None:
        return time if mine.copy_share is None or "%" not in each.asked else f"{mine.copy_share:.1%} ({time})"
    other = found.get(each.other)
    if other is None:
        return None
    ratio = other.median / mine.median if each.over else mine.median / other.median
    return f"{ratio:.2f}x ({time})"
