"""Stable-Baselines3's algorithms on our buffers: what they are given is what its own buffers give, and losses weigh.

`python -m pytest --full -rP -k learns tests/programs/test_integrations_sb3.py` prints the returns of its page.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, in the extra `integrations`")

from gymnasium import spaces  # noqa: E402
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer  # noqa: E402
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv, SimpleMultiObsEnv  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer  # noqa: E402

from gpu_replay import Proportional, TrajectoryReplayBuffer  # noqa: E402
from gpu_replay.integrations.sb3 import (  # noqa: E402
    PrioritizedDDPG,
    PrioritizedDQN,
    PrioritizedSAC,
    PrioritizedTD3,
    SB3HerReplayBuffer,
    SB3ReplayBuffer,
)

SMALL: dict[str, Any] = {"learning_starts": 20, "buffer_size": 200, "batch_size": 8, "device": "cpu", "seed": 0}
BOX, ENVS = spaces.Box(-9, 9, (2,), np.float64), 3


def small(kind: Any, env: str, replay: dict[str, Any], **more: Any) -> Any:
    """A model with a tiny network and these `replay_buffer_kwargs`."""
    return kind("MlpPolicy", env, replay_buffer_kwargs=replay, policy_kwargs={"net_arch": [8]}, **SMALL | more)


def play(buffers: list[Any], steps: int, space: Any = BOX, gymnasium_infos: bool = False, endings: float = 0.2) -> None:
    """Store the same random steps, whose rows have numbers of their own, in several buffers.

    gymnasium_infos: one dictionary of all environments instead of one of each.
    endings: share of done steps; half of them end by a time limit, and so do half as many of the others.
    """
    generator = np.random.default_rng(0)

    def observed(first: float) -> Any:
        rows = (np.arange(2 * ENVS).reshape(ENVS, 2) + first) / 1024
        return {"a": rows, "b": np.arange(ENVS) % 4} if isinstance(space, spaces.Dict) else rows

    for step in range(steps):
        done = generator.random(ENVS) < endings
        limits = generator.random(ENVS) < np.where(done, 0.5, endings / 2)
        infos: Any = [{"TimeLimit.truncated": bool(limit)} for limit in limits]
        infos = {} if gymnasium_infos else infos
        arguments = (np.arange(ENVS)[:, None] % 2, generator.normal(size=ENVS).astype(np.float32), done, infos)
        for buffer in buffers:
            # as everywhere in it, the last observation of an episode is none of the next one
            buffer.add(observed(10 * step), observed(10 * step + 10), *arguments)


def rest(envs: int, **other: Any) -> dict[str, Any]:
    """What `add` takes beside observations, for a step that ends nothing."""
    plain = {"action": np.zeros(envs, int), "reward": np.ones(envs), "done": np.zeros(envs, bool), "infos": [{}] * envs}
    return plain | other


def test_n_step_returns_are_those_of_its_own_buffer() -> None:
    arguments: Any = (60, BOX, spaces.Discrete(2), "cpu", ENVS)
    ours, theirs = (kind(*arguments, n_steps=3, gamma=0.9) for kind in (SB3ReplayBuffer, NStepReplayBuffer))
    assert (ours.n_steps, ours.gamma) == (theirs.n_steps, theirs.gamma) == (3, 0.9)
    for name in ("n_steps", "gamma"):
        with pytest.raises(AttributeError):
            setattr(ours, name, 2)
    play([ours, theirs], 17)
    assert isinstance(ours.storage, TrajectoryReplayBuffer)
    assert (len(ours.storage), ours.size()) == (51, 17)
    # its method draws the environment itself
    all_of = {step: theirs._get_samples(np.full(40, step)) for step in range(17)}
    found = ours.sample(200)
    for row, key in enumerate(ours._keys.tolist()):
        wanted = all_of[key // ENVS]
        other = int((wanted.observations[:, 0] == found.observations[row, 0].double()).nonzero()[0, 0])
        assert found.dones[row] == wanted.dones[other]
        torch.testing.assert_close(found.rewards[row], wanted.rewards[other])
        if not found.dones[row]:
            torch.testing.assert_close(found.discounts[row], wanted.discounts[other])
        torch.testing.assert_close(found.next_observations[row], wanted.next_observations[other].float())
    assert len(set(ours._keys.tolist())) > 40


DICT = spaces.Dict({"a": BOX, "b": spaces.Discrete(4)})
# as CleanRL's dqn.py, c51.py, sac_continuous_action.py and td3_continuous_action.py have it
OF_CLEANRL = {"handle_timeout_termination": False}


CASES = [(DictReplayBuffer, DICT, spaces.Discrete(2), {})]
CASES += [(PlainReplayBuffer, BOX, action, OF_CLEANRL) for action in (spaces.Discrete(2), spaces.Box(-1, 1, (1,)))]


@pytest.mark.parametrize("theirs, space, action, more", CASES)
def test_single_steps_are_those_of_its_own_buffer(theirs: Any, space: Any, action: Any, more: dict[str, Any]) -> None:
    buffers = [kind(60, space, action, torch.device("cpu"), ENVS, **more) for kind in (SB3ReplayBuffer, theirs)]
    play(buffers, 9, space, gymnasium_infos=bool(more))
    ours, theirs = buffers
    found = ours.sample(64)
    at = tuple(np.divmod(ours._keys.numpy(), ENVS))
    over = theirs.dones * (1 - theirs.timeouts)
    live = np.ones(64, bool) if isinstance(space, spaces.Dict) else found.dones[:, 0].numpy() == 0

    def same(one: Any, other: Any, rows: Any = slice(None)) -> None:
        if isinstance(one, dict):
            assert all(one[name][rows].tolist() == other[name][at][rows].tolist() for name in ("a", "b"))
        else:
            np.testing.assert_allclose(one[rows].reshape(other[at][rows].shape), other[at][rows])

    same(found.observations, theirs.observations)
    same(found.next_observations, theirs.next_observations, live)
    for one, other in ((found.actions, theirs.actions), (found.rewards, theirs.rewards), (found.dones, over)):
        same(one, other)
    # as q_network(data.observations).gather(1, data.actions) asks for
    assert found.actions.dtype == (torch.int64 if isinstance(action, spaces.Discrete) else torch.float32)
    assert found.discounts is None


PICTURE, THREE, FOUR = spaces.Box(0, 255, (3, 40, 36), np.uint8), spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2, 2))
WRONG: dict[str, tuple[spaces.Space[Any], int, tuple[int, ...]]] = {
    "HWC for CHW": (PICTURE, 1, (1, 40, 36, 3)),
    "flat for an image": (PICTURE, 1, (1, 3 * 40 * 36)),
    "(3, 2) for 2 of 3": (THREE, 2, (3, 2)),
    "(1, 6) for 2 of 3": (THREE, 2, (1, 6)),
    "(2, 4) for 2 of (2, 2)": (FOUR, 2, (2, 4)),
    "3 numbers for 2": (spaces.Discrete(4), 2, (3,)),
}


@pytest.mark.parametrize("name", ["obs", "next_obs"])
@pytest.mark.parametrize("part", [None, "part"])
@pytest.mark.parametrize("wrong", WRONG)
def test_observations_of_another_shape_are_refused_as_there(wrong: str, part: str | None, name: str) -> None:
    space, envs, shape = WRONG[wrong]
    right = np.zeros((envs, *(space.shape or ())), space.dtype)
    given: dict[str, Any] = {"obs": right, "next_obs": right} | {name: np.zeros(shape, space.dtype)}
    given = {each: {part: value} for each, value in given.items()} if part else given
    arguments: Any = (60, spaces.Dict({part: space}) if part else space, spaces.Discrete(2), "cpu", envs)
    with pytest.raises(ValueError):
        (DictReplayBuffer if part else PlainReplayBuffer)(*arguments).add(**given, **rest(envs))
    ours = SB3ReplayBuffer(*arguments, n_steps=3 if part else 1, gamma=0.9)
    with pytest.raises(ValueError, match="layout") as refused:
        ours.add(**given, **rest(envs))
    expected = [envs, *(space.shape or (1,))]
    assert f"needs {name}{f'.{part}' if part else ''} of shape {expected} " in str(refused.value)
    assert f"found {list(shape)}" in str(refused.value)
    assert (ours.size(), len(ours.storage)) == (0, 0)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_discrete_observations_come_with_or_without_an_axis(shape: tuple[int, ...]) -> None:
    buffer = SB3ReplayBuffer(60, spaces.Discrete(4), spaces.Discrete(2), "cpu", 2)
    buffer.add(np.array([1, 2]).reshape(shape), np.array([3, 0]).reshape(shape), **rest(2))
    assert buffer.storage[[0, 1]].next_obs.tolist() == [[3], [0]]


@pytest.mark.parametrize("in_place, number", [(True, 0.0), (False, np.nan)], ids=["written in place", "NaN"])
def test_steps_follow_each_other_whatever_brings_their_observations(in_place: bool, number: float) -> None:
    buffer = SB3ReplayBuffer(60, DICT, spaces.Discrete(2), "cpu", 1, n_steps=3, gamma=0.99)
    last = {"a": np.array([[0.0, number]]), "b": np.zeros(1, int)}
    for step in range(8):
        obs = {name: value.copy() for name, value in last.items()}
        last = last if in_place else {name: value.copy() for name, value in last.items()}
        last["a"][:, 0], last["b"][:] = step + 1, (step + 1) % 4
        buffer.add(obs, last, **rest(1))
    assert sorted(set(buffer.storage.sample(200).key.tolist())) == [0, 1, 2, 3, 4]


def test_steps_that_never_follow_each_other_say_so() -> None:
    buffer, row = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", 1, n_steps=3, gamma=0.9), np.ones((1, 2))
    with pytest.raises(RuntimeError, match="Add more first"):
        buffer.sample(4)
    for step in range(31):
        buffer.add(row * step, row * step, **rest(1))
    with pytest.raises(RuntimeError, match=r"sample\(4\) needs 3 steps.*of the 31 stored.*obs equals the next_obs"):
        buffer.sample(4)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_first_steps_are_sampled_as_those_of_its_own_buffer(steps: int) -> None:
    ours = SB3ReplayBuffer(60, DICT, spaces.Discrete(2), "cpu", ENVS, sampler=Proportional(), n_steps=3, gamma=0.9)
    theirs = NStepReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", ENVS, n_steps=3, gamma=0.9)
    play([ours], steps, DICT, endings=0.0)
    play([theirs], steps, endings=0.0)
    # its method draws the environment itself
    wanted, found = theirs._get_samples(np.full(80, steps - 1)), ours.sample(2 * ENVS)
    rows = found.observations["a"]
    assert len(rows.unique(dim=0)) == ENVS
    others = [int((wanted.observations[:, 0] == row[0].double()).nonzero()[0, 0]) for row in rows]
    torch.testing.assert_close(found.next_observations["a"], wanted.next_observations[others].float())
    for name in ("actions", "rewards", "discounts", "dones"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name)[others])
    ours.errors.append(torch.full((2 * ENVS, 1), 7.0))
    ours.feed_back()
    assert ours.storage.priorities(ours._keys).tolist() == pytest.approx([7.0] * 2 * ENVS)


OURS = {sb3.DQN: PrioritizedDQN, sb3.SAC: PrioritizedSAC, sb3.TD3: PrioritizedTD3, sb3.DDPG: PrioritizedDDPG}


@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("plain", OURS)
def test_learning_can_start_with_the_first_step(plain: Any, prioritized: bool) -> None:
    env = "CartPole-v1" if plain is sb3.DQN else "Pendulum-v1"
    eager: dict[str, Any] = {"learning_starts": 0, "train_freq": 1}
    its_own = small(plain, env, {}, n_steps=3, **eager)
    if prioritized:
        model = small(OURS[plain], env, {}, n_steps=3, **eager)
    else:
        model = small(plain, env, {"n_steps": 3, "gamma": 0.99}, replay_buffer_class=SB3ReplayBuffer, **eager)
    for each in (its_own, model):
        # the second call resets the environment before there are three steps in a row
        each.learn(2)
        each.learn(8)
    assert model._n_updates == its_own._n_updates == 10
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())


def test_a_buffer_of_two_environments_does_not_go_on_with_one(tmp_path: Path) -> None:
    one, two = (
        small(sb3.DQN, make_vec_env("CartPole-v1", envs), {}, replay_buffer_class=SB3ReplayBuffer) for envs in (1, 2)
    )
    two.learn(40)
    two.save_replay_buffer(tmp_path / "buffer.pkl")
    one.load_replay_buffer(tmp_path / "buffer.pkl")
    with pytest.raises(ValueError, match=r"2 environments \(n_envs\).*found 1\. Load .* as many environments"):
        one.learn(40)
    assert one.replay_buffer.size() == 20


def test_a_reset_between_two_calls_of_learn_ends_what_was_open() -> None:
    buffer = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", 1, n_steps=3, gamma=0.99)
    rows = np.arange(24, dtype=np.float64).reshape(12, 1, 2)
    for step in (*range(5), *range(6, 11)):
        buffer.add(rows[step], rows[step + 1], **rest(1))
    # windows of three steps and the observation after them: two in each part
    assert sorted(set(buffer.storage.sample(200).key.tolist())) == [0, 1, 5, 6]


@pytest.mark.parametrize("kind, factor", [(PrioritizedSAC, 0.5), (PrioritizedTD3, 1.0), (PrioritizedDDPG, 1.0)])
def test_critics_weigh_their_losses_and_feed_their_errors_back(kind: Any, factor: float) -> None:
    kwargs = {"sampler": Proportional(1.0, beta=0.7, eps=0.0)}
    model = small(kind, "Pendulum-v1", kwargs)
    model.learn(40)
    seen: dict[str, Any] = {}

    def keep(_: Any, args: Any, values: Any) -> None:
        if args[1] is model.replay_buffer.drawn.actions:
            seen["critic"] = [each.detach() for each in values]

    def keep_target(_: Any, __: Any, values: Any) -> None:
        seen["target"] = torch.cat(values, 1).min(1, keepdim=True).values

    model.critic.register_forward_hook(keep)
    model.critic_target.register_forward_hook(keep_target)
    if kind is PrioritizedSAC:
        # what remains of the target is then the discounted value alone
        model.ent_coef_optimizer, model.ent_coef_tensor = None, torch.zeros(1)
    critic, gradients = list(model.critic.parameters()), []
    # one more batch, which the network does not follow
    model.critic.optimizer.step = lambda: gradients.extend(each.grad.clone() for each in critic)
    model.train(1, 8)
    buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
    target = drawn.rewards + (1 - drawn.dones) * model.gamma * seen["target"]
    # a copy, which the hooks do not know
    values = model.critic(drawn.observations, drawn.actions.clone())
    loss = factor * sum((buffer.weight * (value - target) ** 2).mean() for value in values)
    errors = torch.cat([(value - target).abs() for value in seen["critic"]], 1).mean(1)
    torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, critic)))
    # the errors of the batch have become priorities
    last = dict(zip(buffer._keys.tolist(), errors.tolist(), strict=True))
    assert buffer.storage.priorities(list(last)).tolist() == pytest.approx(list(last.values()), abs=1e-5)


@pytest.mark.parametrize("kind", OURS.values())
def test_the_buffer_has_the_steps_the_gamma_and_the_seed_of_its_algorithm(kind: Any) -> None:
    env = "CartPole-v1" if kind is PrioritizedDQN else "Pendulum-v1"
    model = small(kind, env, {}, n_steps=3, gamma=0.5, seed=7)
    model.learn(40)
    storage = model.replay_buffer.storage
    assert (model.n_steps, model.replay_buffer.n_steps, storage.gamma, storage.seed) == (3, 3, 0.5, 7)
    single = torch.cat([batch.reward for batch in storage.batches(100)])
    found = model.replay_buffer.sample(100)
    whole = found.discounts[:, 0] == 0.125
    key = model.replay_buffer._keys[whole]
    assert whole.sum() > 50
    torch.testing.assert_close(found.rewards[whole, 0], single[key] + 0.5 * single[key + 1] + 0.25 * single[key + 2])


def test_the_lines_of_cleanrl_on_the_page_run_before_and_after() -> None:
    """Its own lines with the buffer of Stable-Baselines3, those with ours, and with the one line that is swapped."""
    page = (Path(__file__).resolve().parents[2] / "gpu_replay" / "integrations" / "README.md").read_text()
    swap, lines = (match.splitlines() for match in re.findall(r"```diff\n(.*?)```", page, re.DOTALL))
    assert sum(line.startswith("+") for line in lines) == 11
    assert swap[0] == lines[0]
    before = [line[1:] for line in lines[1:] if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    its_own = "from stable_baselines3.common.buffers import ReplayBuffer"
    envs = gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="sync")
    known: dict[str, Any] = {"envs": envs, "obs": envs.reset(seed=0)[0], "actions": np.array([1]), "torch": torch}
    step = zip(("real_next_obs", "rewards", "terminations", "_", "infos"), envs.step(known["actions"]), strict=True)
    known |= dict(step) | {"F": torch.nn.functional, "device": torch.device("cpu")}
    known["args"] = argparse.Namespace(buffer_size=50, batch_size=8, gamma=0.99, seed=0)
    losses = []
    for source in ([its_own, *before], [swap[1][1:], *before], after):
        torch.manual_seed(0)
        names = {"q_network": torch.nn.Linear(4, 2), "target_network": torch.nn.Linear(4, 2), **known}
        exec("\n".join(source), names)
        losses.append(names["loss"].item())
    # all draw the one row that there is
    assert losses == pytest.approx([losses[0]] * 3)
    assert names["rb"].stats().max_priority != 1.0


def test_a_saved_buffer_goes_on(tmp_path: Path) -> None:
    # said to the buffer alone
    model = small(PrioritizedDQN, "CartPole-v1", {"n_steps": 3})
    model.learn(40)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.save(tmp_path / "model.zip")
    loaded = PrioritizedDQN.load(tmp_path / "model.zip", env=model.get_env())
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    assert loaded.replay_buffer.size() == model.replay_buffer.size() == 40
    one, other = (each.replay_buffer.sample(16) for each in (model, loaded))
    assert torch.equal(one.observations, other.observations)
    # a model that is loaded with another gamma has a buffer of that
    assert PrioritizedDQN.load(tmp_path / "model.zip", gamma=0.8).replay_buffer.storage.gamma == 0.8
    loaded.learn(12, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 52
    assert loaded.replay_buffer.storage.stats().max_priority != 1.0


def test_dictionaries_and_normalized_environments_are_learned_from() -> None:
    games = make_vec_env(SimpleMultiObsEnv, n_envs=2, env_kwargs={"channel_last": False})
    env = VecNormalize(games, norm_obs_keys=["vec"])
    model = sb3.DQN("MultiInputPolicy", env, replay_buffer_class=SB3ReplayBuffer, **SMALL)
    model.learn(30)
    batch = model.replay_buffer.sample(8, env)
    plain = model.replay_buffer.storage[model.replay_buffer._keys]
    assert set(batch.observations) == {"img", "vec"}
    wanted = env.normalize_obs({name: plain["obs"][name].numpy() for name in ("img", "vec")})
    assert np.allclose(batch.observations["vec"].numpy(), wanted["vec"])
    assert np.allclose(batch.rewards[:, 0].numpy(), env.normalize_reward(plain.reward.numpy()))


def test_sums_of_rewards_are_normalized_as_those_of_its_own_buffer() -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 1), norm_obs=False, clip_reward=1.5)
    env.ret_rms.var = np.float64(0.5)
    arguments: Any = (60, BOX, spaces.Discrete(2), "cpu", 1)
    ours, theirs = (kind(*arguments, n_steps=3, gamma=0.9) for kind in (SB3ReplayBuffer, NStepReplayBuffer))
    row = np.ones((1, 2))
    for buffer in (ours, theirs):
        for _ in range(6):
            buffer.add(row, row, **rest(1))
    wanted = theirs._get_samples(np.zeros(1, int), env).rewards
    # a single step is within the bound, the sum of three is not
    assert wanted.item() > 3
    torch.testing.assert_close(ours.sample(1, env).rewards, wanted)


def test_what_cannot_be_says_what_to_do() -> None:
    """Settings that contradict the algorithm or that a buffer lacks, and infos of Gymnasium where they must be read."""
    # said twice is no contradiction
    assert small(PrioritizedTD3, "Pendulum-v1", {"n_steps": 3}, n_steps=3).replay_buffer is not None
    ours, other = {"replay_buffer_class": SB3ReplayBuffer}, {"replay_buffer_class": DictReplayBuffer}
    for kind, replay, more, error, message in (
        (PrioritizedTD3, {"gamma": 0.99}, {"gamma": 0.9}, ValueError, "gamma=0.9.*gamma=0.99.*to the algorithm alone"),
        (sb3.SAC, {"n_steps": 3}, ours, ValueError, r"n_steps=3.*gamma of the algorithm"),
        (sb3.DQN, {}, ours | {"optimize_memory_usage": True}, ValueError, "optimize_memory_usage=False"),
        (PrioritizedDQN, {}, other, TypeError, "replay_buffer_class=SB3ReplayBuffer.*DictReplayBuffer"),
    ):
        with pytest.raises(error, match=message):
            small(kind, "CartPole-v1" if "DQN" in kind.__name__ else "Pendulum-v1", replay, **more)
    buffer, row = SB3ReplayBuffer(60, BOX, spaces.Box(-1, 1, (3,)), "cpu", 2), np.zeros((2, 2))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"infos": {"episode": {}}}, TypeError, r"list of infos.*handle_timeout_termination=False"),
        ({"infos": [{}] * 3}, ValueError, "infos of the 2 environments.*found 3"),
        ({"done": np.zeros((2, 1), bool)}, ValueError, r"needs done of shape \[2\].*found \[2, 1\]"),
        ({"reward": 1.0}, ValueError, r"needs reward of shape \[2\].*found \[\]"),
        ({"action": np.zeros((3, 2))}, ValueError, r"needs action of shape \[2, 3\].*found \[3, 2\]"),
        ({"obs": {"a": row}}, KeyError, r"needs obs with obs; found obs\.a"),
    ]
    for other, error, message in refused:
        with pytest.raises(error, match=message):
            buffer.add(**{"obs": row, "next_obs": row, **rest(2, action=np.zeros((2, 3))), **other})
    assert buffer.size() == 0
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        with pytest.raises(AttributeError, match=rf"no array '{name}'.*sample.*storage\.batches.*storage\[keys\]"):
            getattr(buffer, name)
    with pytest.raises(AttributeError, match=r"no array 'next_observations'"):
        buffer._get_samples(np.zeros(1, int))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        buffer.other  # noqa: B018


GOALS = spaces.Dict({name: spaces.Box(-9, 9, (2,)) for name in ("observation", "achieved_goal", "desired_goal")})


class Rewarding:
    """The part of a vector environment that buffers ask for rewards: minus the distance in the first number."""

    def env_method(self, name: str, achieved: np.ndarray, desired: np.ndarray, infos: Any, indices: Any) -> list[Any]:
        assert (name, len(infos), indices) == ("compute_reward", len(achieved), [0])
        return [-np.abs(achieved[:, 0] - desired[:, 0])]


def goal_steps(count: int, length: int = 7) -> list[dict[str, Any]]:
    """Steps of 2 environments: the achieved goal is (step, environment), the desired one (-1, the episode's number).

    Episodes end with every `length`-th step, by turns in a time limit.
    """

    def observed(step: int, episode: int) -> dict[str, np.ndarray]:
        achieved = np.array([[step / 64, env] for env in range(2)])
        return {"observation": achieved * 2, "achieved_goal": achieved, "desired_goal": np.full((2, 2), -1 - episode)}

    found = []
    for step in range(count):
        episode, over = step // length, step % length == length - 1
        infos = [{"TimeLimit.truncated": over and episode % 2 == 1}] * 2
        given = {"obs": observed(step, episode), "next_obs": observed(step + 1, episode), "infos": infos}
        found.append(rest(2, done=np.full(2, over), **given))
    return found


def of_goals(kind: Any, steps: int, **more: Any) -> Any:
    return kind(2 * steps, GOALS, spaces.Discrete(2), Rewarding(), "cpu", 2, **more)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("count", [35, 98], ids=["not full", "full"])
@pytest.mark.parametrize("kind", [SB3HerReplayBuffer, HerReplayBuffer])
def test_goals_are_rewritten_by_the_rule_of_its_own_buffer(kind: Any, count: int, strategy: str) -> None:
    buffer = of_goals(kind, 49, n_sampled_goal=3, goal_selection_strategy=strategy)
    for step in goal_steps(count):
        buffer.add(**step)
    np.random.seed(0)  # noqa: NPY002 (its own generator)
    found = buffer.sample(400)
    given, after = found.observations, found.next_observations
    step = (given["achieved_goal"][:, 0] * 64).round().long()
    env, episode, goal = given["achieved_goal"][:, 1], step // 7, given["desired_goal"]
    rewritten = goal[:, 0] >= 0
    assert rewritten.sum() == 300
    assert goal[~rewritten, 0].tolist() == (-1.0 - episode[~rewritten]).tolist()
    assert torch.equal(after["desired_goal"], goal)
    torch.testing.assert_close(after["achieved_goal"][:, 0] * 64, step + 1.0)
    # what was achieved after a step of the episode
    of = (goal[:, 0] * 64).round().long()[rewritten] - 1
    assert goal[rewritten, 1].tolist() == env[rewritten].tolist()
    assert (of // 7).tolist() == episode[rewritten].tolist()
    last = step[rewritten] // 7 * 7 + 6
    wanted = {"future": of >= step[rewritten], "final": of == last, "episode": of <= last}[strategy]
    assert bool(wanted.all())
    assert strategy == "final" or bool((of != last).any() and (of != step[rewritten]).any())
    distance = -(after["achieved_goal"][:, 0] - goal[:, 0]).abs()
    torch.testing.assert_close(found.rewards[:, 0], torch.where(rewritten, distance, 1.0))
    assert found.dones[:, 0].tolist() == ((step % 7 == 6) & (episode % 2 == 0)).float().tolist()
    # the final observation of an episode that a time limit ended is there
    assert bool(((step % 7 == 6) & (episode % 2 == 1)).any())
    assert step.min() >= count - 49
    assert len(step.unique()) > 30


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_is_learned_with_and_goes_on_from_a_file(strategy: str, tmp_path: Path) -> None:
    games = {"n_bits": 4, "continuous": True, "max_steps": 4}
    env = VecNormalize(make_vec_env(BitFlippingEnv, 2, env_kwargs=games), norm_obs=False)
    kwargs = {"n_sampled_goal": 4, "goal_selection_strategy": strategy}
    settings: dict[str, Any] = {"replay_buffer_class": SB3HerReplayBuffer, "policy_kwargs": {"net_arch": [8]}, **SMALL}
    model = sb3.SAC("MultiInputPolicy", env, replay_buffer_kwargs=kwargs, **settings)
    model.learn(60)
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    other = sb3.SAC("MultiInputPolicy", env, replay_buffer_kwargs=kwargs, **settings)
    other.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=False)
    ours, theirs = model.replay_buffer.sample(64), other.replay_buffer.sample(64)
    assert torch.equal(ours.rewards, theirs.rewards)
    assert torch.equal(ours.observations["desired_goal"], theirs.observations["desired_goal"])
    other.learn(20, reset_num_timesteps=False)
    with pytest.raises(ValueError, match="already initialized"):
        other.replay_buffer.set_env(env)


@pytest.mark.filterwarnings("ignore:The last trajectory")
@pytest.mark.parametrize("cut", [True, False])
def test_running_episodes_end_in_a_loaded_buffer_if_they_are_cut(cut: bool, tmp_path: Path) -> None:
    games = {"n_bits": 30, "continuous": False, "max_steps": 10}
    settings: dict[str, Any] = {"replay_buffer_class": SB3HerReplayBuffer, "policy_kwargs": {"net_arch": [8]}, **SMALL}
    model = sb3.DQN("MultiInputPolicy", make_vec_env(BitFlippingEnv, 1, env_kwargs=games), **settings)
    model.learn(24)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=cut)
    buffer, storage = model.replay_buffer, model.replay_buffer.storage
    # goes on from the last observation of step 23
    last = {name: buffer._next_obs[f"obs.{name}"] for name in model.observation_space.spaces}
    assert bool(buffer._goes_on.any()) != cut
    buffer.add(last, last, **rest(1))
    buffer.add(last, last, **rest(1))
    keys = set(storage.sample(2000).key.tolist())
    assert keys == set(range(25)) - ({23} if cut else set())


def test_hindsight_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not store infos"):
        of_goals(SB3HerReplayBuffer, 10, copy_info_dict=True)
    with pytest.raises(ValueError, match="strategy"):
        of_goals(SB3HerReplayBuffer, 10, goal_selection_strategy="past")
    with pytest.raises(ValueError, match="n_step=1"):
        of_goals(SB3HerReplayBuffer, 10, n_steps=3, gamma=0.9)
    buffer = of_goals(SB3HerReplayBuffer, 10)
    for step in goal_steps(10):
        buffer.add(**step)
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    loaded = load_from_pkl(tmp_path / "buffer.pkl")
    with pytest.raises(RuntimeError, match="without environments.*set_env"):
        loaded.sample(4)
    loaded.set_env(Rewarding())
    loaded.sample(4)
    with pytest.warns(UserWarning, match="will be truncated.*truncate_last_traj=False"):
        loaded.truncate_last_trajectory()
    # those that ended already
    loaded.truncate_last_trajectory()


# the returns that gpu_replay/integrations/README.md records

PRIORITIZED = {"replay_buffer_kwargs": {"sampler": Proportional(alpha=0.6, beta=0.4)}}
# the settings that Stable-Baselines3's own zoo has for CartPole
CARTPOLE: dict[str, Any] = {"learning_rate": 2.3e-3, "batch_size": 64, "learning_starts": 1_000}
CARTPOLE |= {"target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16}
CARTPOLE |= {"exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]}}
PENDULUM = {"learning_rate": 1e-3, "learning_starts": 500}
RUNS: dict[str, tuple[Any, str, int, dict[str, Any], float]] = {
    "PrioritizedDQN": (PrioritizedDQN, "CartPole-v1", 50_000, CARTPOLE | PRIORITIZED, 475),
    "PrioritizedSAC": (PrioritizedSAC, "Pendulum-v1", 6_000, PENDULUM | PRIORITIZED, -200),
    "PrioritizedTD3": (PrioritizedTD3, "Pendulum-v1", 12_000, PENDULUM | PRIORITIZED, -200),
    "SAC": (sb3.SAC, "Pendulum-v1", 6_000, PENDULUM | {"replay_buffer_class": SB3ReplayBuffer}, -200),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SB3HerReplayBuffer, HerReplayBuffer])
def test_hindsight_reaches_goals_as_often_as_its_own_buffer(kind: Any) -> None:
    """Ten bits, of which one is flipped in a step: without hindsight no reward is ever seen."""
    games: dict[str, Any] = {"n_bits": 10, "continuous": False, "max_steps": 10}
    settings: dict[str, Any] = {"learning_starts": 500, "learning_rate": 1e-3, "train_freq": 4, "gradient_steps": 4}
    settings |= {"batch_size": 128, "exploration_fraction": 0.4, "exploration_final_eps": 0.05, "gamma": 0.95}
    settings |= {"target_update_interval": 200, "policy_kwargs": {"net_arch": [128]}, "buffer_size": 50_000}
    env, began = make_vec_env(BitFlippingEnv, 1, env_kwargs=games), time.perf_counter()
    model = sb3.DQN("MultiInputPolicy", env, replay_buffer_class=kind, seed=0, device="cpu", **settings)
    model.learn(12_000)
    seconds = time.perf_counter() - began
    _, lengths = evaluate_policy(
        model, make_vec_env(BitFlippingEnv, 1, env_kwargs=games), 200, return_episode_rewards=True
    )
    # an episode that is not cut ends where the goal is reached
    reached = float(np.mean(np.array(lengths) < 10))
    print(f"{kind.__name__}, 10 bits: {reached:.2f} of 200 goals reached after 12,000 steps, {seconds:.0f} s")
    assert reached >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_learns(name: str) -> None:
    kind, env, steps, settings, bar = RUNS[name]
    began = time.perf_counter()
    model = kind("MlpPolicy", env, seed=0, device="cpu", buffer_size=50_000, **settings)
    model.learn(steps)
    seconds = time.perf_counter() - began
    mean, deviation = evaluate_policy(model, make_vec_env(env, 4, seed=1_000), n_eval_episodes=100)
    print(f"{name}, {env}: {mean:.1f} ± {deviation:.1f} over 100 episodes after {steps:,} steps, {seconds:.0f} s")
    assert mean >= bar
