"""The ring of transitions on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

Nothing here waits for the device unless its docstring states it. The host keeps only a lower bound of the size, to
refuse a sample from too few transitions without asking.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler, Sample
from gpu_replay.engines.storage import Storage, check_live
from gpu_replay.ops.launch import allocator, per_arguments
from gpu_replay.ops.priorities import Add, make_add
from gpu_replay.ops.ring import make_gather


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
            times_sampled, given = storage.times_sampled, dtype is not None
            add = make_add(stores, fields, masses, counters, times_sampled, rows, sampling.initial_counter, given=given)
            return allocator((rows,), torch.int64, sampling.device), add

        # by the number of rows and the dtype of their priorities
        self._adds = per_arguments(make)

    def count_at_least(self, needed: int) -> int:
        """Stored transitions, exact only below `needed`.

        Waits for the device only when adds that others replay, or an interrupt, may have changed the answer.
        """
        sampling = self.sampling
        too_few = sampling.added - sampling.first < needed and sampling.host_count_stale
        if (too_few or sampling.interrupted) and not sampling.capturing():
            sampling.look()
        return min(self._storage.capacity, sampling.added - sampling.first)

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

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The stored transitions of these keys; KeyError naming the first that is not live. Waits for the device."""
        with self.sampling.order:
            check_live(keys, *self.sampling.span())
            return self._reads(keys.shape[0])(keys % self._storage.capacity)

    # all that is stored can be read
    stored = read
