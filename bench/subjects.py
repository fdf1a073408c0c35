"""What is measured: rows whose sampled batches can be checked, and this package's buffers that hold them.

A subject holds one implementation, of this package or another library, as functions, with as little code as possible
around the timed calls. `sample` returns torch tensors of all fields and of the weights, whatever the implementation
itself returns, because that is what a learner needs.

Vectors have the five classic fields of a small environment, all of which follow from the observation. Stacks of frames
are Atari-like steps: every frame encodes the number of its step, its environment, its age in the episode and whether
its step ended the episode; action and reward follow from the number. So any batch can be checked without knowing which
rows it holds: the speed of a buffer that mixes up rows means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer

Rows = dict[str, np.ndarray]

# name of a field to its shape and type
Dtypes = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]

DTYPES: Dtypes = {
    "obs": ((4,), np.float32),
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "next_obs": ((4,), np.float32),
    "terminated": ((), np.bool_),
}


def dtypes_of(width: int) -> Dtypes:
    """The fields of rows whose observations have so many numbers instead of four."""
    return {**DTYPES, **dict.fromkeys(("obs", "next_obs"), ((width,), np.float32))}


def row_bytes(dtypes: Dtypes = DTYPES) -> int:
    """Bytes of all fields of one row."""
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in dtypes.values())


ROW_BYTES = row_bytes()
# numbers of an observation of rows of 3.7 kB
WIDE = 464

STACK = 4
SHAPE = (84, 84)
FRAME_BYTES = SHAPE[0] * SHAPE[1]
ACTIONS = 18
# steps of an episode, about as many as in Pong
EPISODE = 1_000
# different images; the largest prime below 256, so that the number fits one pixel
FRAMES = 251
# what the first pixels of a frame encode
NUMBER, ENV, AGE, ENDED = range(4)
# share of sampled rows that a library with shared frames may pad or cut where its ring wraps
SEAM = 0.1

FRAME_DTYPES: Dtypes = {**DTYPES, **dict.fromkeys(("obs", "next_obs"), ((STACK, *SHAPE), np.uint8))}
# one stored step, as a record describes it
FIELDS: dict[str, list[Any]] = {"obs": ["uint8", list(SHAPE)], "action": ["int64", []]}

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
CPU = torch.device("cpu")
# different inputs, made before anything is timed
POOL = 64
# transitions sampled for a check, and rows of frames that come together; 4,096 stacks with their successors are 231 MB
CHECKED = 256
N_STEP = 3

Stream = Callable[[int, int], Iterator[Any]]
# what `update` needs of a batch, and its fields and weights
Sampled = tuple[Any, Mapping[str, Any]]
# a call, and what to do before each
Call = Callable[[], object]
Bound = tuple[Call, Call]


@dataclass
class Subject:
    """A buffer under measurement.

    add:      stores rows in the form that `stream` gives.
    sample:   draws a batch.
    update:   gives the sampled transitions new priorities (B,): what `sample` gave for it, and these.
    stream:   endless inputs of `add`, so many rows each, made outside of the measured time; where rows are independent
              of each other, a pool of so many that repeats.
    wrong:    what is wrong with the fields and weights of a batch of `CHECKED` transitions, in words.
    add_size: rows that every `add` must bring; None for any number.
    chunk:    rows of an add and transitions of an update while it is being filled.
    filled:   whether it was, and its answers are right.
    """

    add: Callable[[Any], object]
    sample: Callable[[int], Sampled]
    update: Callable[[Any, Any], object]
    stream: Stream
    wrong: Callable[[Mapping[str, Any]], list[str]]
    add_size: int | None = None
    chunk: int = 4096
    filled: bool = False


def pool_of(inputs: Callable[[Rows], Any], width: int = 4) -> Stream:
    """A pool of vectors of such a width, in the form that `inputs` makes of NumPy arrays."""

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        random = np.random.default_rng(1)
        return cycle([inputs(make_rows(count, random, width)) for _ in range(pool)])

    return stream


def steps_of(inputs: Callable[[dict[str, Tensor]], Any], steps: StackStream) -> Stream:
    """Steps in order, which go on where the stream before them ended."""

    def stream(count: int, pool: int = POOL) -> Iterator[Any]:
        return (inputs(steps.step()) for _ in repeat(None))

    return stream


@dataclass(frozen=True)
class Task:
    """What a library's buffer must hold.

    added:   rows of every `add`.
    stacks:  whether rows are consecutive steps of environments with stacks of frames; else independent vectors.
    device:  where batches are wanted; a library that can stores its rows there.
    stepped: whether rows come from a loop over one environment: a float64 reward; flags in an array, which some need.
    width:   numbers of an observation that is a vector.
    uniform: whether no priorities are asked for, where a library has a buffer without them.
    """

    capacity: int
    added: int
    stacks: bool = False
    device: torch.device = CPU
    stepped: bool = False
    width: int = 4
    uniform: bool = False

    @property
    def dtypes(self) -> Dtypes:
        """Shape and type of each field of a row."""
        return FRAME_DTYPES if self.stacks else dtypes_of(self.width)

    def subject(
        self,
        add: Callable[[Any], object],
        sample: Callable[[int], Sampled],
        update: Callable[[Any, Any], object],
        inputs: Callable[[Rows], Any] = lambda rows: rows,
        *,
        has_next_obs: bool = True,
        fixed_add: bool = False,
    ) -> Subject:
        """A library's buffer for this task.

        inputs:       rows as `add` takes them, made of NumPy arrays.
        has_next_obs: whether `next_obs` is stored as given, not taken from the following row.
        fixed_add:    every `add` must bring as many rows as the task says.
        """

        def given(rows: Rows) -> Any:
            return inputs({**rows, "reward": rows["reward"].astype(np.float64)} if self.stepped else rows)

        if not self.stacks:
            wrong, size = partial(wrong_vectors, has_next_obs=has_next_obs), self.added if fixed_add else None
            return Subject(add, sample, update, pool_of(given, self.width), wrong, size)
        steps = StackStream(self.added, device=self.device)
        stream = steps_of(lambda step: given({name: each.cpu().numpy() for name, each in step.items()}), steps)
        return Subject(add, sample, update, stream, partial(faults, seam=SEAM), self.added, CHECKED)

    def subject_of_tensors(
        self, add: Callable[[Any], object], sample: Callable[[int], Sampled], update: Callable[[Any, Any], object]
    ) -> Subject:
        """The same of a library that takes rows as tensors of the device."""
        subject = self.subject(add, sample, update, partial(tensors, device=self.device))
        if self.stacks:
            subject.stream = steps_of(lambda step: step, StackStream(self.added, device=self.device))
        return subject


def of_buffer(buffer: Any, stream: Stream, wrong: Callable[[Any], list[str]], **more: Any) -> Subject:
    """One of this package's buffers."""

    def sample(batch: int) -> Sampled:
        drawn = buffer.sample(batch)
        return drawn.key, drawn

    def add(rows: Any) -> object:
        return buffer.add(**rows)

    return Subject(add, sample, buffer.update_priorities, stream, wrong, **more)


def replay_buffer(capacity: int, device: torch.device = CPU, sampler: Any = None, width: int = 4) -> ReplayBuffer:
    """An empty ReplayBuffer of vectors, observations of `width` numbers."""
    sampler = sampler or Proportional(alpha=ALPHA, beta=BETA)
    return ReplayBuffer(capacity, buffer_fields(dtypes_of(width)), sampler=sampler, device=device, seed=0)


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

    def inputs(step: dict[str, Tensor]) -> Any:
        # the buffer makes the stacks
        given = {**step, "obs": step["obs"][:, -1], "truncated": torch.zeros_like(step["terminated"])}
        return given if device.type == "cuda" else {name: value.numpy() for name, value in given.items()}

    def wrong(batch: Any) -> list[str]:
        names = ("obs", "action", "reward", "next_obs", "discount", "weight")
        found = faults({name: batch[name] for name in names}, ahead=n_step)
        number = batch.obs[:, -1, 0, 0].cpu().numpy()
        right = np.array_equal(number, batch.key.cpu().numpy() // envs % FRAMES)
        return found if right else [*found, "the newest frame of obs is not that of its key"]

    steps = steps_of(inputs, StackStream(envs, stack=1, device=device))
    return of_buffer(buffer, steps, wrong, add_size=envs, chunk=CHECKED)


def tensors(arrays: Mapping[str, np.ndarray], device: torch.device = CPU) -> dict[str, Tensor]:
    """The arrays as tensors of a device; on a CPU they share their memory."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def described(dtypes: Dtypes = DTYPES) -> dict[str, list[Any]]:
    """The fields as a record describes them: name to [dtype, shape]."""
    return {name: [np.dtype(dtype).name, list(shape)] for name, (shape, dtype) in dtypes.items()}


def buffer_fields(dtypes: Dtypes = DTYPES) -> dict[str, Field]:
    """The fields as a ReplayBuffer takes them."""
    return {name: Field(shape, torch.from_numpy(np.empty(0, dtype)).dtype) for name, (shape, dtype) in dtypes.items()}


def make_rows(count: int, random: np.random.Generator, width: int = 4) -> Rows:
    """`count` rows as NumPy arrays [count, *shape], observations of `width` numbers."""
    obs = random.standard_normal((count, width), dtype=np.float32)
    return {"obs": obs, **_implied(obs)}


def wrong_vectors(fields: Mapping[str, Tensor], *, has_next_obs: bool = True) -> list[str]:
    """What is wrong with a sampled batch of vectors and, where it has some, their weights, in words.

    has_next_obs: False for buffers that take `next_obs` from the following row instead of storing it.
    """
    expected = _implied(fields["obs"].cpu().numpy().reshape(len(fields["obs"]), -1))
    found = {name: fields[name].cpu().numpy().reshape(each.shape) for name, each in expected.items()}
    names = [name for name in expected if has_next_obs or name != "next_obs"]
    mixed = [name for name in names if not np.array_equal(found[name], expected[name])]
    wrong = [f"sampled {name!r} does not belong to the sampled observation" for name in mixed]
    return wrong + (weights_fault(fields["weight"], len(fields["obs"])) if "weight" in fields else [])


def weights_fault(weight: Tensor, batch: int) -> list[str]:
    """Whether there are `batch` positive numbers."""
    found = weight.cpu().numpy().reshape(-1)
    right = found.size == batch and np.isfinite(found).all() and found.min() > 0
    return [] if right else [f"the weights are not {batch} positive numbers"]


def _implied(obs: np.ndarray) -> Rows:
    return {
        "action": (np.abs(obs[:, 0]) * np.float32(1000)).astype(np.int64),
        "reward": obs[:, 1].copy(),
        "next_obs": obs + np.float32(1),
        "terminated": obs[:, 2] > 2,
    }


class StackStream:
    """Steps of `envs` environments whose episodes end at different times, in order; `stack` frames each.

    device: where they are made.
    """

    def __init__(self, envs: int, stack: int = STACK, device: torch.device | str = "cpu") -> None:
        self._images = torch.from_numpy(images()).to(device)
        self._envs = torch.arange(envs, device=device)
        self._ago = torch.arange(stack - 1, -1, -1, device=device)
        self._step = 0

    def step(self) -> dict[str, Tensor]:
        """The next step of all environments, by the names of FRAME_DTYPES: stacks are (E, S, 84, 84), oldest first.

        The first frame of an episode is repeated; `next_obs` is the final observation where the episode ended. Single
        frames, of which a buffer makes the stacks, have none.
        """
        age = ((self._step + 100 * self._envs) % EPISODE).clamp_(max=self._step)
        number = self._step % FRAMES
        obs = self._stacks(self._step, age)
        self._step += 1
        after = {"next_obs": self._stacks(self._step, age + 1)} if len(self._ago) > 1 else {}
        return {
            "obs": obs,
            "action": torch.full_like(self._envs, number % ACTIONS),
            "reward": torch.full_like(self._envs, number % 7, dtype=torch.float32),
            **after,
            "terminated": obs[:, -1, 0, ENDED] == 1,
        }

    def _stacks(self, step: int, age: Tensor) -> Tensor:
        # (E, S): how many steps ago each frame is, not before the episode's first
        ago = torch.minimum(self._ago, age[:, None])
        envs = self._envs[:, None]
        stacks = self._images.index_select(0, ((step - ago) % FRAMES).view(-1)).view(*ago.shape, *SHAPE)
        stacks[:, :, 0, ENV] = envs.to(torch.uint8)
        stacks[:, :, 0, AGE] = (age[:, None] - ago).clamp_(max=250).to(torch.uint8)
        stacks[:, :, 0, ENDED] = ((step - ago + 100 * envs) % EPISODE == EPISODE - 1).to(torch.uint8)
        return stacks


def images() -> np.ndarray:
    """(251, 84, 84) uint8 images that compress as well as those of Atari games, to about 6% of their size."""
    random = np.random.default_rng(0)
    made = np.full((FRAMES, *SHAPE), 87, dtype=np.uint8)
    made[:, :10] = 52
    made[:, 76:] = 236
    for number in range(FRAMES):
        top, left = 12 + number % 40, number * 3 % 70
        made[number, top : top + 14, left : left + 14] = random.integers(0, 256, (14, 14))
    made[:, 0, NUMBER] = np.arange(FRAMES)
    return made


def faults(fields: Mapping[str, Tensor], *, ahead: int = 1, gamma: float = 0.99, seam: float = 0.0) -> list[str]:
    """What is wrong with a sampled batch of stacks, in words; empty when every row is consistent.

    fields: obs and next_obs (B, 4, 84, 84), action, reward, weight, and terminated or discount, of B values each.
    ahead:  steps from obs to next_obs.
    gamma:  discount of one step, for rewards of several.
    seam:   share of the rows whose older frames may be padding, or whose next_obs may repeat obs.
    """
    obs, after = (fields[name].cpu().numpy() for name in ("obs", "next_obs"))
    action, reward = (fields[name].cpu().numpy().reshape(-1) for name in ("action", "reward"))
    ended = fields["terminated"] if "terminated" in fields else fields["discount"] == 0
    going = ended.cpu().numpy().reshape(-1) == 0
    newest, following = obs[:, -1, 0].astype(np.int64), after[:, -1, 0].astype(np.int64)
    number, pictures = newest[:, NUMBER], images()
    rewards = sum(gamma**k * ((number + k) % FRAMES % 7) for k in range(ahead))
    # rewards of several steps end where the episode does
    alike = np.isclose(reward, rewards, atol=1e-4) | ~(going | (ahead == 1))
    steps = ((number + ahead) % FRAMES == following[:, NUMBER]) & (following[:, ENV] == newest[:, ENV])
    other = "sampled {!r} does not belong to the sampled observation"
    right = {
        "the newest frame of obs is not one that was stored": np.array_equal(obs[:, -1, 1:], pictures[number, 1:]),
        other.format("action"): np.array_equal(action, number % ACTIONS),
        other.format("reward"): alike.all(),
        other.format("terminated"): ahead > 1 or np.array_equal(going, newest[:, ENDED] == 0),
        "obs has frames that are not those before its newest": _share(~_whole(obs, pictures)) <= seam,
        "the newest frame of next_obs is not that of the step after": _share(~steps[going]) <= seam,
        "next_obs has frames that are not those before its newest": _share(~_whole(after, pictures)[going]) <= seam,
    }
    return [message for message, each in right.items() if not each] + weights_fault(fields["weight"], number.size)


def _whole(stacks: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """(B,) bool: whether the frames of each stack are consecutive; those before the episode's first may be anything."""
    codes = stacks[:, :, 0].astype(np.int64)
    ago = np.arange(STACK - 1, -1, -1)
    number = (codes[:, -1:, NUMBER] - ago) % FRAMES
    inside = codes[:, -1:, AGE] >= ago
    right = (codes[:, :, NUMBER] == number) & (codes[:, :, ENV] == codes[:, -1:, ENV])
    right &= (stacks[:, :, 1:] == pictures[number, 1:]).all(axis=(2, 3))
    whole: np.ndarray = (right | ~inside).all(axis=1)
    return whole


def _share(wrong: np.ndarray) -> float:
    return float(wrong.mean()) if wrong.size else 0.0
