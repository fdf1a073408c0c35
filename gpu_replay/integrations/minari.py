"""Minari: load an offline dataset into a buffer, and write the content of a buffer as a dataset.

buffer = from_minari("D4RL/pen/human-v2", n_step=3)
for batch in buffer.epoch(256): ...
dataset = to_minari(buffer, "cartpole/mine-v0", env="CartPole-v1")
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils._pytree import tree_map

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.integrations.streams import library
from gpu_replay.ops.steps import Flag
from gpu_replay.spaces import step_fields

with library(__name__):
    import gymnasium
    import minari
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec
    from minari import MinariDataset
    from minari.data_collector import EpisodeBuffer


def from_minari(dataset: MinariDataset | str, capacity: int | None = None, **settings: Any) -> TrajectoryReplayBuffer:
    """Make a buffer of one stream that holds the episodes of a dataset, one after the other.

    dataset:  an open dataset, or the name of a local one; `minari.load_dataset(name, download=True)` downloads it.
    capacity: number of steps to keep, the last ones. The default holds all of them, `total_steps + total_episodes`,
              because the last observation of an episode takes a row of its own.
    settings: arguments of `TrajectoryReplayBuffer.from_spaces`: n_step, stack, sampler, device, seed, dtypes.

    Raises TypeError for spaces without a fixed shape, such as Text, ValueError for an episode that continues after it
    ended, FileNotFoundError for a name not found here.
    """
    if isinstance(dataset, str):
        dataset = minari.load_dataset(dataset)
    if capacity is None:
        capacity = int(dataset.total_steps) + int(dataset.total_episodes)
    both = dataset.observation_space, dataset.action_space
    buffer = TrajectoryReplayBuffer.from_spaces(capacity, 1, *both, autoreset="next_step", **settings)
    for episode in dataset.iterate_episodes():
        # one row more than there are actions: it carries the last observation
        steps = {"action": episode.actions, "reward": np.asarray(episode.rewards, np.float32)}
        steps |= {"terminated": episode.terminations, "truncated": episode.truncations.copy()}
        if (steps["terminated"] | steps["truncated"])[:-1].any():
            raise ValueError(f"episode {episode.id} goes on after a step that ended it; split it in the dataset.")
        # the episode ends where the recording does
        steps["truncated"][-1] |= not steps["terminated"][-1]
        steps = tree_map(lambda column: np.concatenate([column, np.zeros_like(column[:1])]), steps)
        buffer.extend(**tree_map(lambda column: np.asarray(column)[:, None], {"obs": episode.observations, **steps}))
    return buffer


def to_minari(buffer: TrajectoryReplayBuffer, dataset_id: str, **settings: Any) -> MinariDataset:
    """Write the episodes that a buffer holds as a dataset, which Minari opens with `load_dataset(dataset_id)`.

    settings: arguments of `minari.create_dataset_from_buffers`: env, or observation_space and action_space;
              algorithm_name, ...

    Of episodes whose beginning was overwritten, and of unfinished ones, the stored part is written and ends with
    `truncated`. Raises ValueError for spaces that do not fit the buffer's fields, and for autoreset modes other than
    "next_step": such buffers do not keep the last observation of every episode, which a dataset needs.
    """
    if buffer.autoreset != "next_step":
        raise ValueError(
            f"to_minari needs the last observation of every episode; with autoreset={buffer.autoreset!r} a buffer does "
            "not keep all of them. Record with autoreset='next_step'."
        )
    if not len(buffer):
        raise RuntimeError("to_minari: the buffer holds no steps. Add more first.")
    observed, acted = _spaces(settings)
    for name, field in step_fields(observed, acted).items():
        if name not in buffer.fields or buffer.fields[name].shape != field.shape:
            held = ", ".join(f"{name} {list(field.shape)}" for name, field in buffer.fields.items())
            raise ValueError(
                f"to_minari: the spaces have {name} {list(field.shape)}, the buffer holds {held}. Give the "
                "observation_space and the action_space of the environment that it was filled from."
            )
    # in parts, since the device may lack memory for a second copy
    parts = [{name: value.cpu().numpy() for name, value in part.items()} for part in buffer.batches(65_536)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    flags = buffer._streams.streams.flags.cpu().numpy().reshape(-1)[columns["key"] % buffer.capacity]
    episodes: list[EpisodeBuffer] = []
    for env in range(buffer.num_envs):
        stream = {name: column[env :: buffer.num_envs] for name, column in columns.items()}
        flag = flags[env :: buffer.num_envs]
        # an episode begins after a last observation, and where the stream was interrupted
        begins = np.flatnonzero(np.append(True, flag[:-1] & (Flag.DEAD | Flag.CUT) != 0))
        for begin, end in zip(begins, [*begins[1:], len(flag)], strict=True):
            rows = {name: column[begin:end] for name, column in stream.items()}
            # of the last row, only the observation belongs to the episode
            if end - begin > 1:
                last = int(end - begin) - 1
                truncated = rows["truncated"][:last].copy()
                truncated[-1] |= not rows["terminated"][last - 1]
                values = {"rewards": rows["reward"][:last].tolist(), "actions": _column(rows, "action", acted, last)}
                values |= {"terminations": rows["terminated"][:last].tolist(), "truncations": truncated.tolist()}
                values["observations"] = _column(rows, "obs", observed, last + 1)
                episodes.append(EpisodeBuffer(len(episodes), infos={}, **values))
    return minari.create_dataset_from_buffers(dataset_id, episodes, **settings)


def _spaces(settings: dict[str, Any]) -> list[Any]:
    """The observation and action spaces that Minari will find in its settings."""
    env = settings.get("env")
    made = gymnasium.make(env) if isinstance(env, (str, EnvSpec)) else env
    names = "observation_space", "action_space"
    return [settings.get(name) or getattr(made, name, None) for name in names]


def _column(rows: dict[str, np.ndarray], name: str, space: Any, count: int) -> Any:
    """The column of this name, or for a composite space the dict or tuple of its columns."""
    if isinstance(space, spaces.Dict):
        return {key: _column(rows, f"{name}.{key}", part, count) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_column(rows, f"{name}.item_{place}", part, count) for place, part in enumerate(space))
    return rows[name][:count]
