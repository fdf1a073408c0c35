"""An update in float32 and bfloat16, on whatever device: images channels last, weights that stay, averages judged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import CPU, Events, make_trainer

from gpu_replay import Batch, Field
from gpu_replay.training.agent import Agent
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings

PIXELS = Field((4, 44, 40), torch.uint8, torch.float32, 1 / 255)
VECTORS = Field((6,), torch.float32)
NATURE: dict[str, Any] = {"network": "nature", "hidden": (8,), "layer_norm": True}
CASES: dict[str, tuple[Field, dict[str, Any]]] = {
    "pong": (PIXELS, {"network": "fine", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "three channels": (Field((3, 44, 40), torch.uint8, torch.float32, 1 / 255), {"network": "fine", "hidden": (16,)}),
    "cosine": (PIXELS, {"network": "cosine", "hidden": (32,), "layer_norm": True, "whiten": True}),
    "vectors": (VECTORS, {"hidden": (16, 16), "layer_norm": True}),
}
NEWER = torch.channels_last


class Operations(TorchDispatchMode):
    """What is sent to the device within it, by name, with all tensors that go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def __torch_dispatch__(self, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else [out]
        tensors = [[each for each in some if isinstance(each, Tensor)] for some in (args, outs)]
        self.made.append((call.overloadpacket.__name__, *tensors))
        return out


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
    online, target = copy.deepcopy(agent.online), agent.target
    adam = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1e-5)

    def values(network: QNetwork, obs: Tensor) -> Tensor:
        seen = obs.float() * (1.0 if obs.is_floating_point() else network.scale)
        if network.cosines is not None:
            seen = (network.cosines(seen) - network.centre) * network.stretch
        elif network.whitens:
            seen = (seen - network.centre) * network.stretch
        out = network.last(network.hidden(network.convolutions(seen).flatten(1)))
        return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True)

    norms = []
    for batch in drawn:
        found = agent.update(batch)
        chosen = values(online, batch.obs)[torch.arange(8), batch.action]
        best = values(online, batch.next_obs).argmax(1)
        wanted = batch.reward + batch.discount * values(target, batch.next_obs)[torch.arange(8), best].detach()
        error = (wanted - chosen).abs()
        huber = torch.where(error < 1, error.square() / 2, error - 0.5)
        adam.zero_grad()
        (batch.weight * huber).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(online.parameters(), 10.0)))
        adam.step()
        torch.testing.assert_close(found, error.detach(), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(agent.online.parameters(), online.parameters(), strict=True):
        # three steps of 1e-3; rounding turns the sign of gradients near zero
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-5)


def test_gradients_are_clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_replay.training.agent.MAX_GRAD_NORM", 0.01)
    agent = make_agent(VECTORS)
    agent.update(batches(VECTORS)[0])
    gradients = torch.cat([weight.grad.flatten() for weight in agent.online.parameters() if weight.grad is not None])
    assert float(torch.linalg.vector_norm(gradients)) == pytest.approx(0.01, rel=1e-3)


def test_gradients_in_bfloat16_are_those_of_float32_to_its_precision() -> None:
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


def test_the_last_layer_and_norms_are_computed_in_float32() -> None:
    network = make_network(bfloat16=True, **NATURE)
    seen = {}
    for name, layer in network.named_modules():
        layer.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    network(pictures(3))
    half, full = torch.bfloat16, torch.float32
    assert seen["convolutions.0"] == seen["convolutions.2"] == seen["hidden.0"] == (half, half)
    assert seen["hidden.1"][1] == full
    assert seen["last"] == (full, full)


def test_weights_are_averaged_exponentially_and_judged() -> None:
    agent = make_agent(VECTORS, ema_updates=4)
    expected = [weight.detach().clone() for weight in agent.online.parameters()]
    for batch in batches(VECTORS, 5):
        agent.update(batch)
        for mean, weight in zip(expected, agent.online.parameters(), strict=True):
            mean += (weight.detach() - mean) / 4
    assert agent.judged is not agent.online
    for mine, mean in zip(agent.judged.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, mean)
    copied = make_agent(VECTORS, ema_updates=4)
    copied.load_state_dict(copy.deepcopy(agent.state_dict()))
    for mine, theirs in zip(copied.judged.parameters(), agent.judged.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # and they go on alike
    for batch in batches(VECTORS, 3):
        assert torch.equal(copied.update(batch), agent.update(batch))


def test_the_trainer_evaluates_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(ema_updates=10, eval_episodes=2)
    asked: list[QNetwork] = []
    evaluate = trainer.evaluator.evaluate
    monkeypatch.setattr(
        trainer.evaluator, "evaluate", lambda network, step: (asked.append(network), evaluate(network, step))[1]
    )
    trainer._records = Silent()
    trainer._evaluate()
    assert asked == [trainer.agent.judged] != [trainer.agent.online]


class Silent(Events):
    def evaluated(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
def test_what_is_not_on_a_cpu_is_prepared_in_one_pass(whiten: bool, half: bool) -> None:
    network, images = make_network(whiten=whiten, bfloat16=half, **NATURE).to("meta"), pictures(6).to("meta")
    with Operations() as operations:
        prepared = network.prepare(images)
    found = [name for name, given, _ in operations.made if any(each.dim() == 4 for each in given)]
    assert [name for name in found if name != "detach"] == ["empty_like", "addcmul"]
    assert prepared.dtype == (torch.bfloat16 if half else torch.float32)
    assert prepared.is_contiguous(memory_format=NEWER)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_transposed_on_the_way_through_convolutions_and_back(device: str) -> None:
    # cuDNN computes channels last where images or kernels are, and so does oneDNN
    network = make_network(bfloat16=device == "cuda", **NATURE).to(device)
    prepared = network.prepare(pictures(5).to(device))
    weights = list(network.parameters())
    with Operations() as operations:
        torch.autograd.grad(network.values(prepared).square().sum(), weights)
    seen = {"convolution": 0, "convolution_backward": 0, "relu_": 0, "threshold_backward": 0}
    for name, given, made in operations.made:
        images = [each for each in given + made if each.dim() == 4]
        if name == "threshold_backward" and images:
            # the gradient of what was flattened comes as numbers did to the first hidden layer
            images = images[1:]
        if name in seen and images:
            seen[name] += 1
            assert all(each.is_contiguous(memory_format=NEWER) for each in images), name
    assert set(seen.values()) == {3}


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


def test_what_captured_graphs_read_stays_where_it_is() -> None:
    agents = [make_agent(whiten=True, ema_updates=5, **NATURE) for _ in range(2)]
    agent = agents[0]
    read = [*agent.parameters(), *agent.buffers()]
    places, before = [each.data_ptr() for each in read], [each.detach().clone() for each in agent.online.parameters()]
    agent.whiten(pictures(16))
    agent.update(batches(PIXELS)[0])
    agent.after_updates(agent._target_every)
    assert not any(torch.equal(*pair) for pair in zip(agent.online.parameters(), before, strict=True))
    agent.load_state_dict(agents[1].state_dict())
    assert [each.data_ptr() for each in read] == places
    assert all(each.is_contiguous(memory_format=NEWER) for each in read if each.dim() == 4)
    # what was restored is whitened as the other is, not as it was
    assert torch.equal(agent.online(pictures(2)), agents[1].online(pictures(2)))
