"""The rows of every benchmark, whose sampled batches can be checked without knowing which rows they hold.

Vectors have the five classic fields of a small environment, all of which follow from the observation. Stacks of frames
are Atari-like steps: every frame encodes the number of its step, its environment, its age in the episode and whether
its step ended the episode; action and reward follow from the number. The check matters: the speed of a buffer that
mixes up rows means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import Field

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


def make_priorities(batch: int, random: np.random.Generator) -> Tensor:
    """(batch,) float32 absolute TD errors, as a learner would give them."""
    return torch.from_numpy(np.abs(random.standard_normal(batch, dtype=np.float32)))


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
    if "terminated" in fields:
        going = fields["terminated"].cpu().numpy().reshape(-1) == 0
    else:
        going = fields["discount"].cpu().numpy().reshape(-1) > 0
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
