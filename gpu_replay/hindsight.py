"""`Hindsight`: relabels a share of every sampled batch with goals achieved later."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from gpu_replay import validation
from gpu_replay.fields import Field
from gpu_replay.ops.hindsight import GoalRows, Strategy, masked_put, put_goals
from gpu_replay.ops.windows import StepStore

_PREFIX = "obs."
_REWARD = torch.float32


@dataclass(frozen=True)
class Hindsight:
    """Relabel a share of every batch with goals that the same episode achieved, and with their rewards.

    achieved, desired: names of the observation fields "obs.NAME" that hold the goal achieved so far and the goal that
                   the agent is given; of one shape and dtype.
    reward_fn:     `reward_fn(achieved, desired)` returns the rewards, [K], of K steps at once, from `[K, *goal]`
                   tensors as they leave `sample()`: the goal achieved after the step, and the new goal. For CPU tensors
                   it may return a NumPy array. `reward_fn(achieved, desired, step)` also gets a dictionary of the
                   action and every field that is no observation, [K, *shape]: a GoalEnv's
                   `compute_reward(achieved, desired, info)` works if fields hold what it reads from `info`. The number
                   of required positional parameters decides; a function without a signature gets two.
    ratio:         share of a batch that is rewritten: exactly `round(ratio * B)` random rows.
    strategy:      where a step's new goal comes from: "future", the goal achieved after a uniformly sampled step from
                   the step itself to the last stored one of its episode; "geometric", the same, but of `k` steps ahead
                   with a probability proportional to `gamma ** (k - 1)`, where k=1 is the step itself; "final", after
                   the last one, or the newest one of an unfinished episode; "episode", after any stored step of the
                   episode.
    gamma:         of the strategy "geometric" alone, above 0 and at most 1, where it equals "future". Goals beyond the
                   stored end of an episode are left out, not moved to it.
    terminated_fn: `terminated_fn(achieved, desired)`, or with `step` as well: [K] bool, if reaching the goal ends an
                   episode: rewritten rows take `terminated` and `discount` from it. Without it these stay unchanged.

    Give it to a TrajectoryReplayBuffer as `relabel`. In a rewritten row of a batch `obs.DESIRED` and `next_obs.DESIRED`
    are the new goal, in every frame of a stack, and `reward` is its reward; keys, weights, priorities and the stored
    values do not change. The observation after a step holds the goal achieved by it. If an episode's last observation
    is missing, because `add` got no `final_obs` or the stream was interrupted, no goal comes from it, and a rewritten
    row that needs it stays unchanged; `reward_fn` may be called for such rows, without effect. Both functions run
    inside `sample`, under the buffer's lock: they must not change the buffer or sample from it (RuntimeError), nor wait
    for a thread that calls it, nor, if you capture samples in a CUDA graph, for the device.

    With a Gymnasium `GoalEnv` (Gymnasium-Robotics):

        import gymnasium
        import gymnasium_robotics
        import torch
        from gpu_replay import Hindsight, TrajectoryReplayBuffer

        def reward_fn(achieved, desired):
            return -(torch.linalg.vector_norm(achieved - desired, dim=1) > 0.05).float()

        gymnasium.register_envs(gymnasium_robotics)
        envs = gymnasium.make_vec("FetchReach-v4", num_envs=8)
        relabel = Hindsight(reward_fn=reward_fn, ratio=0.8, strategy="future")
        buffer = TrajectoryReplayBuffer.from_env(envs, 1_000_000, relabel=relabel)
        obs, _ = envs.reset(seed=0)
        for _ in range(10_000):
            action = envs.action_space.sample()
            after, reward, terminated, truncated, _ = envs.step(action)
            buffer.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            obs = after
        batch = buffer.sample(256)
        batch.obs.observation, batch.obs.desired_goal, batch.next_obs.desired_goal, batch.reward

    Raises TypeError or ValueError for invalid settings.

    Andrychowicz et al. 2017, "Hindsight Experience Replay"; Eysenbach et al. 2022, "Contrastive Learning as
    Goal-Conditioned Reinforcement Learning" (geometric).
    """

    achieved: str = "achieved_goal"
    desired: str = "desired_goal"
    _: KW_ONLY
    reward_fn: Callable[..., Any]
    ratio: float = 0.8
    strategy: Strategy = "future"
    gamma: float | None = None
    terminated_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, value in (("achieved", self.achieved), ("desired", self.desired)):
            if not isinstance(value, str):
                raise TypeError(f"Hindsight {name} must be the name of an observation field; found {value!r}.")
        if self.achieved_field == self.desired_field:
            raise ValueError(f"Hindsight achieved and desired must be two fields; found {self.achieved!r} for both.")
        for name, function in (("reward_fn", self.reward_fn), ("terminated_fn", self.terminated_fn)):
            if name == "reward_fn" or function is not None:
                # looked up once: reading a signature takes longer than many a function
                object.__setattr__(self, f"_{name}_takes", _arguments_of(name, function))
        if isinstance(self.ratio, (int, float)) and 1 < self.ratio < math.inf:
            share = f"{self.ratio / (self.ratio + 1):g}"
            raise ValueError(
                f"Hindsight ratio must be from 0 to 1; found {self.ratio}. n_sampled_goal={self.ratio} of others is "
                f"ratio={share} here."
            )
        object.__setattr__(self, "ratio", validation.check_float("Hindsight ratio", self.ratio, high=1.0))
        validation.check_choice("Hindsight strategy", self.strategy, get_args(Strategy))
        if (self.gamma is None) == (self.strategy == "geometric"):
            raise ValueError(
                "Hindsight gamma belongs to strategy='geometric', which needs it, such as gamma=0.99; found "
                f"strategy={self.strategy!r} and gamma={self.gamma!r}."
            )
        if self.gamma is not None:
            gamma = validation.check_float("Hindsight gamma", self.gamma, high=1.0, above=True)
            object.__setattr__(self, "gamma", gamma)

    @property
    def achieved_field(self) -> str:
        """The field of achieved goals by its full name."""
        return _PREFIX + self.achieved.removeprefix(_PREFIX)

    @property
    def desired_field(self) -> str:
        """The field of desired goals by its full name."""
        return _PREFIX + self.desired.removeprefix(_PREFIX)

    def describe(self) -> dict[str, Any]:
        """The settings, without the functions, as JSON values."""
        return {
            "achieved": self.achieved_field.removeprefix(_PREFIX),
            "desired": self.desired_field.removeprefix(_PREFIX),
            "ratio": self.ratio,
            "strategy": self.strategy,
            **({} if self.gamma is None else {"gamma": self.gamma}),
        }

    def count(self, batch: int) -> int:
        """Rows of a batch that are rewritten."""
        return round(self.ratio * batch)

    def check(self, fields: Mapping[str, Field], n_step: int) -> None:
        """Raise ValueError where a buffer of these fields and settings cannot be relabelled."""
        for name in (self.achieved_field, self.desired_field):
            if name not in fields:
                raise ValueError(
                    f"relabel needs the field {name!r}; the buffer's fields are {', '.join(fields)}. "
                    "Name the goals with Hindsight(achieved=..., desired=...)."
                )
        achieved, desired = fields[self.achieved_field], fields[self.desired_field]
        if (achieved.shape, achieved.dtype) != (desired.shape, desired.dtype):
            raise ValueError(
                f"relabel puts {self.achieved_field!r} in the place of {self.desired_field!r}: both need one shape and "
                f"dtype; found {achieved.shape} {achieved.dtype} and {desired.shape} {desired.dtype}."
            )
        if n_step != 1:
            raise ValueError(
                f"relabel needs n_step=1; found n_step={n_step}. Only the reward of a single step can be recomputed."
            )

    def rewrite(self, tensors: dict[str, Tensor], chosen: GoalRows, raw: Tensor, storage: StepStore) -> None:
        """Give chosen rows new goals in place, and the rewards and terminations of the user's functions.

        tensors: of the batch. raw: as in `put_goals`.
        """
        rows, known = chosen.rows, chosen.known
        achieved, desired = put_goals(tensors, chosen, raw, storage, self.achieved_field, self.desired_field)

        def arguments(name: str, *goals: Tensor) -> tuple[Any, ...]:
            if vars(self)[f"_{name}_takes"] == len(goals):
                return goals
            return *goals, {each: tensors[each].index_select(0, rows) for each in storage.singles}

        # each function gets its own copy, since it may work in place
        again = None if self.terminated_fn is None else arguments("terminated_fn", achieved.clone(), desired.clone())
        reward = self._made("reward_fn", self.reward_fn(*arguments("reward_fn", achieved, desired)), rows)
        if reward.dtype is not _REWARD:
            if reward.dtype.is_complex:
                raise TypeError(f"reward_fn of Hindsight must return real numbers; found {reward.dtype}.")
            reward = validation.cast("reward", reward, _REWARD)
        masked_put(tensors["reward"], rows, known, reward)
        if self.terminated_fn is None or again is None:
            return
        terminated = self._made("terminated_fn", self.terminated_fn(*again), rows)
        if terminated.dtype != torch.bool:
            raise TypeError(f"terminated_fn of Hindsight must return bool; found {terminated.dtype}.")
        masked_put(tensors["terminated"], rows, known, terminated)
        discount = tensors["discount"].new_full(rows.shape, storage.gamma)
        masked_put(tensors["discount"], rows, known, discount.masked_fill_(terminated, 0.0))

    def _made(self, name: str, value: Any, rows: Tensor) -> Tensor:
        """The result of a user's function as a (K,) tensor on the device of the rows, or TypeError / ValueError."""
        count = rows.shape[0]
        # fast path: what most functions return on the CPU
        is_dense = type(value) is Tensor and value.is_cpu and value.layout is torch.strided and not value.is_nested
        if is_dense and rows.is_cpu and not value.requires_grad and value.shape == (count,):
            return value
        device = rows.device
        expected = f"{name} of Hindsight must return one value for each of {count} rows, a tensor [{count}] on {device}"
        if not isinstance(value, (Tensor, np.ndarray)):
            raise TypeError(f"{expected}; found {type(value).__name__}.")
        result = validation.as_tensor(name, value, device)
        if tuple(result.shape) != (count,):
            raise ValueError(f"{expected}; found shape {list(result.shape)}.")
        if not validation.same_device(result.device, device):
            raise ValueError(f"{expected}; found {type(value).__name__} on {result.device}.")
        return result


def _arguments_of(name: str, function: object) -> int:
    """How many arguments a user's function gets, or TypeError."""
    expected = f"Hindsight {name} must be a function of (achieved, desired) or (achieved, desired, step)"
    if not callable(function):
        raise TypeError(f"{expected}; found {function!r}.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # one made of machine code
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(each.kind in positional and each.default is each.empty for each in parameters)
    if required < 2 and any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        # a wrapper that takes anything, such as a module of torch
        return 2
    if required not in (2, 3):
        raise TypeError(f"{expected}; found {function!r}, which takes {required}.")
    return required


def check_hindsight(relabel: object) -> Hindsight:
    """The `relabel` of a buffer that has one, or TypeError."""
    if not isinstance(relabel, Hindsight):
        raise TypeError(f"relabel must be Hindsight(reward_fn=...) or None; found {relabel!r}.")
    return relabel


def check_saved_relabel(path: object, relabel: object, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError where a checkpoint with these arguments needs another `relabel`, or none."""
    saved = arguments.get("relabel")
    if saved is None:
        if relabel is not None:
            raise ValueError(f"{path} was saved without relabel; load it without, or add its steps to a new buffer.")
        return
    words = ", ".join(f"{name}={value!r}" for name, value in saved.items())
    if relabel is None:
        raise ValueError(
            f"{path} was saved with relabel=Hindsight({words}), whose reward_fn is code and is not saved. Give it "
            "again: load(path, relabel=Hindsight(...))."
        )
    if check_hindsight(relabel).describe() != saved:
        raise ValueError(f"{path} was saved with relabel=Hindsight({words}); found {relabel!r}.")
