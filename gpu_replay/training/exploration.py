"""Epsilon-greedy exploration whose random actions may persist for several steps.

Where one random action undoes the one before (Acrobot, MountainCar) independent ones lead nowhere: of 30 random
episodes of Acrobot-v1 none reached the goal within its 500 steps, and 13 did with each action repeated with
probability 0.8.

Dabney et al. 2021, "Temporally-Extended Epsilon-Greedy Exploration", with a geometric duration.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def greedy_actions(values: Tensor, epsilon: float | Tensor, generator: torch.Generator) -> Tensor:
    """values: (E, actions); returns (E,) int64: the best actions, or random ones with probability `epsilon`.

    epsilon: a number, or a tensor () that a captured graph reads anew in each replay.
    """
    greedy = values.argmax(1)
    if not isinstance(epsilon, Tensor) and epsilon <= 0:
        return greedy
    count, actions = values.shape
    chance = torch.rand(count, generator=generator, device=values.device)
    random = torch.randint(actions, (count,), generator=generator, device=values.device)
    return torch.where(chance < epsilon, random, greedy)


class Explorer:
    """Random actions in `E` environments, each repeated in the next step with probability `persistence`.

    In the long run a share `epsilon` of all actions is random, whatever the persistence. Never synchronises with the
    device, and all that moves on lies in memory that stays where it is, or in the generator: a captured graph goes on.

    generator: on the device of the values.
    """

    def __init__(self, persistence: float, generator: torch.Generator) -> None:
        self._persistence = persistence
        self.generator = generator
        # the probability to begin to explore
        self._begin = torch.zeros((), device=generator.device)
        self._random: Tensor | None = None
        self._exploring: Tensor | None = None

    def set_epsilon(self, epsilon: float) -> None:
        """The share of random actions from now on, also of a captured graph; 0 before the first call."""
        # what makes exploring steps a share `epsilon` of all
        self._begin.fill_(epsilon * (1 - self._persistence) / (1 - epsilon * self._persistence))

    @torch.no_grad()
    def choose(self, values: Tensor, group: int = 0, groups: int = 1) -> Tensor:
        """values: (E / groups, actions), of one group after another; returns (E / groups,) int64 actions.

        With the first group all of them draw, so that random numbers are those of a single group.
        """
        if self._persistence <= 0 and groups == 1:
            return greedy_actions(values, self._begin, self.generator)
        count, actions = values.shape
        if self._random is None or self._exploring is None:
            self._random = torch.zeros(count * groups, dtype=torch.int64, device=values.device)
            self._exploring = torch.zeros_like(self._random, dtype=torch.bool)
        if group == 0:
            self._draw(self._random, self._exploring, actions)
        mine = slice(group * count, (group + 1) * count)
        return torch.where(self._exploring[mine], self._random[mine], values.argmax(1))

    def _draw(self, random: Tensor, exploring: Tensor, actions: int) -> None:
        """Renew the random actions of all environments, and which of them explore."""
        count, generator, device = len(random), self.generator, random.device
        if self._persistence <= 0:
            # in the order of `greedy_actions`
            exploring.copy_(torch.rand(count, generator=generator, device=device) < self._begin)
            random.copy_(torch.randint(actions, (count,), generator=generator, device=device))
            return
        fresh = torch.randint(actions, (count,), generator=generator, device=device)
        chance = torch.rand((2, count), generator=generator, device=device)
        persisting = exploring & (chance[0] < self._persistence)
        random.copy_(torch.where(persisting, random, fresh))
        # without exploration nothing persists
        exploring.copy_((persisting | (chance[1] < self._begin)) & (self._begin > 0))

    def state(self) -> dict[str, Tensor]:
        """The generator's state, and the random actions that persist."""
        state = {"generator": self.generator.get_state()}
        if self._persistence > 0 and self._random is not None and self._exploring is not None:
            state |= {"random": self._random, "exploring": self._exploring}
        return state

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from a state."""
        self.generator.set_state(state["generator"])
        if "random" in state:
            self._random = state["random"].to(device, copy=True)
            self._exploring = state["exploring"].to(device, copy=True)
