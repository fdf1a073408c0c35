"""The nouns of environments: what an agent must know of one, what a step of it is, and the interface all share.

`send` starts a step and `recv` returns it, so that emulators run while the network learns. An ended episode is
replaced by a new one within the same step; what the action led to comes beside it in `final_obs`, so that a truncated
episode can be bootstrapped from its real last observation. Environments show single frames; stacking is the agent's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpu_replay.fields import Field


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an agent must know about an environment.

    observation:      the field that stores one frame; its `scale` is what integers are multiplied by.
    reward_threshold: mean return at which it counts as solved, or None.
    bounds:           (low, high) of vector observations, or None for images.
    stack:            newest frames that the agent sees as one observation, on an axis of their own if more than one.
    """

    name: str
    observation: Field
    num_actions: int
    reward_threshold: float | None
    bounds: tuple[Tensor, Tensor] | None
    stack: int = 1

    @property
    def stacked(self) -> Field:
        """What the agent sees: (stack, *shape) of frames, or the frame where they are not stacked."""
        frame = self.observation
        shape = frame.shape if self.stack == 1 else (self.stack, *frame.shape)
        return dataclasses.replace(frame, shape=shape)


@dataclass(frozen=True)
class Step:
    """One step of `E` environments.

    obs:       (E, *shape) the newest frame: a new episode's first after an ending.
    reward:    (E,) float32.
    terminated, truncated: (E,) bool.
    final_obs: (E, *shape) the last frame of episodes that ended, without meaning in other rows; None where none did.
    """

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor | None


class Environment(Protocol):
    """`num_envs` parallel environments."""

    spec: EnvironmentSpec
    num_envs: int

    def reset(self, seed: int) -> Tensor:
        """First frames; the same seed gives the same episodes."""

    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64."""

    def recv(self) -> Step:
        """Finish it."""

    def state(self) -> dict[str, Tensor] | None:
        """What `restore` needs to go on in mid-episode, or None where environments do not give it away."""

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Go on from there; returns what is observed now."""

    def close(self) -> None:
        """Release what the environments hold."""
