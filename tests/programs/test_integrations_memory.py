"""What an adapter made is freed with it, without Python's collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from freed import collector_off_fixture as collector_off_fixture

from gpu_replay import CheckpointError, Proportional, ReplayBuffer, TrajectoryReplayBuffer


def of_gymnasium(folder: Path) -> list[Any]:
    gymnasium = pytest.importorskip("gymnasium")
    from gpu_replay.integrations.gymnasium import collect

    env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    spaces = env.single_observation_space, env.single_action_space
    steps, rows = TrajectoryReplayBuffer.from_env(env, 50, device="cpu"), ReplayBuffer.from_spaces(50, *spaces)
    made = []
    for buffer in (steps, rows):
        progress = collect(env, lambda obs: env.action_space.sample(), buffer, 20, seed=0)
        made += [buffer, progress, collect(env, lambda obs: env.action_space.sample(), buffer, 20, after=progress)]
    env.close()
    return made


def of_torchrl(folder: Path) -> list[Any]:
    tensordict = pytest.importorskip("tensordict")
    from gpu_replay.integrations.torchrl import TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(50, sampler=Proportional(), batch_size=4, device="cpu")
    rb.extend(tensordict.TensorDict({"a": torch.ones(10, 3), ("next", "r"): torch.ones(10, 1)}, [10]))
    drawn = next(iter(rb))
    drawn["td_error"] = torch.ones(4)
    rb.update_tensordict_priority(drawn)
    first = rb.buffer
    rb.dumps(folder / "rb")
    rb.loads(folder / "rb")
    with suppress(CheckpointError):
        rb.loads(folder / "none")
    return [rb, first, rb.buffer]


def of_sb3(folder: Path) -> list[Any]:
    pytest.importorskip("stable_baselines3")
    from gymnasium import spaces

    from gpu_replay.integrations.sb3 import SB3ReplayBuffer

    box, made = spaces.Box(-1, 1, (3,), np.float32), []
    for n_steps in (1, 3):
        rb = SB3ReplayBuffer(50, box, box, "cpu", 2, sampler=Proportional(), n_steps=n_steps, gamma=0.9)
        for step in range(20):
            obs = np.full((2, 2, 3), step / 20, np.float32)
            obs[1] += 0.05
            rb.add(*obs, np.zeros((2, 3), np.float32), np.zeros(2), np.zeros(2), [{}, {}])
        rb.sample(4)
        rb.errors.append(torch.ones(4, 1))
        rb.feed_back()
        with suppress(ValueError):
            rb.sample(0)
        made += [rb, rb.storage]
    return made


def of_goals(folder: Path) -> list[Any]:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.envs import BitFlippingEnv

    from gpu_replay.integrations.sb3 import SB3HerReplayBuffer

    env = make_vec_env(BitFlippingEnv, 1, env_kwargs={"continuous": False})
    obs, infos = env.reset(), [{}]
    rb = SB3HerReplayBuffer(50, env.observation_space, env.action_space, env, "cpu")
    for _ in range(20):
        rb.add(obs, obs, np.zeros(1, int), np.zeros(1), np.zeros(1), infos)
    rb.sample(4)
    return [rb, rb.storage]


def of_fasttd3(folder: Path) -> list[Any]:
    tensordict = pytest.importorskip("tensordict")
    from gpu_replay.integrations.fasttd3 import SimpleReplayBuffer

    rb, rows, flags = SimpleReplayBuffer(2, 50, 3, 3, device="cpu"), torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    after = {"observations": rows, "rewards": rows[:, 0], "dones": flags, "truncations": flags}
    for _ in range(20):
        rb.extend(tensordict.TensorDict({"observations": rows, "actions": rows, "next": after}, [2]))
    return [rb, rb.buffer, rb.sample(4)]


def of_skrl(folder: Path) -> list[Any]:
    pytest.importorskip("skrl")
    from gpu_replay.integrations.skrl import ReplayMemory

    memory, step = ReplayMemory(memory_size=50, num_envs=2, device="cpu"), {"terminated": torch.zeros(2, 1)}
    step |= dict.fromkeys(("observations", "next_observations", "actions", "rewards"), torch.ones(2, 1))
    for name in step:
        memory.create_tensor(name, size=1, dtype=torch.float32)
    for _ in range(20):
        memory.add_samples(**step)
    memory.sample(["observations"], batch_size=4)
    first = memory.buffer
    memory.save(str(folder / "memory"))
    memory.load(str(folder / "memory"))
    return [memory, first, memory.buffer]


def of_minari(folder: Path) -> list[Any]:
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    from gpu_replay.integrations.minari import from_minari, to_minari

    given = {"observation_space": spaces.Box(-9, 9, (2,), np.float32), "action_space": spaces.Discrete(2)}
    rows = {"observations": np.zeros((5, 2), np.float32), "actions": np.zeros(4, np.int64), "rewards": [0.0] * 4}
    ends = {"terminations": [False] * 4, "truncations": [False] * 3 + [True], "infos": {}}
    dataset = minari.create_dataset_from_buffers("test/one-v0", [EpisodeBuffer(**rows, **ends)], **given)
    buffer = from_minari(dataset, device="cpu")
    to_minari(buffer, "test/two-v0", **given)
    return [buffer]


@pytest.mark.parametrize("use", [of_gymnasium, of_torchrl, of_sb3, of_goals, of_fasttd3, of_skrl, of_minari])
@pytest.mark.usefixtures("collector_off")
@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_what_is_dropped_is_freed_at_once(
    use: Callable[[Path], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    # a library may keep something at its first use
    use(tmp_path / "first")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "others"))
    kept = [weakref.ref(each) for each in use(tmp_path / "second")]
    assert kept
    assert [each() for each in kept] == [None] * len(kept)
