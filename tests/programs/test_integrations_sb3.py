"""Stable-Baselines3's algorithms on our buffers: what they are given is what its own buffers give, and losses weigh."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dqn_update import weighted_huber

gymnasium = pytest.importorskip("gymnasium")
sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, in the extra `integrations`")

from gymnasium import spaces  # noqa: E402
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer  # noqa: E402
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import SimpleMultiObsEnv  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

from gpu_replay import Proportional, TrajectoryReplayBuffer  # noqa: E402
from gpu_replay.integrations.sb3 import (  # noqa: E402
    PrioritizedDQN,
    PrioritizedSAC,
    PrioritizedTD3,
    SB3ReplayBuffer,
)

SMALL: dict[str, Any] = {"learning_starts": 20, "buffer_size": 200, "batch_size": 8, "device": "cpu", "seed": 0}
BOX, ENVS = spaces.Box(-9, 9, (2,), np.float64), 3


def small(kind: Any, env: str, replay: dict[str, Any], **more: Any) -> Any:
    """A model with a tiny network and these `replay_buffer_kwargs`."""
    return kind("MlpPolicy", env, replay_buffer_kwargs=replay, policy_kwargs={"net_arch": [8]}, **SMALL | more)


def play(buffers: list[Any], steps: int, space: spaces.Space[Any] = BOX) -> None:
    """Store the same random steps, whose rows have numbers of their own, in several buffers."""
    generator = np.random.default_rng(0)

    def observed(first: int) -> Any:
        rows = (np.arange(2 * ENVS).reshape(ENVS, 2) + first) / 1024
        return {"a": rows, "b": np.arange(ENVS) % 4} if isinstance(space, spaces.Dict) else rows

    for step in range(steps):
        done = generator.random(ENVS) < 0.2
        infos = [{"TimeLimit.truncated": bool(ended and generator.random() < 0.5)} for ended in done]
        arguments = (np.arange(ENVS) % 2, generator.normal(size=ENVS).astype(np.float32), done, infos)
        for buffer in buffers:
            # the next observation is the last one of the episode where that ended
            following = observed(10 * step + 10)
            if not isinstance(following, dict):
                following[done] += 0.5
            buffer.add(observed(10 * step), following, *arguments)


def test_n_step_returns_are_those_of_its_own_buffer() -> None:
    arguments: Any = (60, BOX, spaces.Discrete(2), "cpu", ENVS)
    ours, theirs = (kind(*arguments, n_steps=3, gamma=0.9) for kind in (SB3ReplayBuffer, NStepReplayBuffer))
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


def test_single_steps_and_dictionaries_are_those_of_its_own_buffer() -> None:
    space = spaces.Dict({"a": BOX, "b": spaces.Discrete(4)})
    arguments: Any = (60, space, spaces.Discrete(2), "cpu", ENVS)
    ours, theirs = SB3ReplayBuffer(*arguments), DictReplayBuffer(*arguments)
    play([ours, theirs], 9, space)
    found = ours.sample(64)
    for row, key in enumerate(ours._keys.tolist()):
        step, env = divmod(key, ENVS)
        for name in ("a", "b"):
            for kind in ("observations", "next_observations"):
                assert getattr(found, kind)[name][row].tolist() == getattr(theirs, kind)[name][step, env].tolist()
        assert found.dones[row] == theirs.dones[step, env] * (1 - theirs.timeouts[step, env])
        assert found.rewards[row] == theirs.rewards[step, env]
        assert found.actions[row].tolist() == theirs.actions[step, env].tolist()
    assert found.discounts is None


def test_a_reset_between_two_calls_of_learn_ends_what_was_open() -> None:
    buffer = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", 1, n_steps=3, gamma=0.99)
    rows = np.arange(24, dtype=np.float64).reshape(12, 1, 2)
    for begin in (0, 6):
        for step in range(begin, begin + 5):
            buffer.add(rows[step], rows[step + 1], np.zeros(1, int), np.ones(1), np.zeros(1, bool), [{}])
    assert isinstance(buffer.storage, TrajectoryReplayBuffer)
    # windows of three steps and the observation after them: two in each part
    assert sorted(set(buffer.storage.sample(200).key.tolist())) == [0, 1, 5, 6]


def trained(model: Any, optimizer: Any, network: Any) -> list[torch.Tensor]:
    """Gradients of one more batch, which the network does not follow."""
    gradients: list[torch.Tensor] = []
    optimizer.step = lambda: gradients.extend(each.grad.clone() for each in network.parameters())
    model.train(1, 8)
    del optimizer.step
    return gradients


def check_learned(model: Any, network: Any, gradients: list[torch.Tensor], loss: Any, errors: torch.Tensor) -> None:
    """The gradients were those of the loss, and the errors of the batch have become priorities."""
    torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, list(network.parameters()))))
    last = dict(zip(model.replay_buffer._keys.tolist(), errors.tolist(), strict=True))
    found = model.replay_buffer.storage.priorities(torch.tensor(list(last)))
    assert found.tolist() == pytest.approx(list(last.values()), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"n_steps": 3, "gamma": 0.9}], ids=["1 step", "3 steps"])
def test_dqn_weighs_its_loss_and_feeds_its_errors_back(settings: dict[str, Any]) -> None:
    kwargs = {"sampler": Proportional(1.0, beta=0.7, eps=0.0)}
    model = small(PrioritizedDQN, "CartPole-v1", kwargs, max_grad_norm=1e9, **settings)
    model.learn(60)
    gradients = trained(model, model.policy.optimizer, model.q_net)
    buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
    # a copy, which the hooks do not know
    values, following = model.q_net(drawn.observations.clone()), model.q_net_target(drawn.next_observations)
    discount = (1 - drawn.dones) * (model.gamma if drawn.discounts is None else drawn.discounts)
    rest = (each[:, 0] for each in (drawn.actions, drawn.rewards, discount, buffer.weight))
    loss, error = weighted_huber(values, following, following.argmax(1), *rest)
    assert buffer.weight.unique().numel() > 1
    check_learned(model, model.q_net, gradients, loss, error.abs())


@pytest.mark.parametrize("kind, factor", [(PrioritizedSAC, 0.5), (PrioritizedTD3, 1.0)])
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
    before = {name: value.clone() for name, value in model.critic.state_dict().items()}
    gradients = trained(model, model.critic.optimizer, model.critic)
    buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
    target = drawn.rewards + (1 - drawn.dones) * model.gamma * seen["target"]
    model.critic.load_state_dict(before)
    # a copy, which the hooks do not know
    values = model.critic(drawn.observations, drawn.actions.clone())
    loss = factor * sum((buffer.weight * (value - target) ** 2).mean() for value in values)
    errors = torch.cat([(value - target).abs() for value in seen["critic"]], 1).mean(1)
    check_learned(model, model.critic, gradients, loss, errors)


@pytest.mark.parametrize("place", ["algorithm", "replay_buffer_kwargs"])
@pytest.mark.parametrize("kind", [PrioritizedDQN, PrioritizedSAC, PrioritizedTD3])
def test_the_buffer_has_the_steps_the_gamma_and_the_seed_of_its_algorithm(kind: Any, place: str) -> None:
    env = "CartPole-v1" if kind is PrioritizedDQN else "Pendulum-v1"
    steps = {"n_steps": 3}
    replay, more = (steps, {}) if place == "replay_buffer_kwargs" else ({}, steps)
    model = small(kind, env, replay, gamma=0.5, seed=7, **more)
    model.learn(40)
    storage = model.replay_buffer.storage
    assert (model.n_steps, model.replay_buffer.n_steps, storage.gamma, storage.seed) == (3, 3, 0.5, 7)
    single = torch.cat([batch.reward for batch in storage.batches(100)])
    found = model.replay_buffer.sample(100)
    whole = found.discounts[:, 0] == 0.125
    key = model.replay_buffer._keys[whole]
    assert whole.sum() > 50
    torch.testing.assert_close(found.rewards[whole, 0], single[key] + 0.5 * single[key + 1] + 0.25 * single[key + 2])


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_loop_of_cleanrl_swaps_one_line(env_id: str, n_steps: int) -> None:
    """The calls of its dqn.py, c51.py, sac_continuous_action.py and td3_continuous_action.py, with two environments."""

    def one() -> Any:
        return gymnasium.make(env_id, max_episode_steps=9)

    envs = gymnasium.vector.SyncVectorEnv([one] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def made(kind: Any, **more: Any) -> Any:
        both = envs.single_observation_space, envs.single_action_space
        return kind(200, *both, torch.device("cpu"), n_envs=2, handle_timeout_termination=False, **more)

    ours, theirs = made(SB3ReplayBuffer, n_steps=n_steps, gamma=0.9), made(PlainReplayBuffer)
    obs, _ = envs.reset(seed=1)
    envs.action_space.seed(1)
    for _ in range(40):
        actions = np.array([envs.single_action_space.sample() for _ in range(2)])
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for idx, ended in enumerate(terminations | truncations):
            if ended:
                real_next_obs[idx] = infos["final_obs"][idx]
        for rb in (ours, theirs):
            rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
    data = ours.sample(64)
    steps, places = np.divmod(ours._keys.numpy(), 2)
    following = steps + n_steps - 1
    live = data.dones.flatten() == 0
    wanted = torch.from_numpy(theirs.next_observations[following.clip(0, 39), places])
    torch.testing.assert_close(data.next_observations[live], wanted[live])
    torch.testing.assert_close(data.observations, torch.from_numpy(theirs.observations[steps, places]))
    torch.testing.assert_close(data.actions, torch.from_numpy(theirs.actions[steps, places]))
    assert data.rewards.flatten().shape == data.dones.flatten().shape == (64,)
    # as q_network(data.observations).gather(1, data.actions) asks for
    assert data.actions.dtype == (torch.int64 if env_id == "CartPole-v1" else torch.float32)
    if n_steps == 1:
        assert np.array_equal(data.rewards[:, 0].numpy(), theirs.rewards[steps, places])
        assert np.array_equal(data.dones[:, 0].numpy(), theirs.dones[steps, places])


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
    obs, _ = envs.reset(seed=0)
    actions = np.array([1])
    real_next_obs, rewards, terminations, _, infos = envs.step(actions)
    losses = []
    for source in ([its_own, *before], [swap[1][1:], *before], after):
        torch.manual_seed(0)
        names: dict[str, Any] = {"q_network": torch.nn.Linear(4, 2), "target_network": torch.nn.Linear(4, 2)}
        names |= {"args": argparse.Namespace(buffer_size=50, batch_size=8, gamma=0.99, seed=0), "envs": envs}
        names |= {"device": torch.device("cpu"), "torch": torch, "F": torch.nn.functional, "obs": obs}
        names |= {"actions": actions, "real_next_obs": real_next_obs, "rewards": rewards}
        names |= {"terminations": terminations, "infos": infos}
        exec("\n".join(source), names)
        losses.append(names["loss"].item())
    # all draw the one row that there is
    assert losses == pytest.approx([losses[0]] * 3)
    assert names["rb"].stats().max_priority != 1.0


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_saved_buffer_goes_on(tmp_path: Path, n_steps: int) -> None:
    model = small(PrioritizedDQN, "CartPole-v1", {"n_steps": n_steps})
    model.learn(40)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.save(tmp_path / "model.zip")
    loaded = PrioritizedDQN.load(tmp_path / "model.zip", env=model.get_env())
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    assert loaded.replay_buffer.size() == model.replay_buffer.size() == 40
    one, other = (each.replay_buffer.sample(16) for each in (model, loaded))
    assert torch.equal(one.observations, other.observations)
    # a model that is loaded with another gamma has a buffer of that
    assert n_steps == 1 or PrioritizedDQN.load(tmp_path / "model.zip", gamma=0.8).replay_buffer.storage.gamma == 0.8
    loaded.learn(12, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 52
    assert loaded.replay_buffer.storage.stats().max_priority != 1.0


def test_dictionaries_and_normalized_environments_are_learned_from() -> None:
    env = VecNormalize(
        make_vec_env(SimpleMultiObsEnv, n_envs=2, env_kwargs={"channel_last": False}), norm_obs_keys=["vec"]
    )
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
    for step in range(6):
        for buffer in (ours, theirs):
            buffer.add(step * row, (step + 1) * row, np.zeros(1, int), np.ones(1), np.zeros(1, bool), [{}])
    wanted = theirs._get_samples(np.zeros(1, int), env).rewards
    # a single step is within the bound, the sum of three is not
    assert wanted.item() > 3
    torch.testing.assert_close(ours.sample(1, env).rewards, wanted)


def test_what_cannot_be_says_what_to_do() -> None:
    """Settings that contradict the algorithm or that a buffer lacks, and infos of Gymnasium where they must be read."""
    for name, own, other in (("n_steps", 3, 2), ("gamma", 0.9, 0.99), ("seed", 1, 2)):
        with pytest.raises(ValueError, match=f"{name}={own}.*{name}={other}.*to the algorithm alone"):
            small(PrioritizedTD3, "Pendulum-v1", {name: other}, **{name: own})
    # said twice is no contradiction
    assert small(PrioritizedTD3, "Pendulum-v1", {"n_steps": 3}, n_steps=3).replay_buffer is not None
    ours: dict[str, Any] = {"replay_buffer_class": SB3ReplayBuffer}
    with pytest.raises(ValueError, match=r"n_steps=3.*gamma of the algorithm"):
        small(sb3.SAC, "Pendulum-v1", {"n_steps": 3}, **ours)
    with pytest.raises(ValueError, match="optimize_memory_usage=False"):
        small(sb3.DQN, "CartPole-v1", {}, optimize_memory_usage=True, **ours)
    with pytest.raises(TypeError, match="replay_buffer_class=SB3ReplayBuffer.*DictReplayBuffer"):
        small(PrioritizedDQN, "CartPole-v1", {}, replay_buffer_class=DictReplayBuffer)
    buffer, row = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", 2), np.zeros((2, 2))
    with pytest.raises(TypeError, match=r"list of infos.*handle_timeout_termination=False"):
        buffer.add(row, row, np.zeros(2, int), np.zeros(2), np.zeros(2, bool), {"episode": {}})  # type: ignore[arg-type]
    assert buffer.size() == 0
