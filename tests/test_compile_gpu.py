"""What only a GPU shows of compiled learning steps: they do not wait, run in graphs, and leave what eager ones do.

What compilers make of the operators is tested without one in test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import test_gpu as transitions
import test_trajectory_gpu as steps
import torch
from test_compile import Rewound, checked, inductor_warns
from test_gpu import check_drawn, check_same, graph_of, numbered, pair, powers, waiting_is_an_error
from torch import Tensor

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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", KINDS)
def test_compiled_steps_are_those_of_the_host(name: str, mode: str) -> None:
    """With graphs of the compiler's own, asked for or not, every call is made at every step."""
    gpu, host = pair(1000, transitions.SAMPLERS[name])
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 700, buffer.device))
    quick, plain = torch.compile(stepping(gpu), fullgraph=True, mode=mode), stepping(host)
    for first in range(700, 1900, 100):
        found, result = quick(numbered(first, 100, "cuda"))
        expected, wanted = plain(numbered(first, 100, "cpu"))
        check_drawn(found, expected)
        assert torch.allclose(result.cpu(), wanted, rtol=1e-5, atol=1e-6)
    check_same(gpu, host)


@pytest.mark.parametrize("name", KINDS)
def test_compiled_steps_of_streams_are_those_of_the_host(name: str) -> None:
    streams = steps.Streams(1000, 8, transitions.SAMPLERS[name], "next_step")
    streams.add(40)

    def step(buffer: TrajectoryReplayBuffer, more: dict[str, Tensor]) -> tuple[Batch, Batch]:
        buffer.add(**more)
        batch = buffer.sample(96)
        buffer.update_priorities(batch.key, powers(batch.key))
        return batch, buffer.sample_sequences(9, 3)

    quick = torch.compile(step, fullgraph=True)
    for number in range(40, 160):
        found = quick(streams.gpu, streams.step(number, "cuda"))
        expected = step(streams.host, streams.step(number, "cpu"))
        for mine, other in zip(found, expected, strict=True):
            steps.check_drawn(mine, other)
    streams.check()


def test_a_compiled_step_does_not_wait_for_the_device() -> None:
    gpu, _ = pair(1000, transitions.SAMPLERS["everything"])
    gpu.add(**numbered(0, 700, "cuda"))
    quick, more = torch.compile(stepping(gpu), fullgraph=True), numbered(700, 100, "cuda")
    quick(more)
    with waiting_is_an_error():
        for _ in range(5):
            quick(more)


def test_a_compiled_step_is_captured_and_replayed() -> None:
    gpu, host = pair(1000, transitions.SAMPLERS["everything"])
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 700, buffer.device))
    quick, plain = torch.compile(stepping(gpu), fullgraph=True), stepping(host)
    more = {name: numbered(700, 10, device) for name, device in (("gpu", "cuda"), ("host", "cpu"))}
    # compiled before, so that the capture sees what will run
    quick(more["gpu"])
    plain(more["host"])
    graph, (batch, _) = graph_of(lambda: quick(more["gpu"]))
    plain(more["host"])
    for _ in range(20):
        graph.replay()
        expected, _ = plain(more["host"])
        assert batch.key.tolist() == expected.key.tolist()
    assert gpu._counters.tolist() == host._counters.tolist()


def test_a_captured_step_may_learn_through_compiled_code() -> None:
    gpu, host = pair(1000, transitions.SAMPLERS["everything"])
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 700, buffer.device))

    def learn(batch: Batch) -> tuple[Tensor, Batch]:
        return powers(batch.key) + batch.x.abs().sum() * 0, batch

    step, plain = gpu.capture(64, torch.compile(learn, fullgraph=True)), host.capture(64, learn)
    for _ in range(20):
        check_drawn(step(), plain())
    check_same(gpu, host)


@pytest.mark.parametrize("name", KINDS)
def test_operators_are_what_they_say(name: str) -> None:
    gpu, _ = pair(100, transitions.SAMPLERS[name])
    gpu.add(**numbered(0, 90, "cuda"))
    rewound, draw = Rewound(gpu), gpu._batch_kind
    operators = Operators(rewound, gpu.device)
    more, keys = numbered(90, 5, "cuda"), torch.arange(20, 26, device="cuda")
    checked(operators, draw.draw, draw.layout, 6, None, 0, None)
    checked(operators, torch.ops.gpu_replay.add.default, ",".join(more), list(more.values()), None)
    checked(operators, torch.ops.gpu_replay.update_priorities.default, keys, powers(keys))
