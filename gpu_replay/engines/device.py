"""Transitions on CUDA tensors, through Triton kernels; also on CPU tensors under Triton's interpreter.

Nothing here waits for the device unless its docstring states it. Whatever a replayed graph must advance is in the
counters. The host keeps only a lower bound of the size, to refuse a sample from too few transitions without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_replay.engines.memory import seen_from
from gpu_replay.engines.state import SamplerState
from gpu_replay.engines.storage import Storage
from gpu_replay.graphs.stream_order import StreamOrder
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.draw import DeviceRandom, make_chosen_draw, make_draw
from gpu_replay.ops.launch import allocator, per_arguments
from gpu_replay.ops.masses import Add, DeviceMasses, make_add, make_update
from gpu_replay.ops.ranks import DeviceRanks, device_ranks_bytes
from gpu_replay.ops.ring import Finish, Gather, make_gather
from gpu_replay.samplers import BaseSampler, LinearSchedule, check_chances, choose
from gpu_replay.validation import materialized

# batch sizes for which memory is kept
_SIZES_KEPT = 64
# makes what gathers rows, given what the last launch of their sample counts
MakeGather = Callable[[Finish], Gather]
Sample = Callable[[float | None], dict[str, Tensor]]


class DeviceSampler:
    """Trees, ranks, random stream and counters of one buffer on its device: draws from them, and updates of priorities.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, state: SamplerState, storage: Storage, stream_order: StreamOrder) -> None:
        self.state = state
        self.counters = state.counters
        self.order, self.capturing = stream_order, stream_order.capturing
        self.device = state.counters.device
        # whether adds were captured that others replay, so that the host cannot count on; and whether an interrupt came
        # when an add may have been launched, so that the host must look once
        self.host_count_stale = self.interrupted = False
        self.masses: DeviceMasses | None = None
        base = self._base = state.base
        # whether a sampler of somebody's own was asked for the chances of all places
        self._chances_checked = False
        self._storage = storage
        self._scratch: dict[int, Tensor] = {}
        self._schedule: Tensor | None = None
        self._ranks: DeviceRanks | None = None
        # warns of flawed endings of a trajectory buffer, once, when they are more than these
        self.warn: Callable[[], None] | None = None
        self._known_flaws = 0
        # the smallest live key, until the ring overwrites it, and the next key, but for adds that others replay
        self.first = self.added = 0
        # of a trajectory buffer: eligible starts when their number was last read, and rows overwritten since
        self.eligible = self.overwritten = 0
        if base.prioritized and not base.summed:
            self._ranks = DeviceRanks(state.slots, base.alpha, self.counters)
        if state.tree is not None:
            self.masses = DeviceMasses(state.tree, state.rule, state.initial)
        if isinstance(base.beta, LinearSchedule):
            parts = [base.beta.start, base.beta.end - base.beta.start, float(base.beta.steps)]
            self._schedule = torch.tensor(parts, dtype=torch.float64, device=self.device)
        masses = self.masses
        # another dtype of priorities is another launch
        self._updates = per_arguments(
            lambda keys, dtype: make_update(masses, state.counters, state.slots, keys, state.streams)
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes used in addition to the state's."""
        masses = 0 if self.masses is None else self.masses.nbytes
        ranks = 0 if self._ranks is None else device_ranks_bytes(self.state.slots)
        return masses + ranks + sum(tensor.nbytes for tensor in self._scratch.values())

    def rebuild(self, seed: int) -> None:
        """Take over a restored state; the counters hold the seed. Waits for the device."""
        self.changed()
        self._chances_checked = False
        self._known_flaws = self.counters.tolist()[Counter.FLAWED]
        self.look()

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        self.changed()
        self.first = self.added
        self.eligible = self.overwritten = 0

    def look(self) -> None:
        """Read the span of live keys, which includes adds replayed elsewhere. Waits for the device.

        How many starts are eligible is read by the next call that asks.
        """
        self.first, self.added = self.span()
        self.interrupted, self.eligible, self.overwritten = False, 0, 0

    def counts(self) -> list[int]:
        """The counters, whose flawed endings may be warned of; waits for the device."""
        with self.order:
            counts: list[int] = self.counters.tolist()
        if self.warn is not None and counts[Counter.FLAWED] > self._known_flaws:
            warn, self.warn = self.warn, None
            # where warnings are errors it raises
            warn()
        return counts

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key; waits for the device."""
        with self.order:
            counts = self.counters.tolist()
        added = counts[Counter.ADDED]
        return max(counts[Counter.FIRST], added - self.state.slots), added

    def launch_add(self, rows: int, launch: Callable[..., None], *arguments: object) -> None:
        """Launch an `add` of so many rows, within `ordered`, and count them."""
        if self._ranks is not None:
            self._ranks.changed(self.order.captures)
        # an interrupt that comes from here on leaves a note that the host must look
        earlier, self.interrupted = self.interrupted, not self.order.captures
        launch(*arguments)
        self.count_added(rows)
        self.interrupted = earlier

    def count_added(self, rows: int) -> None:
        """Count the rows of an `add` or a replay; those of an `add` that is captured whoever replays it, or nobody."""
        if not self.order.captures:
            self.added += rows
            self.overwritten += min(rows, max(0, self.added - self.state.slots))
        elif self.order.recorded is not None:
            self.order.recorded += rows
        else:
            self.host_count_stale = True

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
            value = self.order.copied(value) if value.is_pinned() else value.to(self.device, non_blocking=True)
        return materialized(value).contiguous()

    def on_device(
        self, values: dict[str, Tensor], priorities: Tensor | None, ready: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The values on the device, and the priorities if the sampler uses them.

        ready: whether a kernel can read the values as they are.
        """
        given = None if priorities is None or self.masses is None else self.moved(priorities)
        if ready:
            self.order.reads(values.values())
            return values, given
        return {name: self.moved(value) for name, value in values.items()}, given

    def changed(self) -> None:
        """Note, within `ordered`, that the stored transitions or their priorities have changed."""
        if self._ranks is not None:
            self._ranks.changed(self.order.captures)

    def _kept(self, batch: int) -> tuple[Tensor, ...]:
        """Memory for slots, masses and their minima of batches of one size, which the launches of one call alone read;
        () where there are too many sizes to keep it for each.

        It is never freed before the buffer, since graphs may have captured it.
        """
        if batch not in self._scratch and len(self._scratch) < _SIZES_KEPT:
            # rows of whole 16 bytes begin as memory of their own would
            self._scratch[batch] = torch.empty((3, batch + batch % 2), dtype=torch.int64, device=self.device)
        return tuple(row[:batch] for row in self._scratch.get(batch, ()))

    def make_sample(self, batch: int, scheduled: bool, make_gather: MakeGather) -> Sample:
        """A function of beta that samples `batch` rows: 2 launches a call, by rank 1 and a sort before them. The last
        one gathers and counts; an exception before it leaves all as it was.

        scheduled: whether a schedule gives beta.
        """
        state, base, ranks, device = self.state, self._base, self._ranks, self.device
        drawn = batch - state.sampler.newest_of(batch)
        by_rank = ranks is not None and drawn > 0
        own: DeviceRandom | None = None
        if isinstance(base, BaseSampler) and drawn:
            own, chosen = DeviceRandom(state.counters), partial(self._chosen, base)
            draw, blocks, minima = make_chosen_draw(chosen, own, drawn, batch, state.slots, state.eligible_tree), 0, 1
        else:
            draw, blocks, minima = make_draw(
                base.kernel or "uniform",
                state.counters,
                drawn,
                batch,
                state.slots,
                tree=state.tree,
                starts=state.eligible_tree,
                stratified=base.stratified,
                normalize_over_buffer=base.normalize == "buffer",
                replacement=base.replacement,
            )
        schedule = (self._schedule,) if scheduled and self._schedule is not None else ()
        gather = make_gather(Finish((self._storage.times_sampled, *schedule), blocks, minima))
        gather = gather if own is None else own.advancing(gather)
        fixed = 0.0 if isinstance(base.beta, LinearSchedule) else base.beta

        integers, floats = (allocator((batch,), dtype, device) for dtype in (torch.int64, torch.float32))
        kept = self._kept(batch)

        def sample(beta: float | None) -> dict[str, Tensor]:
            slots, masses, lowest = kept or (integers(), integers(), integers())
            key, probability, weight = integers(), floats(), floats()
            ranked: tuple[Tensor, ...] = ()
            if ranks is not None and by_rank:
                ranked = ranks.current(state.masses, self.order.captures)
            draw(ranked, (slots, key, probability, masses, lowest))
            tensors = gather(slots, (slots, masses, weight, lowest), fixed if beta is None else beta)
            tensors["key"], tensors["probability"], tensors["weight"] = key, probability, weight
            return tensors

        return sample

    def _chosen(self, base: BaseSampler, total: Tensor, rows: int, random: DeviceRandom) -> tuple[Tensor, Tensor]:
        """(rows,) places and chances by a sampler of somebody's own."""
        found = choose(base, total, rows, random)
        if self.device.type == "cpu" and not self._chances_checked:
            self._chances_checked = check_chances(base, int(total))
        return found

    def update(self, keys: Tensor, priorities: Tensor, ready: bool) -> None:
        """Give live keys their new masses; 1 launch, 2 for thousands of keys.

        ready: whether a kernel can read both as they are.
        """
        if keys.numel():
            with self.order:
                if not ready:
                    keys, priorities = self.moved(keys), self.moved(priorities)
                self.order.reads((keys, priorities))
                if self._ranks is not None:
                    self._ranks.changed(self.order.captures)
                self._updates(keys.shape[0], priorities.dtype)(keys, priorities, ready)

    def exclude(self, keys: Tensor) -> None:
        """Let the rows of (m,) live keys never be drawn again; a few operations of torch, which wait for nothing."""
        if self.capturing():
            raise RuntimeError("exclude cannot be captured in a CUDA graph; call it between steps.")
        with self.order:
            here = self.moved(keys)
            self.order.reads((here,))
            self.changed()
            # the host knows of no eligible start until it asks again
            self.eligible = 0
            self.state.exclude(here)

    def write(self, keys: Tensor, values: dict[str, Tensor]) -> None:
        """Store rows of some fields under (m,) live keys; the last of a repeated key wins, others are counted.

        A few operations of torch. Waits for nothing, but an interrupt may come between two fields.
        """
        with self.order:
            here, rows = self.moved(keys), {name: self.moved(value) for name, value in values.items()}
            self.order.reads((here, *rows.values()))
            stores = {name: seen_from(self.device, self._storage.tensors[name]) for name in rows}
            self.state.write(stores, here, rows)


class DeviceEngine:
    """Appends, samples and reads the transitions of one buffer, in 1, 2 and 1 launches; draws by rank sort as well.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: Storage, sampling: DeviceSampler) -> None:
        self.sampling = sampling
        self._storage = storage
        stores, fields, counters, masses = storage.tensors, storage.fields, sampling.counters, sampling.masses
        # none of these refers to this object: a buffer that nobody holds gives its memory back at once
        self._reads = per_arguments(lambda rows: make_gather(stores, fields, rows, counters))

        def make_sample(batch: int, scheduled: bool) -> Sample:
            return sampling.make_sample(batch, scheduled, lambda end: make_gather(stores, fields, batch, counters, end))

        # by the batch, and whether a schedule gives beta
        self._samples = per_arguments(make_sample)

        def make(rows: int, dtype: torch.dtype | None) -> tuple[Callable[[], Tensor], Add]:
            add = make_add(stores, fields, masses, counters, storage.times_sampled, rows, given=dtype is not None)
            return allocator((rows,), torch.int64, sampling.device), add

        # by the number of rows and the dtype of their priorities
        self._adds = per_arguments(make)

    def count_at_least(self, needed: int) -> int:
        """Stored transitions but for those that were excluded, exact only below `needed`.

        Waits for the device only when adds that others replay, an interrupt or `exclude` may have changed the answer.
        """
        sampling = self.sampling
        too_few = sampling.added - sampling.first < needed and sampling.host_count_stale
        if (too_few or sampling.interrupted) and not sampling.capturing():
            sampling.look()
        stored = min(self._storage.capacity, sampling.added - sampling.first)
        if sampling.state.excluded and not sampling.capturing():
            return sampling.state.left(stored, needed)
        return stored

    def append(self, values: dict[str, Tensor], rows: int, priorities: Tensor | None, ready: bool) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys; 1 launch for tensors on the device.

        ready: whether a kernel can read the values as they are.
        """
        sampling = self.sampling
        with sampling.order:
            moved, given = sampling.on_device(values, priorities, ready)
            new_keys, add = self._adds(rows, None if given is None else given.dtype)
            keys = new_keys()
            sampling.launch_add(rows, add, moved, given, keys, ready)
        return keys

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Sample `batch` transitions: fields, key, probability and weight; 2 launches.

        By rank 1 and a sort come first where something has changed.
        """
        with self.sampling.order:
            return self._samples(batch, beta is None)(beta)

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The transitions that are stored in these slots."""
        with self.sampling.order:
            return self._reads(slots.shape[0])(slots)

    # all that is stored can be read
    stored = read
