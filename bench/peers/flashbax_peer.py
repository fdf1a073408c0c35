"""flashbax: buffers as pure functions in JAX, compiled, with the state donated to every call."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import numpy as np
import torch.utils.dlpack
from torch import Tensor

from gpu_replay.bench.peers_suite import Sampled, Task
from gpu_replay.bench.rows import Rows
from gpu_replay.bench.subjects import Subject

# read when JAX creates its client: one thread, as for all other implementations
_SETTINGS = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1", "JAX_PLATFORMS": "cpu"}


def make(task: Task) -> Subject:
    """`make_prioritised_flat_buffer` of as many streams as rows are added.

    `next_obs` is the following row, so it is not stored. It returns probabilities; the weights are computed here.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    jax, flashbax = importlib.import_module("jax"), importlib.import_module("flashbax")

    def functions(batch: int) -> Any:
        return flashbax.make_prioritised_flat_buffer(
            max_length=task.capacity,
            min_length=task.added,
            sample_batch_size=batch,
            add_batch_size=task.added,
            priority_exponent=task.alpha,
            device="cpu",
        )

    @cache
    def sampler(batch: int) -> Any:
        draw = functions(batch).sample

        def sample(state: Any, key: Any) -> Any:
            key, this = jax.random.split(key)
            drawn = draw(state, this)
            # P(i) ** -beta over its largest value: N cancels
            weight = drawn.probabilities**-task.beta
            return key, drawn, weight / weight.max()

        return jax.jit(sample)

    def inputs(rows: Rows) -> Any:
        # JAX holds integers of 32 bits by default
        return {**{name: rows[name] for name in one}, "action": rows["action"].astype(np.int32)}

    one = {name: np.zeros(shape, kind) for name, (shape, kind) in task.dtypes.items() if name != "next_obs"}
    one["action"] = one["action"].astype(np.int32)
    pure = functions(1)
    store, change = (jax.jit(each, donate_argnums=0) for each in (pure.add, pure.set_priorities))
    state, key = pure.init(jax.tree.map(jax.numpy.asarray, one)), jax.random.key(0)

    def add(rows: Any) -> object:
        nonlocal state
        state = store(state, rows)
        return state

    def sample(batch: int) -> Sampled:
        nonlocal key
        key, drawn, weight = sampler(batch)(state, key)
        found = {**{name: drawn.experience.first[name] for name in one}, "next_obs": drawn.experience.second["obs"]}
        return drawn.indices, {n: torch.utils.dlpack.from_dlpack(v) for n, v in {**found, "weight": weight}.items()}

    def update(indices: Any, priorities: Tensor) -> object:
        # waits for the result, so that the whole cost is in the measured time
        nonlocal state
        state = change(state, indices, priorities.numpy())
        return jax.block_until_ready(state)

    return task.subject(add, sample, update, inputs, has_next_obs=False, fixed_add=True)
