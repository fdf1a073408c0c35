"""`collect` on real vector environments: every stored transition is what the physics makes of its state and action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode  # noqa: E402

from gpu_replay import Field, ReplayBuffer, TrajectoryReplayBuffer  # noqa: E402
from gpu_replay.integrations.gymnasium import collect  # noqa: E402

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
LIMIT, ENVS = 12, 3


def made(mode: AutoresetMode) -> Any:
    given = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}, "max_episode_steps": LIMIT}
    return gymnasium.make_vec("CartPole-v1", ENVS, **given)


def pushes() -> Callable[[np.ndarray], np.ndarray]:
    """A random policy, mostly to one side: some episodes fall over, others meet the limit of their time."""
    generator = np.random.default_rng(0)
    return lambda obs: (generator.random(len(obs)) < [0.95, 0.5, 0.5]).astype(np.int64)


def check_physics(batch: Any) -> None:
    """Each row against one step of a single environment that was put into its state."""
    single = gymnasium.make("CartPole-v1").unwrapped
    single.reset(seed=0)
    for row in range(len(batch)):
        single.state, single.steps_beyond_terminated = batch.obs[row].double().numpy(), None
        obs, reward, terminated, *_ = single.step(int(batch.action[row]))
        assert bool(batch.terminated[row]) == terminated
        assert float(batch.reward[row]) == reward
        np.testing.assert_allclose(batch.next_obs[row].numpy(), obs, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_transitions_are_those_of_the_physics(mode: AutoresetMode) -> None:
    env = made(mode)
    fields = ReplayBuffer.from_spaces(1, env.single_observation_space, env.single_action_space, device="cpu").fields
    buffer = ReplayBuffer(500, {**fields, "truncated": Field((), torch.bool)}, device="cpu")
    progress = collect(env, pushes(), buffer, 50, seed=1)
    assert progress.obs.shape == (ENVS, 4)
    (batch,) = buffer.batches(500)
    check_physics(batch)
    ended = batch.terminated | batch.truncated
    assert batch.terminated.sum() > 2
    assert (batch.truncated & ~batch.terminated).sum() > 2
    # steps that only reset are not stored, and nothing else is left out
    resets = int(ended.sum() - progress.ended.sum()) if mode == AutoresetMode.NEXT_STEP else 0
    assert len(buffer) == 50 * ENVS - resets
    assert (len(progress.returns), sum(progress.lengths)) == (int(ended.sum()), len(buffer) - int(progress.steps.sum()))
    assert progress.returns == progress.lengths


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_streams_are_those_of_the_physics_also_over_several_calls(mode: AutoresetMode) -> None:
    env = made(mode)
    both = env.single_observation_space, env.single_action_space
    buffers = [TrajectoryReplayBuffer.from_env(env, 600, device="cpu")]
    buffers += [TrajectoryReplayBuffer.from_spaces(600, ENVS, *both, autoreset=mode, device="cpu")]
    whole = collect(env, pushes(), buffers[0], 60, seed=1)
    policy, parts = pushes(), None
    for steps in (1, 7, 12, 40):
        parts = collect(env, policy, buffers[1], steps, after=parts, seed=1)
    one, other = (next(buffer.batches(600)) for buffer in buffers)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert parts is not None
    assert np.array_equal(whole.obs, parts.obs)
    # what follows an episode that was cut off is its true last observation
    eligible = buffers[1].stats().eligible
    batch = buffers[1].sample(eligible)
    check_physics(batch[batch.discount > 0])
    cut = batch.truncated & ~batch.terminated
    assert (eligible > 120, int(cut.sum()) > 2) == (True, True)
    assert bool((batch.discount[cut] > 0).all())
    # a call without `after` begins anew, and joins nothing
    collect(env, pushes(), buffers[0], 20, seed=2)
    again = buffers[0].sample(buffers[0].stats().eligible)
    check_physics(again[again.discount > 0])


def test_a_buffer_for_another_mode_is_refused() -> None:
    env = made(AutoresetMode.SAME_STEP)
    buffer = TrajectoryReplayBuffer.from_env(made(AutoresetMode.NEXT_STEP), 30, device="cpu")
    with pytest.raises(ValueError, match=r"next_step.*same_step.*from_env"):
        collect(env, pushes(), buffer, 1)
    assert len(buffer) == 0


@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_observations_in_parts_are_stored_by_name(kind: type, mode: AutoresetMode) -> None:
    from gymnasium.spaces import Box, Dict, Tuple

    box = Box(-np.inf, np.inf, (2,), np.float32)
    inner = Dict({"pole": box})
    space, cart, pole = Dict({"b": inner, "a": box}), "a", "b.pole"
    if kind is tuple:
        space, cart, pole = Tuple((inner, box)), "item_1", "item_0.pole"

    def parts(obs: np.ndarray) -> Any:
        found = {"pole": obs[2:]}, obs[:2]
        return found if kind is tuple else dict(zip("ba", found, strict=True))

    def one() -> Any:
        single = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
        return gymnasium.wrappers.TransformObservation(single, parts, space)

    env = gymnasium.vector.SyncVectorEnv([one] * ENVS, autoreset_mode=mode)
    buffer = ReplayBuffer.from_spaces(200, env.single_observation_space, env.single_action_space, device="cpu")
    for each in (buffer, TrajectoryReplayBuffer.from_env(env, 200, device="cpu")):
        collect(env, lambda _: torch.arange(ENVS) % 2, each, 40, seed=3)
        batch = each.sample(60)
        batch = batch[~batch.terminated]
        ways = {name: [batch[f"{name}.{part}"] for part in (cart, pole)] for name in ("obs", "next_obs")}
        joined = {name: torch.cat(each, 1) for name, each in ways.items()}
        check_physics(type(batch)(joined | {name: batch[name] for name in ("action", "reward", "terminated")}))
