"""What is measured: this package's buffers, and by the same interface those of other libraries.

A subject holds one implementation as functions, with as little code as possible around the timed calls. `sample`
returns torch tensors of all fields and of the weights, whatever the implementation itself returns, because that is
what a learner needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform

from . import rows as made
from .records import CannotMeasure
from .rows import FRAME_BYTES, FRAMES, SHAPE, STACK, Rows, StackStream, faults, make_priorities, wrong_vectors

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
CPU = torch.device("cpu")
# different inputs, made before anything is timed
POOL = 64
# transitions sampled for a check, and rows of frames that come together; 4,096 stacks with their successors are 231 MB
CHECKED = 256
N_STEP = 3

Stream = Callable[[int, int], Iterator[Any]]
# a call, and what to do before each
Call = Callable[[], object]
Bound = tuple[Call, Call]


@dataclass
class Subject:
    """A buffer under measurement.

    add:      stores rows in the form that `stream` gives.
    sample:   draws a batch: something that `update` and `wrong` understand.
    update:   gives the sampled transitions (B,) new priorities.
    stream:   endless inputs of `add`, so many rows each, made outside of the measured time; where rows are independent
              of each other, a pool of so many that repeats.
    wrong:    what is wrong with a sampled batch of `CHECKED` transitions, in words.
    add_size: rows that every `add` must bring; None for any number.
    chunk:    rows of an add and transitions of an update while it is being filled.
    filled:   whether it was, and its answers are right.
    nbytes:   bytes that it reports to take, if it does.
    """

    add: Callable[[Any], object]
    sample: Callable[[int], Any]
    update: Callable[[Any, Tensor], object]
    stream: Stream
    wrong: Callable[[Any], list[str]]
    add_size: int | None = None
    chunk: int = 4096
    filled: bool = False
    nbytes: int | None = None


def pool_of(inputs: Callable[[Rows], Any], width: int = 4) -> Stream:
    """A pool of vectors of such a width, in the form that `inputs` makes of NumPy arrays."""

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        random = np.random.default_rng(1)
        return cycle([inputs(made.make_rows(count, random, width)) for _ in range(pool)])

    return stream


def bind(operation: str, subject: Subject, batch: int, added: int, device: torch.device) -> Bound:
    """A call of a full subject to measure ("add", "sample", "update", "cycle", "read"), and what to do before each."""
    random = np.random.default_rng(1)
    rows = subject.stream(added, POOL) if added else repeat(None)
    priorities = cycle([make_priorities(batch, random).to(device) for _ in range(POOL)])
    # inputs of the next call: rows, priorities, what was sampled
    given: list[Any] = [None, None, None]

    def prepare() -> None:
        # a copy is as fresh as the tensor that a learner has just computed
        given[:2] = next(rows), next(priorities).clone()
        if operation == "update":
            given[2] = subject.sample(batch)

    def whole_cycle() -> None:
        subject.add(given[0])
        subject.update(subject.sample(batch), given[1])

    def add_and_sample() -> None:
        subject.add(given[0])
        subject.sample(batch)

    calls: dict[str, Call] = {
        "add": lambda: subject.add(given[0]),
        "sample": lambda: subject.sample(batch),
        "update": lambda: subject.update(given[2], given[1]),
        "cycle": whole_cycle,
        "read": add_and_sample,
    }
    return calls[operation], (lambda: None) if operation == "sample" else prepare


def fill(subject: Subject, capacity: int, device: torch.device, *, rounds: int) -> None:
    """Fill the ring past its end, then spread the priorities with up to so many rounds of updates."""
    size = subject.add_size or min(subject.chunk, capacity)
    for rows in islice(subject.stream(size, 16), -(-capacity // size) + 8):
        subject.add(rows)
    random, batch = np.random.default_rng(0), min(subject.chunk, capacity)
    for _ in range(min(rounds, -(-2 * capacity // batch))):
        subject.update(subject.sample(batch), make_priorities(batch, random).to(device))


def check(subject: Subject, implementation: str) -> None:
    """Check that sampled rows belong together and weights are positive; raises CannotMeasure, naming what is wrong."""
    if wrong := subject.wrong(subject.sample(CHECKED)):
        raise CannotMeasure(f"{implementation} is not measured: {'; '.join(wrong)}.")


def of_buffer(buffer: Any, stream: Stream, wrong: Callable[[Any], list[str]], **more: Any) -> Subject:
    """One of this package's buffers."""
    return Subject(
        add=lambda rows: buffer.add(**rows),
        sample=buffer.sample,
        update=lambda sampled, priorities: buffer.update_priorities(sampled.key, priorities),
        stream=stream,
        wrong=wrong,
        nbytes=buffer.nbytes,
        **more,
    )


def replay_buffer(capacity: int, device: torch.device = CPU, sampler: Any = None, width: int = 4) -> ReplayBuffer:
    """An empty ReplayBuffer of vectors, observations of `width` numbers."""
    sampler = sampler or Proportional(alpha=ALPHA, beta=BETA)
    return ReplayBuffer(capacity, made.buffer_fields(made.dtypes_of(width)), sampler=sampler, device=device, seed=0)


def replay(
    capacity: int, device: torch.device = CPU, sampler: Any = None, stepped: bool = False, width: int = 4
) -> Subject:
    """This package's ReplayBuffer.

    Inputs are NumPy arrays for a CPU and tensors of the device for a GPU; `stepped` rows, of which a CPU gets one at a
    time, come as a loop over one environment has them: a float64 reward and a Python bool.
    """

    def inputs(rows: Rows) -> Any:
        if device.type == "cpu":
            reward, ended = rows["reward"].astype(np.float64), rows["terminated"].tolist()
            return {**rows, "reward": reward, "terminated": ended} if stepped and len(reward) == 1 else rows
        return {name: torch.from_numpy(values).to(device) for name, values in rows.items()}

    return of_buffer(replay_buffer(capacity, device, sampler, width), pool_of(inputs, width), wrong_vectors)


def byte_buffer(capacity: int, device: torch.device, sampler: Proportional | RankBased) -> ReplayBuffer:
    """An empty buffer whose rows are one byte: all else is drawing and priorities."""
    return ReplayBuffer(capacity, {"row": Field((), torch.uint8)}, sampler=sampler, device=device, seed=0)


def frame_buffer(
    capacity: int, envs: int, device: torch.device, n_step: int, **settings: Any
) -> TrajectoryReplayBuffer:
    """An empty buffer of single frames of which it makes stacks; `settings` may change the type of sampled frames."""
    dtype = settings.pop("dtype", None)
    fields = {"obs": Field(SHAPE, torch.uint8, dtype), "action": Field((), torch.int64)}
    return TrajectoryReplayBuffer(
        capacity, envs, fields, stack=STACK, n_step=n_step, autoreset="same_step", device=device, seed=0, **settings
    )


def frames(capacity: int, device: torch.device = CPU, n_step: int = N_STEP, envs: int = 8) -> Subject:
    """This package's TrajectoryReplayBuffer, filled with frames that encode the number of their step.

    n_step: steps until bootstrapping; other libraries are compared with one.
    envs:   environments that step together.
    """
    buffer = frame_buffer(capacity, envs, device, n_step, sampler=Proportional(alpha=ALPHA, beta=BETA))
    # the buffer makes the stacks
    steps = StackStream(envs, stack=1, device=device)

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        truncated = torch.zeros(envs, dtype=torch.bool, device=device)
        while True:
            step = {**steps.step(), "truncated": truncated}
            step["obs"] = step["obs"][:, -1]
            yield step if device.type == "cuda" else {name: value.numpy() for name, value in step.items()}

    def wrong(batch: Any) -> list[str]:
        names = ("obs", "action", "reward", "next_obs", "discount", "weight")
        found = faults({name: batch[name] for name in names}, ahead=n_step)
        number = batch.obs[:, -1, 0, 0].cpu().numpy()
        right = np.array_equal(number, batch.key.cpu().numpy() // envs % FRAMES)
        return found if right else [*found, "the newest frame of obs is not that of its key"]

    return of_buffer(buffer, stream, wrong, add_size=envs, chunk=CHECKED)


def take(capacity: int, device: torch.device = CPU) -> Subject:
    """As many bytes of frames copied from random places: NumPy's `take` on a CPU, `index_select` on a GPU."""
    # written, so that its memory is resident
    stored = torch.ones((capacity, FRAME_BYTES), dtype=torch.uint8, device=device)
    random = np.random.default_rng(0)
    places: dict[int, Any] = {}

    def sample(batch: int) -> Any:
        if batch not in places:
            drawn = [random.integers(capacity, size=batch * 2 * STACK) for _ in range(16)]
            places[batch] = cycle(drawn if device.type == "cpu" else [torch.from_numpy(p).to(device) for p in drawn])
        here = next(places[batch])
        return stored.index_select(0, here) if isinstance(here, Tensor) else stored.numpy().take(here, axis=0)

    # full from the start, without priorities; a copy cannot be wrong
    return Subject(lambda rows: None, sample, lambda *_: None, lambda *_: repeat(None), lambda _: [], chunk=CHECKED)


def on_threads(subject: Subject, threads: int) -> Subject:
    """The same subject, which samples while torch uses so many threads."""

    def sample(batch: int) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return subject.sample(batch)
        finally:
            torch.set_num_threads(before)

    return replace(subject, sample=sample)


_GOAL = Field((3,), torch.float32)
_GOAL_FIELDS = {
    "obs.observation": Field((10,), torch.float32),
    "obs.achieved_goal": _GOAL,
    "obs.desired_goal": _GOAL,
    "action": Field((4,), torch.float32),
}
_EPISODE = 50


def goals(capacity: int, relabel: Any) -> Subject:
    """A buffer of one environment with goals, whose batches are relabelled or not; its episodes reach none."""
    buffer = TrajectoryReplayBuffer(capacity, 1, _GOAL_FIELDS, sampler=Uniform(), relabel=relabel, device=CPU, seed=0)

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        random = np.random.default_rng(1)
        steps = []
        for number in range(_EPISODE * 8):
            step: dict[str, Any] = {"reward": np.zeros(1, np.float32), "terminated": np.zeros(1, bool)}
            for name, field in _GOAL_FIELDS.items():
                step[name] = random.standard_normal((1, *field.shape), dtype=np.float32)
            steps.append({**step, "truncated": np.array([number % _EPISODE == _EPISODE - 1])})
        return cycle(steps)

    def wrong(batch: Any) -> list[str]:
        moved = bool((batch["obs.desired_goal"] == batch["next_obs.desired_goal"]).all(dim=1).float().mean() > 0.5)
        return [] if moved == (relabel is not None) else ["goals are not those that were asked for"]

    return of_buffer(buffer, stream, wrong, add_size=1, chunk=CHECKED)


def steps(capacity: int, envs: int) -> Subject:
    """A buffer of steps that environments return as they do: a float64 reward, flags in arrays."""
    fields = {name: each for name, each in made.buffer_fields().items() if name in ("obs", "action")}
    sampler = Proportional(alpha=ALPHA, beta=BETA)
    buffer = TrajectoryReplayBuffer(capacity, envs, fields, sampler=sampler, device=CPU, seed=0)

    def inputs(rows: Rows) -> Any:
        given = {name: values for name, values in rows.items() if name != "next_obs"}
        return {**given, "reward": rows["reward"].astype(np.float64), "truncated": np.zeros(len(rows["obs"]), bool)}

    def wrong(batch: Any) -> list[str]:
        return wrong_vectors({**batch, "terminated": batch["discount"] == 0}, has_next_obs=False)

    return of_buffer(buffer, pool_of(inputs), wrong, add_size=envs)


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The arrays as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
