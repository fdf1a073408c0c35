"""FastTD3 and holosoma: their `SimpleReplayBuffer`, with each observation stored once.

    from gpu_replay.integrations.fasttd3 import SimpleReplayBuffer

No other line of these programs changes, except that FastTD3's loop needs `rb.begin_episodes()` where it resets the
environments after an evaluation. It needs tensordict, which both programs use.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gpu_replay import Batch, Field, TrajectoryReplayBuffer, Uniform
from gpu_replay.integrations.streams import library, ring, vector
from gpu_replay.samplers import Sampler

with library(__name__):
    from tensordict import TensorDict


class SimpleReplayBuffer:
    """A ring of the last `buffer_size` steps of `n_env` environments.

    n_obs, n_act, n_critic_obs: numbers in an observation, an action and an observation of the critic.
    asymmetric_obs:  whether there are observations of the critic; holosoma's class does not ask, so that by default
                     there are if `n_critic_obs` is above 0.
    playground_mode: the critic's observation begins with the actor's (MuJoCo Playground), which then is not stored.
    n_steps, gamma:  steps until bootstrapping, and the discount of one step.
    sampler:         for priorities, call `rb.buffer.update_priorities(data["key"], td_error)` and weight the loss by
                     `data["weight"]`.
    dtype:           of stored observations, such as torch.bfloat16; samples are float32.
    seed:            seed of sampling.

    `buffer` is the underlying TrajectoryReplayBuffer. Samples differ from the original's on purpose: rewards of the
    newest windows never include the oldest steps of a full ring; only complete windows are sampled, which needs
    `n_steps + 1` steps; and environments are not sampled equally often within each batch.
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int = 0,
        asymmetric_obs: bool | None = None,
        playground_mode: bool = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
        *,
        sampler: Sampler = Uniform(replacement=True),  # noqa: B008 (frozen)
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._actor = n_obs
        # where the critic's observation is stored, if there is one
        asymmetric = n_critic_obs > 0 if asymmetric_obs is None else asymmetric_obs
        self._critic = ("actor" if playground_mode else "critic") if asymmetric else None
        fields = {"obs.actor": vector(n_critic_obs if self._critic == "actor" else n_obs, dtype)}
        if self._critic == "critic":
            fields["obs.critic"] = vector(n_critic_obs, dtype)
        fields["action"] = Field((n_act,), torch.float32)
        settings = {"n_step": n_steps, "gamma": gamma, "sampler": sampler, "device": device, "seed": seed}
        self.buffer = ring(n_env * buffer_size, n_env, fields, **settings)

    def extend(self, tensor_dict: Any) -> None:
        """Store one step of all environments.

        tensor_dict: "observations", "actions", "critic_observations" and, in "next", "rewards", "dones",
                     "truncations" and the observations after the step, which are final where an episode ended.

        After a step that ended no episode these observations are not read, because the next call has them. After a
        reset without an ending call `begin_episodes` first. Raises as `TrajectoryReplayBuffer.add` does.
        """
        after = tensor_dict["next"]
        truncated = after["truncations"].bool()
        self.buffer.add(
            obs=self._observed(tensor_dict),
            action=tensor_dict["actions"],
            reward=after["rewards"],
            terminated=after["dones"].bool() & ~truncated,
            truncated=truncated,
            final_obs=self._observed(after),
        )

    def _observed(self, found: Any) -> dict[str, Any]:
        if self._critic == "actor":
            return {"actor": found["critic_observations"]}
        critic = {"critic": found["critic_observations"]} if self._critic else {}
        return {"actor": found["observations"], **critic}

    def begin_episodes(self) -> None:
        """Mark the next step as the first of new episodes, after environments were reset outside of the loop."""
        self.buffer.begin_episodes()

    def sample(self, batch_size: int) -> Any:
        """Sample a TensorDict of `n_env * batch_size` transitions, with "key" and "weight" in addition.

        "effective_n_steps" in "next" are the steps of each window, `n_steps` where an episode terminated. Raises
        RuntimeError before `n_steps + 1` steps are stored.
        """
        batch = _spread(self.buffer.sample(self.buffer.num_envs * batch_size), self.buffer.sampler)
        after = {"rewards": batch.reward, "effective_n_steps": _steps_of(batch, self.buffer)}
        after |= {"dones": (batch.terminated | batch.truncated).long(), "truncations": batch.truncated.long()}
        found = {"actions": batch.action, "key": batch.key, "weight": batch.weight, **self._named(batch.obs)}
        return TensorDict({**found, "next": {**after, **self._named(batch.next_obs)}}, batch_size=len(batch))

    def _named(self, obs: Any) -> dict[str, Any]:
        critic = {"critic_observations": obs[self._critic]} if self._critic else {}
        return {"observations": obs.actor[:, : self._actor], **critic}


def _steps_of(batch: Batch, buffer: TrajectoryReplayBuffer) -> Tensor:
    """(B,) float32, the steps in each window, read from its discount: all of them where the episode terminated.

    With a gamma of 0 or 1 the discount does not tell them; then they are `n_step`, which gives the same discount.
    """
    whole, gamma = torch.full_like(batch.discount, buffer.n_step), buffer.gamma
    if buffer.n_step == 1 or not 0.0 < gamma < 1.0:
        return whole
    return torch.where(batch.terminated, whole, (batch.discount.log() / math.log(gamma)).round())


def _spread(batch: Batch, sampler: Sampler) -> Batch:
    """The batch in an order in which each of its slices is as old as the whole.

    A stratified batch comes sorted, and holosoma cuts one large batch into those of several updates.
    """
    rows = len(batch)
    if isinstance(sampler, Uniform):
        return batch
    # steps of the golden section fall everywhere between those before
    stride = next(each for each in count(round(rows * 0.618)) if math.gcd(each, rows) == 1)
    return batch[torch.arange(rows, device=batch.key.device) * stride % rows]
