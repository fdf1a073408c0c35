"""The interface of environments: their specification, the result of a step, and the methods all of them have.

`send` starts a step and `recv` returns it, so that emulators run while the network learns. An episode that ends is
reset within the same step (same-step autoreset); its last observation is returned as `final_obs`, from which a
truncated episode is bootstrapped. Environments return single frames; `actors` stacks them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_replay import Field


@dataclass(frozen=True)
class EnvironmentSpec:
    """What the agent needs to know about an environment.

    observation:      the field that stores one frame; integers are multiplied by its `scale`.
    reward_threshold: mean return at which the environment counts as solved, or None.
    bounds:           (low, high) of vector observations, or None for images.
    stack:            how many of the newest frames make one observation; more than one adds a stack axis.
    """

    name: str
    observation: Field
    num_actions: int
    reward_threshold: float | None
    bounds: tuple[Tensor, Tensor] | None
    stack: int = 1

    @property
    def stacked(self) -> Field:
        """The agent's observation: (stack, *shape), or the frame alone for a stack of 1."""
        frame = self.observation
        shape = frame.shape if self.stack == 1 else (self.stack, *frame.shape)
        return dataclasses.replace(frame, shape=shape)


@dataclass(frozen=True)
class Step:
    """One step of `E` environments.

    obs:       (E, *shape) the newest frame; after the end of an episode the first one of the next.
    reward:    (E,) float32.
    terminated, truncated: (E,) bool.
    final_obs: (E, *shape) the last frame of each episode that ended, undefined in other rows; None if none ended.
    """

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor | None


def joined(steps: Sequence[Step]) -> Step:
    """The step of all environments, of the steps of parts that follow one another; a single one as it is."""
    if len(steps) == 1:
        return steps[0]
    # where nothing ended any frames will do
    finals = [step.obs if step.final_obs is None else step.final_obs for step in steps]
    return Step(
        obs=torch.cat([step.obs for step in steps]),
        reward=torch.cat([step.reward for step in steps]),
        terminated=torch.cat([step.terminated for step in steps]),
        truncated=torch.cat([step.truncated for step in steps]),
        final_obs=None if all(step.final_obs is None for step in steps) else torch.cat(finals),
    )


class Environment(ABC):
    """`num_envs` parallel environments.

    on_device:  whether a step is work of the agent's device alone, on memory that stays where it is, so that it can be
                captured in a CUDA graph.
    generators: those that such steps draw from.
    """

    spec: EnvironmentSpec
    num_envs: int
    on_device: bool = False
    generators: Sequence[torch.Generator] = ()

    @abstractmethod
    def reset(self, seed: int) -> Tensor:
        """First frames (E, *shape); the same seed gives the same episodes."""

    @abstractmethod
    def send(self, actions: Tensor) -> None:
        """Start a step with actions (E,) int64."""

    @abstractmethod
    def recv(self) -> Step:
        """Wait for the step that `send` started."""

    @property
    def parts(self) -> Sequence[Environment]:
        """Equal parts that are stepped apart, one after the other making up all environments; by default one."""
        return (self,)

    def state(self) -> dict[str, Tensor] | None:
        """What `restore` needs to continue in mid-episode, or None where the simulator does not expose its state."""
        return None

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Continue from a state; returns the current frames. Raises RuntimeError where `state` gives none."""
        raise RuntimeError(f"{self.spec.name} cannot continue in mid-episode; reset it instead.")

    @abstractmethod
    def close(self) -> None:
        """Release what the environments hold."""
