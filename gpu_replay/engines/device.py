"""The ring of transitions on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

Nothing here waits for the device unless its docstring states it. The host keeps only a lower bound of the size, to
refuse a sample from too few transitions without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler, Gather
from gpu_replay.engines.storage import Storage, check_live
from gpu_replay.ops.launch import plans
from gpu_replay.ops.priorities import plan_add
from gpu_replay.ops.ring import plan_gather
from gpu_replay.ops.weights import Drawn


class DeviceEngine:
    """Appends, samples and reads the transitions of one buffer, in at most 2 launches each; draws by rank sort besides.

    The buffer has checked all arguments and holds the lock.
    """

    def __init__(self, storage: Storage, draws: DeviceSampler) -> None:
        self.draws = draws
        self._storage = storage
        self._reads = plans(lambda rows: plan_gather(storage.tensors, storage.fields, rows, draws.counters, drawn=False))
        # by the batch, and whether a schedule gives beta
        self._samples = plans(lambda batch, scheduled: draws.plan_sample(batch, self._gather(batch)))
        ring = storage.tensors, storage.fields, draws.masses, draws.counters, storage.times_sampled
        self._adds = plans(lambda rows, own: plan_add(*ring, rows, draws.source, given=own is not None))

    def rebuild(self, seed: int) -> None:
        """Take over a restored state; the counters hold the seed. Waits for the device."""
        self.draws.rebuild()

    def on_clear(self) -> None:
        """Reset host state after `clear`."""
        self.draws.on_clear()

    def on_replay(self, rows: int) -> None:
        """Count the rows of a replay, or of an `add` that runs now."""
        self.draws.added += rows

    def count_at_least(self, needed: int, skipped: int) -> int:
        """Stored transitions, exact only below `needed`.

        Waits for the device only when adds that others replay may have changed the answer.
        """
        draws = self.draws
        if draws.added - draws.first < needed and draws.uncounted and not draws.capturing():
            draws.look()
        return min(self._storage.capacity, draws.added - draws.first)

    def append(self, values: dict[str, Tensor], rows: int, priorities: Tensor | None) -> Tensor:
        """Store `rows` transitions and return their (rows,) keys; 1 launch for tensors on the device."""
        draws = self.draws
        with draws.ordered():
            moved, own = draws.on_device(values, priorities)
            keys = torch.empty(rows, dtype=torch.int64, device=draws.device)
            draws.changed()
            self._adds(rows, None if own is None else own.dtype)(moved, own, keys)
            if draws.runs_now(rows):
                self.on_replay(rows)
        return keys

    def _gather(self, batch: int) -> Gather:
        gather = plan_gather(self._storage.tensors, self._storage.fields, batch, self.draws.counters, drawn=True)
        return lambda slots, words, sample: gather(slots, sample)

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Sample `batch` transitions: fields, key, probability and weight; 2 launches.

        By rank 1 and a sort come first where something has changed.
        """
        with self.draws.ordered():
            return self._samples(batch, beta is None)(beta)

    def sample_later(self, batch: int, beta: float | None) -> tuple[Tensor, Tensor, Callable[[], dict[str, Tensor]]]:
        """Slots and probabilities of a sample, and what counts and returns it; not called, nothing has changed."""
        end = plan_gather({}, {}, batch, self.draws.counters, drawn=True)
        held: list[Any] = []

        def gather(slots: Tensor, words: tuple[Tensor, ...], sample: Drawn) -> dict[str, Tensor]:
            held.extend((slots, sample))
            return self._reads(batch)(slots)

        with self.draws.ordered():
            tensors = self.draws.plan_sample(batch, gather)(beta)
        return held[0], tensors["probability"], lambda: tensors | end(*held)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live. Waits for the device."""
        with self.draws.ordered():
            check_live(keys, *self.draws.span())
            return self._reads(keys.shape[0])(keys % self._storage.capacity)

    # all that is stored can be read
    stored = read
