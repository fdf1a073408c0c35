"""Predicted times on an H200 for each target: bytes, launches and dependent loads.

The counts follow from the code (levels of the tree, launches of each call); what a byte, a launch and a dependent load
cost comes from a data sheet or is assumed, as marked. Records of a GPU appear beside the prediction in the same table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from gpu_replay.console.markdown import table
from gpu_replay.ops.mass_tree import fanout_for, level_sizes, root_limit_for
from gpu_replay.ops.prefix_sum import scan_block
from gpu_replay.ops.priorities import keys_together
from gpu_replay.ops.rank_merge import BASE, digits_for, joins_for
from gpu_replay.ops.weights import weighed_together

from .cases import DRAW, KEY, MASS, OURS, PRIORITY, PROBABILITY, UPDATE, WEIGHT, Chosen, short
from .record import Record
from .rows import DTYPES, ROW_BYTES
from .stacks import FRAME_BYTES, STACK

# bytes a second of an H200's memory, as its data sheet says
DATA_SHEET = 4.8e12
# assumed microseconds of a launch replayed in a graph, and of a load that depends on the one before it
LAUNCH = 2.0, 3.0
DEPENDENT_LOAD = 0.8
# bytes of the smallest memory transaction
SECTOR = 32
BASELINE = "cumsum + searchsorted + scatter"
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Cost:
    """The cost of a call.

    must:      bytes that any implementation has to move: inputs, outputs and stored state.
    touched:   upper bound on the bytes of all sectors that are read or written, inner levels of the tree included.
    launches:  kernels, and operations of torch, one after another.
    dependent: loads each of which needs the value of the one before.
    """

    must: int = 0
    touched: int = 0
    launches: int = 0
    dependent: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def microseconds(self) -> tuple[float, float]:
        """Lower bound: bytes at full bandwidth and fast launches; upper: slow launches and every dependent load."""
        moving = self.touched / DATA_SHEET * 1e6
        low, high = (moving + self.launches * each for each in LAUNCH)
        return low, high + self.dependent * DEPENDENT_LOAD


def levels(slots: int) -> list[int]:
    """Nodes of each level of the device's tree, leaves first."""
    return level_sizes(slots, fanout_for("triton"), root_limit_for("triton"))


def sectors(nbytes: int) -> int:
    """Bytes of the sectors that hold so many consecutive bytes from a sector's start on."""
    return -(-nbytes // SECTOR) * SECTOR


def draw(slots: int, batch: int, *, gathered: bool = False) -> Cost:
    """Slots by mass, and their weights: each draw reads one block of every level, distinct ones once.

    gathered: whether rows are gathered as well, by the launch that makes the weights.
    """
    fanout = fanout_for("triton")
    blocks = sum(min(batch, size // fanout) for size in levels(slots)) * fanout * MASS
    per_draw = KEY + KEY + MASS + PROBABILITY + 2 * SECTOR + MASS + WEIGHT
    must = batch * DRAW
    # the root and the counters are asked for together, then one level after the other; weights wait for the lowest, but
    # no longer than a gather for its slots, and at the end of the draw for the last ticket before it
    together = not gathered and weighed_together(batch, False) > 0
    apart = 0 if gathered or together else 1
    waits = 2 if together else apart
    return Cost(must, blocks + batch * per_draw, launches=1 + apart, dependent=len(levels(slots)) + waits)


def update(slots: int, batch: int) -> Cost:
    """New masses: the last position of each key is left on its slot, then leaves and ancestors change."""
    above = sum(min(batch * SECTOR, size * MASS) for size in levels(slots)[1:])
    per_key = 2 * KEY + PRIORITY + 4 * SECTOR + 2 * SECTOR
    must = batch * UPDATE
    together = keys_together(batch, False) > 0
    # key and priority, then stamp and leaf; of many the key comes once more before, and the leaf after the stamp
    return Cost(must, batch * per_key + 2 * above, launches=1 if together else 2, dependent=2 if together else 4)


def scan(length: int) -> Cost:
    """Inclusive prefix sums: each number is read and written once, and each block has two words that begin as zeros."""
    blocks = -(-length // scan_block(length))
    if blocks == 1:
        return Cost(2 * length * MASS, 2 * length * MASS, launches=1, dependent=1)
    # zeros are a launch; then a block's own sum is written, the words of others are read, most of them in a cache, and
    # the sum up to it is written. The first blocks, all at once, look a few times before one of them is told
    state = 2 * MASS * blocks
    return Cost(2 * length * MASS, 2 * length * MASS + 4 * state, launches=2, dependent=4)


def build(slots: int) -> Cost:
    """All sums from the leaves: a kernel a level, which fills the level with zeros behind the sums."""
    sizes = levels(slots)
    moved = sum(below + above for below, above in pairwise(sizes)) * MASS
    return Cost(slots * MASS, moved, launches=len(sizes) - 1, dependent=len(sizes) - 1)


def gather_rows(batch: int) -> Cost:
    """Five small fields, each in a tensor of its own."""
    stored = sum(sectors(_bytes_of(name)) for name in DTYPES)
    return Cost(batch * (KEY + 2 * ROW_BYTES), batch * (KEY + stored + ROW_BYTES), launches=1, dependent=2)


def gather_packed(batch: int) -> Cost:
    """One `index_select` of rows that hold the same bytes; a row begins anywhere in a sector."""
    stored = -(-(ROW_BYTES + SECTOR - 1) // SECTOR) * SECTOR
    return Cost(batch * (KEY + 2 * ROW_BYTES), batch * (KEY + stored + ROW_BYTES), launches=1, dependent=2)


def gather_frames(batch: int, itemsize: int, *, distinct: int = 2 * STACK) -> Cost:
    """Stacks before and after as numbers of `itemsize` bytes; distinct: frames among them that differ."""
    written = 2 * STACK * FRAME_BYTES * itemsize
    must = batch * (KEY + distinct * FRAME_BYTES + written)
    return Cost(must, must + batch * 4 * SECTOR, launches=1, dependent=4)


def draw_and_update(slots: int, batch: int) -> Cost:
    """Sample and update of the index alone."""
    return draw(slots, batch) + update(slots, batch)


def merged_ranks(slots: int, changes: int) -> Cost:
    """The list of ranks brought up to date: codes and known codes are compared, the list is read and written.

    Each change is searched for twice, to put it in and to take it out: places and their codes, distinct ones once.
    """
    digits = digits_for(slots)
    searched = min(2 * changes * digits * BASE * 2 * SECTOR, slots * (LISTED + MASS))
    touched = slots * (2 * MASS + 2 * LISTED) + searched + 2 * changes * (3 * SECTOR + 4 * MASS)
    # with the fill of a counter; changes are compared with each other in chunks, slot and code
    joins, chunks = joins_for(slots), -(-min(changes, 1024) // 64)
    return Cost(changes * MASS, touched, 4 + joins, dependent=3 + 3 + 2 * digits + 2 * chunks + joins + 3 + digits)


def sorted_ranks(slots: int) -> Cost:
    """The list made anew: codes arranged by age, eight passes of a stable radix sort over codes and ages, the list."""
    touched = slots * (2 * MASS + (MASS + KEY) + 8 * 2 * (MASS + KEY) + MASS + KEY + LISTED)
    return Cost(slots * LISTED, touched, SORT_LAUNCHES + 2, dependent=SORT_LAUNCHES + 2)


# bytes of an entry of a list of ranks; launches of PyTorch's sort, assumed: ages, histogram, its sums, and the passes
LISTED = 4
SORT_LAUNCHES = 11


def rank_draw(slots: int, batch: int) -> Cost:
    """The draw itself and its weights: each draw searches the running masses of ranks, distinct places once."""
    digits = digits_for(slots)
    searched = min(batch * digits * BASE * SECTOR, slots * MASS)
    touched = searched + batch * (2 * SECTOR + DRAW + 2 * SECTOR + MASS + WEIGHT)
    return Cost(batch * DRAW, touched, launches=2, dependent=3 + digits + 2 + 2)


def by_torch(slots: int, batch: int) -> Cost:
    """The same by `cumsum`, `searchsorted` and `index_copy_` on float64: every call sums up everything."""
    touched = 2 * slots * 8 + batch * 12 * 8
    return Cost(batch * (DRAW + UPDATE), touched, TORCH_LAUNCHES, slots.bit_length())


# operations of torch in one draw and update of `baselines.CumulativeSums`; a test counts them
TORCH_LAUNCHES = 11


def atari_step(slots: int, added: int, batch: int) -> Cost:
    """Add a step of `added` environments, sample `batch` stacks as bfloat16, one step on, and update."""
    # frames, reward, flags and endings in and out; then flags, depth, masses and the nodes above change
    per_env = 2 * (FRAME_BYTES + 8 + 4 + 2) + 6 * SECTOR + 2 * SECTOR * len(levels(slots))
    add = Cost(2 * added * FRAME_BYTES, added * per_env, launches=2, dependent=4)
    # consecutive stacks share all frames but one
    gathered = gather_frames(batch, 2, distinct=STACK + 1)
    return add + draw(slots, batch, gathered=True) + gathered + update(slots, batch)


def _bytes_of(name: str) -> int:
    shape, dtype = DTYPES[name]
    return math.prod(shape) * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Target:
    """One target.

    cost:      of this package's call.
    predicted: what follows for the ratio that the target is about.
    measured:  that ratio in records of a GPU, None where there are none.
    """

    name: str
    target: str
    work: Cost
    predicted: str
    measured: str | None


class _Medians:
    """Medians of kernel records of a GPU."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = [record for record in records if record.environment.device != "cpu"]

    def find(self, case: str, implementation: str) -> Record | None:
        wanted = ("kernels", case, implementation)
        found = [record for record in self._records if (record.suite, record.case, record.implementation) == wanted]
        # replayed graphs come before single launches
        return max(found, key=lambda record: (record.clock == "graph", record.environment.date), default=None)

    def ratio(self, over: str, under: str, *, ours: int = 0, by: tuple[str, str] = (OURS, OURS)) -> str | None:
        """Median of one case over that of another, by these implementations; `ours` says which one is shown as well."""
        found = self.find(over, by[0]), self.find(under, by[1])
        medians = [record.median for record in found if record is not None]
        return f"{medians[0] / medians[1]:.2f}x ({medians[ours]:.1f} µs)" if len(medians) == 2 else None

    def share(self, case: str) -> str | None:
        mine = self.find(case, OURS)
        return None if mine is None or mine.copy_share is None else f"{mine.copy_share:.1%} ({mine.median:.1f} µs)"

    def step(self, added: int, batch: int) -> str | None:
        wanted = ("frame-cycle", added, batch, OURS, "graph")
        found = [
            record.median
            for record in self._records
            if (record.operation, record.added, record.batch, record.implementation, record.clock) == wanted
        ]
        return f"{found[-1]:.1f} µs" if found else None


def _span(values: tuple[float, float], unit: str = "", digits: int = 1) -> str:
    return f"{values[0]:.{digits}f} to {values[1]:.{digits}f}{unit}"


def _between(mine: Cost, theirs: Cost) -> str:
    """Their time over ours, launches costing the same on both sides."""
    ratios = sorted(b / a for a, b in zip(mine.microseconds, theirs.microseconds, strict=True))
    return _span((ratios[0], ratios[1]), "x")


def _of_bandwidth(work: Cost) -> str:
    shares = sorted(work.must / (each / 1e6) / DATA_SHEET for each in work.microseconds)
    return f"{shares[0]:.0%} to {shares[1]:.0%} of the data sheet"


def targets(records: Sequence[Record] = ()) -> list[Target]:
    """Every target, in the order of the table."""
    found, medians = [], _Medians(records)
    index = {slots: draw_and_update(slots, 256) for slots in (10**4, 10**6, 10**7, 10**8)}
    cases = {slots: f"draw-update/N={short(slots)}/B=256" for slots in index}
    for slots, least in ((10**6, 3), (10**7, 10), (10**8, 50)):
        case, predicted = cases[slots], _between(index[slots], by_torch(slots, 256))
        ratio = medians.ratio(case, case, ours=1, by=(BASELINE, OURS))
        found.append(Target(case, f"≥ {least}x torch", index[slots], predicted, ratio))
    for case, least, work in (
        ("frame-gather-bf16/N=1M/B=4096", 85, gather_frames(4096, 2)),
        ("prefix-sum/N=10M", 85, scan(10**7)),
        ("prefix-sum/N=100M", 85, scan(10**8)),
        ("tree-build/N=100M", 70, build(10**8)),
    ):
        found.append(Target(case, f"≥ {least}% of copy bandwidth", work, _of_bandwidth(work), medians.share(case)))
    for batch in (4096, 65_536):
        case, work = f"row-gather/N=1M/B={batch}", gather_rows(batch)
        ratio = medians.ratio(case, case, by=(OURS, "index_select of packed rows alone"))
        found.append(Target(case, "≤ 1.3x index_select", work, _between(gather_packed(batch), work), ratio))
    work, ratio = index[10**6], medians.ratio(cases[10**6], "empty")
    found.append(Target(cases[10**6], "≤ 4x empty kernel", work, _between(Cost(launches=1), work), ratio))
    work, ratio = index[10**8], medians.ratio(cases[10**8], cases[10**4])
    found.append(Target("draw-update, N=10k to 100M", "< 3x", work, _between(index[10**4], work), ratio))
    case, work = "update/N=1M/B=4096", update(10**6, 4096)
    low, high = work.microseconds
    predicted = f"if its trees take {_span((10 * low, 10 * high), ' µs', 0)} or more"
    ratio = medians.ratio(case, case, ours=1, by=("torchrl", OURS))
    found.append(Target(case, "≥ 10x TorchRL", work, predicted, ratio))
    for slots in (10**6, 10**7):
        case, drawn = f"rank-draw/N={short(slots)}/B=256", rank_draw(slots, 256)
        work = merged_ranks(slots, 256) + drawn
        ratio = medians.ratio(case, case, ours=1, by=("sort + searchsorted", OURS))
        found.append(Target(case, "≥ 2x a sort", work, _between(work, sorted_ranks(slots) + drawn), ratio))
    work = atari_step(10**6, 128, 512)
    predicted = _span(work.microseconds, " µs")
    found.append(Target("Atari step, E=128, B=512", "< 100 µs", work, predicted, medians.step(128, 512)))
    return found


def targets_first(cases: Sequence[Chosen]) -> list[Chosen]:
    """The cases that targets are about, then the others, both in their order."""
    named = {"empty", "draw-update/N=10k/B=256", *(target.name for target in targets())}
    return sorted(cases, key=lambda case: case.name not in named and case.operation != "frame-cycle")


def targets_table(records: Sequence[Record]) -> str:
    """Targets down; what is predicted, and what records of a GPU say."""
    rows = []
    for each in targets(records):
        work = each.work
        counts = [f"{work.launches}", f"{work.must / 1000:,.0f}", f"{work.touched / 1000:,.0f}"]
        times = [f"{work.touched / DATA_SHEET * 1e6:,.1f}", f"{work.dependent}", _span(work.microseconds)]
        rows.append([each.name, each.target, *counts, *times, each.predicted, each.measured or NOT_MEASURED])
    header = ["case", "target", "launches", "minimum KB", "KB of sectors", "at full bandwidth, µs", "dependent loads"]
    return table([*header, "predicted, µs", "predicted ratio", "measured"], rows)


_NOTE = (
    "KB are 1,000 bytes. Minimum KB are inputs, outputs and stored state, whatever the implementation; KB of sectors "
    "count every 32-byte sector that the kernels read or write, inner levels of the tree included, at most once per "
    f"draw. The bandwidth is that of an H200's data sheet, {DATA_SHEET / 1e12:.1f} TB/s. Assumed, not measured: a "
    f"launch replayed in a graph takes {LAUNCH[0]:.0f} to {LAUNCH[1]:.0f} µs, and each load that depends on the one "
    f"before it {DEPENDENT_LOAD} µs more. The lower time is bytes and fast launches, the upper slow launches and every "
    "dependent load. Each operation of torch counts as one launch, with its bytes and dependent loads counted alike."
)


def section(records: Sequence[Record]) -> str:
    """The table and its note, for the marked place in a document."""
    return f"{targets_table(records)}\n\n{_NOTE} Reproduce the last column: `bench/on_gpu.sh records`."
