"""A stream of Atari-like steps that can be recognised: what is stored where frames are measured, and how it is checked.

Every frame carries the number of its step, its environment, its age in the episode and whether its step ended the
episode. Action and reward follow from the number. So any sampled batch can be checked without knowing where its rows
came from, also when the stacks were put together by the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .rows import Rows

STACK = 4
SHAPE = (84, 84)
ACTIONS = 18
# an episode of Pong has about so many steps
EPISODE = 1_000
# frames that differ; the largest prime below 256, so that the number fits a pixel
FRAMES = 251
# the pixels of a frame that carry something
NUMBER, ENV, AGE, ENDED = range(4)
# share of sampled rows at the seam of a ring that shares frames, where libraries pad or cut without saying so
SEAM = 0.1

FRAME_DTYPES: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
    "obs": ((STACK, *SHAPE), np.uint8),
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "next_obs": ((STACK, *SHAPE), np.uint8),
    "terminated": ((), np.bool_),
}


@dataclass(frozen=True)
class Step:
    """One step of all environments.

    obs:        (E, 4, 84, 84) uint8, oldest frame first; the first frame of an episode is repeated.
    next_obs:   the same after the step, the final observation where the episode ended.
    action:     (E,) int64.
    reward:     (E,) float32.
    terminated: (E,) bool.
    """

    obs: np.ndarray
    next_obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray

    @property
    def frames(self) -> np.ndarray:
        """(E, 84, 84) uint8, the newest frames of `obs`."""
        return self.obs[:, -1]

    def rows(self) -> Rows:
        """The fields by name."""
        return {name: getattr(self, name) for name in FRAME_DTYPES}


class StackStream:
    """Steps of `envs` environments whose episodes end at different times, in order."""

    def __init__(self, envs: int) -> None:
        self._images = images()
        self._envs = np.arange(envs)
        self._step = 0

    def step(self) -> Step:
        """The next step, whole."""
        age, ended = self._now()
        number = self._step % FRAMES
        step = Step(
            obs=self._stacks(self._step, age),
            next_obs=self._stacks(self._step + 1, age + 1),
            action=np.full(self._envs.size, number % ACTIONS, dtype=np.int64),
            reward=np.full(self._envs.size, number % 7, dtype=np.float32),
            terminated=ended,
        )
        self._step += 1
        return step

    def _now(self) -> tuple[np.ndarray, np.ndarray]:
        age = np.minimum(self._step, (self._step + 100 * self._envs) % EPISODE)
        return age, self._ended(self._step)

    def _ended(self, step: int | np.ndarray) -> np.ndarray:
        ended: np.ndarray = (step + 100 * self._envs) % EPISODE == EPISODE - 1
        return ended

    def _stacks(self, step: int, age: np.ndarray) -> np.ndarray:
        # (E, S): how many steps ago each frame is, not before the episode's first
        ago = np.minimum(np.arange(STACK - 1, -1, -1), age[:, None])
        numbers = (step - ago) % FRAMES
        stacks = self._images[numbers]
        stacks[:, :, 0, ENV] = self._envs[:, None]
        stacks[:, :, 0, AGE] = np.minimum(age[:, None] - ago, 250)
        stacks[:, :, 0, ENDED] = (step - ago + 100 * self._envs[:, None]) % EPISODE == EPISODE - 1
        return stacks


def images() -> np.ndarray:
    """(251, 84, 84) uint8 pictures that compress as well as those of Atari games, to about 6% of their bytes."""
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
    """What is wrong with a sampled batch of stacks, in words; nothing when all rows are whole.

    fields: obs and next_obs (B, 4, 84, 84), action, reward, weight, and terminated or discount, of B values each.
    ahead:  steps from obs to next_obs.
    gamma:  discount of one step, for rewards of several.
    seam:   share of the rows whose older frames may be padding, or whose next_obs may be obs again.
    """
    found = {name: fields[name].cpu().numpy() for name in ("obs", "next_obs", "action", "reward", "weight")}
    flat = {name: found[name].reshape(-1) for name in ("action", "reward", "weight")}
    obs, after = found["obs"], found["next_obs"]
    if "terminated" in fields:
        going = fields["terminated"].cpu().numpy().reshape(-1) == 0
    else:
        going = fields["discount"].cpu().numpy().reshape(-1) > 0
    newest = obs[:, -1, 0].astype(np.int64)
    number = newest[:, NUMBER]
    wrong = []
    pictures = images()
    if not np.array_equal(obs[:, -1, 1:], pictures[number, 1:]):
        wrong.append("the newest frame of obs is not one that was stored")
    if not np.array_equal(flat["action"], number % FRAMES % ACTIONS):
        wrong.append("sampled 'action' does not belong to the sampled observation")
    rewards = sum(gamma**k * ((number + k) % FRAMES % 7) for k in range(ahead))
    alike = np.isclose(flat["reward"], rewards, atol=1e-4)
    if not alike[going | (ahead == 1)].all():
        wrong.append("sampled 'reward' does not belong to the sampled observation")
    if ahead == 1 and not np.array_equal(going, newest[:, ENDED] == 0):
        wrong.append("what ended does not belong to the sampled observation")
    if _share(~_whole(obs, pictures)) > seam:
        wrong.append("obs has frames that are not those before its newest")
    following = after[:, -1, 0].astype(np.int64)
    steps = (number + ahead) % FRAMES == following[:, NUMBER]
    if _share(~(steps & (following[:, ENV] == newest[:, ENV]))[going]) > seam:
        wrong.append("the newest frame of next_obs is not that of the step after")
    if _share(~_whole(after, pictures)[going]) > seam:
        wrong.append("next_obs has frames that are not those before its newest")
    weight = flat["weight"]
    if weight.size != number.size or not np.isfinite(weight).all() or weight.min() <= 0:
        wrong.append(f"the weights are not {number.size} positive numbers")
    return wrong


def _whole(stacks: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """(B,) bool: whether the frames of each stack follow on each other; what is before an episode may be anything."""
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
