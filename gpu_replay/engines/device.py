"""The ring of transitions on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

Nothing here waits for the device unless its docstring states it. The host keeps only a lower bound of the size, to
refuse a sample from too few transitions without asking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler, WeighedDraw
from gpu_replay.engines.storage import Storage, check_live
from gpu_replay.ops.launch import plans
from gpu_replay.ops.priorities import plan_insert
from gpu_replay.ops.ring import plan_gather


class DeviceEngine:
    """Appends, samples and reads the transitions of one buffer, in at most 2 launches each; draws by rank sort besides.

    The buffer has checked all arguments and holds the lock.
    """

    scratch_bytes = 0

    def __init__(self, storage: Storage, draws: DeviceSampler) -> None:
        self.draws = draws
        self._storage = storage
        self._gathers = plans(
            lambda batch, weighed, schedule: plan_gather(
                storage.tensors, storage.fields, batch, storage.device, weighed=weighed
            )
        )
        self._inserts = plans(
            lambda rows, own: plan_insert(
                *(draws.masses, draws.counters, storage.times_sampled, rows, draws.source), given=own is not None
            )
        )

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
        """Store `rows` transitions and return their (rows,) keys; 2 launches for tensors on the device."""
        draws = self.draws
        with draws.ordered():
            # all allocations come before the first write to the ring, since they may fail
            moved, own = draws.on_device(values, priorities)
            keys = torch.empty(rows, dtype=torch.int64, device=draws.device)
            insert = self._inserts(rows, None if own is None else own.dtype)
            draws.add(rows, self.on_replay, lambda: draws.write(moved, rows), lambda: insert(own, keys))
        return keys

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Sample `batch` transitions: fields, key, probability and weight; 2 launches.

        By rank 1 and a sort come first where something has changed.
        """
        with self.draws.ordered():
            return self.gather(self.draws.draw(batch, beta))

    def gather(self, drawn: WeighedDraw) -> dict[str, Tensor]:
        """The result of `sample` for rows that `draws` has drawn, in the same block of `ordered`; 1 launch."""
        gather = self._gathers(drawn.slots.shape[0], *drawn.weights)
        tensors = gather(drawn.slots, drawn.pending)
        tensors.update(drawn.named)
        return tensors

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live. Waits for the device."""
        with self.draws.ordered():
            check_live(keys, *self.draws.span())
            return self._gathers(keys.shape[0], False, False)(keys % self._storage.capacity, None)

    # all that is stored can be read
    stored = read
