"""Priorities as integers, so that sums are exact on every device: their masses, the tree of sums, and their changes.

mass = clamp(floor(min(|priority| + eps, clip) ** alpha * 2**20 + 0.5), 1, limit), limit = 2**62 // slots: the total of
all slots fits 63 bits whatever is given. A slot that must not be drawn has mass 0.

Level 0 of the tree holds one mass per slot, padded with zeros to whole blocks; every further level holds the sum of
each block of `fanout` nodes below it, up to a root of at most `root_limit` nodes. All are int64 and exact, so a total
is `==` the sum of its leaves after any number of updates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.loops import masses as loops
from gpu_replay.loops.constants import ROOT_LIMIT
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_MASS, Counter
from gpu_replay.ops.launch import Launch, aligned, per_program, reciprocal
from gpu_replay.ops.ring import StreamShape, contiguous, moved_rows

if TYPE_CHECKING:
    from gpu_replay.ops.steps import Streams

UNIT = float(2**20)
# priorities below this count as this: log2 of zero has no value
TINY = 1e-300
# exponents above this give more than 2**62, beyond any limit, and still fit an int64
TOP_EXPONENT = 42.5


@dataclass(frozen=True)
class MassRule:
    """How one buffer turns priorities into masses.

    limit: largest mass of one slot. ordered: whether they are order codes instead, see `OrderRule`.
    """

    ordered: ClassVar[bool] = False

    alpha: float
    eps: float
    clip: float
    limit: int

    @classmethod
    def for_slots(cls, slots: int, alpha: float, eps: float, clip: float | None) -> MassRule:
        """The rule for a buffer of so many slots; `clip=None` cuts nothing."""
        return cls(alpha, eps, math.inf if clip is None else clip, 2**62 // slots)

    def masses(self, priorities: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The (B,) int64 masses of (B,) finite float32 or float64 priorities, the largest of them, and how many were
        cut. B is at least 1.
        """
        masses = loops.masses.compiled()(self.numbers(priorities), self.ordered)
        largest, saturated = int(masses.max()), 0
        if largest > self.limit:
            largest, saturated = self.limit, int(np.count_nonzero(masses > self.limit))
            np.minimum(masses, self.limit, out=masses)
        return masses, largest, saturated

    def numbers(self, priorities: np.ndarray) -> np.ndarray:
        """(B,) float64: min(|priority| + eps, clip) ** alpha of (B,) finite priorities, no more than about 2**42.5.

        Written as exp2(log2(x) * alpha) because the kernels have these two functions, not `pow`; NumPy's, since those
        of a compiler round otherwise.
        """
        x = np.empty(priorities.size)
        self._shifted(contiguous(priorities), x)
        np.log2(x, x)
        x *= self.alpha
        return np.exp2(x, x)

    @cached_property
    def _shifted(self) -> Callable[[np.ndarray, np.ndarray], None]:
        """The loop that makes what is raised to `alpha`; the power of the largest number reaches any limit."""
        top = 2 ** (TOP_EXPONENT / self.alpha) if self.alpha * 1024 > TOP_EXPONENT else sys.float_info.max
        return partial(loops.shifted.compiled(), self.eps, min(self.clip, top), TINY if self.eps < TINY else 0.0)

    def mass(self, priority: float) -> int:
        """The mass of one priority."""
        return self.masses(np.array([priority], dtype=np.float64))[1]

    def priorities(self, masses: np.ndarray) -> np.ndarray:
        """The priorities that these masses stand for, to the resolution of a mass; nan when alpha is 0."""
        if self.alpha == 0:
            return np.full(masses.shape, math.nan)
        return np.maximum((masses / UNIT) ** (1 / self.alpha) - self.eps, 0.0)


@dataclass(frozen=True)
class OrderRule(MassRule):
    """Turns priorities into order codes, for draws by rank, without the numbers by which masses are made.

    code = bits of the float64 |priority|, plus 1: the bits of numbers that are not negative ascend with them, so codes
    compare as priorities do, exactly. A slot that must not be drawn has code 0. Sums of codes mean nothing.

    limit: the code of the largest float64, so that none is ever cut.
    """

    ordered: ClassVar[bool] = True

    alpha: float = 0.0
    eps: float = 0.0
    clip: float = math.inf
    limit: int = 2**63 - 2**52

    def numbers(self, priorities: np.ndarray) -> np.ndarray:
        """(B,) float64: |priority| of (B,) finite priorities, whose bits make the codes."""
        return np.abs(priorities, dtype=np.float64)

    def priorities(self, codes: np.ndarray) -> np.ndarray:
        """The (B,) float64 priorities of (B,) int64 codes above 0, exactly."""
        return (codes - 1).view(np.float64)


def fanout_for(backend: Backend) -> int:
    """Children of one node: few where every array operation costs, many where every level is a trip to memory."""
    return 16 if backend == "host" else 32


class TreeArrays(NamedTuple):
    """Host: a tree as `loops/masses.py` takes it."""

    flat: np.ndarray
    starts: np.ndarray
    changed_slots: np.ndarray


class MassTree:
    """int64 masses of `slots` slots, all 0 at first, and their sums.

    levels: leaves first; `levels[0][:slots]` are the masses. With `summed=False` there are leaves alone,
            which hold order codes (see `OrderRule`), since sums of codes mean nothing.
    """

    def __init__(self, slots: int, device: torch.device, backend: Backend, *, summed: bool = True) -> None:
        self.slots = slots
        self.backend = backend
        self.fanout = fanout = fanout_for(backend)
        # nodes of each level, padded to whole blocks; of the root the host's loops scan thousands at once, a kernel one
        # block
        most, sizes = ROOT_LIMIT if backend == "host" else fanout, [-(-slots // fanout) * fanout]
        while summed and sizes[-1] > most:
            sizes.append(-(-(sizes[-1] // fanout) // fanout) * fanout)
        if backend == "host" and device.type != "meta":
            # all levels in one piece, for the compiled loops
            starts = np.cumsum([0, *sizes])
            flat = np.zeros(starts[-1], dtype=np.int64)
            self.levels = torch.from_numpy(flat).split(sizes)
            # no order of ranks is kept yet
            self.host = TreeArrays(flat, starts, np.zeros(0, dtype=np.int64))
        else:
            self.levels = tuple(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)

    @property
    def masses(self) -> Tensor:
        """(slots,) int64 masses in slot order, the tree's own memory."""
        return self.levels[0][: self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in self.levels)

    def total(self) -> int:
        """The exact total mass; on CUDA this waits for the device."""
        return loops.total.compiled()(*self.host[:2]) if self.backend == "host" else int(self.levels[-1].sum())

    def build(self) -> None:
        """Recompute all sums from the leaves."""
        self.mark_all_changed()
        for below, above in pairwise(self.levels):
            sums = below.view(-1, self.fanout).sum(1)
            above[: sums.numel()] = sums

    def clear(self) -> None:
        """No slot has mass."""
        self.mark_all_changed()
        for level in self.levels:
            level.zero_()

    def mark_all_changed(self) -> None:
        """Tell the order of ranks, where the host keeps one, that more slots have changed than can be recorded."""
        if self.backend == "host" and self.host.changed_slots.size:
            self.host.changed_slots[0] = self.host.changed_slots.size

    def lowest(self) -> Tensor:
        """The smallest mass that is not 0 as int64 without dimensions, or NO_MASS when there is none."""
        # in parts, which need little memory
        parts = [torch.where(part > 0, part, NO_MASS).min() for part in self.masses.split(2**24)]
        return torch.stack(parts).min()


TreeArguments = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
NO_TREE: TreeArguments = (), ()
# of a ring of transitions
NO_STEPS = StreamShape(num_envs=1, steps=1, stack=1, n_step=1, next_step=False, finals=0)
# takes values, priorities, keys to be filled, and whether all values are aligned
Add = Callable[[Mapping[str, Tensor], Tensor | None, Tensor, bool], None]


class DeviceMasses:
    """Arguments of the mass kernels: a tree, the numbers of its rule and, for updates, one stamp per slot.

    initial: the counter that has the mass of new transitions, -1 for none, and what it is without that, or before any.
    """

    def __init__(self, tree: MassTree, rule: MassRule, initial: tuple[int, int]) -> None:
        device = tree.levels[0].device
        self.tree = tree
        self.source, mass = initial
        masses = torch.tensor([mass, rule.limit], dtype=torch.int64, device=device)
        numbers = torch.tensor([rule.alpha, rule.eps, rule.clip], dtype=torch.float64, device=device)
        # order codes are made without numbers
        self.rule = (masses,) if rule.ordered else (masses, numbers)
        # levels and rule, as kernels take them
        self.arguments: TreeArguments = tree.levels, self.rule
        self.stamps = torch.full((tree.slots,), -1, dtype=torch.int32, device=device)

    def find_highest(self, counters: Tensor) -> None:
        """Bring the largest stored mass to where kernels take it from."""
        counters[Counter.HIGHEST] = self.tree.masses.max()

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the tree's."""
        return sum(part.nbytes for part in self.rule) + self.stamps.nbytes


def blocks_per_program(rows: int, fanout: int, interpreted: bool) -> int:
    """Blocks of `fanout` slots of one program that inserts, four slots a thread; when interpreted, of all the rows."""
    return min(1024, 1 << (-(-rows // fanout)).bit_length()) if interpreted else 512 // fanout


def keys_together(batch: int, interpreted: bool) -> int:
    """Keys of the one program that updates a whole batch; 0 of a batch that takes several, and a launch before them.

    On a GPU few keys and many are different code to compile: 256, 512 or 1024. One that holds many more than there are
    would make masses for nothing, and one of thousands of keys would leave the rest of the GPU idle.
    """
    if batch > 1024:
        return 0
    if interpreted:
        return 1 << (batch - 1).bit_length()
    return next(keys for keys in (256, 512, 1024) if batch <= keys)


def update_warps(together: int) -> int:
    """Warps of a program that updates `together` keys: a thread for each, within what AMD's GPUs allow.

    0 stands for an update by several programs. A thread with several keys exchanges them through shared memory.
    """
    return min(16, max(4, together // 32))


def make_add(
    stores: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    masses: DeviceMasses | None,
    counters: Tensor,
    times_sampled: Tensor,
    rows: int,
    *,
    given: bool,
) -> Add:
    """Device: store `rows` transitions with their masses, and put their keys into a (rows,) int64. One launch changes
    all that changes, so that nothing comes between.

    given: whether they come with priorities, all of one dtype.
    """
    from gpu_replay.kernels.masses import add_kernel

    capacity, interpreted = times_sampled.numel(), counters.device.type == "cpu"
    names, fanout, skipped = tuple(fields), fanout_for("triton"), max(0, rows - capacity)
    layout, moving = moved_rows(tuple(fields.values()), rows - skipped, interpreted)
    blocks = blocks_per_program(rows - skipped, fanout, interpreted)
    segment = -(-(-(-(rows - skipped) // fanout) + 1) // blocks)
    inserting = max(2 * segment, -(-skipped // (blocks * fanout)))
    launch = Launch(
        add_kernel,
        inserting + moving,
        stores=tuple(stores[name] for name in names),
        tree=NO_TREE if masses is None else masses.arguments,
        counters_ptr=counters,
        times_sampled_ptr=times_sampled,
        rows=rows,
        skipped=skipped,
        capacity=capacity,
        segment=segment,
        inserting=inserting,
        LAYOUT=layout,
        BLOCKS=blocks,
        GIVEN=given,
        SOURCE=-1 if masses is None else masses.source,
    )
    looks_up = masses if masses is not None and masses.source == Counter.HIGHEST else None

    def add(values: Mapping[str, Tensor], priorities: Tensor | None, keys: Tensor, ready: bool) -> None:
        if looks_up is not None:
            looks_up.find_highest(counters)
        inputs, numbers = tuple(map(values.__getitem__, names)), keys if priorities is None else priorities
        launch(inputs, keys, numbers, aligned=(ready or aligned(*inputs)) and (numbers is keys or aligned(numbers)))

    return add


def make_update(
    masses: DeviceMasses | None, counters: Tensor, capacity: int, batch: int, streams: Streams | None
) -> Callable[[Tensor, Tensor, bool], None]:
    """Device: new masses for live keys, the last of a repeated key; one launch a call, two for more keys than a program
    takes. All priorities must be of one dtype; the last argument says that both are aligned.

    streams: of a trajectory buffer, whose stored slots without mass stay so; a mass for one that may get it when its
             window is complete waits there.
    """
    from gpu_replay.kernels.masses import last_wins_kernel, update_kernel

    interpreted = counters.device.type == "cpu"
    together = keys_together(batch, interpreted) if masses is not None else 0
    draws = together or per_program(128, batch, interpreted)
    programs, stamps = -(-batch // draws), counters if masses is None else masses.stamps
    # nothing waits where there are no steps, or no masses
    waiting = None if masses is None else streams
    shape = NO_STEPS if waiting is None else waiting.shape
    lines = shape.num_envs * shape.lines
    shared: dict[str, Any] = {"counters_ptr": counters, "stamp_ptr": stamps, "batch": batch, "capacity": capacity}
    shared |= {"per_capacity": reciprocal(capacity), "DRAWS": draws}
    finds_apart = masses is not None and not together
    stamp = Launch(last_wins_kernel, programs, **shared) if finds_apart else None
    change = Launch(
        update_kernel,
        programs,
        **shared,
        tree=NO_TREE if masses is None else masses.arguments,
        streams=() if waiting is None else (waiting.flags, waiting.depth, waiting.open_masses),
        envs=shape.num_envs,
        per_envs=reciprocal(shape.num_envs),
        stack=shape.stack,
        n_step=shape.n_step,
        lines=lines,
        per_lines=reciprocal(lines),
        ahead=shape.ahead,
        stride=shape.stride,
        per_stride=reciprocal(shape.stride),
        NEXT_STEP=shape.next_step,
        LONG=shape.length > 0,
        STRICT=shape.strict,
        FINDS_WINNERS=together > 0,
        num_warps=update_warps(together),
    )

    def update(keys: Tensor, priorities: Tensor, ready: bool) -> None:
        is_aligned = ready or aligned(keys, priorities)
        if stamp is None:
            change(keys, priorities, aligned=is_aligned)
            return
        try:
            stamp(keys, aligned=is_aligned)
            change(keys, priorities, aligned=is_aligned)
        except BaseException:
            # reset the stamps if the second launch failed, since they would win over those of later updates
            stamps.fill_(-1)
            raise

    return update
