"""A game in host memory whose frames say all that happened in it, and trainers that play it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from training_runs import CPU

from gpu_replay import Field
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.settings import Settings
from gpu_replay.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "num_envs": 6,
    "capacity": 400,
    "warmup": 40,
    "batch_size": 8,
    "hidden": (16,),
    "frame_stack": 3,
    "n_step": 2,
    "target_every": 5,
    "eval_episodes": 2,
    "learning_rate_end": 1e-5,
    "epsilon_steps": 90,
    "clip_reward": True,
}


class Sums(Environment):
    """Each environment counts its actions; episodes end by the number, or after seven steps.

    events: what was asked of it, in order: ("send" or "recv", the first environment).
    """

    def __init__(self, envs: range, stack: int, events: list[tuple[str, int]], groups: int = 1) -> None:
        self.spec = EnvironmentSpec("sums", Field((3, 2), torch.uint8, torch.float32, 1 / 255), 3, None, None, stack)
        self.num_envs, self.events, self._envs = len(envs), events, torch.tensor(envs)
        size = len(envs) // groups
        starts = range(0, len(envs), size) if groups > 1 else ()
        self._parts = [Sums(envs[start : start + size], stack, events) for start in starts]
        self._waiting = False

    @property
    def parts(self) -> Sequence[Environment]:
        return self._parts or (self,)

    def reset(self, seed: int) -> Tensor:
        if self._parts:
            return torch.cat([part.reset(seed) for part in self._parts])
        self._t, self._number = torch.zeros_like(self._envs), (self._envs * 17 + seed) % 251
        return self._frames()

    def send(self, actions: Tensor) -> None:
        assert not self._waiting
        self._waiting, self._actions = True, actions.cpu().clone()
        self.events.append(("send", int(self._envs[0])))

    def recv(self) -> Step:
        assert self._waiting
        self._waiting = False
        self.events.append(("recv", int(self._envs[0])))
        self._t += 1
        self._number = (self._number * 31 + self._actions * 7 + self._envs + 1) % 251
        reward, final = (self._number % 5 - 2).float(), self._frames()
        terminated = self._number % 11 == 0
        ended = terminated | (self._t == 7)
        self._number = torch.where(ended, (self._number + self._envs) % 251, self._number)
        self._t[ended] = 0
        # as ALE, which gives anything where none ended
        final[~ended] = 255
        return Step(self._frames(), reward, terminated, ended & ~terminated, final if bool(ended.any()) else None)

    def state(self) -> dict[str, Tensor] | None:
        if self._parts:
            parts = [part.state() or {} for part in self._parts]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {"number": self._number, "t": self._t}

    def close(self) -> None:
        pass

    def _frames(self) -> Tensor:
        return self._number.to(torch.uint8)[:, None, None].repeat(1, 3, 2)


def sums_trainer(device: torch.device = CPU, groups: int = 1, **changes: Any) -> Trainer:
    """A trainer of six such games."""
    settings = Settings.for_family("catch", **{**SETTINGS, "groups": groups, **changes})
    games = Sums(range(settings.num_envs), settings.frame_stack, [], groups)
    evaluator = Evaluator(Sums(range(2), settings.frame_stack, []), settings, device=device, seed=0, stop=StopRequest())
    return Trainer(games, evaluator, settings, device=device, seed=0)
