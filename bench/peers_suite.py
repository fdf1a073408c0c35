"""The measurements of `bench peers`: other libraries, what is compared, at which sizes, and who takes part in each.

The parts are filled, checked and measured one after the other, so that at most one buffer of each library is in
memory. Most people start with one environment: its steps have a float64 reward and a Python bool, whatever the fields
are. Settings of this package are compared in the same interleaved way (`ratio-*`): sampling by rank and by mass,
uniform sampling with and without replacement, relabelled and plain batches, steps and transitions, two threads and one.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Hindsight, Proportional, RankBased, Uniform

from . import subjects
from .cases import ADDED, FRAME_SLOTS, OURS, Case, cycle_cases
from .measure import Maker, Part, compared
from .records import CannotMeasure, installed_version
from .rows import DTYPES, FRAME_DTYPES, SEAM, Dtypes, Rows, StackStream, faults
from .subjects import ALPHA, BETA, CHECKED, CPU, POOL, Stream, Subject, pool_of, wrong_vectors

HERE = Path(__file__).parent

# what `update` needs of a batch, and its fields and weights
Sampled = tuple[Any, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """What a library's buffer must hold.

    added:   rows of every `add`.
    stacks:  whether rows are consecutive steps of environments with stacks of frames; else independent vectors.
    device:  where it is stored.
    stepped: whether rows come from a loop over one environment: a float64 reward; flags in an array, which some need.
    """

    capacity: int
    added: int
    stacks: bool = False
    device: torch.device = CPU
    stepped: bool = False
    alpha: float = ALPHA
    beta: float = BETA

    @property
    def dtypes(self) -> Dtypes:
        """Shape and type of each field of a row."""
        return FRAME_DTYPES if self.stacks else DTYPES

    def subject(
        self,
        add: Callable[[Any], object],
        sample: Callable[[int], Sampled],
        update: Callable[[Any, Tensor], object],
        inputs: Callable[[Rows], Any] = lambda rows: rows,
        *,
        has_next_obs: bool = True,
        consecutive: bool = False,
        fixed_add: bool = False,
    ) -> Subject:
        """A library's buffer for this task.

        inputs:       rows as `add` takes them, made of NumPy arrays.
        has_next_obs: whether `next_obs` is stored as given, not taken from the following row.
        consecutive:  it holds the steps of one environment, so rows added together are steps of that one.
        fixed_add:    every `add` must bring as many rows as the task says.
        """

        def given(rows: Rows) -> Any:
            return inputs({**rows, "reward": rows["reward"].astype(np.float64)} if self.stepped else rows)

        def wrong(sampled: Sampled) -> list[str]:
            found = sampled[1]
            return faults(found, seam=SEAM) if self.stacks else wrong_vectors(found, has_next_obs=has_next_obs)

        return Subject(
            add,
            sample,
            lambda sampled, priorities: update(sampled[0], priorities),
            self._steps(given, consecutive) if self.stacks else pool_of(given),
            wrong,
            self.added if fixed_add or self.stacks else None,
            chunk=CHECKED if self.stacks else 4096,
        )

    def _steps(self, inputs: Callable[[Rows], Any], consecutive: bool) -> Stream:
        """A stream of steps, which goes on where the one before it ended."""
        steps = StackStream(1 if consecutive else self.added)

        def stream(count: int, pool: int = POOL) -> Iterator[Any]:
            while True:
                found = [steps.step() for _ in range(count if consecutive else 1)]
                yield inputs({name: torch.cat([step[name] for step in found]).numpy() for name in FRAME_DTYPES})

        return stream


class Peer(NamedTuple):
    """Another library.

    distribution: what has to be installed, if anything.
    install:      how, where `pip install DISTRIBUTION` is not enough.
    uniform:      it has no priorities and so does less.
    most:         rows of vectors that it can be filled with in a reasonable time.
    devices:      types of the devices on which it can store.

    The module of its name in `peers/` adapts it: `make(task)` gives a Subject.
    """

    distribution: str | None
    install: str | None = None
    uniform: bool = False
    most: int | None = None
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu",)


_DOPAMINE = "pip install jax flax orbax-checkpoint gin-config python-snappy && pip install --no-deps dopamine-rl"
PEERS = {
    "cpprb": Peer("cpprb"),
    "tianshou": Peer("tianshou"),
    "flashbax": Peer("flashbax"),
    "torchrl": Peer("torchrl", devices=("cpu", "cuda")),
    "dopamine": Peer("dopamine-rl", install=_DOPAMINE, most=10_000),
    "python_sum_tree": Peer(None),
    "stable_baselines3": Peer("stable-baselines3", uniform=True),
}


def peer_version(name: str) -> str | None:
    """Version of the library that a peer needs; None when it needs none or is not installed."""
    distribution = PEERS[name].distribution
    return installed_version(distribution) if distribution else None


def make_peer(name: str, task: Task) -> Subject:
    """An empty buffer of another library.

    Raises CannotMeasure when the library is not installed, does not work with what is, or would take too long to fill;
    what goes wrong in the adapter itself is raised as it is.
    """
    peer = PEERS[name]
    if task.device.type not in peer.devices:
        raise CannotMeasure(f"{name} skipped: it stores nothing on a device of type {task.device.type!r}.")
    if peer.most is not None and not task.stacks and task.capacity > peer.most:
        raise CannotMeasure(f"{name} skipped: filling it with more than {peer.most:,} rows takes too long.")
    try:
        made: Subject = importlib.import_module(f".peers.{name}_peer", __package__).make(task)
        return made
    except CannotMeasure as reason:
        raise CannotMeasure(f"{name} skipped: {reason}") from reason
    except ImportError as error:
        install = peer.install or f"pip install {peer.distribution}"
        raise CannotMeasure(f"{name} skipped: {_line(error)}; it needs `{install}`.") from error
    except Exception as error:
        # an installed library can fail in any way against a newer torch: that is a result, unlike a mistake of ours
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent in (HERE, HERE / "peers"):
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
        except CannotMeasure as reason:
            print(reason, file=sys.stderr)
        else:
            found.append(name)
    return found


STEP_BATCH = 64


class Sizes(NamedTuple):
    """How large the buffers are.

    many:    rows of an add measured alone, for which new buffers are made.
    stepped: transitions of the loop over one environment.
    slots:   transitions of the compared settings.
    """

    vectors: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    stacks: int = FRAME_SLOTS
    batches: tuple[int, ...] = (32, 256, 4096)
    many: tuple[int, ...] = (64,)
    stepped: int = 100_000
    slots: int = 1_000_000


# most of a trial's time goes into compiling, again for every size
QUICK = Sizes((4_000,), 1_000, (32,), many=(), stepped=4_000, slots=4_000)


def parts(sizes: Sizes, names: Sequence[str], device: torch.device) -> list[Part]:
    """All that is compared on a device: this package first, then those of the libraries that take part."""
    largest, stacks, one = sizes.vectors[-1], sizes.stacks, sizes.stepped
    vectors: Maker = partial(subjects.replay, device=device)
    stepped = partial(subjects.replay, device=device, stepped=True)

    def beside(cases: list[Case], ours: Maker, peers: Sequence[str] = names, **task: Any) -> Part:
        def made(name: str, capacity: int) -> Subject:
            return make_peer(name, Task(capacity, device=device, **task))

        return cases, compared({OURS: ours, **{name: partial(made, name) for name in peers}})

    def framed(cases: list[Case], added: int) -> Part:
        return beside(cases, partial(subjects.frames, device=device, n_step=1, envs=added), added=added, stacks=True)

    found = [
        beside(cycle_cases(sizes.vectors, sizes.batches), vectors, added=ADDED),
        framed([Case("frame-cycle", stacks, batch, ADDED) for batch in sizes.batches], ADDED),
    ]
    for many in sizes.many:
        found.append(beside([Case("add", largest, many, many)], vectors, added=many))
        found.append(framed([Case("frame-add", stacks, many, many)], many))
    if device.type != "cpu":
        # trees on a GPU differ most in how they take new priorities
        return [*found, beside([Case("update", largest, batch) for batch in sizes.batches], vectors, added=ADDED)]
    uniform = [name for name in names if PEERS[name].uniform]
    without = partial(stepped, sampler=Uniform())
    return [
        *found,
        beside([Case("step-add", one, 1, 1), Case("step-cycle", one, STEP_BATCH, 1)], stepped, added=1, stepped=True),
        beside([Case("step-exact", one, 1, 1)], vectors, added=1),
        beside([Case("step-uniform", one, STEP_BATCH, 1)], without, uniform, added=1, stepped=True),
        *[(cases, compared(makers)) for cases, makers in _settings(sizes)],
    ]


def _reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.05).float()


def _settings(sizes: Sizes) -> list[tuple[list[Case], dict[str, Maker]]]:
    """Comparisons of settings of this package; the first maker of each is the reference of the ratios."""
    slots = sizes.slots

    def drawn(**samplers: Any) -> dict[str, Maker]:
        return {name: partial(subjects.replay, sampler=sampler) for name, sampler in samplers.items()}

    def on_threads(threads: int) -> Maker:
        return lambda capacity: subjects.on_threads(subjects.frames(capacity, n_step=1), threads)

    def steps(envs: int) -> dict[str, Maker]:
        stored = partial(subjects.replay, stepped=True)
        return {"ReplayBuffer": stored, "TrajectoryReplayBuffer": partial(subjects.steps, envs=envs)}

    exponents: dict[str, Any] = {"alpha": ALPHA, "beta": BETA}
    relabelled = {"plain": None, "Hindsight": Hindsight(reward_fn=_reward)}
    return [
        *[([Case("ratio-steps", sizes.stepped, envs, envs)], steps(envs)) for envs in (1, ADDED)],
        (
            [Case("ratio-rank", slots, batch, ADDED) for batch in sizes.batches],
            drawn(Proportional=Proportional(**exponents), RankBased=RankBased(**exponents)),
        ),
        (
            [Case("ratio-replacement", slots, 64)],
            drawn(**{"Uniform(replacement=True)": Uniform(replacement=True), "Uniform()": Uniform()}),
        ),
        (
            [Case("ratio-hindsight", slots, CHECKED)],
            {name: partial(subjects.goals, relabel=relabel) for name, relabel in relabelled.items()},
        ),
        (
            [Case("ratio-threads", sizes.stacks, CHECKED)],
            {"1 thread": on_threads(1), "2 threads": on_threads(2)},
        ),
    ]
