"""The ways to choose the next transition of a Blind Cliffwalk, run until the values are right."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gpu_replay import Batch, Field, ReplayBuffer
from gpu_replay.samplers import Proportional, RankBased, Sampler, Uniform
from gpu_replay.study.blind_cliffwalk import Memory, QTable, fill_memory

# uniform draws do not depend on what is learned, so they come by the block
BLOCK = 16384
PRIORITIZED: dict[str, Sampler] = {"proportional": Proportional(), "rank": RankBased()}
# by what they should need: the least first
AGENTS = ("oracle", "greedy", "proportional", "rank", "uniform")
Step = tuple[int, int, float, bool]


@dataclass(frozen=True)
class Outcome:
    """One run: `updates` until convergence, or the largest number allowed when `converged` is False."""

    agent: str
    states: int
    transitions: int
    seed: int
    updates: int
    converged: bool
    seconds: float


def solve(agent: str, states: int, seed: int, most_updates: int) -> Outcome:
    """Learn from one transition after another until the mean squared error of Q is below 1e-3.

    agent: "oracle" takes the transition whose update lowers the error most; "greedy" the one with the largest last
           |TD error|; "proportional" and "rank" draw by it from a ReplayBuffer; "uniform" draws from one at random.
    seed:  of the memory's order, the initial values and the draws; agents of one seed share memory and values.

    Transitions that were never drawn come first with "greedy", and have the largest priority so far with the two that
    draw by it. No importance weights: the environment is deterministic, so no bias needs mending.
    """
    random = np.random.default_rng([states, seed])
    memory = fill_memory(states, random)
    table = QTable(states, random)
    start = time.perf_counter()
    updates = LEARNERS[agent](table, memory, seed, most_updates)
    seconds = time.perf_counter() - start
    return Outcome(agent, states, len(memory), seed, updates, table.converged, seconds)


def _oracle(table: QTable, memory: Memory, seed: int, most: int) -> int:
    # copies of a transition are the same update, so one of each is enough to look at
    kinds = sorted(set(_steps(memory)))
    for updates in range(most):
        if table.converged:
            return updates
        table.update(*max(kinds, key=lambda kind: table.gain(*kind)))
    return most


def _greedy(table: QTable, memory: Memory, seed: int, most: int) -> int:
    steps = list(_steps(memory))
    queue = [(-math.inf, key) for key in range(len(steps))]
    for updates in range(most):
        if table.converged:
            return updates
        key = queue[0][1]
        heapq.heapreplace(queue, (-abs(table.update(*steps[key])), key))
    return most


def _prioritized(sampler: Sampler) -> Callable[[QTable, Memory, int, int], int]:
    def learn(table: QTable, memory: Memory, seed: int, most: int) -> int:
        buffer = _buffer(memory, sampler, seed)
        priority = np.empty(1)
        for updates in range(most):
            if table.converged:
                return updates
            batch = buffer.sample(1, beta=0.0)
            priority[0] = abs(table.update(*_first(batch)))
            buffer.update_priorities(batch["key"], priority)
        return most

    return learn


def _uniform(table: QTable, memory: Memory, seed: int, most: int) -> int:
    buffer = _buffer(memory, Uniform(replacement=True), seed)
    updates = 0
    while updates < most:
        batch = buffer.sample(min(BLOCK, most - updates))
        rows = [batch[name].tolist() for name in FIELDS]
        for step in zip(*rows, strict=True):
            if table.converged:
                return updates
            table.update(*step)
            updates += 1
    return updates


FIELDS = {
    "state": Field((), torch.int64),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "terminated": Field((), torch.bool),
}
LEARNERS: dict[str, Callable[[QTable, Memory, int, int], int]] = {
    "oracle": _oracle,
    "greedy": _greedy,
    "uniform": _uniform,
    **{name: _prioritized(sampler) for name, sampler in PRIORITIZED.items()},
}


def _buffer(memory: Memory, sampler: Sampler, seed: int) -> ReplayBuffer:
    """On the CPU everywhere: draws of one transition at a time are no work for a GPU."""
    buffer = ReplayBuffer(len(memory), FIELDS, sampler=sampler, device="cpu", seed=seed)
    buffer.add(**{name: getattr(memory, name) for name in FIELDS})
    return buffer


def _steps(memory: Memory) -> Iterator[Step]:
    columns = [getattr(memory, name).tolist() for name in FIELDS]
    return zip(*columns, strict=True)


def _first(batch: Batch) -> Step:
    state, action, reward, terminated = (batch[name].item() for name in FIELDS)
    return state, action, reward, terminated
