"""What a buffer on a device knows of its steps, on the host for the length of a call that adds many."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.device_sampler import DeviceSampler
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Streams
from gpu_replay.ops.eligibility_host import HostEligibility
from gpu_replay.ops.many_steps import KeptFinals, add_steps
from gpu_replay.ops.mass_tree import MassTree


class HostTwin:
    """Copies of flags, depths, masses and counters; `give_back` puts what became of them on the device."""

    def __init__(self, storage: TrajectoryStorage, draws: DeviceSampler, powers: Tensor) -> None:
        self._draws, self._theirs = draws, storage.streams
        host, shape = torch.device("cpu"), storage.streams.shape
        self._streams = Streams(shape, host)
        for own, other in zip(self._streams.tensors, self._theirs.tensors, strict=True):
            own.copy_(other)
        self._trees: list[tuple[MassTree, MassTree]] = []
        for theirs in draws.state.trees:
            tree = MassTree(shape.slots, host, "host", summed=False)
            tree.masses.copy_(theirs.masses)
            self._trees.append((tree, theirs))
        found = {id(theirs): tree for tree, theirs in self._trees}
        masses, eligible = (found.get(id(each)) for each in (draws.state.tree, draws.state.eligible_tree))
        self._counters = draws.counters.cpu().clone()
        rewards = np.zeros(shape.slots, dtype=np.float32)
        self.eligibility = HostEligibility(
            self._streams, masses, eligible, self._counters.numpy(), rewards, powers.cpu().numpy()
        )
        rule, initial = draws.state.rule, draws.state.plan.initial
        self._initial = 1 if masses is None else rule.mass(1.0 if isinstance(initial, str) else float(initial))

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """(T, num_envs) int64 masses of finite priorities; counts those that were cut."""
        flat, _, saturated = self._draws.state.rule.masses(priorities.reshape(-1))
        self._counters[Counter.SATURATED] += saturated
        return flat.reshape(priorities.shape)

    def add_steps(
        self, terminated: np.ndarray, truncated: np.ndarray, masses: np.ndarray | None, with_final: np.ndarray | None
    ) -> KeptFinals:
        """Add steps as `many_steps.add_steps` does."""
        running = self._draws.source == Counter.MAX_MASS
        initial = (self._counters.tolist()[Counter.MAX_MASS] if running else 0) or self._initial
        return add_steps(
            self.eligibility,
            self._counters.numpy(),
            terminated,
            truncated,
            masses,
            initial,
            running=running,
            with_final=with_final,
        )

    def give_back(self) -> None:
        """Make the device know what is known here."""
        for own, other in zip(self._streams.tensors, self._theirs.tensors, strict=True):
            other.copy_(own)
        for tree, theirs in self._trees:
            theirs.masses.copy_(tree.masses)
            theirs.build()
        self._draws.counters.copy_(self._counters)
