"""Stable-Baselines3: a buffer for its off-policy algorithms; DQN, SAC, TD3 and DDPG with prioritized replay.

    from gpu_replay.integrations.sb3 import PrioritizedDQN, SB3ReplayBuffer

    model = SAC("MlpPolicy", env, replay_buffer_class=SB3ReplayBuffer)
    model = SAC("MultiInputPolicy", env, replay_buffer_class=SB3HerReplayBuffer)    # of goals
    model = PrioritizedDQN("MlpPolicy", env, n_steps=3, replay_buffer_kwargs={"sampler": Proportional(beta=0.4)})
    rb = SB3ReplayBuffer(10_000, space, actions, device, handle_timeout_termination=False)    # in a loop of CleanRL

Stable-Baselines3's `train()` stays. Weighting row i of the loss by w_i is the same as multiplying row i of the
gradient at the network's output by w_i, so hooks on the networks apply the weights.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gpu_replay import Batch, Field, Hindsight, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.integrations.streams import equal_rows, library, ring
from gpu_replay.samplers import Sampler
from gpu_replay.spaces import step_fields

with library(__name__):
    from gymnasium import spaces
    from stable_baselines3 import DDPG, DQN, SAC, TD3
    from stable_baselines3.common.buffers import BaseBuffer
    from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
    from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
    from stable_baselines3.common.preprocessing import get_obs_shape
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

# attributes of Stable-Baselines3's buffers
_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class SB3ReplayBuffer(PlainReplayBuffer):
    """A buffer for `replay_buffer_class=`, on the model's device, and for loops of CleanRL; Dict observations included.

    handle_timeout_termination: whether `infos` mark the steps at which a time limit ended an episode, done or not;
                     False ignores `infos`.
    sampler:         the sampler of the ReplayBuffer; only the Prioritized algorithms of this module update priorities.
    n_steps, gamma:  n-step returns, as in Stable-Baselines3's `NStepReplayBuffer`. With more than one step the buffer
                     stores each observation once, and needs `gamma`: it cannot see the algorithm's.
    seed:            seed of sampling.

    `storage` is the underlying ReplayBuffer, or TrajectoryReplayBuffer for more than one step; it replaces the arrays
    `observations`, `rewards` and so on. Raises ValueError for `optimize_memory_usage`, and for several steps without
    `gamma`.
    """

    pos: int
    # the last sampled batch; the target network's values of its next observations, (B, A) with DQN; its importance
    # weights, (B, 1); and its TD errors, (B, 1) for each critic
    drawn: Any
    following: Tensor
    weight: Tensor
    errors: list[Tensor]
    _relabel: Hindsight | None = None

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
        gamma: float | None = None,
        seed: int = 0,
    ) -> None:
        # skip the parent's __init__, which allocates its own arrays
        BaseBuffer.__init__(self, max(buffer_size // n_envs, 1), observation_space, action_space, device, n_envs)
        if optimize_memory_usage:
            raise ValueError(
                "SB3ReplayBuffer needs optimize_memory_usage=False: leave it out. With n_steps > 1 it stores each "
                "observation once, and a TrajectoryReplayBuffer each frame of a stack."
            )
        if n_steps != 1 and gamma is None:
            raise ValueError(
                f"SB3ReplayBuffer(n_steps={n_steps}) sums rewards and needs the gamma of the algorithm: "
                f"replay_buffer_kwargs={{'n_steps': {n_steps}, 'gamma': 0.99}}."
            )
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self._gamma = gamma
        found, shapes = step_fields(observation_space, action_space), _by_field(get_obs_shape(observation_space))
        fields = {name: Field(shape, found[name].dtype) for name, shape in shapes.items()}
        fields["action"] = Field((self.action_dim,), found["action"].dtype)
        settings: dict[str, Any] = {"sampler": sampler, "device": self.device, "seed": seed}
        self.storage: ReplayBuffer | TrajectoryReplayBuffer
        if n_steps == 1 and self._relabel is None:
            fields |= {f"next_{name}": fields[name] for name in shapes}
            fields |= {"reward": Field((), torch.float32), "terminated": Field((), torch.bool)}
            self.storage = ReplayBuffer(self.buffer_size * n_envs, fields, **settings)
        else:
            settings |= {"n_step": n_steps, "relabel": self._relabel, **({} if gamma is None else {"gamma": gamma})}
            self.storage = ring(self.buffer_size * n_envs, n_envs, fields, **settings)
        # the observations that the next step must start from, by name, and the environments whose episode continues
        self._next_obs: dict[str, np.ndarray] = {}
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
        """Store one step of all environments; where an episode ended, `next_obs` is its last observation.

        Raises ValueError for shapes other than `[n_envs, *shape]` of the spaces (observations of Discrete spaces may be
        `[n_envs]`) and for `infos` of another number of environments, KeyError for parts of observations that the
        space does not have, TypeError for Gymnasium's single dictionary of `infos`.
        """
        truncated = self._timed_out(infos)
        before, after = self._named("obs", obs), self._named("next_obs", next_obs)
        # with one environment its axis may be missing
        rows = action.reshape(self.n_envs, -1) if action.shape[:1] == (self.n_envs,) or self.n_envs == 1 else action
        step: dict[str, Any] = {**before, "action": self._checked("action", rows, (self.action_dim,))}
        ended = self._checked("done", np.asarray(done, bool), ())
        step["reward"] = self._checked("reward", np.asarray(reward, np.float32), ())
        step["terminated"] = ended & ~truncated
        if isinstance(self.storage, TrajectoryReplayBuffer):
            # copies: environments may write the next step into the same arrays
            kept = {name: np.array(value) for name, value in after.items()}
            # learn() may reset environments silently
            same = [equal_rows(np.asarray(before[name]), was) for name, was in self._next_obs.items()]
            reset = self._goes_on & ~np.logical_and.reduce(same) if same else self._goes_on
            if reset.any():
                self.storage.begin_episodes(reset)
            self.storage.add(**step, truncated=truncated, **{f"final_{name}": value for name, value in after.items()})
            self._next_obs, self._goes_on = kept, ~(ended | truncated)
        else:
            self.storage.add(**step, **{f"next_{name}": value for name, value in after.items()})
        self.full |= self.pos + 1 == self.buffer_size
        self.pos = (self.pos + 1) % self.buffer_size

    def _timed_out(self, infos: Any) -> np.ndarray:
        """(n_envs,) bool, in which environments a time limit ended the episode. Raises TypeError or ValueError."""
        if not self.handle_timeout_termination:
            return np.zeros(self.n_envs, bool)
        if isinstance(infos, Mapping):
            raise TypeError(
                "add needs a list of infos, a dictionary for each environment, to see which episodes a time limit "
                "ended; found one dictionary, as Gymnasium's vector environments return. Make the buffer with "
                "handle_timeout_termination=False and give done=terminated."
            )
        if len(infos) != self.n_envs:
            raise ValueError(
                f"add needs infos of the {self.n_envs} environments (n_envs) that this buffer was made for; found "
                f"{len(infos)}. Load a saved buffer into a model with as many environments."
            )
        return np.array([info.get("TimeLimit.truncated", False) for info in infos], bool)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.storage.clear()
        self._goes_on[:] = False
        self._forget_drawn()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Sample `batch_size` transitions, normalized by `env`; `dones` is 0 where a time limit ended the episode.

        Sums of several rewards are scaled like single ones, but not clipped. While no `n_steps` steps and the
        observation after them are stored, the newest steps are sampled as windows of one step. Raises RuntimeError
        while the buffer is empty, and if after ten times `n_steps` steps there still is no window.
        """
        self.feed_back()
        batch = self._draw(batch_size)
        obs, next_obs = (self._normalized(batch[name], env) for name in ("obs", "next_obs"))
        reward = batch.reward[:, None]
        if env is not None and self.n_steps == 1:
            reward = self._to_device(env.normalize_reward(reward.cpu().numpy()))
        elif env is not None and env.norm_reward:
            # `clip_reward` is meant for single rewards, not for their sum
            reward = reward / float(np.sqrt(env.ret_rms.var + env.epsilon))
        discount = batch.discount[:, None] if self.n_steps > 1 else None
        kind = DictReplayBufferSamples if isinstance(obs, dict) else ReplayBufferSamples
        samples = kind(obs, batch.action, next_obs, batch.terminated[:, None].float(), reward, discount)
        self.drawn, self.weight, self._keys = samples, batch.weight[:, None], batch.key
        return samples

    def _draw(self, batch_size: int) -> Batch:
        """A batch of the storage, or of the newest steps while there is no window of `n_steps` steps."""
        try:
            return self.storage.sample(batch_size)
        except RuntimeError:
            if isinstance(self.storage, ReplayBuffer) or not self.size() or self.storage.stats().eligible:
                raise
        # short calls of learn() reset the environments before a window is complete
        if self.size() > 10 * self.n_steps:
            raise RuntimeError(
                f"sample({batch_size}) needs {self.n_steps} steps that follow each other; of the {self.size()} stored "
                "for each environment none do. A step follows another if its obs equals the next_obs of that: add the "
                "steps in their order, and change no observation between two calls."
            )
        *_, step = self.storage.batches(self.n_envs)
        env = torch.arange(batch_size, device=self.device) % self.n_envs
        # no step has ended an episode, for it would be a whole window
        discount = torch.full((batch_size,), self.storage.gamma, device=self.device)
        values = {**step[env].to_dict(), "discount": discount, "weight": torch.ones_like(discount)}
        for name, value in self._next_obs.items():
            values[f"next_{name}"] = torch.from_numpy(value).to(step[name])[env]
        return Batch(values)

    def feed_back(self) -> None:
        """Set the priorities of the last sampled transitions to the mean of the TD errors in `errors`."""
        if self.errors:
            self.storage.update_priorities(self._keys, torch.cat(self.errors, 1).abs().mean(1))
            self.errors.clear()

    def _forget_drawn(self) -> None:
        self.drawn, self.errors = None, []
        self.following = self.weight = self._keys = torch.empty(0)

    def _named(self, argument: str, obs: Any) -> dict[str, Any]:
        """Observations by field name, (n_envs, *shape) as the space says. Raises KeyError or ValueError."""
        space, shapes, given = self.observation_space, _by_field(self.obs_shape), _by_field(obs)
        if given.keys() != shapes.keys():
            raise KeyError(f"add needs {argument} with {', '.join(shapes)}; found {', '.join(given)}.")
        parts = _by_field(space.spaces if isinstance(space, spaces.Dict) else space)
        found = {}
        for name, value in given.items():
            value = value if isinstance(value, Tensor) else np.asarray(value)
            if isinstance(parts[name], spaces.Discrete) and tuple(value.shape) == (self.n_envs,):
                value = value.reshape(self.n_envs, 1)
            found[name] = self._checked(name.replace("obs", argument, 1), value, shapes[name])
        return found

    def _checked(self, name: str, value: Any, shape: tuple[int, ...]) -> Any:
        """The value, or ValueError if it is not (n_envs, *shape)."""
        if tuple(value.shape) == (self.n_envs, *shape):
            return value
        raise ValueError(
            f"add needs {name} of shape {[self.n_envs, *shape]} (n_envs={self.n_envs}); found {list(value.shape)}. "
            "Give each environment a row in the layout of its space (images: VecTransposeImage inside VecNormalize)."
        )

    def _normalized(self, obs: Tensor | Batch, env: VecNormalize | None) -> Any:
        """Sampled observations as a tensor or a dict of tensors."""
        plain = obs if isinstance(obs, Tensor) else obs.to_dict()
        if env is None:
            return plain
        return tree_map(self._to_device, env.normalize_obs(tree_map(lambda value: value.cpu().numpy(), plain)))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        self._forget_drawn()
        return self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name not in _ARRAYS:
            return object.__getattribute__(self, name)
        raise AttributeError(
            f"{type(self).__name__} has no array {name!r}: sample(B) samples; storage.batches(size) walks over what is "
            "stored, and storage[keys] reads it, as tensors named obs, action, reward, terminated."
        )

    @property
    def n_steps(self) -> int:
        """Steps until bootstrapping."""
        return getattr(self.storage, "n_step", 1)

    @property
    def gamma(self) -> float | None:
        """The discount of one step that `n_steps` rewards are summed with."""
        return self._gamma


def _by_field(parts: Any) -> dict[str, Any]:
    """The values of an observation, or of the parts of a dictionary observation, by field name."""
    return {f"obs.{name}": part for name, part in parts.items()} if isinstance(parts, dict) else {"obs": parts}


class _GoalReward:
    """The `compute_reward` of the first environment, as Stable-Baselines3 asks for it; saved without environments."""

    def __init__(self, env: VecEnv | None = None) -> None:
        self.env = env

    def __reduce__(self) -> tuple[Any, ...]:
        return _GoalReward, ()

    def __call__(self, achieved: Tensor, desired: Tensor) -> np.ndarray:
        if self.env is None:
            raise RuntimeError("the buffer was loaded without environments, which compute rewards: call set_env(env).")
        infos: list[dict[str, Any]] = [{} for _ in range(len(achieved))]
        goals = (each.cpu().numpy() for each in (achieved, desired))
        (found,) = self.env.env_method("compute_reward", *goals, infos, indices=[0])
        return np.asarray(found, np.float32)


class SB3HerReplayBuffer(SB3ReplayBuffer, HerReplayBuffer):
    """Hindsight for `replay_buffer_class=`, in place of `HerReplayBuffer`; each observation is stored once.

    env:                     computes rewards of new goals, by its `compute_reward`; the algorithm gives it.
    n_sampled_goal:          rewritten transitions for each that stays: their share is `1 - 1 / (n_sampled_goal + 1)`.
    goal_selection_strategy: "future", "final" or "episode".
    copy_info_dict:          must be False: infos are not stored, and `compute_reward` gets empty ones.
    args, settings:          as in SB3ReplayBuffer; `n_steps` must be 1.

    Steps of running episodes are sampled too, so that training may begin before the first ending. Raises ValueError for
    `copy_info_dict` and for unknown strategies.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        *args: Any,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **settings: Any,
    ) -> None:
        if copy_info_dict:
            raise ValueError("SB3HerReplayBuffer does not store infos: compute_reward must not need them.")
        named = goal_selection_strategy
        strategy: Any = named.lower() if isinstance(named, str) else named.name.lower()
        self.env = env
        ratio = 1 - 1 / (n_sampled_goal + 1)
        self._relabel = Hindsight(reward_fn=_GoalReward(env), ratio=ratio, strategy=strategy)
        SB3ReplayBuffer.__init__(self, buffer_size, observation_space, action_space, *args, **settings)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "env"}

    def set_env(self, env: VecEnv) -> None:
        """Set the environments of a loaded buffer. Raises ValueError where there are some."""
        super().set_env(env)
        # the storage of a loaded buffer has its own copy
        self.storage.relabel.reward_fn.env = env  # type: ignore[union-attr]

    def truncate_last_trajectory(self) -> None:
        """End running episodes, since other ones follow: their newest steps are not sampled. Warns if there are any."""
        if self._goes_on.any():
            warnings.warn(
                "The last trajectory in the replay buffer will be truncated. If its episodes go on, load the buffer "
                "with truncate_last_traj=False.",
                stacklevel=2,
            )
            self.storage.begin_episodes(self._goes_on)  # type: ignore[union-attr]
            self._goes_on[:] = False


class _Prioritized(OffPolicyAlgorithm):
    """Importance-weighted losses, and TD errors fed back as priorities; `replay_buffer_kwargs` may have `sampler`.

    The buffer takes `n_steps`, `gamma` and `seed` from the algorithm; different values in `replay_buffer_kwargs` are a
    ValueError. An algorithm without `n_steps` of its own takes it from `replay_buffer_kwargs`.
    """

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: dict[str, Any]
    # the network whose output the loss compares with its target
    _compared: str

    def _setup_model(self) -> None:
        if self.replay_buffer_class is None:
            self.replay_buffer_class = SB3ReplayBuffer
        if not issubclass(self.replay_buffer_class, SB3ReplayBuffer):
            raise TypeError(
                f"{type(self).__name__} needs replay_buffer_class=SB3ReplayBuffer, which has priorities; found "
                f"{self.replay_buffer_class.__name__}. Leave it out."
            )
        given = self.replay_buffer_kwargs
        self.replay_buffer_kwargs = {"sampler": Proportional(), **given, **self._own_settings()}
        self.n_steps = self.replay_buffer_kwargs.get("n_steps", 1)
        with warnings.catch_warnings():
            # Stable-Baselines3 warns about every buffer class except its own
            warnings.filterwarnings("ignore", "`n_steps=.*is ignored", UserWarning)
            super()._setup_model()
        # a model loaded with another gamma makes a new buffer
        self.replay_buffer_kwargs = given

        def weigh(_module: object, args: tuple[Any, ...], output: Any) -> None:
            drawn, weight = self.replay_buffer.drawn, self.replay_buffer.weight
            values = output if isinstance(output, tuple) else (output,)
            # only in the critics' loss, not where an actor asks for the values of its own actions
            if drawn is None or not all(map(is_, args, (drawn.observations, drawn.actions))):
                return
            if values[0].requires_grad:
                self._note(drawn, values)
                for value in values:
                    value.register_hook(lambda gradient: gradient * weight)

        getattr(self, self._compared).register_forward_hook(weigh)

    def _own_settings(self) -> dict[str, Any]:
        """The settings that the buffer takes from the algorithm, if they were given."""
        own = {"gamma": self.gamma, "n_steps": None if self.n_steps == 1 else self.n_steps, "seed": self.seed}
        told = {name: value for name, value in own.items() if value is not None}
        for name, value in told.items():
            other = self.replay_buffer_kwargs.get(name, value)
            if other != value:
                raise ValueError(
                    f"{type(self).__name__} has {name}={value}, but replay_buffer_kwargs have {name}={other}. Give "
                    f"{name} to the algorithm alone: it passes it on to its buffer."
                )
        return told

    @abstractmethod
    def _note(self, drawn: Any, values: tuple[Tensor, ...]) -> None:
        """Put the TD errors of these values into the buffer's `errors`, now or once their gradients are known."""

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Run the plain algorithm's `train`; hooks add weights and priorities."""
        super().train(gradient_steps, batch_size)
        self.replay_buffer.feed_back()


class PrioritizedDQN(_Prioritized, DQN):
    """DQN with prioritized experience replay (Schaul et al. 2016)."""

    _compared = "q_net"

    def _setup_model(self) -> None:
        super()._setup_model()

        def keep(_module: object, _args: object, values: Tensor) -> None:
            self.replay_buffer.following = values.detach()

        self.q_net_target.register_forward_hook(keep)

    def _note(self, drawn: Any, values: tuple[Tensor, ...]) -> None:
        # the loss evaluates its target first. The gradient would not do: that of the Huber loss is clipped at 1
        best = self.replay_buffer.following.max(1, keepdim=True).values
        discount = self.gamma if drawn.discounts is None else drawn.discounts
        target = drawn.rewards + (1 - drawn.dones) * discount * best
        self.replay_buffer.errors.append(target - values[0].detach().gather(1, drawn.actions.long()))


class _PrioritizedCritics(_Prioritized):
    """An algorithm whose critics have squared losses: the gradient is the TD error times `_slope` / B."""

    _compared = "critic"
    _slope: float

    def _note(self, drawn: Any, values: tuple[Tensor, ...]) -> None:
        errors, scale = self.replay_buffer.errors, len(drawn.rewards) / self._slope
        for value in values:
            value.register_hook(lambda gradient: errors.append(gradient * scale))


class PrioritizedSAC(_PrioritizedCritics, SAC):
    """SAC with prioritized experience replay; the priority is the mean of the critics' TD errors."""

    _slope = 1.0


class PrioritizedTD3(_PrioritizedCritics, TD3):
    """TD3 with prioritized experience replay; the priority is the mean of the critics' TD errors."""

    _slope = 2.0


class PrioritizedDDPG(_PrioritizedCritics, DDPG):
    """DDPG with prioritized experience replay; the priority is the critic's TD error."""

    _slope = 2.0
