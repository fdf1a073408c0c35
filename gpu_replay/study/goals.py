"""The three environments as tasks with goals, for hindsight: what was achieved, what is wanted, what it pays.

With the true goal a step pays what the environment pays and ends where the environment ends (of MountainCar and
Acrobot; a fallen pole stays fallen whatever the goal), so that only the goal is new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
# beyond these, CartPole ends: the cart's position in metres, the pole's angle of 12 degrees in radians
_BOUNDS = (2.4, 12 * 2 * np.pi / 360)


@dataclass(frozen=True)
class GoalTask:
    """What hindsight must know of an environment.

    achieved:      (D,) observation to the (G,) goal that it stands for.
    goal:          the true one.
    reward_fn:     (K, G) achieved after the step, (K, G) wanted -> (K,) what the step pays.
    terminated_fn: the same -> (K,) whether the episode ends there; None where that does not depend on the goal.
    """

    achieved: Callable[[Floats], Floats]
    goal: tuple[float, ...]
    reward_fn: Callable[[Tensor, Tensor], Tensor]
    terminated_fn: Callable[[Tensor, Tensor], Tensor] | None


def _cart_and_angle(obs: Floats) -> Floats:
    return obs[[0, 2]]


def _near(achieved: Tensor, desired: Tensor) -> Tensor:
    return ((achieved - desired).abs() <= torch.tensor(_BOUNDS)).all(1)


def _balanced(achieved: Tensor, desired: Tensor) -> Tensor:
    """1 within the bounds of the goal, else 0; the step that leaves the environment's own bounds is paid as there."""
    return (_near(achieved, desired) | ~_near(achieved, torch.zeros_like(desired))).float()


def _position(obs: Floats) -> Floats:
    return obs[:1]


def _at_flag(achieved: Tensor, desired: Tensor) -> Tensor:
    return (achieved >= desired).squeeze(1)


def _each_step_costs(achieved: Tensor, desired: Tensor) -> Tensor:
    """-1 for every step, the last one too: MountainCar pays nothing for arriving but the end of the costs."""
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
    "CartPole-v1": GoalTask(_cart_and_angle, (0.0, 0.0), _balanced, None),
    "Acrobot-v1": GoalTask(_height, (1.0,), _steps_below_cost, _above),
    "MountainCar-v0": GoalTask(_position, (0.5,), _each_step_costs, _at_flag),
}
