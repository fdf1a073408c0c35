"""The study's hand-written network against autograd and torch's Adam, and its update against one made with torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_replay.study.agent import Agent, Explorer, smooth_l1
from gpu_replay.study.methods import Minibatch
from gpu_replay.study.network import Adam, Backward, Forward, Parameters
from gpu_replay.study.settings import AgentSettings

# hidden layers whose products are computed by NumPy, by torch, and by both
HIDDEN = [(5,), (128,), (64, 48), (300, 300)]


def as_torch(parameters: Parameters) -> nn.Sequential:
    """The same network in torch's own layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters.weights, parameters.biases, strict=True):
        layer = nn.Linear(*weight.shape)
        layer.weight.data = weight.t().clone()
        layer.bias.data = torch.from_numpy(bias.copy())
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def flat(network: nn.Sequential, pick: Callable[[Tensor], Tensor]) -> np.ndarray:
    """A torch network's parameters, or their gradients, in the order of `Parameters.array`."""
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    parts = [part for layer in layers for part in (pick(layer.weight).t().reshape(-1), pick(layer.bias))]
    return torch.cat(parts).detach().numpy()


def minibatch(rows: int, inputs: int, actions: int, seed: int) -> Minibatch:
    """A batch in which errors are small and large, and some steps end episodes."""
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((rows, inputs)).astype(np.float32)
    return Minibatch(
        inputs=obs,
        next_inputs=rng.standard_normal((rows, inputs)).astype(np.float32),
        states=obs,
        action=rng.integers(0, actions, rows),
        reward=rng.normal(0, 2, rows).astype(np.float32),
        discount=np.where(rng.random(rows) < 0.3, 0, 0.9).astype(np.float32),
        weight=rng.random(rows).astype(np.float32),
        keys=torch.arange(rows),
    )


@pytest.mark.parametrize("hidden", HIDDEN)
def test_values_and_gradient_are_those_of_autograd(hidden: tuple[int, ...]) -> None:
    parameters = Parameters((4, *hidden, 3))
    parameters.draw(np.random.default_rng(0))
    reference, forward = as_torch(parameters), Forward(parameters, 17)
    backward, rng = Backward(forward), np.random.default_rng(1)
    for _ in range(2):
        forward.inputs[...] = rng.standard_normal((17, 4))
        backward.outputs[...] = rng.standard_normal((17, 3))
        values = reference(torch.from_numpy(forward.inputs.copy()))
        np.testing.assert_allclose(forward.run(), values.detach().numpy(), rtol=1e-5, atol=1e-6)
        reference.zero_grad()
        values.backward(torch.from_numpy(backward.outputs.copy()))
        np.testing.assert_allclose(backward.run(), flat(reference, lambda p: p.grad), rtol=1e-4, atol=1e-5)


def test_initial_values_are_spread_as_those_of_torch() -> None:
    parameters = Parameters((4, 500, 2))
    parameters.draw(np.random.default_rng(3))
    for weight, bias, bound in zip(parameters.weights, parameters.biases, (4**-0.5, 500**-0.5), strict=True):
        for values in (weight.numpy(), bias):
            assert np.abs(values).max() <= bound
        assert weight.numpy().std() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_adam_is_that_of_torch() -> None:
    parameters = Parameters((6, 9, 2))
    parameters.draw(np.random.default_rng(0))
    weight = torch.from_numpy(parameters.array.copy()).requires_grad_()
    reference, adam = torch.optim.Adam([weight], lr=0.01), Adam(parameters, 0.01)
    rng = np.random.default_rng(1)
    for scale in (1, 1e-3, 30, 0, 1e-6, 1):
        gradient = (rng.standard_normal(parameters.array.shape) * scale).astype(np.float32)
        weight.grad = torch.from_numpy(gradient.copy())
        reference.step()
        adam.step(gradient)
        np.testing.assert_allclose(parameters.array, weight.detach().numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("double", [False, True])
def test_an_update_is_the_one_that_torch_makes(double: bool) -> None:
    scale = (1.0, 3.0, 0.5, 1.0)
    settings = AgentSettings(hidden=(32,), scale=scale, batch_size=20, learning_rate=0.01, double=double)
    agent = Agent(settings, 4, 3, seed=5)
    online, target = as_torch(agent.online), as_torch(agent.online)
    optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
    for step in range(6):
        batch = minibatch(20, 4, 3, step)
        obs, after = (torch.from_numpy(each) * torch.tensor(scale) for each in (batch.inputs, batch.next_inputs))
        values = online(obs)
        chosen = values.gather(1, torch.from_numpy(batch.action)[:, None]).squeeze(1)
        with torch.no_grad():
            following = target(after)
            best = (online if double else target)(after).argmax(1, keepdim=True)
            aim = torch.from_numpy(batch.reward) + torch.from_numpy(batch.discount) * following.gather(1, best)[:, 0]
        losses = functional.smooth_l1_loss(chosen, aim, reduction="none")
        optimizer.zero_grad()
        (torch.from_numpy(batch.weight) * losses).mean().backward()
        optimizer.step()

        td_error, best_values = agent.update(batch)
        np.testing.assert_allclose(best_values, values.detach().amax(1).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(td_error, (chosen - aim).detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(smooth_l1(td_error), losses.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(agent.online.array, flat(online, lambda p: p), rtol=1e-4, atol=1e-5)
        if step == 2:
            agent.copy_to_target()
            target.load_state_dict(online.state_dict())
    # errors beyond one, within it, and both actions' choices were among them
    assert np.abs(td_error).max() > 1 > np.abs(td_error).min()


def test_the_best_action_is_taken() -> None:
    agent = Agent(AgentSettings(hidden=(16,), scale=(1.0, 20.0, 0.1)), 4, 3, seed=0)
    reference = as_torch(agent.online)
    observations = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    # the fourth component is a goal, which is not scaled
    expected = reference(torch.from_numpy(observations) * torch.tensor([1.0, 20.0, 0.1, 1.0])).argmax(1).tolist()
    assert [agent.act(each) for each in observations] == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
def test_random_actions_are_a_share_epsilon_and_last(persistence: float) -> None:
    explorer = Explorer(3, persistence, seed=0)
    found = [explorer.choose(0.3) for _ in range(60_000)]
    random = [action for action in found if action is not None]
    assert len(random) / len(found) == pytest.approx(0.3, abs=0.02)
    for action in range(3):
        assert random.count(action) / len(random) == pytest.approx(1 / 3, abs=0.03)
    pairs = [(a, b) for a, b in pairwise(found) if a is not None]
    same = sum(a == b for a, b in pairs) / len(pairs)
    # it is repeated, or ends and the same one of three begins
    begin = 0.3 * (1 - persistence) / (1 - 0.3 * persistence)
    assert same == pytest.approx(persistence + (1 - persistence) * begin / 3, abs=0.02)
    assert Explorer(3, persistence, seed=1).choose(0.0) is None
    falling = [AgentSettings().epsilon(step) for step in (0, 500, 1_000, 50_000)]
    assert falling == pytest.approx([1.0, 0.525, 0.05, 0.05])
