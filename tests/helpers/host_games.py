"""A game in host memory whose frames say all that happened in it, and trainers that play it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training_runs import CPU, trainer_of

from gpu_replay import Field
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import Trainer

SETTINGS: dict[str, Any] = {"num_envs": 6, "capacity": 400, "warmup": 40, "batch_size": 8, "hidden": (16,), "n_step": 2}
SETTINGS |= {"frame_stack": 3, "target_every": 5, "eval_episodes": 2, "learning_rate_end": 1e-5, "epsilon_steps": 90}
SETTINGS["clip_reward"] = True


class Sums(Environment):
    """Each environment counts its actions; episodes end by the number, or after seven steps."""

    def __init__(self, num_envs: int, stack: int) -> None:
        super().__init__()
        self.spec = EnvironmentSpec("sums", Field((3, 2), torch.uint8, torch.float32, 1 / 255), 3, None, None, stack)
        self.num_envs, self._envs = num_envs, torch.arange(num_envs)
        for name in ("number", "t"):
            self.register_buffer(name, torch.zeros_like(self._envs))

    def reset(self, seed: int) -> Tensor:
        self.t, self.number = torch.zeros_like(self._envs), (self._envs * 17 + seed) % 251
        return self._frames()

    def send(self, actions: Tensor) -> None:
        self._actions = actions.cpu().clone()

    def recv(self) -> Step:
        self.t += 1
        self.number = (self.number * 31 + self._actions * 7 + self._envs + 1) % 251
        reward, final = (self.number % 5 - 2).float(), self._frames()
        terminated = self.number % 11 == 0
        ended = terminated | (self.t == 7)
        self.number = torch.where(ended, (self.number + self._envs) % 251, self.number)
        self.t[ended] = 0
        # as ALE, which gives anything where none ended
        final[~ended] = 255
        return Step(self._frames(), reward, terminated, ended & ~terminated, final if bool(ended.any()) else None)

    def _frames(self) -> Tensor:
        return self.number.to(torch.uint8)[:, None, None].repeat(1, 3, 2)


def sums_trainer(device: torch.device = CPU, **changes: Any) -> Trainer:
    """A trainer of six such games."""
    settings = Settings.for_family("catch", **{**SETTINGS, **changes})
    return trainer_of(Sums(settings.num_envs, settings.frame_stack), Sums(2, settings.frame_stack), settings, device)
