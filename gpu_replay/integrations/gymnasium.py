"""Gymnasium: step a vector environment with a policy and store every step, in any autoreset mode.

buffer = TrajectoryReplayBuffer.from_env(env, 100_000, n_step=3)
progress = collect(env, policy, buffer, 1_000)
progress = collect(env, policy, buffer, 16, after=progress)    # continues from there
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.integrations.streams import library
from gpu_replay.spaces import vector_settings

with library(__name__):
    from gymnasium.vector import VectorEnv
    from gymnasium.vector.utils import concatenate, create_empty_array, iterate


@dataclass
class Progress:
    """Where `collect` stopped.

    obs:     the observations for which the next actions are chosen, as the environment returned them.
    ended:   (E,) bool, which episodes ended in the last step.
    returns: undiscounted returns of the episodes that ended in this call, in that order; `lengths` their steps.
    """

    obs: Any
    ended: np.ndarray
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    # sums over the unfinished episodes
    total: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, int), repr=False)


def collect(
    env: VectorEnv[Any, Any, Any],
    policy: Callable[[Any], Any],
    buffer: ReplayBuffer | TrajectoryReplayBuffer,
    steps: int,
    *,
    after: Progress | None = None,
    seed: int | None = None,
) -> Progress:
    """Step all environments `steps` times and store every step.

    env:    a vector environment that returns copies of its observations (`copy=True`, the default).
    policy: maps observations `[E, ...]` to actions `[E, ...]`, arrays or tensors.
    buffer: has the fields of `from_env` or `from_spaces`; a ReplayBuffer with a field `truncated` gets that too.
    after:  what the last call returned; without it the environments are reset with `seed`.

    In a ReplayBuffer, `next_obs` is the true last observation where an episode ended, and steps that only reset an
    environment are not stored. Raises ValueError if a trajectory buffer is for another number of environments or
    another autoreset mode, TypeError if `env` is not a vector environment.
    """
    found = vector_settings(env)
    mode, count = found.get("autoreset", "next_step"), found["num_envs"]
    if isinstance(buffer, TrajectoryReplayBuffer) and (buffer.num_envs, buffer.autoreset) != (count, mode):
        raise ValueError(
            f"the buffer is for {buffer.num_envs} environments with autoreset={buffer.autoreset!r}; env has {count} "
            f"with {mode!r}. Make it with TrajectoryReplayBuffer.from_env(env, capacity)."
        )
    if after is None:
        obs, _ = env.reset(seed=seed)
        after = Progress(obs, np.zeros(count, bool), total=np.zeros(count), steps=np.zeros(count, int))
        if isinstance(buffer, TrajectoryReplayBuffer):
            # episodes that other calls left unfinished do not continue here
            buffer.begin_episodes()
    done = Progress(after.obs, after.ended, total=after.total.copy(), steps=after.steps.copy())
    for _ in range(steps):
        action = policy(done.obs)
        action = action.detach().cpu().numpy() if isinstance(action, torch.Tensor) else np.asarray(action)
        obs, reward, terminated, truncated, info = env.step(action)
        ended = terminated | truncated
        # environments that this step only reset add nothing to returns and lengths
        acted = ~done.ended if mode == "next_step" else np.ones(count, bool)
        final = info.get("final_obs") if mode == "same_step" else obs if mode == "disabled" else None
        step = {"obs": done.obs, "action": action, "reward": np.asarray(reward, np.float32), "terminated": terminated}
        if isinstance(buffer, TrajectoryReplayBuffer):
            buffer.add(**step, truncated=truncated, final_obs=final if ended.any() else None)
        elif acted.any():
            following = _with_finals(env, obs, final, ended) if mode == "same_step" and ended.any() else obs
            step |= {"next_obs": following, **({"truncated": truncated} if "truncated" in buffer.fields else {})}
            buffer.add(**tree_map(itemgetter(acted), step))
        done.total[acted] += reward[acted]
        done.steps[acted] += 1
        done.returns += done.total[ended].tolist()
        done.lengths += done.steps[ended].tolist()
        done.total[ended], done.steps[ended] = 0, 0
        if mode == "disabled" and ended.any():
            obs, _ = env.reset(options={"reset_mask": ended})
        done.obs, done.ended = obs, ended
    return done


def _with_finals(env: VectorEnv[Any, Any, Any], obs: Any, final: Any, ended: np.ndarray) -> Any:
    """The observations after a step, with `final` (an array of rows, or a dict of columns) where episodes ended."""
    last = iterate(env.observation_space, final) if isinstance(final, dict) else final
    pairs = zip(iterate(env.observation_space, obs), last, ended, strict=True)
    rows = [lasting if over else after for after, lasting, over in pairs]
    empty: Any = create_empty_array(env.single_observation_space, len(rows))
    return concatenate(env.single_observation_space, rows, empty)
