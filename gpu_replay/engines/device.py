"""The buffer's work on CUDA tensors, through Triton kernels; also on CPU tensors under Triton's interpreter.

Nothing here waits for the device except where the docstring says so. Whatever a replayed graph must move on lives in
the counters; the host keeps only a lower bound of the size, to refuse a sample from too few transitions without asking.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_replay.engines.storage import Storage, base_sampler
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.priorities import DeviceMasses, launch_admit, launch_update
from gpu_replay.ops.rank_draw import DeviceRanks, launch_rank_draw
from gpu_replay.ops.ring import launch_gather, launch_write
from gpu_replay.ops.stratified_draw import launch_stratified_draw
from gpu_replay.ops.uniform_draw import launch_uniform_draw
from gpu_replay.ops.weights import PendingWeights, weighing_of
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Sampler, Uniform
from gpu_replay.schedule import LinearSchedule
from gpu_replay.stream_order import StreamOrder


class Drawn(NamedTuple):
    """What a gather needs of the draw before it.

    slots:    (B,) int64.
    named:    key, probability and weight; the weights are empty until the gather makes them where it is to.
    weighing: how it makes them, or None where they are made.
    words:    (1,) int64, where in the random stream the words begin that move pictures; None where none are moved.
    """

    slots: Tensor
    named: dict[str, Tensor]
    weighing: PendingWeights | None = None
    words: Tensor | None = None


class DeviceEngine:
    """Appends, draws and updates for one buffer, in at most 2 launches each; a draw by rank sorts besides.

    The buffer has checked all arguments and holds the lock.
    """

    # whether stored slots without mass exist, which no update may wake
    sparse = False

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        tree: MassTree | None,
        rule: Rule,
        counters: Tensor,
        seed: int,
        stream_order: StreamOrder,
    ) -> None:
        self._storage = storage
        self._stream_order = stream_order
        self._ordered = stream_order.ordered
        self._counters = counters
        self._device = counters.device
        self._base = base = base_sampler(sampler)
        self._newest = sampler.newest if isinstance(sampler, Combined) else 0
        self._tree = tree
        self._masses: DeviceMasses | None = None
        self._source: int | None = None
        self._schedule: Tensor | None = None
        self._ranks: DeviceRanks | None = None
        if isinstance(base, RankBased):
            self._ranks = DeviceRanks(storage.capacity, base.alpha, base.resort_every, counters)
        if tree is not None and isinstance(base, (Proportional, RankBased)):
            initial = 1.0 if isinstance(base.initial, str) else float(base.initial)
            self._masses = DeviceMasses(tree, rule, rule.mass(initial))
            self._source = {"running": Counter.MAX_MASS, "stored": Counter.EDGE_HIGH}.get(str(base.initial))
            if isinstance(base.beta, LinearSchedule):
                beta = base.beta
                parts = [beta.start, beta.end - beta.start, float(beta.steps)]
                self._schedule = torch.tensor(parts, dtype=torch.float64, device=self._device)
        # transitions known to be stored, and whether an add that others replay may have stored more
        self._known = 0
        self._captured = False

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside storage, tree and counters."""
        return sum(part.nbytes for part in (self._masses, self._ranks) if part is not None)

    @property
    def ranked(self) -> Tensor | None:
        """(capacity,) int32 slots in order of their ranks, where the order must outlive a call."""
        return self._ranks.list.slots if self._ranks is not None and self._ranks.every > 1 else None

    def _changed(self) -> None:
        """Something was added or updated."""
        if self._ranks is not None:
            self._ranks.changed(self._capturing())

    def reseed(self, seed: int) -> None:
        """Follow a restored state; the counters hold the seed. Waits for the device."""
        first, added = self.span()
        self._known = added - first
        if self._ranks is not None:
            self._ranks.recall()

    def forget(self) -> None:
        """Follow a `clear`."""
        self._known = 0
        if self._ranks is not None:
            self._ranks.forget(self._capturing())

    def span(self) -> tuple[int, int]:
        """The smallest live key and the next key; waits for the device."""
        with self._ordered():
            counts = self._counters.tolist()
        added = counts[Counter.ADDED]
        return max(counts[Counter.FIRST], added - self._storage.capacity), added

    def size_at_least(self, wanted: int) -> int:
        """Stored transitions, exact only below `wanted`.

        Waits for the device only when adds that others replay may have changed the answer.
        """
        if self._known < wanted and self._captured and not self._capturing():
            first, added = self.span()
            self._known = added - first
        return self._known

    def _capturing(self) -> bool:
        """Whether the calls of this moment go into a graph instead of to the device."""
        return self._stream_order.capturing()

    def _note(self, rows: int) -> None:
        """Follow an `add` of so many rows, made or captured."""
        if not self._capturing():
            self.replayed(rows)
        elif self._stream_order.recorded is not None:
            self._stream_order.recorded.rows += rows
        else:
            self._captured = True

    def replayed(self, rows: int) -> None:
        """Follow a replay that added so many rows."""
        self._known = min(self._storage.capacity, self._known + rows)

    def append(self, values: dict[str, Tensor], rows: int, priorities: Tensor | None) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys; 2 launches for tensors on the device."""
        storage = self._storage
        with self._ordered():
            own = self._write(values, priorities)
            keys = launch_admit(self._masses, self._counters, storage.times_sampled, rows, own, self._source)
            self._note(rows)
        return keys

    def _write(self, values: dict[str, Tensor], priorities: Tensor | None) -> Tensor | None:
        """Put the values after the newest; returns the priorities on the device if they come to count. 1 launch."""
        storage, highest = self._storage, self._source == Counter.EDGE_HIGH
        moved = {name: self._moved(value) for name, value in values.items()}
        own = None if priorities is None or self._masses is None else self._moved(priorities)
        launch_write(storage.tensors, storage.fields, moved, self._counters, self._tree, highest=highest)
        self._changed()
        return own

    def _moved(self, value: Tensor) -> Tensor:
        """The value on the device, without gaps, and out of pinned memory before its owner can change it."""
        if value.device != self._device:
            if self._capturing():
                raise ValueError(
                    f"a call that is captured in a CUDA graph needs its tensors on {self._device}; found one on "
                    f"{value.device}, which a replay could not read anew. Keep one on the device and copy into it."
                )
            value = value.to(self._device, non_blocking=not value.is_pinned())
        return value.contiguous()

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` transitions: fields, key, probability and weight; 2 launches.

        By rank 2 and a sort come first where the order is made anew.
        """
        with self._ordered():
            drawn = self._drawn(batch, beta)
            tensors = launch_gather(self._storage.tensors, self._storage.fields, drawn.slots, drawn.weighing)
        return {**tensors, **drawn.named}

    def _drawn(self, batch: int, beta: float | None) -> Drawn:
        """The next `batch` draws; 1 launch."""
        base, counters, storage = self._base, self._counters, self._storage
        newest = batch if isinstance(base, Latest) else self._newest
        drawn = batch - newest
        if isinstance(base, Proportional) and self._tree is not None and drawn > 0:
            slots, keys, masses, probability = launch_stratified_draw(
                self._tree,
                counters,
                storage.times_sampled,
                drawn,
                batch,
                stratified=base.stratified,
                lowest_of_all=base.normalize == "buffer",
            )
            weighing = self._weighing(base, masses, beta, drawn)
            return Drawn(slots, {"key": keys, "probability": probability, "weight": weighing.weight}, weighing)
        if isinstance(base, RankBased) and drawn > 0:
            return self._by_rank(base, None, drawn, batch, beta)
        if self._ranks is not None:
            self._ranks.passed(self._capturing())
        replacement = isinstance(base, Uniform) and base.replacement
        slots, keys, probability, weight = launch_uniform_draw(
            counters, storage.times_sampled, drawn, batch, storage.capacity, replacement=replacement
        )
        return Drawn(slots, {"key": keys, "probability": probability, "weight": weight})

    def _by_rank(
        self,
        base: RankBased,
        marks: MassTree | None,
        drawn: int,
        batch: int,
        beta: float | None,
        *,
        skipped: int = 0,
        shifted: bool = False,
        exact: bool = False,
    ) -> Drawn:
        """The next draws by rank, none of them in the newest `skipped` slots; newest rows are marked ones if any are.

        shifted: words that move pictures are taken as well.
        exact: the ranks are those of this moment in any case, as they must be where slots are skipped.
        1 launch; 2 and a sort before it where the order is made anew.
        """
        ranks, tree = self._ranks, self._tree
        if ranks is None or tree is None:
            raise RuntimeError(f"{base} draws by rank; this engine was made without ranks.")
        # an order without the newest slots serves this call alone
        alone = skipped > 0 or (exact and ranks.every > 1)
        capturing = self._capturing()
        ranked = ranks.exact(tree, skipped, capturing) if alone else ranks.current(tree, capturing)
        found = launch_rank_draw(
            ranks.sums,
            ranked,
            tree,
            marks,
            self._counters,
            self._storage.times_sampled,
            drawn,
            batch,
            skipped=skipped,
            shifted=shifted,
            outdated=self.sparse and ranks.every > 1 and not alone,
            stratified=base.stratified,
            lowest_of_all=base.normalize == "buffer",
        )
        weighing = self._weighing(base, found.masses, beta, drawn, batch if shifted else 0)
        named = {"key": found.keys, "probability": found.probability, "weight": weighing.weight}
        return Drawn(found.slots, named, weighing, found.words)

    def _weighing(
        self, base: Proportional | RankBased, masses: Tensor, beta: float | None, drawn: int, shifts: int = 0
    ) -> PendingWeights:
        """What the gather makes weights of the masses just drawn by; it moves on past the words of `shifts`, too."""
        schedule = self._schedule if beta is None else None
        exponent = beta if beta is not None else base.beta if isinstance(base.beta, (int, float)) else 0.0
        return weighing_of(masses, self._counters, schedule, float(exponent), drawn, shifts)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live. Waits for the device."""
        with self._ordered():
            first, added = self.span()
            dead = ((keys < first) | (keys >= added)).nonzero()
            if dead.numel():
                key = int(keys[dead[0, 0]])
                raise KeyError(f"key {key} is not live; the buffer holds the keys from {first} to {added - 1}.")
            return launch_gather(self._storage.tensors, self._storage.fields, keys % self._storage.capacity)

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        """Give live keys their new masses; 1 launch, 2 for thousands of keys."""
        if keys.numel():
            with self._ordered():
                moved, numbers = self._moved(keys), self._moved(priorities)
                self._changed()
                launch_update(self._masses, self._counters, self._storage.capacity, moved, numbers, sparse=self.sparse)
