"""flashbax: buffers as pure functions in JAX, compiled, with the state donated to every call."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch.utils.dlpack
from torch import Tensor

from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import PeerSubject, Task

# read when JAX creates its client: one thread, as for all other implementations
_SETTINGS = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1", "JAX_PLATFORMS": "cpu"}


class FlashbaxBuffer(PeerSubject):
    """`make_prioritised_flat_buffer` of as many streams as rows are added.

    `next_obs` is the following row, so it is not stored. It returns probabilities; the weights are computed here.
    """

    has_next_obs = False

    def __init__(self, task: Task) -> None:
        super().__init__(task, fixed_add=True)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._jax = importlib.import_module("jax")
        self._flashbax = importlib.import_module("flashbax")
        functions = self._functions(1)
        one = {
            "obs": np.zeros(*task.dtypes["obs"]),
            "action": np.zeros((), np.int32),
            "reward": np.zeros((), np.float32),
            "terminated": np.zeros((), np.bool_),
        }
        self._state = functions.init(self._jax.tree.map(self._jax.numpy.asarray, one))
        self._add = self._jax.jit(functions.add, donate_argnums=0)
        self._update = self._jax.jit(functions.set_priorities, donate_argnums=0)
        self._samplers: dict[int, Any] = {}
        self._key = self._jax.random.key(0)

    def _functions(self, batch: int) -> Any:
        return self._flashbax.make_prioritised_flat_buffer(
            max_length=self.task.capacity,
            min_length=self.task.added,
            sample_batch_size=batch,
            add_batch_size=self.task.added,
            priority_exponent=self.task.alpha,
            device="cpu",
        )

    def _sampler(self, batch: int) -> Any:
        if batch not in self._samplers:
            draw, split, power = self._functions(batch).sample, self._jax.random.split, -self.task.beta

            def sample(state: Any, key: Any) -> Any:
                key, this = split(key)
                drawn = draw(state, this)
                # P(i) ** -beta over its largest value: N cancels
                weight = drawn.probabilities**power
                return key, drawn, weight / weight.max()

            self._samplers[batch] = self._jax.jit(sample)
        return self._samplers[batch]

    def inputs(self, rows: Rows) -> Any:
        """See Subject; JAX holds integers of 32 bits by default."""
        return {
            "obs": rows["obs"],
            "action": rows["action"].astype(np.int32),
            "reward": rows["reward"],
            "terminated": rows["terminated"],
        }

    def add(self, rows: Any) -> object:
        """See Subject."""
        self._state = self._add(self._state, rows)
        return self._state

    def sample(self, batch: int) -> Any:
        """See Subject."""
        self._key, drawn, weight = self._sampler(batch)(self._state, self._key)
        first, second = drawn.experience.first, drawn.experience.second
        tensor = torch.utils.dlpack.from_dlpack
        return drawn.indices, {
            "obs": tensor(first["obs"]),
            "action": tensor(first["action"]),
            "reward": tensor(first["reward"]),
            "next_obs": tensor(second["obs"]),
            "terminated": tensor(first["terminated"]),
            "weight": tensor(weight),
        }

    def update(self, sampled: Any, priorities: Tensor) -> object:
        """See Subject; waits for the result, so that the whole cost is in the measured time."""
        self._state = self._update(self._state, sampled[0], priorities.numpy())
        return self._jax.block_until_ready(self._state)


def make(task: Task) -> FlashbaxBuffer:
    """An empty buffer; ImportError without flashbax."""
    return FlashbaxBuffer(task)
