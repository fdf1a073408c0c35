"""`buffer.capture`: one call that samples, learns and updates, and what it does where it cannot, or must not, go on.

On a CPU a step runs as it is, with the host code and with interpreted kernels. What it becomes on a GPU is played in
test_capture_graphs.py; what only a real one shows is in test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from devices import scale
from programs import SAMPLERS
from refusals import whole_state
from torch import Tensor
from transitions import NUMBER

from gpu_replay import Batch, Field, ReplayBuffer, Sequences, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract

STEPS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
SAMPLED = ("uniform", "latest", "annealed", "rank-annealed", "combined-proportional")
BUFFERS: dict[str, Callable[[Any, str], Any]] = {
    "transitions": lambda sampler, device: ReplayBuffer(50, NUMBER, sampler=sampler, device=device, seed=3),
    "steps": lambda sampler, device: of_steps(sampler, device, n_step=2, stack=2),
    "sequences": lambda sampler, device: of_steps(sampler, device, sequences=Sequences(3)),
}
ROWS = 8
# of a buffer that is filled, and of a step that is called
TURNS, CALLS = scale((12, 16), (4, 4))


def of_steps(sampler: Any, device: str, **settings: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(60, 3, STEPS, sampler=sampler, device=device, seed=3, **settings)


def add(buffer: Any, turn: int | Tensor) -> None:
    """Three rows with the number of the turn."""
    number = torch.zeros(3, dtype=torch.int64, device=buffer.device) + turn
    if isinstance(buffer, ReplayBuffer):
        buffer.add(number=number)
    else:
        flags = number < 0
        buffer.add(obs=number, action=number, reward=number.float(), terminated=flags, truncated=flags)


def filled(kind: str, sampler: Any, device: str = "cpu") -> Any:
    buffer = BUFFERS[kind](sampler, device)
    for turn in range(TURNS):
        add(buffer, turn)
    return buffer


def powers(batch: Batch) -> Tensor:
    """A power of two for each row."""
    return torch.bitwise_left_shift(torch.ones_like(batch.key), batch.key % 7).double()


def steps_of(buffer: Any) -> int:
    """How many samples the schedule has seen."""
    return buffer.state_dict()["counters"]["STEP"]


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("name", scale(SAMPLED, ["combined-proportional"]))
def test_a_step_is_a_sample_what_learns_from_it_and_an_update(name: str, kind: str, device: str) -> None:
    buffer, twin = (filled(kind, SAMPLERS[name], device) for _ in range(2))
    step = buffer.capture(ROWS, lambda batch: (powers(batch), {"key": batch.key, "weight": batch.weight}))
    for turn in range(CALLS):
        found, expected = step(), twin.sample(ROWS)
        twin.update_priorities(expected.key, powers(expected))
        assert found["key"].tolist() == expected.key.tolist()
        assert torch.equal(found["weight"], expected.weight)
        if turn % 3 == 2:
            for each in (buffer, twin):
                add(each, TURNS + turn)
        if turn == CALLS // 2:
            buffer.load_state_dict(twin.state_dict())
    assert whole_state(buffer) == whole_state(twin)
    assert (steps_of(buffer), step.captured) == (CALLS, device == "cuda")
    assert step.replays == (CALLS - 3 if device == "cuda" else 0)


@pytest.mark.parametrize("kind", scale([*BUFFERS], ["transitions"]))
def test_a_step_may_add_and_be_cleared(kind: str, device: str) -> None:
    buffer, twin = (filled(kind, SAMPLERS["annealed"], device) for _ in range(2))
    number = torch.full((3,), TURNS, device=device)

    def learn(batch: Batch) -> Tensor:
        add(buffer, number)
        number.add_(1)
        return powers(batch)

    step = buffer.capture(ROWS, learn, beta=0.5)
    for turn in range(CALLS):
        assert step() is None
        batch = twin.sample(ROWS, beta=0.5)
        add(twin, TURNS + turn)
        twin.update_priorities(batch.key, powers(batch))
    assert whole_state(buffer) == whole_state(twin)
    buffer.clear()
    with pytest.raises(RuntimeError, match=r"sample\(8\): the buffer holds no .*Add more first"):
        step()
    assert (buffer.added, len(buffer)) == (3 * (TURNS + CALLS), 0)


@pytest.mark.parametrize("kind", scale([*BUFFERS], ["steps"]))
def test_a_step_that_draws_nothing_adds(kind: str, device: str) -> None:
    buffer, twin = (BUFFERS[kind](SAMPLERS["annealed"], device) for _ in range(2))
    number = torch.zeros((3,), dtype=torch.int64, device=device)

    def act() -> tuple[Tensor, Tensor]:
        add(buffer, number)
        number.add_(1)
        return number + 1, number - 1

    step = buffer.capture(None, act)
    # into an empty buffer, and then past the end of the ring
    for turn in range(25):
        more, less = step()
        add(twin, turn)
        assert (more.tolist(), less.tolist()) == ([turn + 2] * 3, [turn] * 3)
    assert whole_state(buffer) == whole_state(twin)
    assert (buffer.added, step.captured) == (75, device == "cuda")


class Losses(NamedTuple):
    value: Tensor
    parts: list[Tensor]


def test_what_comes_out_holds_no_backward_pass() -> None:
    weight, buffer = torch.ones(1, requires_grad=True), filled("transitions", SAMPLERS["annealed"])
    before = buffer.masses()

    def learn(batch: Batch) -> tuple[None, Any]:
        loss = weight * batch.number
        return None, {"losses": Losses(loss.mean(), [loss, loss * 2]), "batch": (batch, None)}

    output = buffer.capture(ROWS, learn)()
    # priorities may be left as they are
    assert torch.equal(buffer.masses(), before)
    found = output["losses"]
    assert isinstance(found, Losses)
    assert not any(tensor.requires_grad for tensor in (found.value, *found.parts))
    assert torch.equal(found.parts[1], found.parts[0] * 2)
    assert torch.equal(found.parts[0], output["batch"][0].number.float())


ONES = torch.ones(ROWS)
# what learns, or what it returns
WRONG: list[tuple[Any, Any, dict[str, Any], Any, str]] = [
    (8, ONES[:, None], {}, ValueError, r"tensor of shape \[8\] on cpu, .* found shape \[8, 1\] on cpu"),
    (8, ONES.to("meta"), {}, ValueError, r"found shape \[8\] on meta"),
    (8, 0.5, {}, TypeError, r"or a tuple \(priorities, output\); found float"),
    (8, (ONES, 0.5), {}, TypeError, "so that must be tensors; found float"),
    (8, ONES.bool(), {}, TypeError, "priorities must be real numbers"),
    (0, powers, {}, ValueError, "the batch size must be at least 1; found 0"),
    (8, None, {}, TypeError, "needs a function that learns from a batch; found NoneType"),
    (8, powers, {"beta": -1}, ValueError, "beta must be from 0 to 1e.100; found -1"),
    (8, powers, {"warm_ups": 0}, ValueError, "warm_ups must be at least 1; found 0"),
    (8, powers, {"generators": [0]}, TypeError, "generators must be of type torch.Generator; found int"),
    (8, powers, {"generators": torch.Generator()}, TypeError, "must be a list of torch.Generator; found Generator"),
]


@pytest.mark.parametrize("rows, learn, named, error, message", WRONG)
def test_steps_that_make_no_sense(rows: Any, learn: Any, named: dict[str, Any], error: Any, message: str) -> None:
    buffer = filled("transitions", SAMPLERS["annealed"])
    before = buffer.masses()
    with pytest.raises(error, match=message):
        buffer.capture(rows, learn if learn is None or callable(learn) else lambda batch: learn, **named)()
    assert torch.equal(buffer.masses(), before)
