"""The agent's arithmetic: updates against autograd and Adam, networks and exploration by hand, settings."""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from dqn_update import weighted_huber
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import CPU, make_trainer, train

from gpu_replay import Batch, Combined, Field, LinearSchedule, Proportional, RankBased, Uniform
from gpu_replay.console.errors import UserError
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.study.agent import Explorer as ExplorerOfTheStudy
from gpu_replay.training import command, run
from gpu_replay.training.agent import Agent, Explorer
from gpu_replay.training.device_games import Catch
from gpu_replay.training.environments import EpisodeStatistics
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import FREQUENCIES, QNetwork
from gpu_replay.training.settings import PRESETS, Settings
from gpu_replay.training.train import SAMPLED, Stopwatch, beta_schedule

PIXELS = Field((4, 44, 40), torch.uint8, torch.float32, 1 / 255)
VECTORS = Field((6,), torch.float32)
NATURE: dict[str, Any] = {"network": "nature", "hidden": (8,), "layer_norm": True}
CASES: dict[str, tuple[Field, dict[str, Any]]] = {
    "pong": (PIXELS, {"network": "fine", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "three channels": (Field((3, 44, 40), torch.uint8, torch.float32, 1 / 255), {"network": "fine", "hidden": (16,)}),
    "cosine": (PIXELS, {"network": "cosine", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "vectors": (VECTORS, {"hidden": (16, 16), "layer_norm": True}),
}


def pictures(count: int, field: Field = PIXELS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if field.dtype != torch.uint8:
        return torch.randn(count, *field.shape, generator=generator)
    return torch.randint(0, 256, (count, *field.shape), dtype=torch.uint8, generator=generator)


def make_network(field: Field = PIXELS, **changes: Any) -> QNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return QNetwork(field, 3, Settings(**changes))


def make_agent(field: Field = PIXELS, **changes: Any) -> Agent:
    return Agent(make_network(field, **changes), Settings(adam_eps=1e-5, **changes), CPU, 1, seed=0)


def batches(field: Field, count: int = 3, rows: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            {"obs": pictures(rows, field, 2 * place), "next_obs": pictures(rows, field, 2 * place + 1)}
            | {"action": torch.randint(3, (rows,), generator=generator)}
            | {"reward": 30 * torch.randn(rows, generator=generator), "discount": torch.full((rows,), 0.9)}
            | {"weight": torch.linspace(0.2, 1, rows)}
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_plain_autograd_and_adam(name: str) -> None:
    field, changes = CASES[name]
    agent, drawn = make_agent(field, **changes), batches(field)
    agent.whiten(torch.cat([batch.obs for batch in drawn]))
    online, target = copy.deepcopy(agent.online), copy.deepcopy(agent.target)
    adam = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1e-5)

    def values(network: QNetwork, obs: Tensor) -> Tensor:
        seen = obs.float() * (1.0 if obs.is_floating_point() else network.scale)
        if network.cosines is not None:
            seen = (network.cosines(seen) - network.centre) * network.stretch
        elif network.whitens:
            seen = (seen - network.centre) * network.stretch
        out = network.last(network.hidden(network.convolutions(seen).flatten(1)))
        return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True)

    for batch in drawn:
        found = agent.update(batch)
        best = values(online, batch.next_obs).argmax(1)
        following, rest = values(target, batch.next_obs), (batch.action, batch.reward, batch.discount, batch.weight)
        loss, error = weighted_huber(values(online, batch.obs), following, best, *rest)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        adam.step()
        torch.testing.assert_close(found, error.abs(), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(agent.online.parameters(), online.parameters(), strict=True):
        # three steps of 1e-3; rounding turns the sign of gradients near zero
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-5)


def test_gradients_are_averaged_over_ranks_and_clipped_together() -> None:
    norms: list[float] = []

    def enlarge(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            assert weight.grad is not None
            weight.grad.mul_(1e6)

    settings = Settings()
    agent = Agent(make_network(VECTORS), settings, CPU, 1, seed=0, average=enlarge)
    agent.update(batches(VECTORS)[0])
    norms = [float(weight.grad.square().sum()) for weight in agent.online.parameters() if weight.grad is not None]
    assert sum(norms) ** 0.5 == pytest.approx(10, rel=1e-3)


class Table(nn.Module):
    """Two actions whose values are the weights, whatever is observed; observation 1 asks for the second row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[1.0, 2.0], [5.0, 3.0]]))

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


def two_rows(weight: Tensor) -> Batch:
    numbers = {"obs": torch.zeros(2), "next_obs": torch.ones(2), "weight": weight, "action": torch.tensor([0, 1])}
    return Batch(numbers | {"reward": torch.tensor([1.0, -1.0]), "discount": torch.tensor([0.5, 0.0])})


def test_targets_and_loss_by_hand() -> None:
    agent = table_agent()
    # the online network prefers action 0 in the next state, which the target values 10, and action 1 at 20
    assert agent.update(two_rows(torch.tensor([1.0, 0.5]))).tolist() == [1 + 0.5 * 10 - 1, 3.0]
    agent.after_updates(1)
    assert agent.means() == pytest.approx(((1.0 * 4.5 + 0.5 * 2.5) / 2, 4.0, 1.5))
    # read once, forgotten
    assert all(mean != mean for mean in agent.means())


@pytest.mark.parametrize("together", [1, 2])
def test_target_network_follows_every_so_many_updates(together: int) -> None:
    agent = table_agent(target_every=3)
    before = agent.target.table.clone()
    for done in range(together, 7, together):
        for _ in range(together):
            agent.update(two_rows(torch.ones(2)))
        agent.after_updates(together)
        # between steps, the first time that so many are made
        due = done // 3 > (done - together) // 3
        assert torch.equal(agent.target.table, agent.online.table) == due
        assert torch.equal(agent.target.table, before) != due
        before = agent.target.table.clone()


def test_bfloat16_is_for_convolutions_and_hidden_layers_alone() -> None:
    field, changes = CASES["pong"]
    drawn, gradients = batches(field)[0], []
    for half in (False, True):
        agent = make_agent(field, bfloat16=half, **changes)
        agent.whiten(drawn.obs)
        agent.update(drawn)
        assert all(weight.dtype == torch.float32 for weight in agent.online.parameters())
        gradients.append([weight.grad for weight in agent.online.parameters()])
    for full, half_ in zip(*gradients, strict=True):
        difference = torch.linalg.vector_norm(half_ - full) / torch.linalg.vector_norm(full)
        # rounding turns ReLUs, and the gradients of random pixels nearly cancel: 0.23 at the most was seen
        assert float(difference) < 0.35
    network, seen = make_network(bfloat16=True, **NATURE), {}
    for name, layer in network.named_modules():
        layer.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    network(pictures(3))
    assert seen["convolutions.0"] == seen["convolutions.2"] == seen["hidden.0"] == (torch.bfloat16, torch.bfloat16)
    assert (seen["hidden.1"][1], seen["last"]) == (torch.float32, (torch.float32, torch.float32))


def test_weights_are_averaged_exponentially_and_that_is_judged() -> None:
    agent = make_agent(VECTORS, ema_updates=4)
    expected = [weight.detach().clone() for weight in agent.online.parameters()]
    for batch in batches(VECTORS, 5):
        agent.update(batch)
        for mean, weight in zip(expected, agent.online.parameters(), strict=True):
            mean += (weight.detach() - mean) / 4
    for mine, mean in zip(agent.judged.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, mean)
    copied = make_agent(VECTORS, ema_updates=4)
    copied.load_state_dict(copy.deepcopy(agent.state_dict()))
    for batch in batches(VECTORS, 3):
        assert torch.equal(copied.update(batch), agent.update(batch))
    for mine, theirs in zip(copied.judged.parameters(), agent.judged.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # a run evaluates and keeps the average
    trainer, _, _ = train(steps=640, warmup=320, ema_updates=10, eval_every=9_999, eval_episodes=2)
    kept, judged, online = (
        torch.cat([weight.flatten() for weight in network.parameters()])
        for network in (trainer.evaluator.best.network, trainer.agent.judged, trainer.agent.online)
    )
    assert torch.equal(kept, judged)
    assert not torch.equal(kept, online)


# networks


class Operations(TorchDispatchMode):
    """What is sent to the device within it, by name, with all images that go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        given = (*args, *(out if isinstance(out, (tuple, list)) else [out]))
        images = [each for each in given if isinstance(each, Tensor) and each.dim() == 4]
        self.made.append((call.overloadpacket.__name__, images))
        return out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_transposed_on_the_way_through_convolutions_and_back(device: str) -> None:
    # cuDNN computes channels last where images or kernels are, and so does oneDNN
    network = make_network(bfloat16=device == "cuda", **NATURE).to(device)
    prepared = network.prepare(pictures(5).to(device))
    with Operations() as operations:
        torch.autograd.grad(network.values(prepared).square().sum(), list(network.parameters()))
    seen = {"convolution": 0, "convolution_backward": 0, "relu_": 0, "threshold_backward": 0}
    for name, images in operations.made:
        # the gradient of what was flattened comes as numbers did to the first hidden layer
        images = images[1:] if name == "threshold_backward" else images
        if name in seen and images:
            seen[name] += 1
            assert all(each.is_contiguous(memory_format=torch.channels_last) for each in images), name
    assert set(seen.values()) == {3}


@pytest.mark.parametrize("as_sampled", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", ["fine", "cosine"])
def test_whitened_images_have_no_mean_and_a_deviation_of_one(name: str, as_sampled: torch.dtype) -> None:
    network = make_network(network=name, hidden=(8,), whiten=True)
    frames = (pictures(1) // 2 + pictures(64, seed=1) // 12).to(torch.uint8)
    obs = frames if as_sampled == torch.uint8 else frames.float() / 255
    network.whiten(obs)
    deviation, mean = torch.std_mean(network.prepare(obs), (0, 1) if name == "fine" else 0, correction=0)
    if name == "fine":
        mean, deviation = network.prepare(obs).mean((0, 1)), network.prepare(obs).std()
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=2e-4, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=1e-3, rtol=0)
    # stored bytes and sampled floats have the same values
    torch.testing.assert_close(network(frames), network(frames.float() / 255), rtol=1e-4, atol=1e-4)
    # what never changes stays finite
    network.whiten(torch.full_like(obs, 87))
    assert bool(network(obs).isfinite().all())


def test_a_cosine_network_sees_low_frequencies_of_the_newest_image_and_of_differences() -> None:
    field = Field((3, 8, 16), torch.uint8, torch.float32, 1 / 255)
    network, frames = make_network(field, network="cosine", hidden=(8,)), pictures(2, field)
    down, across = FREQUENCIES

    def frequency(picture: list[list[float]], k: int, m: int) -> float:
        return sum(
            pixel * math.cos(math.pi * k * (y + 0.5) / 8) * math.cos(math.pi * m * (x + 0.5) / 16)
            for y, row in enumerate(picture)
            for x, pixel in enumerate(row)
        )

    places = [(k, m) for k in range(down) for m in range(across)]
    for seen, shown in zip(network.prepare(frames), (frames.double() / 255).tolist(), strict=True):
        one, two, three = ([frequency(picture, k, m) for k, m in places] for picture in shown)
        expected = [b - a for a, b in zip(one + two, two + three, strict=True)] + three
        torch.testing.assert_close(seen, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_bounded_components_are_mapped_and_unbounded_ones_are_not() -> None:
    bounds = (torch.tensor([-2.0, -3.4e38]), torch.tensor([4.0, 3.4e38]))
    network = QNetwork(Field((2,), torch.float32), 2, Settings(), bounds)
    seen = network.prepare(torch.tensor([[4.0, 7.0], [-2.0, -7.0], [1.0, 0.0]]))
    assert seen.tolist() == [[1.0, 7.0], [-1.0, -7.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "name, shape", [("nature", (84, 84)), ("nature", (3, 16, 16)), ("fine", (2,)), ("cosine", (2,))]
)
def test_a_network_that_does_not_suit_the_observation_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=f"--network {name}"):
        make_network(Field(shape, torch.float32), network=name)


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_finds_the_values_of_a_cpu() -> None:
    obs = pictures(64)
    # TF32 has ten bits, bfloat16 seven: 0.013 to 0.025 on a CPU
    for half, tolerance in ((False, 1e-2), (True, 0.1)):
        network = make_network(whiten=True, bfloat16=half, **NATURE)
        network.whiten(obs)
        expected = make_network(whiten=True, **NATURE)
        expected.load_state_dict(network.state_dict())
        wanted = expected(obs)
        assert float((network.to("cuda")(obs.cuda()).cpu() - wanted).abs().max() / wanted.std()) < tolerance


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
@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_the_share_of_random_actions_is_epsilon_whatever_the_persistence(
    explorer: Callable[[float, float], Callable[[], Tensor]], persistence: float, epsilon: float
) -> None:
    choose = explorer(persistence, epsilon)
    chosen = torch.stack([choose() for _ in range(150)])[50:]
    random = chosen >= 0
    # 40,000 actions, in runs of ten at the most: a standard error below 0.008; one in 51 of a random one is the greedy
    assert float(random.float().mean()) == pytest.approx(epsilon, abs=0.045 if epsilon else 0)
    if epsilon:
        repeated = float((chosen[1:] == chosen[:-1])[random[:-1]].float().mean())
        assert repeated == pytest.approx(persistence, abs=0.05)
        # of all actions alike
        shares = torch.bincount(chosen[random], minlength=50)[:50] / random.sum()
        assert float(shares.max()) < 0.1


@pytest.mark.parametrize("window", [1, 3, 100])
def test_episode_statistics_against_lists(window: int) -> None:
    generator, statistics = torch.Generator().manual_seed(window), EpisodeStatistics(4, window, CPU)
    finished: list[tuple[float, int]] = []
    running = [(0.0, 0)] * 4

    def check() -> None:
        count, *means = statistics.read()
        last = finished[-window:]
        assert count == len(finished)
        if last:
            assert means == pytest.approx([sum(each) / len(last) for each in zip(*last, strict=True)], abs=1e-4)

    check()
    for _ in range(60):
        reward = torch.randint(-2, 3, (4,), generator=generator).float()
        ended = torch.rand(4, generator=generator) < 0.3
        statistics.push(reward, ended)
        for env in range(4):
            running[env] = (running[env][0] + float(reward[env]), running[env][1] + 1)
            if ended[env]:
                finished.append(running[env])
                running[env] = (0.0, 0)
        check()
    # those that actors finished elsewhere
    for more in ([(1.0, 10), (2.0, 20)], [(3.0, 1), (4.0, 1), (8.0, 4)]):
        statistics.finish([each[0] for each in more], [float(each[1]) for each in more])
        finished += more
        check()


# settings, schedules, times


@pytest.mark.parametrize("family", PRESETS)
def test_settings_survive_a_trip_through_json(family: str) -> None:
    settings = Settings.for_family(family, gamma=0.5, hidden=(7, 9))  # type: ignore[arg-type]
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


TYPES: dict[str, tuple[object, ...]] = {
    "steps": (None, "abc", True, 2.0, [3]),
    "sampler": ("bogus", 1, None),
    "network": ("bogus", True),
    "whiten": ("no", 1, None),
    "bfloat16": ("auto", 0),
    "num_envs": (2.5, "2"),
    "gamma": ("0.9", None, True),
    "hidden": ("wide", 3, [1.5], [True]),
}
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"lr": 1, "gama": 2}, "gama, lr"),
    ({"steps": 0}, "--steps .*at least 1.* 0"),
    ({"gamma": 1.5}, "--gamma .*0 to 1.* 1.5"),
    ({"persistence": 1.0}, "--persistence .*less than 1"),
    ({"learning_rate": float("nan")}, "--learning-rate .*nan"),
    ({"stop_at": float("nan")}, "--stop-at .*finite.*nan"),
    ({"eval_from": float("inf")}, "--eval-from .*finite.*inf"),
    ({"threads": 100_000}, "--threads .*1 to 1,024.*100000"),
    ({"hidden": []}, "--hidden .*widths"),
    ({"warmup": 100, "capacity": 99}, "--warmup 100 .*--capacity 99"),
    ({"batch_size": 64, "warmup": 63}, "--warmup 63 .*--batch-size 64"),
]


@pytest.mark.parametrize(
    "changes, message",
    [
        *NONSENSE,
        *(({name: each}, f"--{name.replace('_', '-')} must ") for name, values in TYPES.items() for each in values),
    ],
)
def test_settings_of_other_types_and_without_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings.from_dict(changes)


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
    made = {}
    for name in ("proportional", "uniform", "combined", "rank"):
        settings = Settings(sampler=name, steps=3_200, num_envs=32, updates=2, warmup=64)
        made[name] = run.make_buffer(Catch.spec, settings, beta_schedule(settings), CPU, 0, 32).sampler
    beta = LinearSchedule(0.4, 1.0, steps=(3_200 - 64) // 32 * 2)
    prioritized = Proportional(alpha=0.6, beta=beta)
    assert made == {
        "proportional": prioritized,
        "uniform": Uniform(),
        "combined": Combined(prioritized),
        "rank": RankBased(alpha=0.6, beta=beta),
    }


def test_streams_of_seeds_differ_and_repeat() -> None:
    seeds = {stream_seed(seed, stream, i) for seed in (0, 1) for stream in ("training", "final") for i in range(50)}
    assert (len(seeds), stream_seed(5, "network")) == (200, stream_seed(5, "network"))
    first, same, other = (
        torch.cat([each.flatten() for each in make_trainer(seed=seed, eval_episodes=1).agent.online.parameters()])
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_stopwatch_charges_each_part_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("torch.cuda.synchronize", lambda *_: None)
    on_cpu, on_gpu, looked = Stopwatch(CPU), Stopwatch(torch.device("cuda")), []
    for _ in range(3 * SAMPLED):
        for watch in (on_cpu, on_gpu):
            watch.begin()
        looked.append(on_gpu.looks_inside)
        for part, seconds in (("act", 1), ("replay", 2), ("learn", 4)):
            now[0] += seconds
            on_cpu.lap(part)
            on_gpu.lap(part)
    assert on_cpu.seconds == {"env": 0.0, "act": 3.0 * SAMPLED, "replay": 6.0 * SAMPLED, "learn": 12.0 * SAMPLED}
    # on a GPU one step in so many is timed, and that one is not made of graphs
    assert on_gpu.seconds == {"env": 0.0, "act": 3.0, "replay": 6.0, "learn": 12.0}
    assert on_cpu.shares()["replay"] == on_gpu.shares()["replay"] == pytest.approx(2 / 7)
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
