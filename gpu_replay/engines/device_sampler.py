"""Draws and priority updates on CUDA tensors, through Triton kernels; also on CPU tensors under Triton's interpreter.

Nothing here waits for the device unless its docstring states it. Whatever a replayed graph must advance is in the
counters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.storage import Storage
from gpu_replay.ops.counters import NO_MASS, Counter, blocks_for
from gpu_replay.ops.draws import DeviceDraws
from gpu_replay.ops.eligible_draw import plan_eligible_draw
from gpu_replay.ops.launch import Kept
from gpu_replay.ops.priorities import DeviceMasses, plan_update
from gpu_replay.ops.rank_draw import DeviceRanks, plan_rank_draw
from gpu_replay.ops.ring import plan_write
from gpu_replay.ops.stratified_draw import plan_stratified_draw
from gpu_replay.ops.uniform_draw import plan_uniform_draw, uniform_blocks
from gpu_replay.ops.weights import PendingWeights, weighing_of
from gpu_replay.schedule import LinearSchedule
from gpu_replay.stream_order import StreamOrder
from gpu_replay.validation import computed


class WeighedDraw(NamedTuple):
    """What a gather needs of the draw before it.

    slots:   (B,) int64.
    named:   key, probability and weight; the weights are empty until the gather makes them where it is to.
    pending: how it makes them, or None where they are made.
    words:   (1,) int64, where in the random stream the words begin that move pictures; None where none are moved.
    """

    slots: Tensor
    named: dict[str, Tensor]
    pending: PendingWeights | None
    words: Tensor | None

    @property
    def weights(self) -> tuple[bool, bool]:
        """Whether the gather makes weights, and by a schedule: other gathers are planned for."""
        return self.pending is not None, self.pending is not None and self.pending.schedule is not None


@dataclass
class _Taken:
    """What the sample in progress has taken, as far as its launches were made.

    added:   transitions when it began.
    slots:   (B,) that were counted as sampled.
    pending: of a draw by priority, whose gather moves schedule and stream on.
    steps, blocks: by which schedule and stream were moved on by other launches.
    """

    added: int
    slots: Tensor | None = None
    pending: PendingWeights | None = None
    steps: int = 0
    blocks: int = 0


class _DrawPlan(NamedTuple):
    """How batches of one size are drawn.

    draw:  one launch; takes the list of ranks where draws are by rank.
    drawn: rows that are not the newest.
    moves: blocks of the random stream by which that launch moves on, with the schedule; None where the gather does.
    """

    draw: Callable[..., DeviceDraws]
    drawn: int
    moves: int | None


def _plan_draws(state: DrawState, storage: Storage, ranks: DeviceRanks | None) -> Kept[_DrawPlan]:
    """How batches are drawn, by their size, the newest slots to skip, whether they are shifted, and whether the list of
    ranks is made for one call.
    """
    return Kept(lambda *key: plan_draw(state, storage, ranks, *key))


def plan_draw(
    state: DrawState, storage: Storage, ranks: DeviceRanks | None, batch: int, skipped: int, shifted: bool, alone: bool
) -> _DrawPlan:
    """How one kind of batch is drawn."""
    plan, starts = state.plan, state.eligible_tree
    drawn = batch - plan.newest_of(batch)
    rows = (state.counters, storage.times_sampled, drawn, batch)
    by_priority: dict[str, Any] = {"stratified": plan.stratified, "lowest_of_all": plan.lowest_of_all}
    of_starts = {**by_priority, "skipped": skipped, "shifted": shifted}
    draw: Callable[..., DeviceDraws]
    if ranks is not None and drawn > 0:
        outdated = state.sparse and ranks.every > 1 and not alone
        of_starts |= {"merged": ranks.every == 1 and not alone, "outdated": outdated}
        draw = plan_rank_draw(ranks.sums, state.masses, starts, *rows, **of_starts)
    elif state.sparse:
        draw = plan_eligible_draw(state.tree, starts, *rows, replacement=plan.replacement, **of_starts)
    elif state.tree is not None and drawn > 0:
        draw = plan_stratified_draw(state.tree, *rows, **by_priority)
    else:
        draw = plan_uniform_draw(*rows, state.slots, replacement=plan.replacement)
    if state.tree is not None and drawn > 0:
        return _DrawPlan(draw, drawn, None)
    return _DrawPlan(draw, drawn, uniform_blocks(drawn, plan.replacement) + blocks_for(batch if shifted else 0))


class Ring(Protocol):
    """What adds to a ring by launches, and keeps count of it on the host."""

    def on_replay(self, rows: int) -> None:
        """Count rows that were added."""

    def recount(self) -> None:
        """Count anew what is stored. Waits for the device."""

    def forget(self, rows: int) -> None:
        """Forget the oldest rows, in whose slots so many others were to come. Waits for the device."""


class DeviceSampler:
    """Trees, ranks, random stream and counters of one buffer on its device: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, state: DrawState, storage: Storage, stream_order: StreamOrder) -> None:
        self.state = state
        self.counters = state.counters
        self.stream_order = stream_order
        self.ordered = stream_order.ordered
        self.device = state.counters.device
        # whether adds were captured that others replay, so that the host cannot count on
        self.uncounted = False
        self.masses: DeviceMasses | None = None
        plan = self._plan = state.plan
        self._storage = storage
        self._schedule: Tensor | None = None
        self._ranks: DeviceRanks | None = None
        # whether it draws from some of the slots, for one call
        self._narrowed = False
        # transitions added, but for those that others replay
        self.added = 0
        self._taken = _Taken(0)
        if plan.kind == "rank":
            self._ranks = DeviceRanks(state.slots, plan.alpha, plan.resort_every, self.counters)
        if state.tree is not None:
            initial = 1.0 if isinstance(plan.initial, str) else float(plan.initial)
            self.masses = DeviceMasses(state.tree, state.rule, state.rule.mass(initial))
        # where the initial mass of new transitions is found, if it is among the counters
        self.source = {"running": Counter.MAX_MASS, "stored": Counter.HIGHEST}.get(str(plan.initial))
        if isinstance(plan.beta, LinearSchedule):
            parts = [plan.beta.start, plan.beta.end - plan.beta.start, float(plan.beta.steps)]
            self._schedule = torch.tensor(parts, dtype=torch.float64, device=self.device)
        self._draws = _plan_draws(state, storage, self._ranks)
        highest, masses = self.source == Counter.HIGHEST, self.masses
        # by the rows
        self._writes = Kept(
            lambda rows: plan_write(storage.tensors, storage.fields, rows, state.counters, state.tree, highest=highest)
        )
        # by the keys, and the dtype of their priorities
        self._updates = Kept(
            lambda keys, own: plan_update(masses, state.counters, state.slots, keys, sparse=state.sparse)
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside those of the state."""
        return sum(part.nbytes for part in (self.masses, self._ranks) if part is not None)

    @property
    def ranked(self) -> Tensor | None:
        """(capacity,) int32 slots in order of their ranks, where the order must outlive a call."""
        return self._ranks.list.slots if self._ranks is not None and self._ranks.every > 1 else None

    def rebuild(self) -> None:
        """Take over a restored state; the counters hold the seed. Waits for the device."""
        self.added = self.span()[1]
        if self._ranks is not None:
            self._ranks.rebuild()

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        if self._ranks is not None:
            self._ranks.on_clear(self.capturing())

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key; waits for the device."""
        with self.ordered():
            counts = self.counters.tolist()
        added = counts[Counter.ADDED]
        return max(counts[Counter.FIRST], added - self.state.slots), added

    # what a draw that raises takes back

    def mark(self) -> Any:
        """Where the draws stand, for `take_back` of the draw that begins here."""
        self._taken = _Taken(self.added)
        if self._ranks is not None:
            self._ranks.mark()
        return self._taken

    def take_back(self, mark: Any) -> None:
        """Let the draws stand where they stood at this mark, unless other draws came after it. Waits for the device."""
        taken = self._taken
        if mark is not taken or self.capturing():
            return
        with self.ordered():
            blocks, steps = taken.blocks, taken.steps
            # the gather puts the smallest mass away when it moves schedule and stream on
            if taken.pending is not None and int(self.counters[Counter.LOWEST]) == NO_MASS:
                blocks, steps = blocks + taken.pending.blocks, steps + 1
            self.counters[Counter.LOWEST] = NO_MASS
            self.counters[Counter.RANDOM] -= blocks
            self.counters[Counter.STEP] -= steps
            # what was added meanwhile has not been sampled
            if taken.slots is not None and taken.added == self.added:
                less = self._storage.times_sampled.new_full((1,), -1).expand(taken.slots.shape)
                self._storage.times_sampled.scatter_add_(0, taken.slots, less)
            if self._ranks is not None:
                self._ranks.take_back()
            self._taken = _Taken(self.added)

    def took(self, blocks: int) -> None:
        """The sample in progress has moved the stream on by so many more blocks."""
        self._taken.blocks += blocks

    # launches that belong together

    def add(self, ring: Ring, rows: int, *launches: Callable[[], object]) -> None:
        """Make the launches that add `rows` transitions: all of them, or none.

        The first overwrites the oldest transitions, which nothing brings back; the second counts the new ones in; all
        but the second may be made twice. So an exception that comes meanwhile does not end the call: the launches that
        are missing are made, and an interrupt is raised then, as if it had come after the call. If they cannot be made
        either, the transitions that were overwritten are forgotten: none is a mixture of two.
        """
        made = 0
        try:
            for launch in launches:
                launch()
                made += 1
            if self.runs_now(rows):
                ring.on_replay(rows)
        except BaseException as error:
            # a graph whose capture failed does not run
            if self.capturing():
                raise
            try:
                if made == 1 and self.uncounted:
                    # where others add as well, nobody knows whether this was counted in
                    raise error
                counted = made == 1 and self.span()[1] != self.added
                for launch in launches[made + counted :]:
                    launch()
                ring.recount()
            except BaseException:
                # a first launch that cannot be made has not written
                if made:
                    with suppress(Exception):
                        ring.forget(rows)
                raise error from None
            if not isinstance(error, Exception):
                raise

    def capturing(self) -> bool:
        """Whether the calls of this moment go into a graph instead of to the device."""
        return self.stream_order.capturing()

    def runs_now(self, rows: int) -> bool:
        """Whether an `add` of so many rows runs now; one that is captured is noted for its replays."""
        if not self.capturing():
            return True
        if self.stream_order.recorded is not None:
            self.stream_order.recorded.rows += rows
        else:
            self.uncounted = True
        return False

    def moved(self, value: Tensor) -> Tensor:
        """The value on the device, without gaps, and out of pinned memory before its owner can change it."""
        here = value.device == self.device
        if here and value.is_contiguous() and not value.is_neg() and not value._is_zerotensor():
            return value
        if not here:
            if self.capturing():
                raise ValueError(
                    f"a call that is captured in a CUDA graph needs its tensors on {self.device}; found one on "
                    f"{value.device}, which a replay could not read again. Keep one on the device and copy into it."
                )
            value = self.stream_order.copied(value) if value.is_pinned() else value.to(self.device, non_blocking=True)
        return computed(value).contiguous()

    def on_device(
        self, values: Mapping[str, Tensor], priorities: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The values on the device, and the priorities if they come to count."""
        own = None if priorities is None or self.masses is None else self.moved(priorities)
        return {name: self.moved(value) for name, value in values.items()}, own

    def write(self, values: Mapping[str, Tensor], rows: int) -> None:
        """Store values that are on the device after the newest; 1 launch."""
        self._changed(rows)
        self._writes[(rows,)](values)

    def _changed(self, rows: int) -> None:
        """So many rows were added or updated."""
        if self._ranks is not None:
            self._ranks.changed(rows, self.capturing())

    def among(self, allowed: Tensor) -> DeviceSampler:
        """What draws, for one call, no other slots than the allowed, (slots,) bool; a few small launches of torch."""
        found = copy.copy(self)
        found.state, found._narrowed = self.state.narrowed(allowed), True
        found._draws = _plan_draws(found.state, self._storage, self._ranks)
        return found

    def draw(
        self, batch: int, beta: float | None, skipped: int = 0, *, shifted: bool = False, exact: bool = False
    ) -> WeighedDraw:
        """Draw `batch` slots, none of them among the newest `skipped`; 1 launch.

        By rank 2 and a sort come first where the order is rebuilt, or 4 to 8 where changes are merged into it.

        shifted: words that move pictures are taken as well.
        exact:   ranks are those of this moment in any case, as they must be where slots are skipped.
        """
        plan, ranks, ranked, alone = self._plan, self._ranks, None, False
        if ranks is not None:
            capturing = self.capturing()
            if batch == plan.newest_of(batch):
                ranks.skip_sample(capturing)
            else:
                # an order without the newest slots serves this call alone
                alone, tree = skipped > 0 or self._narrowed or (exact and ranks.every > 1), self.state.masses
                ranked = ranks.exact(tree, skipped, capturing) if alone else ranks.current(tree, capturing)
        planned = self._draws[batch, skipped, shifted, alone]
        found = planned.draw() if ranked is None else planned.draw(ranked)
        pending, taken = None, self._taken
        taken.slots = found.slots
        if planned.moves is not None:
            taken.blocks += planned.moves
            taken.steps += 1
            weight = found.value
        else:
            schedule, settled = (self._schedule, plan.beta) if beta is None else (None, beta)
            exponent = 0.0 if isinstance(settled, LinearSchedule) else settled
            # the gather also advances the stream past the words of the shifts
            shifts = batch if shifted else 0
            pending = weighing_of(found.value, self.counters, schedule, exponent, planned.drawn, shifts)
            taken.pending = pending
            weight = pending.weight
        named = {"key": found.keys, "probability": found.probability, "weight": weight}
        return WeighedDraw(found.slots, named, pending, found.words)

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        """Give live keys their new masses; 1 launch, 2 for thousands of keys."""
        if keys.numel():
            with self.ordered():
                moved, numbers = self.moved(keys), self.moved(priorities)
                self._changed(keys.numel())
                self._updates[moved.shape[0], numbers.dtype](moved, numbers)
