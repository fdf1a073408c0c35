"""A recognisable stream of Atari-like steps, stored in every benchmark of frames, and the check of its samples.

Every frame encodes the number of its step, its environment, its age in the episode and whether its step ended the
episode; action and reward follow from the number. Any sampled batch can therefore be checked without knowing which
rows it holds, also where the buffer assembled the stacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

FRAME_DTYPES: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
    "obs": ((STACK, *SHAPE), np.uint8),
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "next_obs": ((STACK, *SHAPE), np.uint8),
    "terminated": ((), np.bool_),
}
# one stored step, as a record describes it
FIELDS: dict[str, list[Any]] = {"obs": ["uint8", list(SHAPE)], "action": ["int64", []]}


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
        wrong.append("sampled 'terminated' does not belong to the sampled observation")
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
