"""Other libraries by the interface of `Subject`: a buffer for a task as a few closures each, and who is installed.

To add a library, write its function and add it to `PEERS`. What it needs is imported where it is used.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from .operations import ADDED
from .records import CannotMeasure, installed_version
from .subjects import ALPHA, BETA, EPS, Rows, Sampled, Subject, Task, buffer_fields, tensors
from .torch_rings import Fields, PrioritizedTorchRing, TorchRing

# weights of a batch without priorities
_ones = cache(lambda batch: np.ones(batch, np.float32))


def cpprb(task: Task) -> Subject:
    """`PrioritizedReplayBuffer` or `ReplayBuffer` in C++, which return NumPy arrays; scalars come as [B, 1]."""
    fields = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in task.dtypes.items()}
    library, prioritized = importlib.import_module("cpprb"), not task.uniform
    kind = partial(library.PrioritizedReplayBuffer, alpha=ALPHA) if prioritized else library.ReplayBuffer
    buffer, draw = kind(task.capacity, fields), {"beta": BETA} if prioritized else {}

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch, **draw)
        found = {name: drawn[name] for name in task.dtypes}
        return drawn.get("indexes"), tensors({**found, "weight": drawn.get("weights", _ones(batch))}, task.device)

    def update(indices: Any, priorities: Tensor) -> object:
        return buffer.update_priorities(indices, priorities.cpu().numpy())

    return task.subject(lambda rows: buffer.add(**rows), sample, update if prioritized else lambda *_: None)


def rlox(task: Task) -> Subject:
    """`PrioritizedReplayBuffer` or `ReplayBuffer` in Rust: values are float32 and flags are 0 or 1.

    The first takes one transition a call, and draws the same rows again unless each sample is given another seed.
    """
    if task.stacks:
        raise CannotMeasure("it stores float32 alone, in which stacks of frames would take four times their bytes.")
    library, prioritized = importlib.import_module("rlox"), not task.uniform
    kind = partial(library.PrioritizedReplayBuffer, alpha=ALPHA, beta=BETA) if prioritized else library.ReplayBuffer
    buffer, seeds = kind(task.capacity, task.width, 1), count()
    names = dict(zip(task.dtypes, ("obs", "actions", "rewards", "next_obs", "terminated"), strict=True))

    def inputs(rows: Rows) -> Any:
        obs, after, action = (rows[name].astype(np.float32) for name in ("obs", "next_obs", "action"))
        reward, ended = rows["reward"].astype(np.float32), rows["terminated"]
        if prioritized:
            flags = ended.tolist()
            return list(zip(obs, action[:, None], reward.tolist(), flags, repeat(False), after, strict=False))
        flat = (obs.ravel(), after.ravel(), action, reward)
        return (*flat, ended.astype(np.uint8), np.zeros(len(ended), np.uint8))

    def add(rows: Any) -> None:
        for row in rows:
            buffer.push(*row)

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch, next(seeds))
        found = {ours: drawn[theirs] for ours, theirs in names.items()}
        return drawn.get("indices"), tensors({**found, "weight": drawn.get("weights", _ones(batch))}, task.device)

    def update(indices: Any, priorities: Tensor) -> object:
        return buffer.update_priorities(indices, priorities.cpu().numpy().astype(np.float64))

    if prioritized:
        return task.subject(add, sample, update, inputs)
    return task.subject(lambda rows: buffer.push_batch(*rows), sample, lambda *_: None, inputs)


def tianshou(task: Task) -> Subject:
    """`PrioritizedVectorReplayBuffer` of as many sub-buffers as rows are added at once: its way of adding a batch.

    Rings in NumPy, a float64 sum tree in Numba. Stacks of frames are stored whole and `obs_next` is the stack of the
    following step (`ignore_obs_next`). Storing single frames (`stack_num`, `save_only_last_obs`) takes a seventh of the
    memory, and copies each batch twice.
    """
    data = importlib.import_module("tianshou.data")
    buffer = data.PrioritizedVectorReplayBuffer(
        task.capacity, task.added, alpha=ALPHA, beta=BETA, ignore_obs_next=task.stacks
    )
    names = dict(zip(task.dtypes, ("obs", "act", "rew", "obs_next", "terminated"), strict=True))
    truncated = np.zeros(task.added, dtype=np.bool_)

    def inputs(rows: Rows) -> Any:
        return {**{theirs: rows[ours] for ours, theirs in names.items()}, "truncated": truncated}

    def sample(batch: int) -> Sampled:
        drawn, index = buffer.sample(batch)
        return index, tensors({**{ours: drawn[theirs] for ours, theirs in names.items()}, "weight": drawn.weight})

    def update(index: Any, priorities: Tensor) -> object:
        return buffer.update_weight(index, priorities.numpy())

    return task.subject(lambda rows: buffer.add(data.Batch(rows)), sample, update, inputs, fixed_add=True)


# read when JAX creates its client: one thread, as for all other implementations
_JAX = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1", "JAX_PLATFORMS": "cpu"}


def flashbax(task: Task) -> Subject:
    """`make_prioritised_flat_buffer` in JAX, compiled, of as many streams as rows are added; the state is donated.

    `next_obs` is the following row, so it is not stored. It returns probabilities; the weights are computed here.
    """
    for name, value in _JAX.items():
        os.environ.setdefault(name, value)
    jax, library = importlib.import_module("jax"), importlib.import_module("flashbax")

    def functions(batch: int) -> Any:
        return library.make_prioritised_flat_buffer(
            max_length=task.capacity,
            min_length=task.added,
            sample_batch_size=batch,
            add_batch_size=task.added,
            priority_exponent=ALPHA,
            device="cpu",
        )

    @cache
    def sampler(batch: int) -> Any:
        draw = functions(batch).sample

        def sample(state: Any, key: Any) -> Any:
            key, this = jax.random.split(key)
            drawn = draw(state, this)
            # P(i) ** -beta over its largest value: N cancels
            weight = drawn.probabilities**-BETA
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


def torchrl(task: Task) -> Subject:
    """`ReplayBuffer` with `LazyTensorStorage` and `PrioritizedSampler`: float32 segment trees in C++, or in CUDA.

    Its wheels contain a compiled extension that only loads with the torch it was built with; with another torch there
    is no prioritized replay. Stacks of frames are stored whole, twice.
    """
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    importlib.import_module("torchrl")
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        versions = f"torchrl {installed_version('torchrl')} cannot be loaded by torch {torch.__version__}"
        raise CannotMeasure(
            f"the compiled extension of {versions}, so there is no prioritized replay; build it from source against "
            f"this torch (`pip install git+https://github.com/pytorch/rl --no-build-isolation`)."
        ) from error
    data = importlib.import_module("torchrl.data")
    samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
    tensordict: Any = importlib.import_module("tensordict").TensorDict
    # only newer versions have trees on a device
    trees = "device" in inspect.signature(samplers.PrioritizedSampler).parameters and task.device.type != "cpu"
    where = {"device": task.device} if trees else {}
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(task.capacity, device=task.device),
        sampler=samplers.PrioritizedSampler(task.capacity, alpha=ALPHA, beta=BETA, **where),
    )

    def add(rows: Any) -> object:
        return buffer.extend(tensordict(rows, batch_size=[rows["obs"].shape[0]]))

    def sample(batch: int) -> Sampled:
        drawn, info = buffer.sample(batch, return_info=True)
        weight = info["priority_weight"] if "priority_weight" in info else info["_weight"]
        found = {name: drawn.get(name) for name in task.dtypes}
        return info["index"], {**found, "weight": torch.as_tensor(weight).to(task.device)}

    return task.subject_of_tensors(add, sample, buffer.update_priority)


def python_sum_tree(task: Task) -> Subject:
    """The tree that most tutorials write: Python loops over a flat list of floats, transitions as tuples in a second.

    Its adds keep references and copy nothing.
    """
    leaves = 1 << (task.capacity - 1).bit_length()
    tree = [0.0] * (2 * leaves)
    stored: list[Any] = [None] * task.capacity
    draws = random.Random(0)
    added, top = 0, 1.0

    def change(slot: int, mass: float) -> None:
        node = slot + leaves
        difference = mass - tree[node]
        while node:
            tree[node] += difference
            node >>= 1

    def find(target: float) -> int:
        node = 1
        while node < leaves:
            node *= 2
            if target >= tree[node]:
                target -= tree[node]
                node += 1
        return min(node - leaves, min(added, task.capacity) - 1)

    def inputs(rows: Rows) -> Any:
        return list(zip(*(rows[name] for name in task.dtypes), strict=True))

    def add(rows: Any) -> None:
        nonlocal added
        for row in rows:
            slot = added % task.capacity
            stored[slot] = row
            # with the largest mass so far
            change(slot, top)
            added += 1

    def sample(batch: int) -> Sampled:
        total = tree[1]
        part = total / batch
        slots = [find((i + draws.random()) * part) for i in range(batch)]
        masses = np.array([tree[slot + leaves] for slot in slots])
        weight = (masses / total * min(added, task.capacity)) ** -BETA
        columns = zip(*(stored[slot] for slot in slots), strict=True)
        kinds = task.dtypes.items()
        found = {name: np.array(column, dtype) for (name, (_, dtype)), column in zip(kinds, columns, strict=True)}
        return slots, tensors({**found, "weight": (weight / weight.max()).astype(np.float32)})

    def update(slots: Any, priorities: Tensor) -> None:
        nonlocal top
        for slot, priority in zip(slots, priorities.tolist(), strict=True):
            mass = (priority + EPS) ** ALPHA
            top = max(top, mass)
            change(slot, mass)

    return task.subject(add, sample, update, inputs)


def stable_baselines3(task: Task) -> Subject:
    """`ReplayBuffer` in NumPy of as many environments as rows are added: uniform, so an update does nothing.

    Scalars come as [B, 1], `terminated` as floats. Stacks of frames are stored once a step and the following row serves
    as `next_obs` (`optimize_memory_usage`).
    """
    spaces = importlib.import_module("gymnasium.spaces")
    shape, dtype = task.dtypes["obs"]
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    infos: list[dict[str, Any]] = [{} for _ in range(task.added)]
    buffer = importlib.import_module("stable_baselines3.common.buffers").ReplayBuffer(
        task.capacity,
        spaces.Box(low, high, shape, dtype),
        # values of actions are not validated
        spaces.Discrete(18),
        device=task.device,
        n_envs=task.added,
        optimize_memory_usage=task.stacks,
        handle_timeout_termination=False,
    )

    def inputs(rows: Rows) -> Any:
        return rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["terminated"], infos

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch)
        found = {"obs": drawn.observations, "action": drawn.actions, "reward": drawn.rewards}
        found |= {"next_obs": drawn.next_observations, "terminated": drawn.dones}
        return None, {**found, "weight": torch.ones(batch, device=task.device)}

    return task.subject(lambda rows: buffer.add(*rows), sample, lambda *_: None, inputs, fixed_add=True)


def torch_ring(task: Task) -> Subject:
    """`TorchRing`, a tensor for each field on the device: uniform, so an update does nothing."""
    ring = TorchRing(task.capacity, fields_of(task), task.device)
    ones = cache(lambda batch: torch.ones(batch, device=task.device))

    def sample(batch: int) -> Sampled:
        slots, found = ring.sample(batch)
        return slots, {**found, "weight": ones(batch)}

    return task.subject_of_tensors(ring.add, sample, lambda *_: None)


def torch_prioritized_ring(task: Task) -> Subject:
    """`PrioritizedTorchRing`: running sums of all priorities at every sample, a scatter at every update."""
    ring = PrioritizedTorchRing(task.capacity, fields_of(task), task.device, alpha=ALPHA, beta=BETA, eps=EPS)
    return task.subject_of_tensors(ring.add, ring.sample, ring.update)


def fields_of(task: Task) -> Fields:
    """The fields of a task as the rings of tensors take them."""
    return {name: (field.shape, field.dtype) for name, field in buffer_fields(task.dtypes).items()}


class Peer(NamedTuple):
    """Another library, or what is written without one.

    make:         gives an empty buffer for a task.
    distribution: what has to be installed, if anything.
    uniform:      it has no priorities and so does less.
    both:         it has a buffer without priorities too, for tasks that ask for none.
    devices:      types of the devices on which it gives its batches; a library that stores on a CPU copies them there.
    """

    make: Callable[[Task], Subject]
    distribution: str | None
    uniform: bool = False
    both: bool = False
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu",)


PEERS = {
    "cpprb": Peer(cpprb, "cpprb", both=True, devices=("cpu", "cuda")),
    "rlox": Peer(rlox, "rlox", both=True, devices=("cpu", "cuda")),
    "tianshou": Peer(tianshou, "tianshou"),
    "flashbax": Peer(flashbax, "flashbax"),
    "torchrl": Peer(torchrl, "torchrl", devices=("cpu", "cuda")),
    "python_sum_tree": Peer(python_sum_tree, None),
    "stable_baselines3": Peer(stable_baselines3, "stable-baselines3", uniform=True, devices=("cpu", "cuda")),
    "torch_ring": Peer(torch_ring, None, uniform=True, devices=("cuda",)),
    "torch_prioritized_ring": Peer(torch_prioritized_ring, None, devices=("cuda",)),
}


def names_on(kind: str) -> list[str]:
    """Those that give their batches on a type of device."""
    return [name for name, peer in PEERS.items() if kind in peer.devices]


def peer_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of the libraries that these peers need; None of one that needs none or is not installed."""
    needed = {name: PEERS[name].distribution for name in names}
    return {name: installed_version(distribution) if distribution else None for name, distribution in needed.items()}


def make_peer(name: str, task: Task) -> Subject:
    """An empty buffer of another library.

    Raises CannotMeasure when the library is not installed or does not work with what is; what goes wrong in the adapter
    itself is raised as it is.
    """
    peer = PEERS[name]
    try:
        if task.device.type not in peer.devices:
            raise CannotMeasure(f"it is not measured on a device of type {task.device.type!r}.")
        return peer.make(task)
    except CannotMeasure as reason:
        raise CannotMeasure(f"{name} skipped: {reason}") from reason
    except ImportError as error:
        raise CannotMeasure(f"{name} skipped: {_line(error)}; it needs `pip install {peer.distribution}`.") from error
    except Exception as error:
        # an installed library can fail in any way against a newer torch: that is a result, unlike a mistake of ours
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename) == Path(__file__):
            raise
        raise CannotMeasure(f"{name} skipped: installed, but it fails here: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def available(names: Sequence[str], device: torch.device) -> list[str]:
    """Those of the libraries that make a buffer here; the others are reported once, with the reason."""
    found = []
    for name in names:
        try:
            make_peer(name, Task(1_000, ADDED, device=device))
            found.append(name)
        except CannotMeasure as reason:
            print(reason, file=sys.stderr)
    return found
