"""Draws and priority updates on CUDA tensors, through Triton kernels; also on CPU tensors under Triton's interpreter.

Nothing here waits for the device unless its docstring states it. Whatever a replayed graph must advance is in the
counters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.storage import Storage
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops.counters import NO_MASS, Counter
from gpu_replay.ops.draw import plan_draw
from gpu_replay.ops.launch import plans
from gpu_replay.ops.priorities import DeviceMasses, plan_update
from gpu_replay.ops.rank_draw import DeviceRanks
from gpu_replay.ops.weights import Drawn
from gpu_replay.samplers import LinearSchedule
from gpu_replay.validation import materialized

# gathers the rows at slots, moved by words of the stream, and finishes their sample
Gather = Callable[[Tensor, tuple[Tensor, ...], Drawn], dict[str, Tensor]]
Sample = Callable[[float | None], dict[str, Tensor]]


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
        base = self._base = state.base
        if base.kernel is None:
            raise ValueError(
                f'{state.sampler} has no kernel, so a buffer on {self.device} cannot draw by it. Give device="cpu", '
                "or a sampler of gpu_replay."
            )
        self._storage = storage
        self._schedule: Tensor | None = None
        self._ranks: DeviceRanks | None = None
        # whether it draws from some of the slots, for one call
        self._narrowed = False
        # the smallest live key, until the ring overwrites it, and the next key, but for adds that others replay
        self.first = self.added = 0
        if base.prioritized and not base.summed:
            self._ranks = DeviceRanks(state.slots, base.alpha, self.counters)
        if state.tree is not None:
            initial = 1.0 if isinstance(base.initial, str) else float(base.initial)
            self.masses = DeviceMasses(state.tree, state.rule, state.rule.mass(initial))
        # where the initial mass of new transitions is found, if it is among the counters
        self.source = {"running": Counter.MAX_MASS, "stored": Counter.HIGHEST}.get(str(base.initial))
        if isinstance(base.beta, LinearSchedule):
            parts = [base.beta.start, base.beta.end - base.beta.start, float(base.beta.steps)]
            self._schedule = torch.tensor(parts, dtype=torch.float64, device=self.device)
        masses = self.masses
        # another dtype of priorities is another launch
        tracks = state.tracks_eligibility
        self._updates = plans(
            lambda keys, dtype: plan_update(masses, state.counters, state.slots, keys, tracks_eligibility=tracks)
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside those of the state."""
        return sum(part.nbytes for part in (self.masses, self._ranks) if part is not None)

    def rebuild(self) -> None:
        """Take over a restored state, whose counters hold the seed. Waits for the device."""
        self.changed()
        self.look()

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        self.changed()
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
        self, values: dict[str, Tensor], priorities: Tensor | None, ready: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The values on the device, and the priorities if the sampler uses them.

        ready: whether a kernel can read the values as they are.
        """
        own = None if priorities is None or self.masses is None else self.moved(priorities)
        if ready:
            self.stream_order.reads(values.values())
            return values, own
        return {name: self.moved(value) for name, value in values.items()}, own

    def changed(self) -> None:
        """Note that the stored transitions or their priorities have changed."""
        if self._ranks is not None:
            self._ranks.changed(self.capturing())

    def restricted_to(self, allowed: Tensor) -> DeviceSampler:
        """A sampler for one call over the allowed slots alone, (slots,) bool; a few small launches of torch."""
        sampler = copy.copy(self)
        sampler.state, sampler._narrowed = self.state.narrowed(allowed), True
        return sampler

    def make_sample(
        self, batch: int, scheduled: bool, gather: Gather, *, skipped: int = 0, shifted: bool = False, more: int = 0
    ) -> Sample:
        """A function of beta that samples `batch` rows, none of them from the newest `skipped` slots: 2 launches a call,
        by rank 1 and a sort before them. The last one gathers and counts; an exception before it leaves all as it was.

        scheduled: whether a schedule gives beta. shifted: whether words that move pictures are taken as well.
        more:      blocks of words that `gather` takes after them.
        """
        state, base, ranks, device = self.state, self._base, self._ranks, self.device
        drawn = batch - state.sampler.newest_of(batch)
        # an order that leaves out slots is valid for one call only
        by_rank, alone = ranks is not None and drawn > 0, skipped > 0 or self._narrowed
        draw, blocks = plan_draw(
            base.kernel or "uniform",
            state.counters,
            drawn,
            batch,
            state.slots,
            tree=state.tree,
            starts=state.eligible_tree,
            sums=None if ranks is None else ranks.sums,
            tracks_eligibility=state.tracks_eligibility,
            skipped=skipped,
            shifted=shifted,
            stratified=base.stratified,
            lowest_of_all=base.normalizes_over_buffer,
            replacement=base.replacement,
        )
        schedule = (self._schedule,) if scheduled and self._schedule is not None else ()
        fixed = 0.0 if isinstance(base.beta, LinearSchedule) else base.beta

        def sample(beta: float | None) -> dict[str, Tensor]:
            slots, masses, key = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(3))
            probability, weight = (torch.empty(batch, dtype=torch.float32, device=device) for _ in range(2))
            words = (torch.empty(1, dtype=torch.int64, device=device),) if shifted else ()
            ranked: tuple[Tensor, ...] = ()
            if ranks is not None and by_rank:
                ranked = ranks.of(state.masses, skipped) if alone else ranks.current(state.masses, self.capturing())
            pointers = (slots, masses, weight, self._storage.times_sampled, *schedule)
            try:
                draw((slots, key, probability, masses), words, ranked)
                tensors = gather(slots, words, Drawn(pointers, blocks + more, fixed if beta is None else beta))
            except BaseException:
                if not self.capturing():
                    self.counters[Counter.LOWEST] = NO_MASS
                raise
            return tensors | {"key": key, "probability": probability, "weight": weight}

        return sample

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        """Give live keys their new masses; 1 launch, 2 for thousands of keys."""
        if keys.numel():
            with self.ordered():
                moved, numbers = self.moved(keys), self.moved(priorities)
                self.stream_order.reads((moved, numbers))
                self.changed()
                self._updates(moved.shape[0], numbers.dtype)(moved, numbers)
