"""The agent of training: its targets, networks and exploration by hand, settings, schedules and evaluations."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_runs import CPU, make_trainer, train

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, Uniform
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.study.agent import Explorer as ExplorerOfTheStudy
from gpu_replay.training import command, registry, run
from gpu_replay.training.agent import Agent, Explorer, alone
from gpu_replay.training.device_games import Catch
from gpu_replay.training.environments import Environment, EnvironmentSpec, EpisodeStatistics, Step
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import ENVIRONMENTS, PRESETS, Settings
from gpu_replay.training.train import beta_schedule

PIXELS = Field((4, 44, 40), torch.uint8, torch.float32, 1 / 255)
VECTORS = Field((6,), torch.float32)
NATURE: dict[str, Any] = {"network": "nature", "hidden": (8,), "layer_norm": True}


def pictures(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *PIXELS.shape), dtype=torch.uint8, generator=generator)


def make_network(field: Field = PIXELS, **changes: Any) -> QNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return QNetwork(field, 3, Settings(**changes))


def make_agent(field: Field = VECTORS, average: Any = alone, **changes: Any) -> Agent:
    return Agent(make_network(field, **changes), Settings(**changes), CPU, 1, seed=0, average=average)


def batch_of(obs: Tensor, next_obs: Tensor) -> Batch:
    numbers = {"action": torch.arange(8) % 3, "reward": 30 * torch.randn(8), "discount": torch.full((8,), 0.9)}
    return Batch({"obs": obs, "next_obs": next_obs, "weight": torch.linspace(0.2, 1, 8), **numbers})


def vectors() -> Batch:
    return batch_of(torch.randn(8, 6), torch.randn(8, 6))


def flat(network: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


# what follows an update, which itself is compared in test_dqn_updates


def learn(agent: Agent, batch: Batch | None = None) -> None:
    batch = vectors() if batch is None else batch
    agent.update(batch, agent.targets(batch))


def test_gradients_are_averaged_over_ranks_before_they_are_clipped_together() -> None:
    def enlarge(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            weight.grad *= 1e6

    agent = make_agent(average=enlarge)
    learn(agent)
    norms = [float(weight.grad.square().sum()) for weight in agent.online.parameters()]
    assert sum(norms) ** 0.5 == pytest.approx(10, rel=1e-3)


def test_a_reward_ends_what_is_learned_of_an_episode() -> None:
    obs, reward = torch.randn(8, 6), torch.tensor([0.0, 1.0, -1.0, 0.0, 0.5, 0.0, 0.0, -2.0])
    batch = Batch({**batch_of(obs, obs.flip(0)).to_dict(), "reward": reward})
    ends, goes_on = (make_agent(end_on_reward=each).targets(batch) for each in (True, False))
    assert torch.equal(ends, torch.where(reward == 0, goes_on, reward))
    assert bool((goes_on != reward).all())


def test_target_network_follows_every_so_many_updates() -> None:
    agent = make_agent(target_every=3)
    # between steps of two updates, the first time that so many are made
    for due in (False, True, True):
        before = flat(agent.target)
        for _ in range(2):
            learn(agent)
        agent.after_updates(2)
        assert torch.equal(flat(agent.target), flat(agent.online)) == due
        assert torch.equal(flat(agent.target), before) != due
    # means since they were read
    assert all(mean == mean for mean in agent.means())
    assert all(mean != mean for mean in agent.means())


def test_weights_are_averaged_exponentially_and_that_is_judged() -> None:
    agent = make_agent(ema_updates=4)
    expected = flat(agent.online)
    for _ in range(5):
        learn(agent)
        expected += (flat(agent.online) - expected) / 4
    torch.testing.assert_close(flat(agent.judged), expected)
    # a run evaluates and keeps the average
    trainer, _, _ = train(steps=640, warmup=320, ema_updates=10, eval_every=9_999, eval_episodes=2)
    kept, judged = (flat(each) for each in (trainer.evaluator.best.network, trainer.agent.judged))
    assert torch.equal(kept, judged)
    assert not torch.equal(kept, flat(trainer.agent.online))


# networks


def test_in_bfloat16_weights_stay_exact_and_values_near() -> None:
    agent, plain = make_agent(PIXELS, bfloat16=True, **NATURE), make_network(**NATURE)
    for seed in range(2):
        learn(agent, batch_of(pictures(8, seed=seed), pictures(8, seed=seed)))
    assert all(weight.dtype == torch.float32 for weight in agent.online.parameters())
    # values are those of the newest weights
    plain.load_state_dict(agent.online.state_dict())
    found, expected = agent.online(pictures(3)), plain(pictures(3))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_transposed_on_the_way_through_convolutions_and_back(device: str) -> None:
    # cuDNN computes channels last where images or kernels are, and so does oneDNN
    network, seen = make_network(bfloat16=device == "cuda", **NATURE).to(device), []

    def look(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.extend((args[0], out))
        out.register_hook(seen.append)

    for layer in network.convolutions:
        layer.register_forward_hook(look)
    network.values(network.prepare(pictures(5).to(device))).square().sum().backward()
    kernels = [weight for weight in network.convolutions.parameters() if weight.dim() == 4]
    assert (len(kernels), len(seen)) == (3, 6 * 3)
    for each in (*seen, *kernels, *(weight.grad for weight in kernels)):
        assert each.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["fine", "cosine"])
def test_whitened_images_have_no_mean_and_a_deviation_of_one(name: str) -> None:
    network = make_network(network=name, hidden=(8,), whiten=True)
    frames = (pictures(1) // 2 + pictures(64, seed=1) // 12).to(torch.uint8)
    network.whiten(frames)
    deviation, mean = torch.std_mean(network.prepare(frames), (0, 1) if name == "fine" else 0, correction=0)
    if name == "fine":
        deviation = network.prepare(frames).std()
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=2e-4, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=1e-3, rtol=0)
    # stored bytes and sampled floats have the same values
    torch.testing.assert_close(network(frames), network(frames.float() / 255), rtol=1e-4, atol=1e-4)
    # what never changes stays finite
    network.whiten(torch.full_like(frames, 87))
    assert bool(network(frames).isfinite().all())


def test_bounded_components_are_mapped_and_unbounded_ones_are_not() -> None:
    bounds = (torch.tensor([-2.0, -3.4e38]), torch.tensor([4.0, 3.4e38]))
    network = QNetwork(Field((2,), torch.float32), 2, Settings(), bounds)
    seen = network.prepare(torch.tensor([[4.0, 7.0], [-2.0, -7.0], [1.0, 0.0]]))
    assert seen.tolist() == [[1.0, 7.0], [-1.0, -7.0], [0.0, 0.0]]


# exploration and episodes


def of_training(persistence: float, epsilon: float) -> Callable[[], Tensor]:
    """Actions of 400 environments at a time, -1 for the greedy one, which is the last of 51."""
    explorer, values = Explorer(persistence, 400, CPU, seed=0), torch.arange(51.0).repeat(400, 1)
    explorer.set_epsilon(epsilon)

    def choose() -> Tensor:
        chosen = explorer.choose(values)
        return torch.where(chosen == 50, -1, chosen)

    return choose


def of_the_study(persistence: float, epsilon: float) -> Callable[[], Tensor]:
    explorers = [ExplorerOfTheStudy(50, persistence, seed) for seed in range(400)]

    def choose() -> Tensor:
        found = [explorer.choose(epsilon) for explorer in explorers]
        return torch.tensor([-1 if action is None else action for action in found])

    return choose


@pytest.mark.parametrize("explorer", [of_training, of_the_study])
@pytest.mark.parametrize("persistence, epsilon", [(0.9, 0.0), (0.0, 0.1), (0.5, 0.5), (0.9, 1.0)])
def test_epsilon_is_the_share_of_random_actions(explorer: Any, persistence: float, epsilon: float) -> None:
    choose = explorer(persistence, epsilon)
    chosen = torch.stack([choose() for _ in range(150)])[50:]
    random = chosen >= 0
    # 40,000 actions, in runs of ten at the most: a standard error below 0.008; one in 51 of a random one is the greedy
    assert float(random.float().mean()) == pytest.approx(epsilon, abs=0.045 if epsilon else 0)
    if epsilon:
        repeated = float((chosen[1:] == chosen[:-1])[random[:-1]].float().mean())
        assert repeated == pytest.approx(persistence, abs=0.05)
        # of all actions alike
        assert float(chosen[random].bincount().max() / random.sum()) < 0.1


def test_episode_statistics_against_lists() -> None:
    generator, statistics = torch.Generator().manual_seed(0), EpisodeStatistics(4, 3, CPU)
    finished: list[tuple[float, int]] = []
    running = [(0.0, 0)] * 4
    for _ in range(60):
        reward = torch.randint(-2, 3, (4,), generator=generator).float()
        ended = torch.rand(4, generator=generator) < 0.3
        statistics.push(reward, ended)
        running = [(paid + more, steps + 1) for (paid, steps), more in zip(running, reward.tolist(), strict=True)]
        finished += [each for each, over in zip(running, ended.tolist(), strict=True) if over]
        running = [(0.0, 0) if over else each for each, over in zip(running, ended.tolist(), strict=True)]
        count, *means = statistics.read()
        assert count == len(finished)
        last = finished[-3:]
        assert not last or means == pytest.approx([sum(each) / len(last) for each in zip(*last, strict=True)])
    # one that an actor finished elsewhere
    statistics.finish([3.0], [7.0])
    _, *means = statistics.read()
    assert means == pytest.approx([sum(each) / 3 for each in zip(*finished[-2:], (3.0, 7.0), strict=True)])


def test_the_latest_points_say_what_a_game_returns() -> None:
    statistics, going_on = EpisodeStatistics(2, 3, CPU), torch.tensor([False, False])
    assert math.isnan(statistics.expected(21))
    statistics.push(torch.tensor([1.0, -1.0]), going_on)
    assert statistics.expected(21) == 0
    # of 1 and 1 each older point is worth 1 / 300 less, however many points come at once
    statistics.push(torch.tensor([0.0, -1.0]), going_on)
    assert statistics.expected(21) == pytest.approx(-21 / (1 + 299 / 300))
    statistics.count_points(torch.ones(30, 40))
    lost = (299 / 300 + 1) * (299 / 300) ** 1_200
    won = (299 / 300) ** 1_201 + 1_200
    assert statistics.expected(21) == pytest.approx(21 * (won - lost) / won, rel=1e-5)
    # steps without points, and endings, change nothing
    before = statistics.expected(21)
    statistics.push(torch.zeros(2), ~going_on)
    assert statistics.expected(21) == before


# settings, schedules, times


@pytest.mark.parametrize("family", PRESETS)
def test_settings_survive_a_trip_through_json(family: str) -> None:
    settings = Settings.for_family(family, gamma=0.5, hidden=(7, 9))  # type: ignore[arg-type]
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_settings_of_single_environments_yield_to_the_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium, _ = pytest.importorskip("gymnasium"), pytest.importorskip("ale_py")
    # it cannot be made without Box2D
    monkeypatch.setattr(registry, "spaces", lambda name: (gymnasium.spaces.Box(-1.0, 1.0, (8,)), None))
    chosen, own = registry.identify(name), ENVIRONMENTS[name]
    settings = chosen.settings(CPU)
    assert {each: getattr(settings, each) for each in own} == own
    assert chosen.settings(CPU, steps=123_456).steps == 123_456


# of other types, and without sense: what settings.json says, and a pattern of the error
REFUSED = """
"steps": true => --steps must
"sampler": "bogus" => --sampler must
"whiten": "no" => --whiten must
"num_envs": 2.5 => --num-envs must
"gamma": 1.5 => --gamma .*0 to 1.* 1.5
"hidden": [true] => --hidden must
"lr": 1, "gama": 2 => gama, lr
"persistence": 1.0 => --persistence .*less than 1
"eval_from": Infinity => --eval-from .*finite.*inf
"threads": 100000 => --threads .*1 to 1,024.*100000
"batch_size": 64, "warmup": 63 => --warmup 63 .*--batch-size 64
"""


@pytest.mark.parametrize("changes, message", [line.split(" => ") for line in REFUSED.strip().splitlines()])
def test_settings_of_other_types_and_without_sense_are_refused(changes: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings.from_dict(json.loads(f"{{{changes}}}"))


def test_schedules_go_from_start_to_end_and_stay() -> None:
    changes = {"epsilon_end": 0.05, "epsilon_steps": 100, "epsilon_late": 0.2, "epsilon_late_steps": 300}
    trainer = make_trainer(eval_episodes=1, steps=1_000, **changes)
    found = [trainer.epsilon(step) for step in (0, 50, 100, 200, 300, 1000)]
    assert found == pytest.approx([1, 0.525, 0.05, 0.03, 0.01, 0.01])
    assert make_trainer(eval_episodes=1, epsilon_end=0.05, epsilon_steps=100).epsilon(10**7) == pytest.approx(0.05)
    rates = {"learning_rate": 1e-3, "learning_rate_end": 0.0, "log_every": 320, "eval_episodes": 1}
    _, events, _ = train(steps=640, warmup=320, eval_every=9_999, **rates)
    assert [row["learning_rate"] for row in events.rows] == pytest.approx([5e-4, 0.0])


def test_sampler_setting_makes_that_sampler_with_beta_annealed_over_the_planned_updates() -> None:
    beta = LinearSchedule(0.4, 1.0, steps=(3_200 - 64) // 32 * 2)
    prioritized = Proportional(alpha=0.6, beta=beta)
    samplers = {"proportional": prioritized, "uniform": Uniform(), "combined": Combined(prioritized)}
    samplers["rank"] = RankBased(alpha=0.6, beta=beta)
    for name, sampler in samplers.items():
        settings = Settings(sampler=name, steps=3_200, num_envs=32, updates=2, warmup=64)
        assert run.make_buffer(Catch.spec, settings, beta_schedule(settings), CPU, 0, 32).sampler == sampler


def test_a_seed_decides_the_network() -> None:
    first, same, other = (flat(make_trainer(seed=seed, eval_episodes=1).agent.online) for seed in (0, 0, 1))
    assert (torch.equal(first, same), torch.equal(first, other)) == (True, False)


def plan_of(*flags: str) -> run.Plan:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.new(parser.parse_args([*flags, "--device", "cpu"]))


def test_pong_ends_at_18_and_other_games_do_not() -> None:
    pytest.importorskip("ale_py")
    changed = "pong --stop-at 5 --eval-from -21"
    for flags, threshold, eval_from in (("pong", 18.0, 15.0), (changed, 5.0, -21.0), ("breakout", None, None)):
        plan = plan_of(*flags.split())
        settings = plan.settings
        with closing(plan.environment.make(1, settings, CPU)) as games:
            evaluator = Evaluator(games, settings, device=CPU, seed=0, stop=StopRequest())
        assert (evaluator.threshold, settings.eval_from, settings.eval_episodes) == (threshold, eval_from, 20)


@pytest.mark.parametrize(
    ("name", "instructions", "faster"),
    [
        ("AMD EPYC", ("avx512_bf16",), True),
        ("AMD EPYC", (), False),
        ("Intel Xeon", ("avx512_bf16",), False),
        ("Intel Xeon", ("avx512_bf16", "amx_bf16"), True),
    ],
)
def test_precision_follows_from_the_machine(name: str, instructions: Any, faster: bool, monkeypatch: Any) -> None:
    pytest.importorskip("ale_py")
    found = {"cpu_name": name, **dict.fromkeys(("avx512_bf16", "amx_bf16"), False), **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert plan_of("pong").settings.bfloat16 is faster
    assert plan_of("pong", "--network", "mlp").settings.bfloat16 is False
    for flag, given in (("--bfloat16", True), ("--no-bfloat16", False)):
        assert plan_of("pong", flag).settings.bfloat16 is given


# evaluations against a scripted environment: what counts, which network is kept, when a run may end


class Scripted(Environment):
    """Environment `e` pays `payments[visit][e]` in each of its `e + 1` steps, then pays 100 a step."""

    def __init__(self, payments: Any, threshold: float | None = None, most_points: float | None = None) -> None:
        super().__init__()
        self.num_envs = len(payments[0])
        self.spec = EnvironmentSpec("scripted", Field((1,), torch.float32), 2, threshold, None, 1, most_points)
        self.seeds: list[int] = []
        self.steps, self._payments, self._lengths = 0, payments, torch.arange(1, self.num_envs + 1)

    def reset(self, seed: int) -> Tensor:
        self.seeds.append(seed)
        self._pay = torch.tensor(self._payments[len(self.seeds) - 1])
        self._t = 0
        return torch.zeros(self.num_envs, 1)

    def recv(self) -> Step:
        self._t += 1
        self.steps += 1
        reward = torch.where(self._t <= self._lengths, self._pay, 100.0)
        obs, ended = torch.zeros(self.num_envs, 1), self._t == self._lengths
        # the first environment is truncated, the others terminate
        first = self._lengths == 1
        return Step(obs, reward, terminated=ended & ~first, truncated=ended & first, final_frame=obs)


def evaluator(environment: Scripted, **changes: float) -> Evaluator:
    settings = Settings.for_family("vector", eval_episodes=environment.num_envs, **changes)
    return Evaluator(environment, settings, device=CPU, seed=0, stop=StopRequest())


def network(bias: float = 0.0) -> QNetwork:
    made = QNetwork(Field((1,), torch.float32), 2, Settings(hidden=(2,)))
    with torch.no_grad():
        made.last.bias.fill_(bias)
    return made


def test_each_environment_counts_with_its_first_episode_alone() -> None:
    environment = Scripted([[1.0, 2.0, 3.0]], threshold=5.0)
    result, solved = evaluator(environment).evaluate(network(), 10)
    # returns 1, 4 and 9
    assert result.return_mean == pytest.approx(14 / 3)
    assert result.return_std == pytest.approx(((11**2 + 2**2 + 13**2) / 27) ** 0.5)
    assert result.length_mean == 2
    # below the threshold nothing needs to be confirmed
    assert not solved
    assert (environment.steps, len(environment.seeds)) == (3, 1)
    # episodes are cut off with what they have
    result, _ = evaluator(Scripted([[1.0, 2.0, 3.0]]), eval_max_steps=2).evaluate(network(), 10)
    assert result.return_mean == pytest.approx((1 + 4 + 6) / 3)
    assert result.length_mean == pytest.approx(5 / 3)


def test_the_best_network_is_kept_as_it_was() -> None:
    judge = evaluator(Scripted([[1.0], [5.0], [3.0], [2.0]]))
    net = network()
    for step, bias in ((10, 0.1), (20, 0.2), (30, 0.3)):
        with torch.no_grad():
            net.last.bias.fill_(bias)
        judge.evaluate(net, step)
    assert (judge.best.step, judge.best.evaluation.return_mean) == (20, 5.0)
    assert judge.best.network.last.bias.tolist() == pytest.approx([0.2] * 3)
    assert judge.final().return_mean == 2.0


@pytest.mark.parametrize(
    ("payments", "steps"),
    [
        # episodes of one to four steps, with at most 6 points each: 1 + 6 + 5 + 6 after a step, 1 + 3 + 4 + 6 after two
        ([1.0, 1.5, -1.0, 1.5], 2),
        # the first alone costs too much
        ([-9.0, 1.5, 1.5, 1.5], 1),
        # at the threshold nothing is out of reach: it is confirmed
        ([6.0, 3.0, 0.0, 1.0], 8),
    ],
)
def test_an_evaluation_that_cannot_reach_the_threshold_stops(payments: list[float], steps: int) -> None:
    environment = Scripted([payments] * 4, threshold=4.0, most_points=6.0)
    judge = evaluator(environment)
    result, solved = judge.evaluate(network(), 10, whole=False)
    assert environment.steps == steps
    assert solved is (steps == 8)
    if not solved:
        assert (result.episodes, judge.best, judge.final()) == (0, None, None)
        assert result.return_mean != result.return_mean
    else:
        assert (result.episodes, result.return_mean) == (4, 4.0)
    # a closing evaluation is whole
    total = sum(pay * length for pay, length in zip(payments, range(1, 5), strict=True))
    assert judge.evaluate(network(), 20)[0].return_mean == pytest.approx(total / 4)
    assert judge.best is not None
    # each evaluation has seeds of its own
    assert len(set(environment.seeds)) == len(environment.seeds)


@pytest.mark.parametrize(
    ("payments", "solved", "final"),
    [
        # both evaluations reach it: the second, on fresh seeds, is what is reported
        ([[19.0, 19.0], [17.0, 20.0], [1.0, 1.0]], True, 18.5),
        # the first was luck; the best network is played once more at the end
        ([[19.0, 19.0], [17.0, 18.0], [5.0, 5.0]], False, 5.0),
    ],
)
@pytest.mark.parametrize("stop_at", [None, 18.0])
def test_solved_is_what_two_evaluations_reach(payments: Any, solved: bool, final: float, stop_at: float | None) -> None:
    lengths = torch.arange(1.0, 3.0)
    threshold = 18.0 if stop_at is None else 1.0
    environment = Scripted([(torch.tensor(each) / lengths).tolist() for each in payments], threshold)
    judge, net = evaluator(environment, stop_at=stop_at), network()
    assert judge.evaluate(net, 10)[1] is solved
    copied = evaluator(environment, stop_at=stop_at)
    copied.load_state_dict(judge.state_dict(), net)
    assert copied.best.solved is solved
    assert copied.final().return_mean == pytest.approx(final)
    assert len(set(environment.seeds)) == len(payments) - solved


def test_a_solved_network_is_better_than_a_lucky_one() -> None:
    environment = Scripted([[9.0], [1.0], [5.0], [5.0]], threshold=4.0)
    judge = evaluator(environment)
    assert judge.evaluate(network(), 10)[1] is False
    assert judge.evaluate(network(), 20)[1] is True
    assert judge.best.step == 20
