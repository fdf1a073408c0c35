"""Stable-Baselines3's algorithms on our buffers: what they are given is what its own buffers give, and losses weigh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, in the extra `integrations`")

from gymnasium import spaces  # noqa: E402
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer  # noqa: E402
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
    return kind("MlpPolicy", env, replay_buffer_kwargs=replay, policy_kwargs={"net_arch": [8]}, **SMALL, **more)


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
    buffer = SB3ReplayBuffer(60, BOX, spaces.Discrete(2), "cpu", 1, n_steps=3)
    rows = np.arange(24, dtype=np.float64).reshape(12, 1, 2)
    for begin in (0, 6):
        for step in range(begin, begin + 5):
            buffer.add(rows[step], rows[step + 1], np.zeros(1, int), np.ones(1), np.zeros(1, bool), [{}])
    assert isinstance(buffer.storage, TrajectoryReplayBuffer)
    # windows of three steps and the observation after them: two in each part
    assert sorted(set(buffer.storage.sample(200).key.tolist())) == [0, 1, 5, 6]


@pytest.mark.parametrize("settings", [{}, {"n_steps": 3, "gamma": 0.9}], ids=["1 step", "3 steps"])
def test_dqn_weighs_its_loss_and_feeds_its_errors_back(settings: dict[str, Any]) -> None:
    kwargs = {"sampler": Proportional(1.0, beta=0.7, eps=0.0), **settings}
    model = small(PrioritizedDQN, "CartPole-v1", kwargs, max_grad_norm=1e9)
    model.learn(60)
    gradients: list[list[torch.Tensor]] = []
    step = model.policy.optimizer.step
    model.policy.optimizer.step = lambda: gradients.append([each.grad.clone() for each in model.q_net.parameters()])
    model.train(1, 8)
    model.policy.optimizer.step = step
    buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
    # a copy, which the hooks do not know
    values = model.q_net(drawn.observations.clone()).gather(1, drawn.actions)
    discount = model.gamma if drawn.discounts is None else drawn.discounts
    best = model.q_net_target(drawn.next_observations).max(1, keepdim=True).values
    target = (drawn.rewards + (1 - drawn.dones) * discount * best).detach()
    loss = (buffer.weight * torch.nn.functional.smooth_l1_loss(values, target, reduction="none")).mean()
    assert buffer.weight.unique().numel() > 1
    for found, wanted in zip(gradients[0], torch.autograd.grad(loss, list(model.q_net.parameters())), strict=True):
        torch.testing.assert_close(found, wanted)
    last = dict(zip(buffer._keys.tolist(), (target - values).abs()[:, 0].tolist(), strict=True))
    assert buffer.storage.priorities(torch.tensor(list(last))).tolist() == pytest.approx(list(last.values()), abs=1e-5)


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
    gradients: list[list[torch.Tensor]] = []
    before = {name: value.clone() for name, value in model.critic.state_dict().items()}
    model.critic.optimizer.step = lambda: gradients.append([each.grad.clone() for each in model.critic.parameters()])
    model.train(1, 8)
    buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
    target = drawn.rewards + (1 - drawn.dones) * model.gamma * seen["target"]
    model.critic.load_state_dict(before)
    # a copy, which the hooks do not know
    values = model.critic(drawn.observations, drawn.actions.clone())
    loss = factor * sum((buffer.weight * (value - target) ** 2).mean() for value in values)
    for found, wanted in zip(gradients[0], torch.autograd.grad(loss, list(model.critic.parameters())), strict=True):
        torch.testing.assert_close(found, wanted)
    errors = torch.cat([(value - target).abs() for value in seen["critic"]], 1).mean(1).tolist()
    last = dict(zip(buffer._keys.tolist(), errors, strict=True))
    assert buffer.storage.priorities(torch.tensor(list(last))).tolist() == pytest.approx(list(last.values()), abs=1e-4)


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


def test_the_option_that_it_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="optimize_memory_usage=False"):
        sb3.DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=SB3ReplayBuffer, optimize_memory_usage=True, **SMALL)


def test_priorities_need_a_buffer_that_has_some() -> None:
    with pytest.raises(TypeError, match="PrioritizedDQN needs replay_buffer_class=SB3ReplayBuffer.*DictReplayBuffer"):
        small(PrioritizedDQN, "CartPole-v1", {}, replay_buffer_class=DictReplayBuffer)
