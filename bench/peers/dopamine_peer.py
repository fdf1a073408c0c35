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

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.rows import STACK, Rows
from gpu_replay.bench.subjects import Subject, tensors


def _module(name: str) -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return importlib.import_module(f"dopamine.jax.replay_memory.{name}")


def make(task: Task) -> Subject:
    """`ReplayBuffer` with `PrioritizedSamplingDistribution`; `next_obs` is the following row, so it is not given.

    It returns probabilities, from which the weights are computed here.
    """
    made = _module("elements").TransitionElement
    draws = _module("samplers").PrioritizedSamplingDistribution
    buffer = _module("replay_buffer").ReplayBuffer(
        # stacks, steps until bootstrapping, discount
        _module("accumulator").TransitionAccumulator(STACK if task.stacks else 1, 1, 0.99),
        draws(0, priority_exponent=task.alpha, max_capacity=task.capacity),
        batch_size=32,
        max_capacity=task.capacity,
        compress=False,
    )

    def inputs(rows: Rows) -> Any:
        # its accumulator builds the stacks
        obs, after = ((rows[name][:, -1] if task.stacks else rows[name]) for name in ("obs", "next_obs"))
        elements = []
        for i, ended in enumerate(rows["terminated"]):
            elements.append(made(obs[i], int(rows["action"][i]), float(rows["reward"][i]), False))
            if ended:
                # an ending is an element of its own, with the final observation
                elements.append(made(after[i], 0, 0.0, True))
        return elements

    def add(rows: Any) -> None:
        for element in rows:
            buffer.add(element, priority=1.0)

    def sample(batch: int) -> Sampled:
        drawn, about = buffer.sample(batch, with_sample_metadata=True)
        weight = about.probabilities**-task.beta
        # stacks come with the frames last
        obs, after = np.moveaxis(drawn.state, -1, 1), np.moveaxis(drawn.next_state, -1, 1)
        found = {"obs": obs, "action": drawn.action, "reward": drawn.reward, "next_obs": after}
        return about.keys, tensors({**found, "terminated": drawn.is_terminal, "weight": weight / weight.max()})

    def update(keys: Any, priorities: Any) -> object:
        return buffer.update(keys, priorities=priorities.numpy())

    return task.subject(add, sample, update, inputs, has_next_obs=False, consecutive=True)
