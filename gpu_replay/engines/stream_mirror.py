"""A host copy of the step metadata of a buffer on a device, for one call that adds many steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops.eligibility import GivenFinals, Streams
from gpu_replay.ops.mass_tree import DIRTY, MassTree
from gpu_replay.ops.steps import NONE_KEPT, HostSteps, KeptFinals


class StreamMirror:
    """Host copies of flags, depths, masses and counters; `write_back` copies the changed ones to the device."""

    def __init__(self, storage: TrajectoryStorage, draws: DeviceSampler, powers: Tensor) -> None:
        state, host, shape = draws.state, torch.device("cpu"), storage.streams.shape
        streams, counters, times_sampled = Streams(shape, host), state.counters.cpu(), storage.times_sampled.cpu()
        counters, times_sampled = counters.clone(), times_sampled.clone()
        self._pairs = [(counters, state.counters), (times_sampled, storage.times_sampled)]
        self._pairs += zip(streams.tensors, storage.streams.tensors, strict=True)
        self._theirs, trees = state.trees, []
        for theirs in (state.tree, state.eligible_tree):
            own = None
            if theirs is not None:
                own = MassTree(shape.slots, host, "host", high=theirs.high is not None, summed=False)
                if own.high is not None:
                    own.high.fill_(DIRTY)
                self._pairs.append((own.masses, theirs.masses))
            trees.append(own)
        for own_tensor, other in self._pairs:
            own_tensor.copy_(other)
        self._rule = None if state.tree is None else state.rule
        self._steps = HostSteps(
            streams,
            (trees[0], trees[1]),
            state.initial,
            counters.numpy(),
            np.zeros(shape.slots, dtype=np.float32),
            powers.cpu().numpy(),
            times_sampled.numpy(),
        )

    def add(
        self, terminated: np.ndarray, truncated: np.ndarray, priorities: np.ndarray | None, finals: GivenFinals | None
    ) -> KeptFinals:
        """Add (T, E) steps, priorities in float64 or None; returns which final observations are to be kept.

        A priority that is no number is counted, and the start enters without one.
        """
        masses, saturated = None, 0
        if priorities is not None and self._rule is not None:
            finite = np.isfinite(priorities.reshape(-1))
            masses, _, saturated = self._rule.masses(np.where(finite, priorities.reshape(-1), 0.0))
            masses *= finite
        kept = NONE_KEPT if finals is None else self._steps.keep(terminated, truncated, finals)
        # windows are not summed up on a device
        rewards = np.zeros(terminated.size, dtype=np.float32)
        return self._steps.add((terminated, truncated, rewards), masses, saturated, kept, kept)

    def write_back(self) -> None:
        """Copy the changed state to the device."""
        for own, theirs in self._pairs:
            theirs.copy_(own)
        for tree in self._theirs:
            tree.build()
