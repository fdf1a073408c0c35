"""Endings that a loop hands in another way than the buffer expects: counted, warned of once, and never half stored."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import on_device
from pairs import StepPair, play

from gpu_replay import Field, TrajectoryReplayBuffer
from gpu_replay.ops.steps import Flag

gymnasium = pytest.importorskip("gymnasium")

# each test says which of them come
SAID = pytest.mark.filterwarnings("error:.*this warning comes once:UserWarning")
pytestmark = [pytest.mark.contract, SAID]

FRAMES = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}
RESETS = r"(?s)the step after an episode's end has a reward or a flag.*'disabled' or 'same_step'.*from_env.*final_obs="
LOST = r"(?s)an episode was truncated, and its final observation is not stored.*Give final_obs="


def told(buffer: TrajectoryReplayBuffer, words: str, add: Callable[[], Any]) -> None:
    """Fail unless this `add` warns at its own line, or on a device the next `stats`."""

    def both() -> None:
        add()
        assert len(seen) == (not on_device(buffer))
        buffer.stats()

    with pytest.warns(UserWarning, match=words) as seen:
        both()
    assert [warning.filename for warning in seen] == [__file__]


UNSAID = r"one environment was made without autoreset=, and takes 'next_step'.*env\.reset\(\), give .*'disabled'"


def test_one_environment_without_autoreset_is_warned_of_where_it_is_made(device: str, tmp_path: Path) -> None:
    spaces = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)
    makers: list[Callable[..., TrajectoryReplayBuffer]] = [
        lambda envs, **more: TrajectoryReplayBuffer(8, envs, FRAMES, device=device, **more),
        lambda envs, **more: TrajectoryReplayBuffer.from_spaces(8, envs, *spaces, device=device, **more),
    ]
    for make in makers:
        with pytest.warns(UserWarning, match=UNSAID) as seen:
            unsaid = make(1)
        assert [(warning.filename, warning.lineno) for warning in seen] == [(__file__, make.__code__.co_firstlineno)]
        said = make(1, autoreset="next_step")
        assert (type(unsaid.autoreset), repr(unsaid)) == (str, repr(said))
        make(2)
        for mode in ("same_step", "disabled"):
            make(1, autoreset=mode)
        # nobody chose anew
        unsaid.save(tmp_path / "saved")
        TrajectoryReplayBuffer.load(tmp_path / "saved", device)
        said.load_state_dict(unsaid.state_dict())
        copy.deepcopy(unsaid)
        remake, arguments = unsaid.__reduce__()
        remake(*arguments)
    TrajectoryReplayBuffer.from_env(pendulum(), 8, device=device)
    assert "autoreset: 'Autoreset | AutoresetMode' = 'next_step'" in str(inspect.signature(TrajectoryReplayBuffer))
    with pytest.raises(ValueError, match="autoreset"):
        TrajectoryReplayBuffer(8, 1, FRAMES, autoreset=None, device=device)  # type: ignore[arg-type]


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=5)


def classic_loop(env: Any, buffer: TrajectoryReplayBuffer, steps: int) -> dict[int, tuple[Any, bool]]:
    """The loop of every tutorial, over one environment; returns what came after each step, and whether it ended it."""
    after: dict[int, tuple[Any, bool]] = {}
    obs, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for step in range(steps):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        given = {"obs": obs[None], "action": action[None], "reward": np.array([reward], np.float32)}
        given |= {"terminated": np.array([terminated]), "truncated": np.array([truncated])}
        buffer.add(**given, final_obs=following[None] if truncated else None)
        after[step] = following, truncated
        obs = env.reset()[0] if terminated or truncated else following
    return after


def test_from_env_makes_the_buffer_for_the_classic_loop(device: str) -> None:
    env = pendulum()
    buffer = TrajectoryReplayBuffer.from_env(env, 100, device=device)
    after = classic_loop(env, buffer, 30)
    stats = buffer.stats()
    assert (stats.unexpected_resets, stats.lost_truncations, stats.eligible) == (0, 0, 30)
    batch = buffer[list(after)]
    assert batch.truncated.tolist() == [ended for _, ended in after.values()]
    assert batch.next_obs.cpu().tolist() == [following.tolist() for following, _ in after.values()]


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode), ids=lambda mode: mode.value)
def test_each_autoreset_mode_of_gymnasium_into_a_buffer_made_by_hand(mode: Any, device: str) -> None:
    envs = gymnasium.vector.SyncVectorEnv([pendulum] * 2, autoreset_mode=mode)
    spaces = envs.single_observation_space, envs.single_action_space
    buffer = TrajectoryReplayBuffer.from_spaces(100, 2, *spaces, device=device)

    def loop() -> None:
        obs, _ = envs.reset(seed=0)
        for _ in range(18):
            action = envs.action_space.sample()
            after, reward, terminated, truncated, _ = envs.step(action)
            buffer.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            if truncated.any() and mode == gymnasium.vector.AutoresetMode.DISABLED:
                after, _ = envs.reset(options={"reset_mask": truncated})
            obs = after

    if mode == gymnasium.vector.AutoresetMode.NEXT_STEP:
        loop()
        assert buffer.stats().unexpected_resets == 0
    else:
        told(buffer, RESETS, loop)
        assert buffer.stats().unexpected_resets == 2 * 3


def step(reward: float = 0.0, *, terminated: bool = False, truncated: bool = False, **more: Any) -> dict[str, Any]:
    """One step of one environment with 84x84 frames."""
    flags = {"terminated": torch.tensor([terminated]), "truncated": torch.tensor([truncated])}
    frame = torch.zeros(1, 84, 84, dtype=torch.uint8)
    given = {"obs": frame, "action": torch.zeros(1, dtype=torch.int64), "reward": torch.tensor([reward])}
    return given | flags | more


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_warning_that_is_an_error_stores_nothing(autoreset: Any, device: str) -> None:
    buffer = TrajectoryReplayBuffer(50, 1, FRAMES, autoreset=autoreset, device=device)
    buffer.add(**step(1.0, terminated=True))
    before, odd = buffer.state_dict(), step(1.0, truncated=True)
    many = {name: torch.stack([value, value]) for name, value in odd.items()}
    if on_device(buffer):
        buffer.extend(**many)
    # on a device the steps are stored by then, and it is told once
    calls: list[Callable[[], Any]] = 2 * [lambda: buffer.add(**odd), lambda: buffer.extend(**many)]
    for call in [buffer.stats] if on_device(buffer) else calls:
        with pytest.raises(UserWarning, match=RESETS if autoreset == "next_step" else LOST):
            call()
    for _ in range(3):
        buffer.stats()
    if not on_device(buffer):
        after = buffer.state_dict()
        assert after["counters"] == before["counters"]
        assert all(torch.equal(after["tensors"][name], each) for name, each in before["tensors"].items())
        told(buffer, RESETS if autoreset == "next_step" else LOST, lambda: buffer.extend(**many))
    # the first of the two is a reset step, after which an episode begins
    name, count = ("unexpected_resets", 1) if autoreset == "next_step" else ("lost_truncations", 2)
    assert getattr(buffer.stats(), name) == count


@pytest.mark.parametrize(
    "slots, shape, places",
    [
        (1_000, (84, 84), 445),
        (64_000, (84, 84), 2_000),
        (320, (128, 128, 3), 64),
        (3_200, (128, 128, 3), 100),
        (4, (4, 1024, 1024), 4),
        (100, (4,), 100),
        (98_304, (8,), 98_304),
        (262_144, (16,), 262_144),
        (262_144, (64,), 131_072),
    ],
    ids=str,
)
def test_final_observations_have_places_for_one_step_in_32_at_least(
    slots: int, shape: tuple[int, ...], places: int
) -> None:
    fields = {**FRAMES, "obs": Field(shape, torch.uint8)}
    buffer = TrajectoryReplayBuffer(slots, 4, fields, autoreset="same_step", device="cpu")
    assert buffer.state_dict()["settings"]["final_capacity"] == places


def test_counts_and_places_are_those_of_the_checkpoint(tmp_path: Path, device: str) -> None:
    buffer = TrajectoryReplayBuffer(50, 1, FRAMES, autoreset="same_step", final_capacity=3, device=device)
    told(buffer, LOST, lambda: buffer.add(**step(truncated=True)))
    buffer.save(tmp_path / "c")
    # it is not this buffer that lost it
    loaded = TrajectoryReplayBuffer.load(tmp_path / "c", device)
    assert loaded.stats().lost_truncations == 1
    assert loaded.state_dict()["settings"]["final_capacity"] == 3
    told(loaded, LOST, lambda: loaded.add(**step(truncated=True)))
    assert loaded.stats().lost_truncations == 2
    settings: dict[str, Any] = {"autoreset": "same_step", "final_capacity": 3, "terminal_obs": True, "device": device}
    with pytest.raises(ValueError, match="terminal_obs"):
        TrajectoryReplayBuffer(50, 1, FRAMES, **settings).load_state_dict(loaded.state_dict())


NUMBERS = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}


def test_a_state_of_an_earlier_version_gives_final_observations_too(device: str) -> None:
    """It knows no flag for them where the next step has them."""
    pair = StepPair(40, 2, fields=NUMBERS, device=device)
    play(pair, "..T..U..T", "....T....", fields=NUMBERS)
    state = pair.buffer.state_dict()
    state["tensors"]["streams.flags"] &= 255 - Flag.FINAL
    for name in ("NONFINITE", "TERMINALS", "LOST_TERMINALS"):
        del state["counters"][name]
    pair.buffer.load_state_dict(state)
    # of the last one its own stands for it
    assert pair.buffer[[4, 9, 16]].next_obs.tolist() == [4, 106, 9]
    pair.check_contents()


def test_rewards_that_are_not_finite_are_counted(device: str) -> None:
    buffer = TrajectoryReplayBuffer(40, 2, NUMBERS, autoreset="next_step", device=device)
    given = [[1.0, np.nan], [np.inf, 0.0], [-np.inf, 3.4e38], [0.0, np.nan]]
    for number, reward in enumerate(given):
        ends = {"terminated": [number == 2, False], "truncated": [False, False]}
        buffer.add(obs=[0.0, 0.0], action=[0, 0], reward=reward, **ends)
    buffer.extend(obs=np.zeros((2, 2), np.float32), action=np.zeros((2, 2), np.int64), reward=[[0, np.nan], [0, 0]],
                  terminated=np.zeros((2, 2), bool), truncated=np.zeros((2, 2), bool))  # fmt: skip
    assert buffer.stats().nonfinite_rewards == 5
    restored = copy.deepcopy(buffer)
    assert restored.stats().nonfinite_rewards == 5
