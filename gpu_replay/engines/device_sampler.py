"""Draws and priority updates on CUDA tensors, through Triton kernels; also on CPU tensors under Triton's interpreter.

Nothing here waits for the device unless its docstring states it. Whatever a replayed graph must advance is in the
counters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.storage import Storage
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops.counters import NO_MASS, Counter
from gpu_replay.ops.draw import DrawLaunch, plan_draw
from gpu_replay.ops.launch import plans
from gpu_replay.ops.priorities import DeviceMasses, plan_update
from gpu_replay.ops.rank_draw import DeviceRanks
from gpu_replay.ops.ring import plan_write
from gpu_replay.ops.weights import PendingWeights, pending_weights
from gpu_replay.samplers import LinearSchedule
from gpu_replay.validation import materialized


class WeighedDraw(NamedTuple):
    """The results of a draw that the following gather needs.

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
class DrawLedger:
    """The counts and random blocks consumed by the launches of the sample in progress, for `take_back`.

    slots:   (B,) that were counted as sampled.
    added:   the next key when they were.
    pending: of a draw by priority, whose gather moves schedule and stream on.
    steps, blocks: by how much other launches advanced schedule and stream.
    """

    slots: Tensor | None = None
    added: int = 0
    pending: PendingWeights | None = None
    steps: int = 0
    blocks: int = 0


def _draws_of(state: DrawState, storage: Storage, ranks: DeviceRanks | None) -> Callable[[int, int, bool], DrawLaunch]:
    """A function that plans draws by batch size, newest slots to skip, and whether images are shifted."""
    plan = state.plan

    @plans
    def planned(batch: int, skipped: int, shifted: bool) -> DrawLaunch:
        return plan_draw(
            "uniform" if plan.kind == "newest" else plan.kind,
            *(state.counters, storage.times_sampled, batch - plan.newest_of(batch), batch, state.slots),
            tree=state.tree,
            starts=state.eligible_tree,
            sums=None if ranks is None else ranks.sums,
            tracks_eligibility=state.tracks_eligibility,
            skipped=skipped,
            shifted=shifted,
            stratified=plan.stratified,
            lowest_of_all=plan.lowest_of_all,
            replacement=plan.replacement,
        )

    return planned


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
        # the smallest live key, until the ring overwrites it, and the next key, but for adds that others replay
        self.first = self.added = 0
        self._ledger = DrawLedger()
        if plan.kind == "rank":
            self._ranks = DeviceRanks(state.slots, plan.alpha, self.counters)
        if state.tree is not None:
            initial = 1.0 if isinstance(plan.initial, str) else float(plan.initial)
            self.masses = DeviceMasses(state.tree, state.rule, state.rule.mass(initial))
        # where the initial mass of new transitions is found, if it is among the counters
        self.source = {"running": Counter.MAX_MASS, "stored": Counter.HIGHEST}.get(str(plan.initial))
        if isinstance(plan.beta, LinearSchedule):
            parts = [plan.beta.start, plan.beta.end - plan.beta.start, float(plan.beta.steps)]
            self._schedule = torch.tensor(parts, dtype=torch.float64, device=self.device)
        self._draws = _draws_of(state, storage, self._ranks)
        highest, masses = self.source == Counter.HIGHEST, self.masses
        self._writes = plans(
            lambda rows: plan_write(storage.tensors, storage.fields, rows, state.counters, state.tree, highest=highest)
        )
        # another dtype of priorities is another launch
        tracks = state.tracks_eligibility
        self._updates = plans(
            lambda keys, dtype: plan_update(masses, state.counters, state.slots, keys, tracks_eligibility=tracks)
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside those of the state."""
        return sum(part.nbytes for part in (self.masses, self._ranks) if part is not None)

    # no order of ranks outlives a call
    ranked: Tensor | None = None

    def rebuild(self) -> None:
        """Take over a restored state, whose counters hold the seed. Waits for the device."""
        self._changed()
        self.look()

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        self._changed()
        self.first = self.added

    def look(self) -> None:
        """Read the span of live keys, which includes adds replayed elsewhere. Waits for the device."""
        self.first, self.added = self.span()

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key; waits for the device."""
        with self.ordered():
            counts = self.counters.tolist()
        added = counts[Counter.ADDED]
        return max(counts[Counter.FIRST], added - self.state.slots), added

    # undoing a draw that raises

    def mark(self) -> Any:
        """The position of the draws, for `take_back` of the draw that begins here."""
        self._ledger = DrawLedger()
        return self._ledger

    def take_back(self, mark: Any) -> None:
        """Let the draws stand where they stood at this mark, unless other draws came after it. Waits for the device."""
        ledger = self._ledger
        if mark is not ledger or self.capturing():
            return
        with self.ordered():
            blocks, steps = ledger.blocks, ledger.steps
            # the gather puts the smallest mass away when it moves schedule and stream on
            if ledger.pending is not None and int(self.counters[Counter.LOWEST]) == NO_MASS:
                blocks, steps = blocks + ledger.pending.blocks, steps + 1
            self.counters[Counter.LOWEST] = NO_MASS
            self.counters[Counter.RANDOM] -= blocks
            self.counters[Counter.STEP] -= steps
            # rows added meanwhile have not been sampled
            if ledger.slots is not None:
                sampled = self._storage.times_sampled
                ages = (ledger.slots - ledger.added) % sampled.numel()
                unchanged = (ages >= self.added - ledger.added).to(sampled.dtype)
                sampled.scatter_add_(0, ledger.slots, -unchanged)
            self._ledger = DrawLedger()

    def note_blocks(self, blocks: int) -> None:
        """Note that the sample in progress has advanced the stream by this many more blocks."""
        self._ledger.blocks += blocks

    def add(self, rows: int, count: Callable[[int], None], *launches: Callable[[], None]) -> None:
        """Make the launches that add `rows` transitions; then `count` them, unless that is left to replays.

        The first overwrites the oldest transitions, which nothing brings back, and those after it count the new ones
        in. An exception of the first leaves all as it was, and a later launch that raises one is made again. Where that
        does not help, and after an interrupt, the buffer refuses all calls until it is cleared or loaded.
        """
        first, *others = launches
        self.stream_order.interrupted = eager = not self.capturing()
        try:
            first()
        except Exception:
            self.stream_order.interrupted = False
            raise
        for launch in others:
            try:
                launch()
            except Exception:
                if not eager:
                    raise
                launch()
        if self.runs_now(rows):
            count(rows)
        self.stream_order.interrupted = False

    def capturing(self) -> bool:
        """Whether the calls of this moment go into a graph instead of to the device."""
        return self.stream_order.capturing()

    def runs_now(self, rows: int) -> bool:
        """Whether an `add` of these rows runs now; if it is captured, its rows are noted for replays."""
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
        return materialized(value).contiguous()

    def on_device(
        self, values: Mapping[str, Tensor], priorities: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The values on the device, and the priorities if the sampler uses them."""
        own = None if priorities is None or self.masses is None else self.moved(priorities)
        return {name: self.moved(value) for name, value in values.items()}, own

    def write(self, values: Mapping[str, Tensor], rows: int) -> None:
        """Store values that are on the device after the newest; 1 launch."""
        self._changed()
        self._writes(rows)(values)

    def _changed(self) -> None:
        """Note that the stored transitions or their priorities have changed."""
        if self._ranks is not None:
            self._ranks.changed(self.capturing())

    def restricted_to(self, allowed: Tensor) -> DeviceSampler:
        """A sampler for one call over the allowed slots alone, (slots,) bool; a few small launches of torch."""
        sampler = copy.copy(self)
        sampler.state, sampler._narrowed = self.state.narrowed(allowed), True
        sampler._draws = _draws_of(sampler.state, self._storage, self._ranks)
        return sampler

    def draw(self, batch: int, beta: float | None, skipped: int = 0, *, shifted: bool = False) -> WeighedDraw:
        """Draw `batch` slots, none of them among the newest `skipped`; 1 launch, by rank 1 and a sort before it.

        shifted: words that move pictures are taken as well.
        """
        plan, ranks = self._plan, self._ranks
        ranked: tuple[Tensor, ...] = ()
        if ranks is not None and batch > plan.newest_of(batch):
            # an order that leaves out slots is valid for this call only
            alone, tree = skipped > 0 or self._narrowed, self.state.masses
            ranked = ranks.of(tree, skipped) if alone else ranks.current(tree, self.capturing())
        planned = self._draws(batch, skipped, shifted)
        rows = planned.launch(ranked)
        pending, ledger = None, self._ledger
        ledger.slots, ledger.added = rows.slots, self.added
        if planned.moves is not None:
            ledger.blocks += planned.moves
            ledger.steps += 1
            weight = rows.value
        else:
            schedule, settled = (self._schedule, plan.beta) if beta is None else (None, beta)
            exponent = 0.0 if isinstance(settled, LinearSchedule) else settled
            # the gather also advances the stream past the words of the shifts
            shifts = batch if shifted else 0
            pending = pending_weights(rows.value, self.counters, schedule, exponent, planned.drawn, shifts)
            ledger.pending = pending
            weight = pending.weight
        named = {"key": rows.keys, "probability": rows.probability, "weight": weight}
        return WeighedDraw(rows.slots, named, pending, rows.words)

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        """Give live keys their new masses; 1 launch, 2 for thousands of keys."""
        if keys.numel():
            with self.ordered():
                moved, numbers = self.moved(keys), self.moved(priorities)
                self._changed()
                self._updates(moved.shape[0], numbers.dtype)(moved, numbers)
