"""Stable-Baselines3: a buffer for its off-policy algorithms, and DQN, SAC and TD3 with prioritized replay.

    from gpu_replay.integrations.sb3 import PrioritizedDQN, SB3ReplayBuffer

    model = SAC("MlpPolicy", env, replay_buffer_class=SB3ReplayBuffer)
    model = PrioritizedDQN("MlpPolicy", env, replay_buffer_kwargs={"sampler": Proportional(alpha=0.6, beta=0.4)})

`train()` stays that of Stable-Baselines3: the gradient of a loss in which row i has the weight w_i is that of the plain
loss with row i of the gradient of the network's output multiplied by w_i, and so hooks on the networks weigh it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from gpu_replay import Batch, Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.samplers import Sampler
from gpu_replay.spaces import step_fields


class SB3ReplayBuffer(PlainReplayBuffer):
    """A buffer for `replay_buffer_class=`, on the model's device; Dict observations included.

    sampler:         as that of a ReplayBuffer; only the Prioritized algorithms of this module update priorities.
    n_steps, gamma:  n-step returns, as those of Stable-Baselines3's `NStepReplayBuffer`; with more than one step every
                     observation is stored once.
    seed:            of the draws.

    `storage` is the ReplayBuffer, or with more than one step the TrajectoryReplayBuffer, behind it.
    """

    pos: int
    # what `sample` gave last, its importance weights (B, 1), and the TD errors, (B, 1) of each critic, found for it
    drawn: Any
    weight: Tensor
    errors: list[Tensor]

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        sampler: Sampler = Uniform(replacement=True),  # noqa: B008 (frozen)
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int = 0,
    ) -> None:
        # not that of the parent, which allocates its arrays
        BaseBuffer.__init__(self, max(buffer_size // n_envs, 1), observation_space, action_space, device, n_envs)
        if optimize_memory_usage:
            raise ValueError(
                "SB3ReplayBuffer needs optimize_memory_usage=False; with n_steps > 1 it stores frames once."
            )
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = n_steps
        found = step_fields(observation_space, action_space)
        shapes = get_obs_shape(observation_space)
        named = {f"obs.{name}": shape for name, shape in shapes.items()} if isinstance(shapes, dict) else None
        named = named or {"obs": shapes}
        fields = {name: Field(shape, found[name].dtype) for name, shape in named.items()}
        fields["action"] = Field((self.action_dim,), found["action"].dtype)
        settings: dict[str, Any] = {"sampler": sampler, "device": self.device, "seed": seed}
        self.storage: ReplayBuffer | TrajectoryReplayBuffer
        if n_steps == 1:
            fields |= {f"next_{name}": Field(shape, found[name].dtype) for name, shape in named.items()}
            fields |= {"reward": Field((), torch.float32), "terminated": Field((), torch.bool)}
            self.storage = ReplayBuffer(self.buffer_size * n_envs, fields, **settings)
        else:
            settings |= {"n_step": n_steps, "gamma": gamma, "autoreset": "same_step"}
            self.storage = TrajectoryReplayBuffer(self.buffer_size * n_envs, n_envs, fields, **settings)
        # the observations that must come next, and those environments whose episode goes on
        self._next_obs: Any = None
        self._goes_on = np.zeros(n_envs, bool)
        self._forget_drawn()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of all environments; `next_obs` of those that are done is their last observation."""
        limit = self.handle_timeout_termination
        truncated = np.array([limit and info.get("TimeLimit.truncated", False) for info in infos], bool)
        ended = np.asarray(done, bool)
        truncated &= ended
        step = {
            "obs": self._shaped(obs),
            "action": action.reshape(self.n_envs, self.action_dim),
            "reward": np.asarray(reward, np.float32),
            "terminated": ended & ~truncated,
        }
        after = self._shaped(next_obs)
        if isinstance(self.storage, TrajectoryReplayBuffer):
            # learn() may reset environments without a word
            reset = self._goes_on & ~_same_rows(step["obs"], self._next_obs) if self._goes_on.any() else self._goes_on
            if reset.any():
                self.storage.begin_episodes(reset)
            self.storage.add(**step, truncated=truncated, final_obs=after)
            self._next_obs, self._goes_on = after, ~ended
        else:
            self.storage.add(**step, next_obs=after)
        self.full |= self.pos + 1 == self.buffer_size
        self.pos = (self.pos + 1) % self.buffer_size

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.storage.clear()
        self._goes_on[:] = False
        self._forget_drawn()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Draw `batch_size` transitions, normalized by `env`; `dones` leaves out those that a time limit ended."""
        self.feed_back()
        batch = self.storage.sample(batch_size)
        obs, next_obs = (self._normalized(batch[name], env) for name in ("obs", "next_obs"))
        reward = batch.reward[:, None]
        if env is not None:
            reward = self._to_device(env.normalize_reward(reward.cpu().numpy()))
        discount = batch.discount[:, None] if self.n_steps > 1 else None
        kind = DictReplayBufferSamples if isinstance(obs, dict) else ReplayBufferSamples
        samples = kind(obs, batch.action, next_obs, batch.terminated[:, None].float(), reward, discount)
        self.drawn, self.weight, self._keys = samples, batch.weight[:, None], batch.key
        return samples

    def feed_back(self) -> None:
        """Give the transitions drawn last the mean of the TD errors in `errors` as their priority."""
        if self.errors:
            self.storage.update_priorities(self._keys, torch.cat(self.errors, 1).abs().mean(1))
            self.errors.clear()

    def _forget_drawn(self) -> None:
        self.drawn, self.weight, self._keys, self.errors = None, torch.empty(0), torch.empty(0), []

    def _shaped(self, obs: Any) -> Any:
        """Observations with the axes that Stable-Baselines3 gives them: a number has one of length 1."""
        if isinstance(obs, dict):
            return {name: value.reshape(self.n_envs, *self.obs_shape[name]) for name, value in obs.items()}
        return obs.reshape(self.n_envs, *self.obs_shape)

    def _normalized(self, obs: Tensor | Batch, env: VecNormalize | None) -> Any:
        """Sampled observations as a tensor or a dict of tensors."""
        if isinstance(obs, Tensor):
            return obs if env is None else self._to_device(env.normalize_obs(obs.cpu().numpy()))
        if env is None:
            return obs.to_dict()
        arrays = env.normalize_obs({name: value.cpu().numpy() for name, value in obs.items()})
        return {name: self._to_device(value) for name, value in arrays.items()}

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        self._forget_drawn()
        return self.__dict__


def _same_rows(one: Any, other: Any) -> np.ndarray:
    """Which rows of two observations are equal, (E,) bool."""
    if isinstance(one, dict):
        return np.logical_and.reduce([_same_rows(one[name], other[name]) for name in one])
    return (one == other).reshape(len(one), -1).all(1)


class _Prioritized(OffPolicyAlgorithm):
    """Losses weighed by importance, and TD errors fed back as priorities; `replay_buffer_kwargs` may have `sampler`."""

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: dict[str, Any]

    def _setup_model(self) -> None:
        if self.replay_buffer_class is None:
            self.replay_buffer_class = SB3ReplayBuffer
        self.replay_buffer_kwargs = {"sampler": Proportional(), **self.replay_buffer_kwargs}
        super()._setup_model()
        self._weigh()

    @abstractmethod
    def _weigh(self) -> None:
        """Hook the networks whose output the loss compares with its target."""

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """That of the algorithm without priorities; the hooks do the rest."""
        super().train(gradient_steps, batch_size)
        self.replay_buffer.feed_back()


class PrioritizedDQN(_Prioritized, DQN):
    """DQN with prioritized experience replay (Schaul et al. 2016)."""

    def _weigh(self) -> None:
        following: list[Tensor] = []

        def keep(_module: object, _args: object, values: Tensor) -> None:
            following[:] = [values.detach()]

        def weigh(_module: object, args: tuple[Any, ...], values: Tensor) -> None:
            buffer, drawn, weight = self.replay_buffer, self.replay_buffer.drawn, self.replay_buffer.weight
            if drawn is None or args[0] is not drawn.observations or not values.requires_grad:
                return
            taken = values.detach().gather(1, drawn.actions.long())
            discount = self.gamma if drawn.discounts is None else drawn.discounts
            target = drawn.rewards + (1 - drawn.dones) * discount * following[0].max(1, keepdim=True).values
            # not from the gradient: that of the Huber loss ends at 1
            buffer.errors.append(target - taken)
            values.register_hook(lambda gradient: gradient * weight)

        self.q_net_target.register_forward_hook(keep)
        self.q_net.register_forward_hook(weigh)


class _PrioritizedCritics(_Prioritized):
    """Of an algorithm whose critics have squared losses: their gradient is the TD error times `_slope` / B."""

    _slope: float

    def _weigh(self) -> None:
        def weigh(_module: object, args: tuple[Any, ...], values: tuple[Tensor, ...]) -> None:
            buffer, drawn, weight = self.replay_buffer, self.replay_buffer.drawn, self.replay_buffer.weight
            if drawn is None or args[1] is not drawn.actions or not values[0].requires_grad:
                return

            def weighed(gradient: Tensor) -> Tensor:
                buffer.errors.append(gradient * (len(gradient) / self._slope))
                return gradient * weight

            for value in values:
                value.register_hook(weighed)

        self.critic.register_forward_hook(weigh)


class PrioritizedSAC(_PrioritizedCritics, SAC):
    """SAC with prioritized experience replay; the priority is the mean of the critics' TD errors."""

    _slope = 1.0


class PrioritizedTD3(_PrioritizedCritics, TD3):
    """TD3 with prioritized experience replay; the priority is the mean of the critics' TD errors."""

    _slope = 2.0
