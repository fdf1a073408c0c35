"""The fast update beside a plain one of modules, autograd and Adam, in one thread and in two."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_runs import make_trainer

from gpu_replay import Batch, Field
from gpu_replay.training import precision
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.helper_thread import HelperThread, Task
from gpu_replay.training.networks import QNetwork, cpu_has_bfloat16
from gpu_replay.training.precision import random_batch, with_precision
from gpu_replay.training.settings import Settings

CPU = torch.device("cpu")
PICTURES = EnvironmentSpec("pictures", Field((42, 42), torch.uint8, torch.float32, 1 / 255), 3, None, None, stack=4)
VECTORS = EnvironmentSpec("vectors", Field((6,), torch.float32), 3, None, None)
CASES: dict[str, tuple[EnvironmentSpec, dict[str, Any]]] = {
    "pong": (PICTURES, {"network": "compact", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "plain": (PICTURES, {"network": "small", "hidden": (32, 16), "dueling": False, "double": False}),
    "three channels": (dataclasses.replace(PICTURES, stack=3), {"network": "compact", "hidden": (16,)}),
    "cosine": (PICTURES, {"network": "cosine", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "vectors": (VECTORS, {"hidden": (16, 16), "layer_norm": True}),
}


def make_agent(spec: EnvironmentSpec, helper: HelperThread | None = None, **changes: Any) -> Agent:
    settings = Settings(**{"adam_eps": 1e-5, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Agent(QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds), settings, CPU, 0, helper=helper)


def batches(spec: EnvironmentSpec, count: int = 3) -> list[Batch]:
    """Rows at a stride of one draw, as the trainer takes them."""
    drawn = random_batch(spec, count * 8)
    if not spec.observation.scale:
        generator = torch.Generator().manual_seed(1)
        seen = {
            name: torch.randn(count * 8, *spec.observation.shape, generator=generator) for name in ("obs", "next_obs")
        }
        drawn = Batch({**drawn, **seen})
    return [Batch({name: rows[part::count] for name, rows in drawn.items()}) for part in range(count)]


class Plain:
    """An update with modules and optimiser of torch, in float32."""

    def __init__(self, agent: Agent) -> None:
        self.settings = agent.settings
        self.online, self.target = copy.deepcopy(agent.online), copy.deepcopy(agent.target)
        self.adam = torch.optim.Adam(
            self.online.parameters(), lr=self.settings.learning_rate, eps=self.settings.adam_eps
        )

    def values(self, network: QNetwork, obs: Tensor) -> Tensor:
        seen = obs.float() * (1.0 if obs.is_floating_point() else network.scale)
        if network.cosines is not None:
            seen = network.prepare(obs)
        elif network.whitens:
            seen = (seen - network.centre) * network.stretch
        out = network.head(nn.Sequential(*network.convolutions)(seen).flatten(1))
        return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True) if self.settings.dueling else out

    def update(self, batch: Batch) -> Tensor:
        chosen = self.values(self.online, batch.obs).gather(1, batch.action[:, None]).squeeze(1)
        with torch.no_grad():
            following = self.values(self.target, batch.next_obs)
            chooser = self.values(self.online, batch.next_obs) if self.settings.double else following
            best = following.gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)
            target = batch.reward + batch.discount * best
        loss = (batch.weight * functional.smooth_l1_loss(chosen, target, reduction="none")).mean()
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), self.settings.max_grad_norm)
        self.adam.step()
        return (target - chosen).detach().abs()


def weights(network: QNetwork) -> dict[str, Tensor]:
    return dict(network.named_parameters())


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_plain_autograd_and_adam(name: str) -> None:
    spec, changes = CASES[name]
    # a norm that clips, and weights of importance that differ
    agent, drawn = make_agent(spec, max_grad_norm=0.5, **changes), batches(spec)
    for batch in drawn:
        batch["weight"].copy_(torch.linspace(0.2, 1, len(batch.weight)))
    agent.whiten(torch.cat([batch.obs for batch in drawn]))
    plain = Plain(agent)
    found, expected = agent.updates_with(drawn), [plain.update(batch) for batch in drawn]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for part, weight in weights(plain.online).items():
        # three steps of 1e-3; rounding turns the sign of gradients near zero
        torch.testing.assert_close(weights(agent.online)[part], weight, rtol=0, atol=3e-5)


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="this CPU runs no convolutions in bfloat16")
def test_gradients_in_bfloat16_are_those_of_float32_to_its_precision() -> None:
    spec, changes = CASES["pong"]
    drawn = batches(spec)[0]
    gradients = []
    for half in (False, True):
        agent = make_agent(spec, bfloat16=half, max_grad_norm=1e9, **changes)
        agent.whiten(drawn.obs)
        agent.update(drawn)
        gradients.append({name: weight.grad for name, weight in weights(agent.online).items()})
    for name, full in gradients[0].items():
        # mypy: every weight has a gradient
        assert full is not None
        difference = torch.linalg.vector_norm(gradients[1][name] - full) / torch.linalg.vector_norm(full)
        # rounding turns ReLUs, and the gradients of random pixels nearly cancel: 0.23 at the most was seen
        assert float(difference) < 0.35, name


@pytest.mark.parametrize("half", [False, True])
def test_two_threads_learn_what_one_learns_bit_for_bit(half: bool) -> None:
    spec, changes = CASES["pong"]
    alone, helped = (make_agent(spec, helper, bfloat16=half, **changes) for helper in (None, HelperThread()))
    for turn in range(3):
        drawn = batches(spec)
        for mine, theirs in zip(helped.updates_with(drawn), alone.updates_with(drawn), strict=True):
            assert torch.equal(mine, theirs)
        if turn == 1:
            alone._update_target()
            helped._update_target()
    for name, weight in weights(alone.online).items():
        assert torch.equal(weights(helped.online)[name], weight)


def test_a_task_is_done_once_by_whoever_comes_first() -> None:
    helper, gate, began, ran = HelperThread(), threading.Event(), threading.Event(), []

    def wait() -> None:
        began.set()
        gate.wait(10)

    def work(number: int) -> int:
        ran.append((number, threading.current_thread() is threading.main_thread()))
        return number

    blocking = helper.offer(Task(wait))
    tasks = [helper.offer(Task(lambda number=number: work(number))) for number in range(3)]
    began.wait(10)
    # the helper is busy: the first thread does the work itself
    assert tasks[1].result() == 1
    gate.set()
    blocking.result()
    assert [task.result() for task in tasks] == [0, 1, 2]
    assert sorted(number for number, _ in ran) == [0, 1, 2]
    assert (1, True) in ran


def test_an_error_of_a_task_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise ValueError("no such row")

    task = HelperThread().offer(Task(fail))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such row"):
            task.result()


def test_weights_are_averaged_exponentially_and_judged() -> None:
    agent = make_agent(VECTORS, ema_updates=4)
    expected = {name: weight.detach().clone() for name, weight in weights(agent.online).items()}
    for batch in batches(VECTORS, 5):
        agent.update(batch)
        for name, weight in weights(agent.online).items():
            expected[name] += (weight.detach() - expected[name]) / 4
    assert agent.judged is not agent.online
    for name, weight in weights(agent.judged).items():
        torch.testing.assert_close(weight, expected[name])
    copied = make_agent(VECTORS, ema_updates=4)
    copied.restore(agent.state())
    for name, weight in weights(agent.judged).items():
        assert torch.equal(weights(copied.judged)[name], weight)
    assert make_agent(VECTORS).judged.state_dict().keys() == agent.judged.state_dict().keys()


def test_a_state_with_moments_for_each_weight_is_continued() -> None:
    agent, drawn = make_agent(VECTORS, ema_updates=4), batches(VECTORS, 4)
    agent.updates_with(drawn[:2])
    state = copy.deepcopy(agent.state())
    # as before weights were views of one tensor, and without an average
    del state["averaged"]
    sizes = [weight.numel() for weight in agent.online.parameters()]
    parts = {name: state["optimizer"][name].split(sizes) for name in ("exp_avg", "exp_avg_sq")}
    state["optimizer"] = {
        str(place): {
            "step": state["optimizer"]["step"],
            **{name: part[place].view(weight.shape) for name, part in parts.items()},
        }
        for place, weight in enumerate(agent.online.parameters())
    }
    resumed = make_agent(VECTORS, ema_updates=4)
    resumed.restore(state)
    assert torch.equal(*(torch.cat([w.flatten() for w in net.parameters()]) for net in (resumed.judged, agent.online)))
    for batch in drawn[2:]:
        assert torch.equal(resumed.update(batch), agent.update(batch))


@pytest.mark.parametrize(("milliseconds", "half"), [((8.0, 12.9), False), ((5.8, 4.4), True)])
def test_the_faster_precision_wins_and_is_named(
    milliseconds: tuple[float, float], half: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "update_milliseconds", lambda *_: milliseconds)
    settings = Settings.for_family("atari")
    assert settings.bfloat16 is None
    assert with_precision(settings, PICTURES, CPU).bfloat16 is half
    assert f"{'bfloat16' if half else 'float32'} it is" in capsys.readouterr().err
    # what was chosen is not timed again
    for chosen in (True, False):
        given = dataclasses.replace(settings, bfloat16=chosen)
        assert with_precision(given, PICTURES, CPU) is given


def test_precision_is_not_timed_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.for_family("atari")
    assert with_precision(settings, PICTURES, torch.device("cuda")).bfloat16 is True
    assert with_precision(dataclasses.replace(settings, network="mlp"), PICTURES, CPU).bfloat16 is False
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    assert with_precision(settings, PICTURES, CPU).bfloat16 is False


def test_both_precisions_are_timed_and_random_numbers_stay_as_they_are() -> None:
    settings = Settings.for_family("atari", hidden=(8,), batch_size=4)
    before = torch.get_rng_state()
    assert all(each > 0 for each in precision.update_milliseconds(settings, PICTURES, CPU, updates=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trainer_evaluates_the_average() -> None:
    trainer = make_trainer(ema_updates=10, eval_episodes=2)
    assert trainer.agent.judged is not trainer.agent.online
    asked: list[QNetwork] = []
    evaluate = trainer.evaluator.evaluate

    def noted(network: QNetwork, step: int) -> Any:
        asked.append(network)
        return evaluate(network, step)

    trainer.evaluator.evaluate = noted  # type: ignore[method-assign]
    trainer._evaluate(type("Silent", (), {"evaluated": lambda *_: None})())
    assert asked == [trainer.agent.judged]
