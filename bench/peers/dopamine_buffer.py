"""Dopamine: transitions as objects in an ordered dictionary, a float64 sum tree in NumPy that works on whole batches.

Only its replay is imported, `dopamine.jax.replay_memory`. That needs jax, flax, orbax-checkpoint, gin-config and
python-snappy, but none of the rest of the distribution's requirements (TensorFlow, gym): install it with `--no-deps`.

Elements are stored as they are (`compress=False`): unpacking its compressed stacks takes about ten times as long as
drawing them. It holds the steps of one environment, which are given one at a time. A capacity that is a power of two
fails once it is full: the new element enters the tree before the oldest leaves it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import PeerSubject, Task

from .tree_index import TreeIndex

_MEMORY = "dopamine.jax.replay_memory"
_STACK = 4


def _module(name: str) -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return importlib.import_module(f"{_MEMORY}.{name}")


class DopamineBuffer(PeerSubject):
    """`ReplayBuffer` with `PrioritizedSamplingDistribution`; `next_obs` is the following row, so it is not given.

    It returns probabilities, from which the weights are computed here.
    """

    has_next_obs = False
    consecutive = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        accumulator, samplers = _module("accumulator"), _module("samplers")
        self._element: Any = _module("elements").TransitionElement
        self._beta = task.beta
        distribution = samplers.PrioritizedSamplingDistribution(
            0, priority_exponent=task.alpha, max_capacity=task.capacity
        )
        self._buffer = _module("replay_buffer").ReplayBuffer(
            # stacks, steps until bootstrapping, discount
            accumulator.TransitionAccumulator(_STACK if task.stacks else 1, 1, 0.99),
            distribution,
            batch_size=32,
            max_capacity=task.capacity,
            compress=False,
        )

    def inputs(self, rows: Rows) -> Any:
        """See Subject; an ending is an element of its own, with the final observation."""
        elements = []
        for i, ended in enumerate(rows["terminated"]):
            action, reward = int(rows["action"][i]), float(rows["reward"][i])
            elements.append(self._element(self._observation(rows["obs"][i]), action, reward, False))
            if ended:
                elements.append(self._element(self._observation(rows["next_obs"][i]), 0, 0.0, True))
        return elements

    def _observation(self, values: np.ndarray) -> np.ndarray:
        # its accumulator builds the stacks
        return values[-1] if self.task.stacks else values

    def add(self, rows: Any) -> object:
        """See Subject."""
        for element in rows:
            self._buffer.add(element, priority=1.0)
        return None

    def sample(self, batch: int) -> Any:
        """See Subject; stacks come with the frames last."""
        drawn, about = self._buffer.sample(batch, with_sample_metadata=True)
        weight = about.probabilities**-self._beta
        return about.keys, {
            "obs": self._tensor(drawn.state),
            "action": torch.from_numpy(drawn.action),
            "reward": torch.from_numpy(drawn.reward),
            "next_obs": self._tensor(drawn.next_state),
            "terminated": torch.from_numpy(drawn.is_terminal),
            "weight": torch.from_numpy(weight / weight.max()),
        }

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).movedim(-1, 1)

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject."""
        return self._buffer.update(sampled[0], priorities=priorities.numpy())


class DopamineIndex(TreeIndex):
    """`SumTree`, in NumPy."""

    def __init__(self, task: Task) -> None:
        self._tree = _module("sum_tree").SumTree(task.capacity)
        super().__init__(task)

    def total(self) -> float:
        """See TreeIndex."""
        return float(self._tree.root)

    def find(self, targets: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree.query(targets)
        return found

    def masses(self, slots: np.ndarray) -> np.ndarray:
        """See TreeIndex."""
        found: np.ndarray = self._tree.get(slots)
        return found

    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """See TreeIndex."""
        self._tree.set(slots, masses)


def make(task: Task) -> DopamineBuffer:
    """An empty buffer; ImportError without dopamine-rl and what its replay needs."""
    return DopamineBuffer(task)


def make_index(task: Task) -> DopamineIndex:
    """A full index; ImportError likewise."""
    return DopamineIndex(task)
