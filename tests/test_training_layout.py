"""Images become channels last in the pass that scales and whitens them, and stay so through the network and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay import Batch, Field
from gpu_replay.training.dqn import Agent
from gpu_replay.training.networks import QNetwork, cpu_has_bfloat16
from gpu_replay.training.settings import Settings

CPU = torch.device("cpu")
PIXELS = Field((4, 44, 40), torch.uint8, torch.float32, 1 / 255)
SMALL: dict[str, Any] = {"network": "nature", "hidden": (8,), "layer_norm": True}
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


def pictures(count: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *PIXELS.shape), dtype=torch.uint8, generator=generator).to(device)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_gpu_prepares_images_in_one_pass(whiten: bool, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = QNetwork(PIXELS, 3, Settings(whiten=whiten, bfloat16=half, **SMALL))
    stored, dtype = pictures(6), torch.bfloat16 if half else torch.float32
    network.whiten(stored)
    for seen, scaling in ((stored, "mul"), (stored.float() / 255, "copy_")):
        expected = network.prepare(seen)
        with Operations() as operations:
            prepared = network._in_one_pass(seen, dtype)
        names = [name for name, *_ in operations.made if name != "detach"]
        assert names == ["empty_like", "addcmul" if whiten else scaling]
        torch.testing.assert_close(prepared, expected.to(dtype))
        assert prepared.is_contiguous(memory_format=NEWER)
    # whatever is not on a CPU is prepared like that
    monkeypatch.setattr(network, "_in_one_pass", lambda images, dtype: (images, dtype))
    there = stored.to("meta")
    assert network.prepare(there) == (there, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_transposed_on_the_way_through_convolutions_and_back(device: str) -> None:
    # cuDNN computes channels last where images or kernels are, and so does oneDNN
    network = QNetwork(PIXELS, 3, Settings(bfloat16=device == "cuda", **SMALL)).to(device)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    prepared = network._in_one_pass(pictures(5, device), half)
    weights = [mine.detach().requires_grad_() for mine in network.lowered()]
    with Operations() as operations:
        torch.autograd.grad(network.forward_with(prepared, weights).square().sum(), weights)
    seen = {"convolution": 0, "convolution_backward": 0, "relu_": 0, "threshold_backward": 0}
    for name, given, made in operations.made:
        images = [each for each in given + made if each.dim() == 4]
        if name == "threshold_backward" and images:
            # the gradient of what was flattened comes as numbers did to the first hidden layer
            images = images[1:]
        if name in seen and images:
            seen[name] += 1
            assert all(each.is_contiguous(memory_format=NEWER) for each in images), name
        else:
            # beside views only the flattening moves images
            copied = name in ("clone", "_to_copy", "copy_", "contiguous")
            assert not (copied and images) or (name == "clone" and given[0].shape[1:] == (64, 2, 1))
    assert set(seen.values()) == {3}


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_finds_the_values_of_a_cpu() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = QNetwork(PIXELS, 3, Settings(whiten=True, **SMALL))
    obs = pictures(64)
    network.whiten(obs)
    expected, halved = network(obs), copy.deepcopy(network)
    halved._halved = QNetwork(PIXELS, 3, Settings(whiten=True, bfloat16=True, **SMALL))._halved
    # TF32 has ten bits, bfloat16 seven: 0.013 to 0.025 on a CPU
    for there, tolerance in ((network, 1e-2), (halved, 0.1)):
        found = there.to("cuda")(obs.cuda()).cpu()
        assert float((found - expected).abs().max() / expected.std()) < tolerance


def test_prepared_and_lowered_numbers_stay_where_captured_graphs_read_them() -> None:
    settings = Settings(whiten=True, **SMALL)
    agents = [Agent(QNetwork(PIXELS, 3, settings), settings, CPU, seed=0) for _ in range(2)]
    agent = agents[0]
    networks = (agent.online, agent.target)
    read = [*agent._lowered, *agent._lowered_target, *(each for net in networks for each in (net.offset, net.gain))]
    places, before = [each.data_ptr() for each in read], [each.detach().clone() for each in read]
    frames = pictures(16)
    batch = Batch(
        {"obs": frames[:8], "next_obs": frames[8:], "action": torch.arange(8) % 3, "reward": torch.ones(8)}
        | {"discount": torch.full((8,), 0.9), "weight": torch.ones(8), "key": torch.arange(8)}
    )
    agent.whiten(frames)
    agent.update(batch)
    agent._update_target()
    for _ in range(2):
        assert [each.data_ptr() for each in read] == places
        # each has changed, and kernels are still channels last
        assert not any(torch.equal(*pair) for pair in zip(read, before, strict=True))
        assert all(each.is_contiguous(memory_format=NEWER) for each in read if each.dim() == 4)
        before = [each.detach().clone() for each in read]
        agent.restore(agents[1].state())
    # what was restored is whitened as the other is, not as it was
    for name in ("offset", "gain"):
        assert torch.equal(getattr(agents[0].online, name), getattr(agents[1].online, name))


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="this CPU runs no convolutions in bfloat16")
def test_weights_and_gradients_of_one_kind_are_copied_at_once() -> None:
    settings = Settings(whiten=True, bfloat16=True, **SMALL)
    agent = Agent(QNetwork(PIXELS, 3, settings), settings, CPU, seed=0)
    gradients = [torch.full_like(each, place + 1) for place, each in enumerate(agent._lowered)]
    with Operations() as operations:
        agent._step(gradients)
    names = [name for name, *_ in operations.made]
    # gradients of kernels, of what else is bfloat16 and of the rest; kernels and what else is bfloat16
    assert names.count("_foreach_copy_") == 5
    assert "copy_" not in names
    for mine, weight in zip(agent._lowered, agent.online.parameters(), strict=True):
        assert torch.equal(mine, weight.to(mine.dtype))
    # gradients are clipped together
    flat = torch.cat([each.grad.flatten() for each in agent.online.parameters() if each.grad is not None])
    expected = torch.cat([each.float().flatten() for each in gradients])
    torch.testing.assert_close(flat, expected * (settings.max_grad_norm / torch.linalg.vector_norm(expected)))
