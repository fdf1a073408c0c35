"""The agent's arithmetic against numbers worked out by hand: targets, losses, networks, exploration, counting."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, Uniform
from gpu_replay.cli import main
from gpu_replay.console.errors import UserError
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training import command
from gpu_replay.training.catch import Catch
from gpu_replay.training.dqn import Agent
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.exploration import Explorer
from gpu_replay.training.networks import FREQUENCIES, QNetwork
from gpu_replay.training.replay import make_buffer
from gpu_replay.training.settings import PRESETS, Settings
from gpu_replay.training.stopwatch import Stopwatch

CPU = torch.device("cpu")
VECTOR = Field((2,), torch.float32)


class Table(torch.nn.Module):
    """Two actions whose values are the weights, whatever is observed; observation 1 asks for the second row."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [5.0, 3.0]]))

    def prepare(self, obs: Tensor) -> Tensor:
        return obs.long()

    def lowered(self) -> list[Tensor]:
        return [self.values]

    def forward_with(self, prepared: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return weights[0][prepared]


def table_agent(**changes: object) -> Agent:
    agent = Agent(Table(), Settings(**changes), CPU, seed=0)  # type: ignore[arg-type]
    # the target disagrees with the online network about which next action is best
    agent.target.values.data.copy_(torch.tensor([[0.0, 0.0], [10.0, 20.0]]))
    return agent


def learn(agent: Agent, batch: Batch) -> Tensor:
    td_error = agent.update(batch)
    agent.after_update()
    return td_error


def batch(**changes: Tensor) -> Batch:
    zeros, ones = torch.zeros(2), torch.ones(2)
    plain = {"obs": zeros, "next_obs": ones, "weight": ones, "action": torch.tensor([0, 1])}
    plain |= {"reward": torch.tensor([1.0, -1.0]), "discount": torch.tensor([0.5, 0.0])}
    return Batch(plain | changes)


def test_the_step_is_that_of_the_averaged_gradients() -> None:
    def average(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            assert weight.grad is not None
            weight.grad.zero_()

    agent = Agent(Table(), Settings(), CPU, seed=0, average=average)  # type: ignore[arg-type]
    before = [weight.detach().clone() for weight in agent.online.parameters()]
    assert float(learn(agent, batch()).sum()) > 0
    for weight, was in zip(agent.online.parameters(), before, strict=True):
        assert torch.equal(weight, was)


# double: the online network prefers action 0 in the next state, which the target values 10
@pytest.mark.parametrize(("double", "td_errors"), [(True, [1 + 0.5 * 10 - 1, 3.0]), (False, [1 + 0.5 * 20 - 1, 3.0])])
def test_the_target_network_values_the_online_or_the_best_action(double: bool, td_errors: list[float]) -> None:
    assert learn(table_agent(double=double), batch()).tolist() == td_errors


def test_loss_is_huber_weighted_by_importance() -> None:
    agent = table_agent()
    learn(agent, batch(weight=torch.tensor([1.0, 0.5])))
    loss, td_error, value = agent.means()
    assert (loss, td_error) == (pytest.approx((1.0 * 4.5 + 0.5 * 2.5) / 2), pytest.approx(4.0))
    assert value == pytest.approx(1.5)
    # read once, forgotten
    assert all(mean != mean for mean in agent.means())


def test_a_weight_of_zero_teaches_nothing() -> None:
    agent = table_agent()
    before = agent.online.values.detach().clone()
    learn(agent, batch(weight=torch.zeros(2)))
    assert torch.equal(agent.online.values, before)


def test_learning_moves_towards_the_target_and_nothing_flows_into_the_target_network() -> None:
    agent = table_agent(target_every=10_000)
    target, first = agent.target.values.clone(), learn(agent, batch())
    for _ in range(50):
        last = learn(agent, batch())
    assert (last < first).all()
    assert torch.equal(agent.target.values, target)


@pytest.mark.parametrize("tau, share", [(1.0, 1.0), (0.25, 0.25)])
def test_target_network_follows_every_so_many_updates(tau: float, share: float) -> None:
    agent = table_agent(target_every=3, target_tau=tau)
    before = agent.target.values.clone()
    for _ in range(2):
        learn(agent, batch())
    assert torch.equal(agent.target.values, before)
    learn(agent, batch())
    expected = before + share * (agent.online.values.detach() - before)
    torch.testing.assert_close(agent.target.values, expected)


def test_dueling_head_is_value_plus_centred_advantage() -> None:
    network = QNetwork(VECTOR, 3, Settings(hidden=(4,), dueling=True))
    obs = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    raw = network.head(obs)
    expected = raw[:, :1] + raw[:, 1:] - raw[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(network(obs), expected)
    torch.testing.assert_close(network(obs).mean(1), raw[:, 0])


def image_network(channels: int, **changes: object) -> QNetwork:
    image = Field((channels, 42, 42), torch.uint8, torch.float32, 1 / 255)
    return QNetwork(image, 3, Settings(network="compact", hidden=(8,), **changes))  # type: ignore[arg-type]


def test_stored_bytes_and_sampled_floats_have_the_same_values() -> None:
    network = image_network(4)
    frames = torch.randint(0, 256, (2, 4, 42, 42), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(frames), network(frames.float() / 255))


@pytest.mark.parametrize("as_sampled", [torch.uint8, torch.float32])
def test_whitened_images_have_no_mean_and_a_deviation_of_one(as_sampled: torch.dtype) -> None:
    network, generator = image_network(4, whiten=True), torch.Generator().manual_seed(0)
    still = torch.randint(0, 200, (42, 42), generator=generator)
    frames = (still + torch.randint(0, 20, (64, 4, 42, 42), generator=generator)).to(torch.uint8)
    obs = frames if as_sampled == torch.uint8 else frames.float() / 255
    network.whiten(obs)
    seen = network.prepare(obs)
    torch.testing.assert_close(seen.mean((0, 1)), torch.zeros(42, 42), atol=1e-4, rtol=0)
    assert float(seen.std()) == pytest.approx(1, abs=1e-3)


def test_whitening_a_picture_that_never_changes_stays_finite() -> None:
    network, obs = image_network(1, whiten=True), torch.full((4, 1, 42, 42), 87, dtype=torch.uint8)
    network.whiten(obs)
    assert bool(network(obs).isfinite().all())


@pytest.mark.parametrize("as_sampled", [torch.uint8, torch.float32])
def test_a_cosine_network_sees_low_frequencies_of_the_newest_image_and_of_differences(as_sampled: torch.dtype) -> None:
    image = Field((3, 8, 16), torch.uint8, torch.float32, 1 / 255)
    network = QNetwork(image, 3, Settings(network="cosine", hidden=(8,)))
    frames = torch.randint(0, 256, (2, 3, 8, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    obs = frames if as_sampled == torch.uint8 else frames.float() / 255
    shown = (frames.double() / 255).tolist()
    down, across = FREQUENCIES

    def frequency(picture: list[list[float]], k: int, m: int) -> float:
        return sum(
            pixel * math.cos(math.pi * k * (y + 0.5) / 8) * math.cos(math.pi * m * (x + 0.5) / 16)
            for y, row in enumerate(picture)
            for x, pixel in enumerate(row)
        )

    places = [(k, m) for k in range(down) for m in range(across)]
    for seen, (first, second, third) in zip(network.prepare(obs), shown, strict=True):
        one, two, three = ([frequency(picture, k, m) for k, m in places] for picture in (first, second, third))
        expected = [b - a for a, b in zip(one + two, two + three, strict=True)] + three
        torch.testing.assert_close(seen, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_whitened_frequencies_have_a_mean_of_zero_and_a_deviation_of_one_each() -> None:
    image = Field((2, 42, 42), torch.uint8, torch.float32, 1 / 255)
    network = QNetwork(image, 3, Settings(network="cosine", hidden=(8,), whiten=True))
    obs = torch.randint(0, 256, (64, 2, 42, 42), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network.whiten(obs)
    deviation, mean = torch.std_mean(network.prepare(obs), 0, correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-4, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=1e-3, rtol=0)
    network.whiten(torch.full_like(obs, 87))
    assert bool(network(obs).isfinite().all())


def test_bounded_components_are_mapped_and_unbounded_ones_are_not() -> None:
    bounds = (torch.tensor([-2.0, -3.4e38]), torch.tensor([4.0, 3.4e38]))
    network = QNetwork(VECTOR, 2, Settings(), bounds)
    seen = (torch.tensor([[4.0, 7.0], [-2.0, -7.0], [1.0, 0.0]]) - network.centre) * network.stretch
    assert seen.tolist() == [[1.0, 7.0], [-1.0, -7.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "name, shape", [("nature", (84, 84)), ("nature", (3, 16, 16)), ("small", (2,)), ("cosine", (2,))]
)
def test_a_network_that_does_not_suit_the_observation_is_refused(name: str, shape: tuple[int, ...]) -> None:
    settings = Settings(network=name)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"--network {name}"):
        QNetwork(Field(shape, torch.float32), 2, settings)


@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
def test_the_share_of_random_actions_is_epsilon_whatever_the_persistence(persistence: float, epsilon: float) -> None:
    explorer = Explorer(persistence, torch.Generator().manual_seed(0))
    # 50 actions of which the last is the best: a random action is nearly never the greedy one
    values = torch.arange(50.0).repeat(400, 1)
    explorer.set_epsilon(epsilon)
    chosen = torch.stack([explorer.choose(values) for _ in range(150)])[50:]
    share = float((chosen != 49).float().mean())
    # 40,000 actions, in runs of ten at the most: a standard error below 0.008
    assert share == pytest.approx(epsilon * 49 / 50, abs=0.03)
    repeated = float((chosen[1:] == chosen[:-1])[chosen[:-1] != 49].float().mean())
    assert repeated == pytest.approx(persistence, abs=0.04)


def test_without_epsilon_the_best_action_is_taken() -> None:
    values = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    for persistence in (0.0, 0.9):
        explorer = Explorer(persistence, torch.Generator().manual_seed(0))
        for epsilon in (0.0, 1.0, 0.0):
            # what would persist ends as well
            explorer.set_epsilon(epsilon)
            assert torch.equal(explorer.choose(values), values.argmax(1)) == (epsilon == 0)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_episode_statistics_against_lists(window: int) -> None:
    generator, statistics = torch.Generator().manual_seed(window), EpisodeStatistics(4, window, CPU)
    finished: list[tuple[float, int]] = []
    running = [(0.0, 0)] * 4
    assert statistics.read()[0] == 0
    for _ in range(60):
        reward = torch.randint(-2, 3, (4,), generator=generator).float()
        ended = torch.rand(4, generator=generator) < 0.3
        statistics.push(reward, ended)
        for env in range(4):
            running[env] = (running[env][0] + float(reward[env]), running[env][1] + 1)
            if ended[env]:
                finished.append(running[env])
                running[env] = (0.0, 0)
        count, mean_return, mean_length = statistics.read()
        assert count == len(finished)
        last = finished[-window:]
        if last:
            assert mean_return == pytest.approx(sum(each[0] for each in last) / len(last), abs=1e-4)
            assert mean_length == pytest.approx(sum(each[1] for each in last) / len(last), abs=1e-4)


@pytest.mark.parametrize("family", PRESETS)
def test_settings_survive_a_trip_through_json(family: str) -> None:
    settings = Settings.for_family(family, gamma=0.5, hidden=(7, 9))  # type: ignore[arg-type]
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UserError, match="unknown settings: gama, lr"):
        Settings.from_dict({"lr": 1, "gama": 2})
    for edited in ({"steps": None}, {"hidden": "wide"}, {"hidden": 3}):
        with pytest.raises(UserError, match="not those of a run"):
            Settings.from_dict(edited)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "--steps must be at least 1; found 0"),
        ({"gamma": 1.5}, "--gamma must be from 0 to 1; found 1.5"),
        ({"persistence": 1.0}, "--persistence must be less than 1"),
        ({"learning_rate": float("nan")}, "--learning-rate must be at least 0; found nan"),
        ({"stop_at": float("nan")}, "--stop-at must be finite; found nan"),
        ({"eval_from": float("inf")}, "--eval-from must be finite; found inf"),
        ({"threads": 100_000}, "--threads must be from 1 to 1,024; found 100000"),
        ({"hidden": ()}, "--hidden must name widths"),
        ({"warmup": 100, "capacity": 99}, "--warmup 100 does not fit in --capacity 99"),
        ({"batch_size": 64, "warmup": 63}, "--warmup 63 must be at least --batch-size 64"),
        ({"groups": 3}, "--groups 3 must divide --num-envs 32"),
        ({"sampler": "combined", "newest": 65}, "--newest 65 does not fit in --batch-size 64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(**changes)  # type: ignore[arg-type]


def test_a_default_of_groups_gives_way_to_the_number_of_environments() -> None:
    assert Settings.for_family("atari-cuda").groups == 2
    assert Settings.for_family("atari-cuda", num_envs=6).groups == 2
    assert Settings.for_family("atari-cuda", num_envs=1).groups == 1
    with pytest.raises(UserError, match="--groups 2 must divide --num-envs 1"):
        Settings.for_family("atari-cuda", num_envs=1, groups=2)


def test_groups_are_not_for_actors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "catch", "--groups", "2", "--actors", "2"]) == 2
    assert "--groups does not go with --actors" in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    plan = command._new_plan(parser.parse_args(["catch", "--device", "cpu", "--actors", "2"]), 0.0)
    assert plan.settings.groups == 1


def test_schedules_go_from_start_to_end_and_stay() -> None:
    settings = Settings(epsilon_end=0.05, epsilon_steps=100, epsilon_late=0.2, epsilon_late_steps=300)
    found = [settings.epsilon(step) for step in (0, 50, 100, 200, 300, 1000)]
    assert found == pytest.approx([1, 0.525, 0.05, 0.03, 0.01, 0.01])
    settings = Settings(steps=1_000, epsilon_end=0.05, epsilon_steps=100, learning_rate=1.0, learning_rate_end=0.0)
    assert settings.epsilon(10**7) == pytest.approx(0.05)
    assert [settings.learning_rate_at(step) for step in (0, 500, 1_000, 2_000)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_sampler_setting_makes_that_sampler_with_beta_annealed_over_the_planned_updates() -> None:
    made = {}
    for name in ("proportional", "uniform", "combined", "rank"):
        settings = Settings(sampler=name, newest=3, steps=3_200, num_envs=32, updates=2, warmup=64)
        made[name] = make_buffer(Catch.spec, settings, CPU, seed=0).sampler
    beta = LinearSchedule(0.4, 1.0, steps=(3_200 - 64) // 32 * 2)
    assert (made["proportional"], made["uniform"]) == (Proportional(alpha=0.6, beta=beta), Uniform())
    assert made["combined"] == Combined(Proportional(alpha=0.6, beta=beta), newest=3)
    assert made["rank"] == RankBased(alpha=0.6, beta=beta)


def test_streams_of_seeds_differ_and_repeat() -> None:
    seeds = {stream_seed(seed, stream, i) for seed in (0, 1) for stream in ("training", "final") for i in range(50)}
    assert (len(seeds), stream_seed(5, "network")) == (200, stream_seed(5, "network"))


def test_stopwatch_charges_each_part_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 20.0, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    watch = Stopwatch(CPU)
    watch.begin()
    for part in ("act", "replay", "learn"):
        watch.lap(part)
    watch.begin()
    watch.lap("replay")
    assert watch.seconds == {"env": 0.0, "act": 1.0, "replay": 6.0, "learn": 7.0}
    assert watch.shares()["replay"] == pytest.approx(6 / 14)


@pytest.mark.parametrize(
    ("flags", "stop_at", "eval_from"),
    [(["pong"], 18.0, 8.0), (["pong", "--stop-at", "5", "--eval-from", "-21"], 5.0, -21.0), (["breakout"], None, None)],
)
def test_pong_ends_at_18_and_other_games_do_not(
    flags: list[str], stop_at: float | None, eval_from: float | None, tmp_path: Path
) -> None:
    pytest.importorskip("ale_py")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    plan = command._new_plan(parser.parse_args([*flags, "--device", "cpu", "--output", str(tmp_path)]), 0.0)
    assert (plan.settings.stop_at, plan.settings.eval_from) == (stop_at, eval_from)
    assert (plan.settings.eval_episodes, plan.settings.bfloat16) == (30, None)
