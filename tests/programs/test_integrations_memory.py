"""What an adapter made is freed with it, without Python's collector. The tests of each adapter say how it is used."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from freed import collector_off_fixture as collector_off_fixture

from gpu_replay import CheckpointError, Proportional, ReplayBuffer, TrajectoryReplayBuffer


def of_gymnasium(folder: Path) -> list[Any]:
    from test_integrations_gymnasium import MODES, collect, made, pushes

    env, found = made(MODES[0]), []
    spaces = env.single_observation_space, env.single_action_space
    for buffer in (TrajectoryReplayBuffer.from_env(env, 51, device="cpu"), ReplayBuffer.from_spaces(50, *spaces)):
        progress = collect(env, pushes(), buffer, 20, seed=0)
        found += [buffer, progress, collect(env, pushes(), buffer, 20, after=progress)]
    env.close()
    return found


def of_torchrl(folder: Path) -> list[Any]:
    from test_integrations_torchrl import filled

    rb = filled(count=9, sampler=Proportional(), batch_size=4)
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
    from test_integrations_sb3 import BOX, ENVS, SB3ReplayBuffer, play, spaces

    made = []
    for n_steps in (1, 3):
        settings = {"sampler": Proportional(), "n_steps": n_steps, "gamma": 0.9}
        rb = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", ENVS, **settings)
        play([rb], 20)
        rb.sample(4)
        rb.errors.append(torch.ones(4, 1))
        rb.feed_back()
        with suppress(ValueError):
            rb.sample(0)
        made += [rb, rb.storage]
    return made


def of_goals(folder: Path) -> list[Any]:
    from test_integrations_sb3 import SB3HerReplayBuffer, goal_steps
    from test_integrations_sb3 import of_goals as made

    rb = made(SB3HerReplayBuffer, 25)
    for step in goal_steps(20):
        rb.add(**step)
    rb.sample(4)
    return [rb, rb.storage]


def of_fasttd3(folder: Path) -> list[Any]:
    from test_integrations_streams import Stream, fasttd3_filled

    rb = fasttd3_filled(Stream(20), 20, 50)
    return [rb, rb.buffer, rb.sample(4)]


def of_skrl(folder: Path) -> list[Any]:
    from test_integrations_skrl import made, steps_of, store

    memory = made(25, 2)
    store(steps_of(20, 2, True), memory)
    memory.sample(["observations"], batch_size=4)
    first = memory.buffer
    memory.save(str(folder / "memory"))
    memory.load(str(folder / "memory"))
    return [memory, first, memory.buffer]


def of_minari(folder: Path) -> list[Any]:
    from test_integrations_minari import SPACES, from_minari, small_dataset, to_minari

    buffer = from_minari(small_dataset(), device="cpu")
    to_minari(buffer, "test/two-v0", **SPACES)
    return [buffer]


@pytest.mark.parametrize("use", [of_gymnasium, of_torchrl, of_sb3, of_goals, of_fasttd3, of_skrl, of_minari])
@pytest.mark.usefixtures("collector_off")
@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_what_is_dropped_is_freed_at_once(use: Any, tmp_path: Path, monkeypatch: Any) -> None:
    # a library may keep something at its first use
    for name in ("first", "second"):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / name / "datasets"))
        kept = [weakref.ref(each) for each in use(tmp_path / name)]
    assert kept
    assert [each() for each in kept] == [None] * len(kept)
