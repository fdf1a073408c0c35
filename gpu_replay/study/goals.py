"""The three environments as tasks with goals, for hindsight: the achieved goal, the desired goal, the reward.

With the true goal, rewards and terminations are the environment's own (CartPole terminates whatever the goal), so that
only the goal is new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
# bounds beyond which CartPole terminates: the cart's position in metres, the pole's angle of 12 degrees in radians
_BOUNDS = (2.4, 12 * 2 * np.pi / 360)


@dataclass(frozen=True)
class GoalTask:
    """What hindsight needs to know of an environment.

    achieved:      (D,) observation -> (G,) goal that it achieves.
    goal:          the true one.
    reward_fn:     (K, G) achieved after the step, (K, G) desired -> (K,) reward.
    terminated_fn: the same -> (K,) whether the episode ends there; None where that does not depend on the goal.
    """

    achieved: Callable[[Floats], Floats]
    goal: tuple[float, ...]
    reward_fn: Callable[[Tensor, Tensor], Tensor]
    terminated_fn: Callable[[Tensor, Tensor], Tensor] | None


def _near(achieved: Tensor, desired: Tensor) -> Tensor:
    return ((achieved - desired).abs() <= torch.tensor(_BOUNDS)).all(1)


def _balanced(achieved: Tensor, desired: Tensor) -> Tensor:
    """1 within the bounds of the goal, else 0; the step that leaves the environment's bounds is rewarded as there."""
    return (_near(achieved, desired) | ~_near(achieved, torch.zeros_like(desired))).float()


def _each_step_costs(achieved: Tensor, desired: Tensor) -> Tensor:
    """-1 for every step, the last one too, as MountainCar does."""
    return torch.full((len(achieved),), -1.0)


def _height(obs: Floats) -> Floats:
    """The tip of Acrobot over its axis, -cos(a) - cos(a + b), in lengths of a link; obs: cos a, sin a, cos b, sin b."""
    return np.array([-obs[0] - (obs[0] * obs[2] - obs[1] * obs[3])], dtype=np.float32)


def _above(achieved: Tensor, desired: Tensor) -> Tensor:
    return (achieved > desired).squeeze(1)


def _steps_below_cost(achieved: Tensor, desired: Tensor) -> Tensor:
    """0 for the step that reaches the goal, else -1."""
    return _above(achieved, desired).float() - 1


TASKS = {
    "CartPole-v1": GoalTask(lambda obs: obs[[0, 2]], (0.0, 0.0), _balanced, None),
    "Acrobot-v1": GoalTask(_height, (1.0,), _steps_below_cost, _above),
    "MountainCar-v0": GoalTask(
        lambda obs: obs[:1], (0.5,), _each_step_costs, lambda achieved, desired: (achieved >= desired).squeeze(1)
    ),
}
