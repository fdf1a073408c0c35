"""FlashSAC: its `TorchUniformBuffer`, with each observation stored once and windows made while sampling.

    from gpu_replay.integrations.flashsac import TorchUniformBuffer

`flash_rl/agents/flashSAC/agent.py` imports the class; no other line changes. It needs no library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay import TrajectoryReplayBuffer, Uniform
from gpu_replay.integrations.streams import load_like, ring, vector
from gpu_replay.samplers import Sampler


class TorchUniformBuffer:
    """A ring of the last `max_length` transitions of a vector environment.

    observation_space, action_space: Boxes of the vector environment, (E, numbers), or of a single one, (numbers,).
    n_step, gamma:     steps until bootstrapping, and the discount of one step.
    min_length:        windows that can be sampled before `can_sample` is true, at least 1 and at most those of a full
                       ring.
    sample_batch_size: rows of a sample.
    device_type:       "cpu", "cuda" or "cuda:1".
    sampler:           for priorities, call `buffer.buffer.update_priorities(batch["key"], td_error)` and weight the
                       loss by `batch["weight"]`.
    dtype:             of stored float observations, such as torch.bfloat16; samples are float32.
    seed:              seed of sampling.

    `buffer` is the underlying TrajectoryReplayBuffer. `save` writes a folder, not a pickle.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        n_step: int,
        gamma: float,
        max_length: int,
        min_length: int,
        sample_batch_size: int,
        device_type: str,
        *,
        sampler: Sampler = Uniform(replacement=True),  # noqa: B008 (frozen)
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        envs = observation_space.shape[0] if len(observation_space.shape) > 1 else 1
        kinds = (("obs", observation_space, dtype), ("action", action_space, torch.float32))
        fields = {name: vector(space.shape[-1], _stored(space.dtype, floats)) for name, space, floats in kinds}
        settings = {"n_step": n_step, "gamma": gamma, "sampler": sampler, "device": device_type, "seed": seed}
        self.buffer = ring(max_length, envs, fields, **settings)
        # the newest steps of a full ring begin no whole window
        most = self.buffer.capacity - n_step * envs
        self._min_length, self._batch = max(1, min(min_length, most)), sample_batch_size

    def __len__(self) -> int:
        return len(self.buffer)

    def reset(self) -> None:
        """Forget all transitions."""
        self.buffer.clear()
        self.buffer.begin_episodes()

    def begin_episodes(self) -> None:
        """Mark the next step as the first of new episodes, after environments were reset outside of the loop."""
        self.buffer.begin_episodes()

    def add(self, transition: Mapping[str, Any]) -> None:
        """Store one step of all environments.

        transition: "observation", "action", "reward", "terminated", "truncated" and "next_observation", which is the
                    last one of an episode where one ended, and otherwise is not read: it is the next call's
                    "observation".

        Raises as `TrajectoryReplayBuffer.add` does.
        """
        flags = {name: torch.as_tensor(transition[name]) != 0 for name in ("terminated", "truncated")}
        values = {"obs": transition["observation"], "final_obs": transition["next_observation"]}
        self.buffer.add(**values, **flags, action=transition["action"], reward=transition["reward"])

    def can_sample(self) -> bool:
        """Whether `min_length` windows can be sampled, and each environment has more than `n_step` steps: before, only
        windows that an ending cut short could be.
        """
        short = self.buffer.n_step * self.buffer.num_envs
        count = self.buffer._available(max(self._min_length, short + 1))
        # more windows than that are of more steps; `len` may wait for a GPU
        return count >= self._min_length and (count > short or len(self) > short)

    def sample(self) -> dict[str, Tensor]:
        """Sample `sample_batch_size` transitions; flags are floats.

        Batches also have "key", "weight" and "discount": gamma to the power of the steps in the window, which may be
        fewer than `n_step` if an episode was truncated, and 0 if it terminated. Raises RuntimeError while `can_sample`
        is false.
        """
        if not self.can_sample():
            count = self.buffer._available(self._min_length)
            raise RuntimeError(
                f"sample: {count} windows can be sampled; it needs min_length={self._min_length}, and more than "
                f"{self.buffer.n_step} steps of each environment. Add more first."
            )
        batch = self.buffer.sample(self._batch)
        flags = {name: batch[name].float() for name in ("terminated", "truncated")}
        others = {name: batch[name] for name in ("action", "reward", "discount", "key", "weight")}
        return {"observation": batch.obs, "next_observation": batch.next_obs, **flags, **others}

    def get_observations(self) -> Tensor:
        """(len(buffer), numbers), all stored observations, oldest first, as they are sampled.

        Raises RuntimeError for an empty buffer.
        """
        if not len(self):
            raise RuntimeError("get_observations: the buffer holds no observations. Add more first.")
        return torch.cat([batch.obs for batch in self.buffer.batches(65_536)])

    def save(self, path: str | Path) -> None:
        """Write the whole state to a folder; see `TrajectoryReplayBuffer.save`."""
        self.buffer.save(path)

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote; new episodes begin. Raises CheckpointError if it is damaged or of other settings."""
        settings = ("capacity", "num_envs", "fields", "n_step", "gamma", "sampler")
        wanted = {name: getattr(self.buffer, name) for name in settings}
        self.buffer = load_like(TrajectoryReplayBuffer, path, self.buffer.device, **wanted)


def _stored(dtype: Any, floats: torch.dtype) -> torch.dtype:
    found = torch.from_numpy(np.empty(0, dtype)).dtype
    return floats if found.is_floating_point else found
