"""The agent's arithmetic against numbers worked out by hand: targets, losses, networks, exploration, counting."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from torch import Tensor
from training_runs import CPU, make_trainer

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, Uniform
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training import command, run
from gpu_replay.training.agent import Agent, Explorer
from gpu_replay.training.device_games import Catch
from gpu_replay.training.environments import EpisodeStatistics
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import FREQUENCIES, QNetwork
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import PRESETS, Settings
from gpu_replay.training.train import SAMPLED, Stopwatch, beta_schedule

VECTOR = Field((2,), torch.float32)


class Table(torch.nn.Module):
    """Two actions whose values are the weights, whatever is observed; observation 1 asks for the second row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [5.0, 3.0]]))

    def prepare(self, obs: Tensor) -> Tensor:
        return obs.long()

    def forward(self, obs: Tensor) -> Tensor:
        return self.values(self.prepare(obs))

    def lower(self) -> None:
        pass

    def values(self, prepared: Tensor) -> Tensor:
        return self.table[prepared]


def table_agent(**changes: object) -> Agent:
    agent = Agent(Table(), Settings(**changes), CPU, 1, seed=0)  # type: ignore[arg-type]
    # the target disagrees with the online network about which next action is best
    agent.target.table.data.copy_(torch.tensor([[0.0, 0.0], [10.0, 20.0]]))
    return agent


def learn(agent: Agent, batch: Batch) -> Tensor:
    td_error = agent.update(batch)
    agent.after_updates(1)
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

    agent = Agent(Table(), Settings(), CPU, 1, seed=0, average=average)  # type: ignore[arg-type]
    before = [weight.detach().clone() for weight in agent.online.parameters()]
    assert float(learn(agent, batch()).sum()) > 0
    for weight, was in zip(agent.online.parameters(), before, strict=True):
        assert torch.equal(weight, was)


def test_the_target_network_values_the_action_that_the_online_one_chooses() -> None:
    # the online network prefers action 0 in the next state, which the target values 10, and action 1 at 20
    assert learn(table_agent(), batch()).tolist() == [1 + 0.5 * 10 - 1, 3.0]


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
    before = agent.online.table.detach().clone()
    learn(agent, batch(weight=torch.zeros(2)))
    assert torch.equal(agent.online.table, before)


def test_learning_moves_towards_the_target_and_nothing_flows_into_the_target_network() -> None:
    agent = table_agent(target_every=10_000)
    target, first = agent.target.table.clone(), learn(agent, batch())
    for _ in range(50):
        last = learn(agent, batch())
    assert (last < first).all()
    assert torch.equal(agent.target.table, target)


@pytest.mark.parametrize("together", [1, 2])
def test_target_network_follows_every_so_many_updates(together: int) -> None:
    agent = table_agent(target_every=3)
    before = agent.target.table.clone()
    for done in range(together, 7, together):
        for _ in range(together):
            agent.update(batch())
        agent.after_updates(together)
        # between steps, the first time that so many are made
        due = done // 3 > (done - together) // 3
        assert torch.equal(agent.target.table, agent.online.table) == due
        assert torch.equal(agent.target.table, before) != due
        before = agent.target.table.clone()


def test_dueling_head_is_value_plus_centred_advantage() -> None:
    network = QNetwork(VECTOR, 3, Settings(hidden=(4,)))
    obs = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    raw = network.last(network.hidden(obs))
    expected = raw[:, :1] + raw[:, 1:] - raw[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(network(obs), expected)
    torch.testing.assert_close(network(obs).mean(1), raw[:, 0])


def image_network(channels: int, **changes: object) -> QNetwork:
    image = Field((channels, 42, 42), torch.uint8, torch.float32, 1 / 255)
    return QNetwork(image, 3, Settings(network="fine", hidden=(8,), **changes))  # type: ignore[arg-type]


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
    "name, shape", [("nature", (84, 84)), ("nature", (3, 16, 16)), ("fine", (2,)), ("cosine", (2,))]
)
def test_a_network_that_does_not_suit_the_observation_is_refused(name: str, shape: tuple[int, ...]) -> None:
    settings = Settings(network=name)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"--network {name}"):
        QNetwork(Field(shape, torch.float32), 2, settings)


@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
def test_the_share_of_random_actions_is_epsilon_whatever_the_persistence(persistence: float, epsilon: float) -> None:
    # 50 actions of which the last is the best: a random action is nearly never the greedy one
    values = torch.arange(50.0).repeat(400, 1)
    explorer = Explorer(persistence, len(values), CPU, seed=0)
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
        explorer = Explorer(persistence, len(values), CPU, seed=0)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", value) for value in (None, "abc", True, 2.0, [3])),
        *(("sampler", value) for value in ("bogus", 1, None)),
        *(("network", value) for value in ("bogus", True)),
        *(("whiten", value) for value in ("no", 1, None)),
        *(("bfloat16", value) for value in ("auto", 0)),
        *(("num_envs", value) for value in (2.5, "2")),
        *(("gamma", value) for value in ("0.9", None, True)),
        *(("hidden", value) for value in ("wide", 3, [1.5], [True])),
    ],
)
def test_settings_of_other_types_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must "):
        Settings.from_dict({name: value})


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
        ({"hidden": ()}, "--hidden must be widths"),
        ({"warmup": 100, "capacity": 99}, "--warmup 100 does not fit in --capacity 99"),
        ({"batch_size": 64, "warmup": 63}, "--warmup 63 must be at least --batch-size 64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(**changes)  # type: ignore[arg-type]


def test_schedules_go_from_start_to_end_and_stay() -> None:
    changes = {"epsilon_end": 0.05, "epsilon_steps": 100, "epsilon_late": 0.2, "epsilon_late_steps": 300}
    trainer = make_trainer(eval_episodes=1, steps=1_000, learning_rate=1.0, learning_rate_end=0.0, **changes)
    found = [trainer.epsilon(step) for step in (0, 50, 100, 200, 300, 1000)]
    assert found == pytest.approx([1, 0.525, 0.05, 0.03, 0.01, 0.01])
    assert make_trainer(eval_episodes=1, epsilon_end=0.05, epsilon_steps=100).epsilon(10**7) == pytest.approx(0.05)
    assert [trainer._rate(step) for step in (0, 500, 1_000, 2_000)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_sampler_setting_makes_that_sampler_with_beta_annealed_over_the_planned_updates() -> None:
    made = {}
    for name in ("proportional", "uniform", "combined", "rank"):
        settings = Settings(sampler=name, steps=3_200, num_envs=32, updates=2, warmup=64)
        made[name] = make_buffer(Catch.spec, settings, beta_schedule(settings), CPU, 0, 32).sampler
    beta = LinearSchedule(0.4, 1.0, steps=(3_200 - 64) // 32 * 2)
    assert (made["proportional"], made["uniform"]) == (Proportional(alpha=0.6, beta=beta), Uniform())
    assert made["combined"] == Combined(Proportional(alpha=0.6, beta=beta))
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


def test_on_a_gpu_one_step_in_so_many_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    watch = Stopwatch(torch.device("cuda"))
    monkeypatch.setattr(watch, "_now", lambda: now[0])
    looked = []
    for _ in range(3 * SAMPLED):
        watch.begin()
        looked.append(watch.looks_inside)
        now[0] += 1
        watch.lap("act")
        now[0] += 2
        watch.lap("learn")
    assert watch.seconds == {"env": 0.0, "act": 3.0, "replay": 0.0, "learn": 6.0}
    # and that one is not made of graphs
    assert [step for step, each in enumerate(looked) if each] == [SAMPLED - 1, 2 * SAMPLED - 1, 3 * SAMPLED - 1]


def plan_of(*flags: str) -> run.Plan:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.new(parser.parse_args([*flags, "--device", "cpu"]))


@pytest.mark.parametrize(
    ("flags", "threshold", "eval_from"),
    [(["pong"], 18.0, 8.0), (["pong", "--stop-at", "5", "--eval-from", "-21"], 5.0, -21.0), (["breakout"], None, None)],
)
def test_pong_ends_at_18_and_other_games_do_not(flags: list[str], threshold: float | None, eval_from: float) -> None:
    pytest.importorskip("ale_py")
    plan = plan_of(*flags)
    settings = plan.settings
    with closing(plan.environment.make(1, settings, CPU)) as games:
        evaluator = Evaluator(games, settings, device=CPU, seed=0, stop=StopRequest())
    assert (evaluator.threshold, settings.eval_from, settings.eval_episodes) == (threshold, eval_from, 30)


@pytest.mark.parametrize("instructions", [{"avx512_bf16": True}, {"amx_bf16": True}, {"avx512_bf16": False}, {}])
def test_the_precision_follows_from_the_machine_alone(
    instructions: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions, raising=False)
    assert plan_of("pong").settings.bfloat16 is any(instructions.values())
    assert plan_of("pong", "--network", "mlp").settings.bfloat16 is False
    for flag, given in (("--bfloat16", True), ("--no-bfloat16", False)):
        assert plan_of("pong", flag).settings.bfloat16 is given
