"""Minari: offline datasets into a buffer, and what a buffer holds into a dataset.

buffer = from_minari(minari.load_dataset("D4RL/pen/human-v2"), n_step=3, sampler=Proportional())
dataset = to_minari(buffer, "cartpole/mine-v0", env="CartPole-v1")
"""

from __future__ import annotations

from typing import Any

import minari
import numpy as np
from minari import MinariDataset
from minari.data_collector import EpisodeBuffer
from torch.utils._pytree import tree_map

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.ops.eligibility import Flag

_ROWS = 65_536


def from_minari(dataset: MinariDataset, capacity: int | None = None, **settings: Any) -> TrajectoryReplayBuffer:
    """A buffer of one stream that holds the episodes of a dataset, one after the other.

    capacity: steps that are kept, the last ones; by default all fit: `total_steps + total_episodes`, because the last
              observation of an episode takes a row of its own.
    settings: of `TrajectoryReplayBuffer.from_spaces`: n_step, stack, sampler, device, seed, dtypes.

    Raises TypeError for spaces without a fixed shape, such as Text.
    """
    rows = int(dataset.total_steps) + int(dataset.total_episodes)
    spaces = dataset.observation_space, dataset.action_space
    buffer = TrajectoryReplayBuffer.from_spaces(capacity or rows, 1, *spaces, autoreset="next_step", **settings)
    for episode in dataset.iterate_episodes():
        # a row more than there are actions: it carries the last observation
        values = {"obs": _nested(episode.observations), "action": _longer(_nested(episode.actions))}
        flags = {"terminated": episode.terminations, "truncated": episode.truncations}
        if not (flags["terminated"][-1] or flags["truncated"][-1]):
            # the recording ended, and so does the episode here
            flags["truncated"] = np.append(flags["truncated"][:-1], True)
        values |= {"reward": np.asarray(episode.rewards, np.float32), **flags}
        values |= {name: _longer(values[name]) for name in ("reward", "terminated", "truncated")}
        buffer.extend(**tree_map(lambda column: column[:, None], values))
    return buffer


def to_minari(buffer: TrajectoryReplayBuffer, dataset_id: str, **settings: Any) -> MinariDataset:
    """Write the episodes that a buffer holds as a dataset, which Minari opens with `load_dataset(dataset_id)`.

    settings: of `minari.create_dataset_from_buffers`: env, or observation_space and action_space; algorithm_name, ...

    Episodes whose beginning was overwritten, and those that go on, are written as far as they are stored, cut by
    `truncated`. Raises ValueError for buffers with another autoreset mode than "next_step": they do not keep the last
    observation of every episode, which a dataset has.
    """
    if buffer.autoreset != "next_step":
        raise ValueError(
            f"to_minari needs the last observation of every episode; with autoreset={buffer.autoreset!r} a buffer does "
            "not keep all of them. Record with autoreset='next_step'."
        )
    parts = [{name: value.cpu().numpy() for name, value in part.items()} for part in buffer.batches(_ROWS)]
    if not parts:
        raise RuntimeError("to_minari: the buffer holds no steps. Add more first.")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    flags = buffer._streams.streams.flags.cpu().numpy().reshape(-1)[columns["key"] % buffer.capacity]
    episodes: list[EpisodeBuffer] = []
    for env in range(buffer.num_envs):
        stream = {name: column[env :: buffer.num_envs] for name, column in columns.items()}
        flag = flags[env :: buffer.num_envs]
        # a row begins an episode after a last observation, and where the stream was broken
        begins = np.flatnonzero(np.append(True, flag[:-1] & (Flag.DEAD | Flag.CUT) != 0))
        for begin, end in zip(begins, [*begins[1:], len(flag)], strict=True):
            rows = {name: column[begin:end] for name, column in stream.items()}
            # the last row gives its observation alone
            if end - begin > 1:
                episodes.append(_episode(len(episodes), rows, int(end - begin) - 1))
    return minari.create_dataset_from_buffers(dataset_id, episodes, **settings)


def _episode(number: int, rows: dict[str, np.ndarray], steps: int) -> EpisodeBuffer:
    """An episode of so many steps; the row after them has the last observation."""
    truncated = rows["truncated"][:steps].copy()
    truncated[-1] |= not rows["terminated"][steps - 1]
    return EpisodeBuffer(
        id=number,
        observations=_unflattened(rows, "obs", steps + 1),
        actions=_unflattened(rows, "action", steps),
        rewards=rows["reward"][:steps].tolist(),
        terminations=rows["terminated"][:steps].tolist(),
        truncations=truncated.tolist(),
        infos={},
    )


def _unflattened(rows: dict[str, np.ndarray], name: str, count: int) -> Any:
    """The column of this name, or the dict of those in its group."""
    if name in rows:
        return rows[name][:count]
    found: dict[str, Any] = {}
    for each in rows:
        if each.startswith(f"{name}."):
            key = each.removeprefix(f"{name}.").split(".")[0]
            found[key] = _unflattened(rows, f"{name}.{key}", count)
    return found


def _nested(values: Any) -> Any:
    """Columns as arrays; those of a tuple space by the names that its fields have."""
    if isinstance(values, tuple):
        values = {f"item_{place}": value for place, value in enumerate(values)}
    return {name: _nested(value) for name, value in values.items()} if isinstance(values, dict) else np.asarray(values)


def _longer(values: Any) -> Any:
    """With a row of zeros after the last."""
    return tree_map(lambda column: np.concatenate([column, np.zeros_like(column[:1])]), values)
