"""Every DQN in the package makes the updates of plain autograd and Adam: that of training, of the study and of SB3."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from training_runs import CPU

from gpu_replay import Batch, Field, Proportional
from gpu_replay.study.agent import Agent as StudyAgent
from gpu_replay.study.methods import Minibatch
from gpu_replay.study.network import Parameters
from gpu_replay.study.settings import AgentSettings
from gpu_replay.training.agent import Agent
from gpu_replay.training.networks import FREQUENCIES, QNetwork
from gpu_replay.training.settings import Settings

Columns = dict[str, Tensor]


class Plain:
    """DQN in torch's own words.

    values: of a network and its observations, (B, A).
    """

    def __init__(
        self,
        online: nn.Module,
        values: Any = nn.Module.__call__,
        *,
        double: bool,
        gap: float = 0.0,
        clip: float = math.inf,
        **adam: float,
    ) -> None:
        self.online, self.target = copy.deepcopy(online), copy.deepcopy(online)
        self._values, self._double, self._gap, self._clip = values, double, gap, clip
        self._adam = torch.optim.Adam(self.online.parameters(), **adam)

    def update(self, batch: Columns) -> Columns:
        """Magnitudes of the TD errors and best values before the update; means of loss, errors and chosen values."""
        rows, values = torch.arange(len(batch["action"])), self._values(self.online, batch["obs"])
        with torch.no_grad():
            following = self._values(self.target, batch["next_obs"])
            chooser = self._values(self.online, batch["next_obs"]) if self._double else following
            target = batch["reward"] + batch["discount"] * following[rows, chooser.argmax(1)]
            target -= self._gap * (values.max(1).values - values[rows, batch["action"]])
        chosen = values[rows, batch["action"]]
        size = (target - chosen).abs()
        loss = (batch["weight"] * torch.where(size < 1, size.square() / 2, size - 0.5)).mean()
        self._adam.zero_grad()
        loss.backward()
        clip_grad_norm_(self.online.parameters(), self._clip)
        self._adam.step()
        means = torch.stack([loss, size.mean(), chosen.mean()])
        return {"size": size.detach(), "best": values.detach().amax(1), "means": means.detach()}


# the plain one, then after each update its batch and what was found, and the network in the end
Subject = tuple[Plain, Iterator[tuple[Columns, Columns]], Callable[[], nn.Module]]


def of_training(field: Field, **changes: Any) -> Subject:
    torch.manual_seed(0)
    network = QNetwork(field, 3, Settings(layer_norm=True, **changes))
    agent = Agent(network, Settings(adam_eps=1e-5, **changes), CPU, 1, seed=0)
    images, shape = field.dtype == torch.uint8, (2, 8, *field.shape)

    def made() -> Batch:
        obs = torch.randint(0, 256, shape, dtype=torch.uint8) if images else torch.randn(shape)
        numbers = {"action": torch.randint(3, (8,)), "reward": 30 * torch.randn(8), "weight": torch.linspace(0.2, 1, 8)}
        return Batch({"obs": obs[0], "next_obs": obs[1], "discount": torch.full((8,), 0.9), **numbers})

    batches = [made() for _ in range(3)]
    agent.whiten(torch.cat([batch.obs for batch in batches]))

    def values(network: QNetwork, obs: Tensor) -> Tensor:
        seen = obs.float() * (network.scale if images else 1.0)
        if changes.get("network") == "cosine":
            # low frequencies of differences and of the newest image
            waves = [
                torch.cos(torch.pi * torch.outer(torch.arange(count), (torch.arange(side) + 0.5) / side))
                for count, side in zip(FREQUENCIES, field.shape[1:], strict=True)
            ]
            low = torch.einsum("ky,nfyx,mx->nfkm", waves[0], seen, waves[1]).flatten(2)
            seen = torch.cat([low[:, 1:] - low[:, :-1], low[:, -1:]], 1).flatten(1)
        if network.whitens:
            seen = (seen - network.centre) * network.stretch
        features = network.convolutions(seen)
        # all channels of a pixel, then those of the next
        features = features.movedim(1, -1) if images and len(network.convolutions) else features
        out = network.last(network.hidden(features.flatten(1)))
        return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True)

    gap = changes.get("advantage_learning", 0.0)
    plain = Plain(agent.online, values, double=True, gap=gap, clip=10.0, lr=1e-3, eps=1e-5)

    def updates() -> Iterator[tuple[Columns, Columns]]:
        for batch in batches:
            size = agent.update(batch, agent.targets(batch))
            agent.after_updates(1)
            yield batch.to_dict(), {"size": size, "means": torch.tensor(agent.means())}

    return plain, updates(), lambda: agent.online


def of_the_study(hidden: tuple[int, ...], double: bool) -> Subject:
    # the fourth component is a goal, which is not scaled
    scale, rng = (1.0, 3.0, 0.5), np.random.default_rng(0)
    settings = AgentSettings(hidden=hidden, scale=scale, batch_size=20, learning_rate=0.01, double=double)
    agent = StudyAgent(settings, 4, 3, seed=5)

    def in_torch(parameters: Parameters) -> nn.Sequential:
        layers: list[nn.Module] = []
        for weight, bias in zip(parameters.weights, parameters.biases, strict=True):
            layer = nn.Linear(*weight.shape)
            layer.weight.data, layer.bias.data = weight.t().clone(), torch.from_numpy(bias.copy())
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    factors = torch.tensor((*scale, 1.0))
    plain = Plain(in_torch(agent.online), lambda network, obs: network(obs * factors), double=double, lr=0.01)

    def updates() -> Iterator[tuple[Columns, Columns]]:
        for step in range(6):
            obs, after = rng.standard_normal((2, 20, 4)).astype(np.float32)
            columns: Any = {
                "action": rng.integers(0, 3, 20),
                "reward": rng.normal(0, 2, 20).astype(np.float32),
                "discount": np.where(rng.random(20) < 0.3, 0, 0.9).astype(np.float32),
                "weight": rng.random(20).astype(np.float32),
            }
            error, best = agent.update(Minibatch(obs, after, obs, **columns, keys=torch.arange(20)))
            columns |= {"obs": obs, "next_obs": after}
            found = {"size": np.abs(error), "best": best}
            yield tuple({name: torch.from_numpy(each) for name, each in part.items()} for part in (columns, found))
            if step == 2:
                agent.copy_to_target()
                plain.target.load_state_dict(plain.online.state_dict())
        # the best action is taken
        observations = rng.standard_normal((50, 4)).astype(np.float32)
        expected = plain.online(torch.from_numpy(observations) * factors).argmax(1).tolist()
        assert [agent.act(each) for each in observations] == expected
        assert len(set(expected)) > 1

    return plain, updates(), lambda: in_torch(agent.online)


def of_sb3(**settings: Any) -> Subject:
    pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, in the extra `integrations`")
    from gpu_replay.integrations.sb3 import PrioritizedDQN

    replay = {"sampler": Proportional(1.0, beta=0.7, eps=0.0)}
    settings |= {"learning_starts": 40, "buffer_size": 200, "seed": 0, "device": "cpu", "replay_buffer_kwargs": replay}
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8]}, max_grad_norm=1e9, **settings)
    # nothing is learned yet
    model.learn(40)

    def updates() -> Iterator[tuple[Columns, Columns]]:
        for _ in range(4):
            model.train(1, 8)
            buffer, drawn = model.replay_buffer, model.replay_buffer.drawn
            discount = (1 - drawn.dones) * (model.gamma if drawn.discounts is None else drawn.discounts)
            numbers = {"action": drawn.actions, "reward": drawn.rewards, "discount": discount, "weight": buffer.weight}
            rows = {name: each[:, 0] for name, each in numbers.items()}
            # copies, which the hooks do not know; the errors have become priorities
            seen = {"obs": drawn.observations.clone(), "next_obs": drawn.next_observations.clone()}
            yield {**seen, **rows}, {"size": buffer.storage.priorities(buffer._keys).float()}

    plain = Plain(model.q_net, double=False, lr=1e-4)
    return plain, updates(), lambda: model.q_net


PIXELS = Field((4, 44, 40), torch.uint8, torch.float32, 1 / 255)
SUBJECTS: dict[str, tuple[Callable[..., Subject], dict[str, Any]]] = {
    "pong": (of_training, {"field": PIXELS, "network": "fine", "hidden": (32,), "whiten": True}),
    "advantage": (of_training, {"field": Field((6,), torch.float32), "hidden": (16,), "advantage_learning": 0.9}),
    "cosine": (of_training, {"field": PIXELS, "network": "cosine", "hidden": (32,), "whiten": True}),
    "vectors": (of_training, {"field": Field((6,), torch.float32), "hidden": (16, 16)}),
    # hidden layers whose products are computed by NumPy, by torch, and by both
    "study": (of_the_study, {"hidden": (5,), "double": False}),
    "study, double": (of_the_study, {"hidden": (64, 48), "double": True}),
    "study, by torch": (of_the_study, {"hidden": (300, 300), "double": False}),
    "sb3": (of_sb3, {}),
    "sb3, 3 steps": (of_sb3, {"n_steps": 3, "gamma": 0.9}),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_updates_are_those_of_plain_autograd_and_adam(name: str) -> None:
    make, settings = SUBJECTS[name]
    plain, updates, network = make(**settings)
    for batch, found in updates:
        expected = plain.update(batch)
        for each in found:
            torch.testing.assert_close(found[each], expected[each], rtol=1e-4, atol=1e-4)
    assert batch["weight"].unique().numel() > 1
    # rounding turns the sign of gradients near zero: three steps of 1e-3, six of 1e-2
    tolerance = 1e-4 if make is of_the_study else 3e-5
    for mine, theirs in zip(network().parameters(), plain.online.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=tolerance)
