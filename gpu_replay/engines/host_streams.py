"""A sample of a trajectory buffer on the host as a few compiled loops, where Numba is installed.

In small batches a call costs more than its work. What the loops need to know of a buffer is put together once, as in
`host_compiled.py`. Batches of 1 MB and more, whose gathers may use several threads, fields that are converted, pictures
that are moved and rings in a file go the way that they go without Numba.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.fields import Field
from gpu_replay.ops import _backend, threads
from gpu_replay.ops.batch_memory import LARGE, BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.hindsight import Relabels, Shown
from gpu_replay.ops.ring import as_numpy, as_sampled
from gpu_replay.ops.uniform_draw import PERMUTATION_WORDS, rectangle, words_of
from gpu_replay.ops.windows import StoredWindows

_INT64, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)


class _Drawn(NamedTuple):
    """(B,) drawn starts, and the arrays that `numba_streams.gather` filled."""

    slots: np.ndarray
    keys: np.ndarray
    probability: np.ndarray
    weight: np.ndarray
    arrays: tuple[np.ndarray, ...]


def compiled_streams(
    storage: TrajectoryStorage, draws: HostSampler, windows: StoredWindows, memory: BatchMemory
) -> CompiledStreams | None:
    """The compiled samples of a buffer; None where its loops are not compiled, or do not do what its batches need."""
    loops = _backend.whole_samples()
    converted = any(storage.fields[name].converts for name in storage.observations)
    if loops is None or converted or storage.random_shift or storage.read_ahead() is not None:
        return None
    # windows of 256 steps and more have longer lengths
    return CompiledStreams(storage, draws, windows, memory, loops) if windows.lengths.itemsize == 1 else None


class CompiledStreams:
    """Samples as `TrajectoryHostEngine` does, to the same bytes.

    loops: the module `numba_streams`. memory: where that of larger batches comes from.
    """

    def __init__(
        self, storage: TrajectoryStorage, draws: HostSampler, windows: StoredWindows, memory: BatchMemory, loops: Any
    ) -> None:
        self._draws, self._loops, self._memory = draws, loops, memory
        self._shape = shape = storage.streams.shape
        observations = storage.observations
        names = [*observations, *(name for name in storage.fields if name not in observations and name != "reward")]
        self._names, self._observations = names, len(observations)
        fields = [storage.fields[name] for name in names]
        # the memory of the rings is that of these, as long as they are
        rings = [as_numpy(storage.tensors[name]) for name in names]
        pools = [as_numpy(storage.finals[name]) if name in storage.finals else None for name in names]
        self._table = np.array([_line(*each) for each in zip(rings, pools, fields, strict=True)], dtype=np.int64)
        frames = (shape.stack,) if shape.stack > 1 else ()
        stacked = [(2, (*frames, *ring.shape[1:]), ring.dtype) for ring in rings[: len(observations)]]
        # how many rows for each of the batch, and what a row is
        self._outputs = [*stacked, *((1, ring.shape[1:], ring.dtype) for ring in rings[len(observations) :])]
        self._row_bytes = sum(times * math.prod(each) * dtype.itemsize for times, each, dtype in self._outputs)
        # NumPy has no bfloat16
        changes = [field.converts or field.dtype == torch.bfloat16 for field in fields]
        self._fields = list(zip(names, fields, changes, strict=True))
        streams = storage.streams
        others = (
            streams.final.numpy(),
            draws.counters,
            draws.times_sampled,
            streams.spans.numpy(),
            streams.parted.numpy(),
        )
        arrays = windows.flags, windows.depth, windows.lengths, windows.sums, windows.powers, *others
        # read by their addresses, so they must stay
        self._kept = rings, pools, arrays
        settings = shape.num_envs, shape.stack, shape.next_step, shape.hindsight, windows.zero, storage.capacity
        # which fields are goals is not known yet
        known = [*settings, len(observations), 0, 0, 0]
        self._state = np.array([*known, *loops.places_of(*arrays)], dtype=np.int64)
        plan = draws.state.plan
        self._alike = plan.kind == "uniform" and not plan.newest
        self._replacement = plan.replacement
        self._no_doubles, self._no_words = np.zeros(0), np.zeros(0, dtype=np.uint64)
        self._relabel: Relabels | None = None
        self._goals = self._fields[0], np.dtype(np.float32)

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor] | None:
        """Draw `batch` starts: fields, windows, key, probability and weight; None, with nothing changed, for many."""
        if batch * self._row_bytes >= threads.LARGE:
            return None
        drawn, _ = self._drawn(batch, beta)
        self._gather(drawn)
        return self._tensors(drawn)

    def sample_shown(
        self, batch: int, beta: float | None, relabel: Relabels, count: int
    ) -> tuple[dict[str, Tensor], Shown] | None:
        """As `sample`, with other goals in `count` rows."""
        if batch * self._row_bytes >= threads.LARGE:
            return None
        if relabel is not self._relabel:
            self._note(relabel)
        strategy, ((_, field, changes), dtype) = relabel.strategy, self._goals
        last = strategy == "final"
        drawn, words = self._drawn(batch, beta, PERMUTATION_WORDS + (0 if last else count))
        rows, known = np.empty(count, _INT64), np.empty(count, _BOOL)
        shown = np.empty((count, *field.shape), dtype), np.empty((count, *field.shape), dtype)
        chosen = last, strategy == "episode", words, rectangle(batch)
        self._gather(drawn)
        places = drawn.slots, self._table, self._state, id(drawn.arrays)
        complete = self._loops.put_goals(*places, *chosen, rows, known, id(shown))
        tensor = torch.from_numpy
        after, goals = tensor(shown[0]), tensor(shown[1])
        if changes:
            after, goals = as_sampled(shown[0], field), as_sampled(shown[1], field)
        return self._tensors(drawn), Shown(tensor(rows), None if complete else tensor(known), after, goals)

    def _note(self, relabel: Relabels) -> None:
        """Note which fields are goals."""
        achieved, desired = (self._names.index(name) for name in (relabel.achieved_field, relabel.desired_field))
        self._goals = self._fields[desired], self._outputs[desired][2]
        self._state[7:10] = achieved, desired, self._table[desired, 2]
        self._relabel = relabel

    def _drawn(self, batch: int, beta: float | None, more: int = 0) -> tuple[_Drawn, np.ndarray]:
        """Draw, make what is to be filled, and take `more` random words after those of the draw, which are returned."""
        draws, loops = self._draws, self._loops
        if self._alike:
            slots = np.empty(batch, _INT64)
            probability, weight = np.empty(batch, _FLOAT32), np.empty(batch, _FLOAT32)
            count = draws.counters.item(Counter.ELIGIBLE)
            if self._replacement:
                source, words = (draws.doubles(batch), self._no_words, (0, 0)), None
            else:
                # in one call, since whole blocks are taken in any case
                words = draws.words(PERMUTATION_WORDS + more)
                source = self._no_doubles, words_of(count, words[:PERMUTATION_WORDS]), rectangle(max(count, 1))
                words = words[PERMUTATION_WORDS:]
            found = loops.draw_uniformly(*source, *draws.state.eligible.compiled[:3], slots, probability, weight)
            if found < (1 if self._replacement else batch):
                raise RuntimeError(
                    f"sample({batch}): {found} starts can be drawn, where {count} were counted. The buffer was changed "
                    "past its lock, or its memory is damaged; load it from a checkpoint."
                )
        else:
            slots, probability, weight = draws.draw(batch, beta)
            words = None
        if words is None:
            words = draws.words(more) if more else self._no_words
        keys = np.empty(batch, _INT64)
        if batch * self._row_bytes < LARGE:
            outputs = [np.empty((times * batch, *shape), dtype) for times, shape, dtype in self._outputs]
        else:
            outputs = [
                self._memory.array(name, (times * batch, *shape), dtype)
                for name, (times, shape, dtype) in zip(self._names, self._outputs, strict=True)
            ]
        windows = np.empty(batch, _FLOAT32), np.empty(batch, _FLOAT32), np.empty(batch, _BOOL), np.empty(batch, _BOOL)
        return _Drawn(slots, keys, probability, weight, (*outputs, *windows)), words

    def _gather(self, drawn: _Drawn) -> None:
        """Gather and count."""
        self._draws.counting(drawn.slots)
        self._loops.gather(drawn.slots, self._table, self._state, id(drawn.arrays), drawn.keys)

    def _tensors(self, drawn: _Drawn) -> dict[str, Tensor]:
        """The batch by name, in its order."""
        slots, keys, probability, weight, arrays = drawn
        tensor, batch, observations = torch.from_numpy, slots.size, self._observations
        found: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for (name, field, changes), array in zip(self._fields, arrays, strict=False):
            if len(found) < observations:
                first, second = array[:batch], array[batch:]
                found[name] = as_sampled(first, field) if changes else tensor(first)
                after[f"next_{name}"] = as_sampled(second, field) if changes else tensor(second)
            else:
                found[name] = as_sampled(array, field) if changes else tensor(array)
        reward, discount, terminated, truncated = arrays[-4:]
        found["reward"] = tensor(reward)
        found.update(after)
        found["discount"] = tensor(discount)
        found["terminated"] = tensor(terminated)
        found["truncated"] = tensor(truncated)
        found["key"] = tensor(keys)
        found["probability"] = tensor(probability)
        found["weight"] = tensor(weight)
        return found


def _line(ring: np.ndarray, pool: np.ndarray | None, field: Field) -> tuple[int, int, int, int]:
    """Where rows begin, how far they are apart, their bytes, and where kept final observations begin."""
    addresses = [0 if each is None else each.__array_interface__["data"][0] for each in (ring, pool)]
    return addresses[0], ring.strides[0], field.row_bytes, addresses[1]
