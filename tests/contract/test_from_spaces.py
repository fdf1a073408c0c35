"""`from_spaces` and `from_env`: fields and settings of buffers from what a Gymnasium environment says of itself."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

pytestmark = pytest.mark.contract

WIDE = spaces.Box(-1, 1, (2,), np.float64)
PIXELS = spaces.Box(0, 255, (2,), np.uint8)
NESTED = spaces.Dict({"arm": spaces.Dict({"angle": WIDE, "speed": WIDE}), "camera": PIXELS})


@pytest.mark.parametrize(
    "space, field",
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), Field((8, 8, 3), torch.uint8)),
        (WIDE, Field((2,), torch.float32)),
        (spaces.Box(-5, 5, (), np.int16), Field((), torch.int16)),
        (spaces.Discrete(5), Field((), torch.int64)),
        (spaces.MultiDiscrete([3, 4]), Field((2,), torch.int64)),
        (spaces.MultiBinary(6), Field((6,), torch.int8)),
    ],
    ids=str,
)
def test_every_array_space_keeps_its_shape_and_dtype(space: object, field: Field, device: str) -> None:
    buffer = ReplayBuffer.from_spaces(3, space, space, sampler=Proportional(), device=device, seed=7)
    ends = {"reward": Field((), torch.float32), "terminated": Field((), torch.bool)}
    assert dict(buffer.fields) == {"obs": field, "action": field, "next_obs": field, **ends}
    assert (buffer.capacity, buffer.device.type, buffer.sampler, buffer.seed) == (3, device, Proportional(), 7)


@pytest.mark.parametrize("space", [spaces.Text(5), "Box"], ids=str)
def test_spaces_without_a_fixed_shape_are_refused_and_those_in_place_of_fields_are_sent_here(space: object) -> None:
    for given in ((space, spaces.Discrete(2)), (spaces.Discrete(2), space)):
        with pytest.raises((TypeError, ValueError), match=r"(?i)space"):
            ReplayBuffer.from_spaces(3, *given, device="cpu")
        with pytest.raises(TypeError, match="(?i)space") as refused:
            steps_from(4, *given)
        assert "ReplayBuffer" not in str(refused.value)
    for kind, sizes in ((ReplayBuffer, (8,)), (TrajectoryReplayBuffer, (8, 2))):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.from_spaces"):
            kind(*sizes, WIDE, spaces.Discrete(3))


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        (None, {"arm.angle": "float32", "action": "float32", "camera": "uint8"}),
        ({"obs": {"arm": torch.float64}, "reward": torch.float64}, {"arm.speed": "float64", "reward": "float64"}),
        ({"obs.arm": torch.float16, "obs.arm.angle": torch.float64}, {"arm.angle": "float64"}),
        ({"obs": torch.float32, "next_obs": torch.bfloat16}, {"camera": "float32", "next_obs.camera": "bfloat16"}),
    ],
    ids=str,
)
def test_dtypes_are_those_asked_for(dtypes: Any, expected: dict[str, str]) -> None:
    fields = ReplayBuffer.from_spaces(3, NESTED, WIDE, dtypes=dtypes, device="cpu").fields
    for name, dtype in expected.items():
        # the observation after a step is as the one before, where nothing else is said
        both = [f"obs.{name}"] + [f"next_obs.{name}"] * ("next_obs" not in (dtypes or {}))
        assert {str(fields[each].dtype) for each in ([name] if name in fields else both)} == {f"torch.{dtype}"}


def steps_from(capacity: int, *given: Any, **more: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer.from_spaces(capacity, 2, *given, device="cpu", **more)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"dtypes": {"observation": torch.float32}}, KeyError, "dtype"),
        ({"dtypes": {"obs": "float32"}}, TypeError, "dtype"),
        ({"extra": {"obs": Field((2,), torch.float32)}}, KeyError, "extra has 'obs'"),
    ],
    ids=str,
)
def test_dtypes_and_fields_that_cannot_be_are_refused(given: Any, error: type[Exception], message: str) -> None:
    for make in (partial(ReplayBuffer.from_spaces, device="cpu"), steps_from):
        with pytest.raises(error, match=message):
            make(3, WIDE, WIDE, **given)


def test_a_trajectory_buffer_has_the_fields_of_one_environment() -> None:
    settings: dict[str, Any] = {"stack": 2, "n_step": 3, "autoreset": "disabled", "dtypes": {"obs.arm": torch.float64}}
    buffer = steps_from(13, NESTED, WIDE, **settings)
    arm = Field((2,), torch.float64)
    observations = {"obs.arm.angle": arm, "obs.arm.speed": arm, "obs.camera": Field((2,), torch.uint8)}
    assert dict(buffer.fields) == {**observations, "action": Field((2,), torch.float32)}
    assert (buffer.capacity, buffer.num_envs, buffer.stack, buffer.n_step) == (12, 2, 2, 3)
    with pytest.raises(KeyError, match="'reward'"):
        steps_from(13, NESTED, WIDE, dtypes={"reward": torch.float64})


def test_further_fields_come_beside_those_of_the_spaces() -> None:
    extra = {"hidden": Field((4,), torch.float32)}
    assert "hidden" in ReplayBuffer.from_spaces(9, WIDE, WIDE, extra=extra, device="cpu").fields
    known = dict.fromkeys(("obs", "action"), Field((2,), torch.float32))
    assert steps_from(9, WIDE, WIDE, extra=extra).fields == {**known, **extra}
    made = TrajectoryReplayBuffer.from_env(gymnasium.make_vec("CartPole-v1", 2), 9, extra=extra, device="cpu")
    assert made.fields["hidden"] == extra["hidden"]


def test_stacked_frames_are_warned_of_and_other_pictures_are_not() -> None:
    class Stacks(gymnasium.vector.VectorEnv):  # type: ignore[misc]
        num_envs = 2
        metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

        def __init__(self, *shape: int) -> None:
            self.single_observation_space = spaces.Box(0, 255, shape, np.uint8)
            self.single_action_space = spaces.Discrete(3)

    for shape, frame in (((4, 84, 84), r"\(84, 84\)"), ((3, 3, 64, 64), r"\(3, 64, 64\)")):
        with pytest.warns(UserWarning, match=rf"{shape[0]} stacked frames.*{frame}.*\[:, -1\]"):
            TrajectoryReplayBuffer.from_env(Stacks(*shape), 10, device="cpu")
    for other in ((84, 84), (3, 64, 64), (210, 160, 3)):
        # warnings are errors
        TrajectoryReplayBuffer.from_env(Stacks(*other), 10, device="cpu")


def test_a_single_environment_is_one_that_its_loop_resets(device: str) -> None:
    env = gymnasium.make("CartPole-v1")
    buffer = TrajectoryReplayBuffer.from_env(env, 9, device=device)
    assert (buffer.num_envs, buffer.autoreset, buffer.fields["obs"].shape) == (1, "disabled", (4,))
    resetting = gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.Autoreset(env))
    assert TrajectoryReplayBuffer.from_env(resetting, 9, device=device).autoreset == "next_step"
    assert TrajectoryReplayBuffer.from_env(env, 9, autoreset="same_step", device=device).autoreset == "same_step"


def test_wrappers_are_looked_through_for_what_they_hide_but_not_for_spaces() -> None:
    class Wrapper:
        """As those of simulators, which hand on only what they know."""

        unwrapped = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
        single_observation_space = spaces.Box(0, 1, (7,))
        single_action_space = spaces.Discrete(2)

    buffer = TrajectoryReplayBuffer.from_env(Wrapper(), 9, device="cpu")
    assert (buffer.num_envs, buffer.autoreset, buffer.fields["obs"].shape) == (3, "next_step", (7,))
    # one whose observations are those of all environments together
    del Wrapper.single_observation_space
    with pytest.raises(TypeError, match="without num_envs or the spaces of one environment.*from_spaces"):
        TrajectoryReplayBuffer.from_env(Wrapper(), 9, device="cpu")


def test_settings_that_the_environment_does_not_say_are_asked_for() -> None:
    one = gymnasium.make("CartPole-v1")
    env = gymnasium.vector.SyncVectorEnv([lambda: one] * 2)
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    buffer = TrajectoryReplayBuffer.from_env(wrapped, 9, dtypes={"obs": torch.float64}, stack=2, device="cpu")
    assert (buffer.capacity, buffer.stack, buffer.fields["obs"].dtype) == (8, 2, torch.float64)
    with pytest.raises(TypeError, match="vector environment.*found dict.*single_observation_space"):
        TrajectoryReplayBuffer.from_env({}, 8)
    with pytest.raises(TypeError, match=r"from_env takes \(env, capacity\).*exchanged: found \(8, SyncV"):
        TrajectoryReplayBuffer.from_env(8, env)
    env.metadata = {}
    with pytest.raises(ValueError, match="autoreset='next_step'"):
        TrajectoryReplayBuffer.from_env(env, 8)
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    given = TrajectoryReplayBuffer.from_env(env, 8, autoreset=same_step, device="cpu")
    assert given.state_dict()["settings"]["autoreset"] == "same_step"
    # what another environment of its class leaves there before gymnasium 1.4
    env.metadata = {"autoreset_mode": "SameStep"}
    assert TrajectoryReplayBuffer.from_env(wrapped, 8, device="cpu").autoreset == "next_step"
