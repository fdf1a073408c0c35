"""What only a GPU shows of compiled learning steps: they do not wait, run in graphs, and leave what eager ones do.

What compilers make of the operators is tested without one in test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_twins import SAMPLERS, OnGpu, graph_of, powers, waiting_is_an_error
from test_compile import Rewound, checked, inductor_warns
from torch import Tensor
from twins import check_batches

from gpu_replay import Batch, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.graphs.custom_ops import Operators

pytestmark = [pytest.mark.gpu, inductor_warns]

# of tensors that have the same bits on every machine
KINDS = ("uniform", "everything", "combined-rank")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stepping(buffer: ReplayBuffer) -> Callable[[dict[str, Tensor]], tuple[Batch, Tensor]]:
    """A step that adds, draws and updates, with some work for the compiler."""

    def step(more: dict[str, Tensor]) -> tuple[Batch, Tensor]:
        buffer.add(**more)
        batch = buffer.sample(65)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch, (batch.x * batch.weight[:, None]).tanh().sum(1)

    return step


def filled(name: str) -> OnGpu:
    both = OnGpu(1000, 100, SAMPLERS[name])
    both.add(7, own=False)
    return both


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", KINDS)
def test_compiled_steps_are_those_of_the_host(name: str, mode: str) -> None:
    """With graphs of the compiler's own, asked for or not, every call is made at every step."""
    both = filled(name)
    quick, plain = torch.compile(stepping(both.gpu), fullgraph=True, mode=mode), stepping(both.host)
    for first in range(700, 1900, 100):
        found, result = quick(both.given(first, own=False))
        expected, wanted = plain(both.given(first, "cpu", own=False))
        check_batches(found, expected)
        assert torch.allclose(result.cpu(), wanted, rtol=1e-5, atol=1e-6)
    both.check()


@pytest.mark.parametrize("name", KINDS)
def test_compiled_steps_of_streams_are_those_of_the_host(name: str) -> None:
    both = OnGpu(1000, 8, SAMPLERS[name], "next_step")
    both.add(40)

    def step(buffer: TrajectoryReplayBuffer, more: dict[str, Tensor]) -> tuple[Batch, Batch]:
        buffer.add(**more)
        batch = buffer.sample(96)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch, buffer.sample_sequences(9, 3)

    quick = torch.compile(step, fullgraph=True)
    for first in range(320, 1280, 8):
        found, expected = quick(both.gpu, both.given(first)), step(both.host, both.given(first, "cpu"))
        for mine, other in zip(found, expected, strict=True):
            check_batches(mine, other)
    both.check()


def test_a_compiled_step_does_not_wait_for_the_device() -> None:
    both = filled("everything")
    quick, more = torch.compile(stepping(both.gpu), fullgraph=True), both.given(700, own=False)
    quick(more)
    with waiting_is_an_error():
        for _ in range(5):
            quick(more)


def test_a_compiled_step_is_captured_and_replayed() -> None:
    both = filled("everything")
    quick, plain = torch.compile(stepping(both.gpu), fullgraph=True), stepping(both.host)
    mine, other = (both.given(700, device, own=False, rows=10) for device in ("cuda", "cpu"))
    # compiled before, so that the capture sees what will run
    quick(mine)
    plain(other)
    graph, (batch, _) = graph_of(lambda: quick(mine))
    plain(other)
    for _ in range(20):
        graph.replay()
        expected, _ = plain(other)
        assert batch.key.tolist() == expected.key.tolist()
    assert both.gpu._counters.tolist() == both.host._counters.tolist()


def test_a_captured_step_may_learn_through_compiled_code() -> None:
    both = filled("everything")

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        return powers(batch.key) + batch.x.abs().sum() * 0, batch

    step, plain = both.gpu.capture(64, torch.compile(learn, fullgraph=True)), both.host.capture(64, learn)
    for _ in range(20):
        check_batches(step(), plain())
    both.check()


@pytest.mark.parametrize("name", KINDS)
def test_operators_are_what_they_say(name: str) -> None:
    both = OnGpu(100, 90, SAMPLERS[name])
    both.add(own=False)
    rewound, draw = Rewound(both.gpu), both.gpu._batch_kind
    operators = Operators(rewound, both.gpu.device)
    more, keys = both.given(90, own=False, rows=5), torch.arange(20, 26, device="cuda")
    checked(operators, draw.draw, draw.layout, 6, None, 0, None)
    checked(operators, torch.ops.gpu_replay.add.default, ",".join(more), list(more.values()), None)
    checked(operators, torch.ops.gpu_replay.update_priorities.default, keys, powers(keys))
