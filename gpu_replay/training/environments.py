"""The nouns of environments: what an agent must know of one, what a step of it is, and the interface all share.

`send` starts a step and `recv` returns it, so that emulators run while the network learns. An ended episode is
replaced by a new one within the same step; what the action led to is kept in `next_obs`, so that no transition joins
two episodes and a truncated one can be bootstrapped from its real last observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpu_replay.fields import Field


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an agent must know about an environment.

    observation:      the field that stores one observation; its `scale` is what integers are multiplied by.
    reward_threshold: mean return at which it counts as solved, or None.
    bounds:           (low, high) of vector observations, or None for images.
    """

    name: str
    observation: Field
    num_actions: int
    reward_threshold: float | None
    bounds: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Step:
    """One step of `E` environments.

    obs:        (E, *shape) what to act upon next: a new episode's first observation after an ending.
    reward:     (E,) float32.
    terminated, truncated: (E,) bool.
    next_obs:   (E, *shape) what the action led to: the final observation at an ending, else the same as `obs`.
    """

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Tensor


class Environment(Protocol):
    """`num_envs` parallel environments."""

    spec: EnvironmentSpec
    num_envs: int

    def reset(self, seed: int) -> Tensor:
        """First observations; the same seed gives the same episodes."""

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
