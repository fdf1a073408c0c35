"""Learning steps under `torch.compile(fullgraph=True)`: what they leave behind is what eager ones do.

Each test plays the same calls to two buffers with one seed, compiled and not. The backend `aot_eager` needs no compiler
and does all that is done before code is generated: operators are made functional, arguments that are written are
copied, what nobody needs is left out.
"""

from __future__ import annotations

import gc
import random
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from devices import scale
from pairs import columns, lettered
from programs import any_program, run
from refusals import whole_state
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transitions import FIELDS as NUMBERED
from transitions import fill, transitions

from gpu_replay import (
    Batch,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    ReplayBuffer,
    Sequences,
    TrajectoryReplayBuffer,
)

Replay = ReplayBuffer | TrajectoryReplayBuffer
SCHEDULED = Proportional(beta=LinearSchedule(0.4, 1.0, 4))
# what leaves is of other types than what is stored
FIELDS = NUMBERED | {
    "obs": Field((2, 3), torch.float32, torch.float16, 1 / 64),
    "reward": Field((), torch.float64, torch.float32, 1 / 64),
}
STEP_FIELDS = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
ENVS = 3
# steps that a ring of streams holds, and that were added to one that has turned
STEPS, TURNED = scale((20, 24), (9, 11))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Compiled code of one test is not that of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step_of(number: int) -> dict[str, Tensor]:
    """Step `number` of all environments; each episode has seven steps."""
    letters = ["T" if (number + 2 * env) % 7 == 6 else "." for env in range(ENVS)]
    given = columns(lettered(number, letters, STEP_FIELDS), STEP_FIELDS)
    return {name: torch.from_numpy(value) for name, value in given.items()}


def filled(sampler: Any = SCHEDULED, seed: int = 5, capacity: int = scale(61, 23)) -> ReplayBuffer:
    """Transitions in a ring that has turned."""
    buffer = ReplayBuffer(capacity, FIELDS, sampler=sampler, seed=seed)
    fill(buffer, capacity + 9)
    return buffer


def streamed(stack: int = 2, n_step: int = 3, **more: Any) -> TrajectoryReplayBuffer:
    """Streams of steps in a ring that has turned."""
    settings: dict[str, Any] = {"stack": stack, "n_step": n_step, "sampler": SCHEDULED, "seed": 5, **more}
    buffer = TrajectoryReplayBuffer(STEPS * ENVS, ENVS, STEP_FIELDS, **settings)
    for number in range(TURNED):
        buffer.add(**step_of(number))
    return buffer


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def same(found: Any, expected: Any, name: str = "") -> bool:
    """Whether two results of the two ways are one, batches tensor by tensor and in the order of their names."""
    if isinstance(expected, Batch):
        return list(found) == list(expected) and all(same(found[each], expected[each], each) for each in expected)
    if isinstance(expected, tuple):
        return all(same(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


def check_left(buffer: Replay, eager: Replay) -> None:
    """Fail unless both hold the same transitions, priorities, counts and random state."""
    assert whole_state(buffer) == whole_state(eager)


def check_alike(
    make: Callable[[], Any], step: Callable[..., Any], calls: Iterable[tuple[Any, ...]], backend: Any = "aot_eager"
) -> None:
    """Fail unless compiled calls give what eager ones do, and leave the same behind."""
    buffer, eager, quick = make(), make(), compiled(step, backend)
    for arguments in calls:
        assert same(quick(buffer, *arguments), step(eager, *arguments))
    check_left(buffer, eager)


def test_rows_come_with_their_axis_and_numbers_in_tensors() -> None:
    def add(replay: ReplayBuffer, rows: dict[str, Any]) -> Tensor:
        return replay.add(**rows)

    one: dict[str, Any] = {**transitions([7], NUMBERED)}
    for rows, error in (
        ({name: value[0] for name, value in one.items()}, "leading axis"),
        (one | {"action": 7}, "a tensor or an array inside torch.compile, with its leading axis; found int"),
    ):
        buffer = ReplayBuffer(5, NUMBERED)
        with pytest.raises(Exception, match=error):
            compiled(add)(buffer, rows)
        assert buffer.added == 0
    for forms in ({}, {"terminated": one["terminated"] * 1.0}, {"reward": one["reward"][:, None]}):
        check_alike(lambda: ReplayBuffer(5, NUMBERED), add, [(one | forms,)])
    none = {name: value[:0] for name, value in one.items()}
    check_alike(lambda: ReplayBuffer(5, NUMBERED), add, [(none,), (one,)])


def test_steps_of_streams_are_added_sampled_and_updated_in_one_graph() -> None:
    def learn(replay: TrajectoryReplayBuffer, step: dict[str, Tensor]) -> tuple[Tensor, Batch, Batch]:
        keys, batch = replay.add(**step, priority=step["reward"].abs()), replay.sample(6)
        replay.update_priorities(batch.key, batch.next_obs[:, -1].sum(1).abs())
        replay.write(keys, obs=step["obs"] + 1.0)
        return keys, batch, replay.sample(4)

    check_alike(streamed, learn, [(step_of(number),) for number in range(TURNED, TURNED + 4)])


def test_sequences_are_drawn_with_their_length() -> None:
    make = partial(streamed, stack=1, n_step=1, sequences=Sequences(5, stride=2))
    check_alike(make, lambda replay: replay.sample(4), [()] * 2)


def test_arrays_are_added_with_priorities() -> None:
    more = {name: value.numpy() for name, value in transitions(range(100, 104), FIELDS).items()}

    def add(replay: ReplayBuffer, given: dict[str, np.ndarray]) -> Tensor:
        # their shape is known while they are compiled: one for each transition
        return replay.add(**given, priority=np.arange(4.0)).unsqueeze(1).expand(-1, 2)

    check_alike(filled, add, [(more,)])


def test_dictionaries_and_any_name_are_taken() -> None:
    number = Field((), torch.int64)
    fields = {"obs": {"a,b%;": number, "c": number}, "action": number}

    def step(replay: TrajectoryReplayBuffer, number: Tensor) -> Batch:
        obs, final, reward = {"a,b%;": number, "c": -number}, {"a,b%;": number + 90, "c": number}, number.float()
        terminated, truncated = torch.tensor([False]), torch.tensor([True])
        replay.add(obs=obs, action=number, reward=reward, terminated=terminated, truncated=truncated, final_obs=final)
        return replay.sample(1)

    settings: dict[str, Any] = {"autoreset": "same_step", "sampler": Latest(), "device": "cpu"}
    check_alike(
        lambda: TrajectoryReplayBuffer(8, 1, fields, **settings), step, [(torch.tensor([each]),) for each in range(2)]
    )


def test_two_buffers_in_one_step_keep_their_own_order() -> None:
    """What is drawn after an update sees it, though no value says that it comes after."""
    pairs = [(filled(), filled(seed=6)) for _ in range(2)]

    def step(first: ReplayBuffer, second: ReplayBuffer) -> tuple[Batch, Batch, Batch]:
        before, other = first.sample(4), second.sample(8)
        first.update_priorities(before.key, torch.full((4,), 1e6))
        second.update_priorities(other.key, other.weight)
        return before, other, first.sample(4)

    quick = compiled(step)
    for _ in range(2):
        before, other, after = quick(*pairs[0])
        assert same((before, other, after), step(*pairs[1]))
        # a million times the priority of the rest
        assert set(after.key.tolist()) <= set(before.key.tolist())
    for buffer, eager in zip(*pairs, strict=True):
        check_left(buffer, eager)


@pytest.mark.parametrize("way", ["function", "afterwards"])
def test_gradients_inside_a_step_and_after_it_do_not_draw_again(way: str) -> None:
    def step(replay: ReplayBuffer, weight: Tensor) -> Any:
        batch = replay.sample(8)

        def loss(weight: Tensor) -> tuple[Tensor, Tensor]:
            error = (batch.obs[:, 0].float() * weight).sum(1).tanh() - batch.reward
            return (batch.weight * error.square()).mean(), error

        result, error = torch.func.grad(loss, has_aux=True)(weight) if way == "function" else loss(weight)
        replay.update_priorities(batch.key, error.abs())
        return result, batch

    def learned(buffer: ReplayBuffer, step: Callable[..., Any]) -> tuple[Any, ...]:
        results: list[Any] = []
        for number in range(3):
            weight = torch.full((3,), 1.0 + number, requires_grad=way != "function")
            result, batch = step(buffer, weight)
            if way == "afterwards":
                result.backward()
                result = weight.grad
            results += [result, batch]
        return tuple(results)

    buffer, eager = filled(), filled()
    assert same(learned(buffer, compiled(step)), learned(eager, step))
    check_left(buffer, eager)


def test_batch_sizes_and_exponents_that_change_are_not_compiled_each_time() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    calls = [(5 + number, 0.1 * number) for number in range(10)]
    check_alike(filled, lambda replay, rows, beta: replay.sample(rows, beta=beta), calls, counter)
    assert counter.frame_count <= 3


def test_a_call_that_eager_code_refuses_raises_the_same() -> None:
    buffer, draw = ReplayBuffer(10, FIELDS), compiled(lambda replay: replay.sample(4))
    with pytest.raises(RuntimeError, match=r"sample\(4\): the buffer holds no transitions"):
        draw(buffer)
    fill(buffer, 8)
    assert len(draw(buffer)) == 4


def test_a_buffer_that_was_compiled_for_is_freed() -> None:
    def drawn() -> weakref.ref[ReplayBuffer]:
        buffer = filled()
        compiled(lambda: buffer.sample(4).key.sum())()
        return weakref.ref(buffer)

    gone = drawn()
    gc.collect()
    assert gone() is None


GOALS: dict[str, Any] = {"fields": "goals", "n_step": 1, "relabel": "future"}
LIVED: list[tuple[str, str, dict[str, Any]]] = [
    ("rows", "latest", {}),
    ("rows", "rank-annealed", {}),
    ("steps", "combined-proportional", {"fields": 2, "relabel": None}),
    ("steps", "annealed", GOALS),
]


@pytest.mark.parametrize("kind, name, known", LIVED)
def test_draws_of_every_sampler_are_those_of_eager_calls(kind: str, name: str, known: dict[str, Any]) -> None:
    program = any_program(random.Random(3), kind, name, calls=25, capacity=scale(40, 20), place="memory", **known)

    def step(replay: Replay) -> Batch:
        # a call whose result is not used is made once
        replay.sample(3)
        return replay.sample(6)

    check_alike(lambda: run(program).buffer, step, [()] * 2)


# inductor imports setuptools, which looks for distutils and takes another one where a warning is an error
inductor_warns = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@inductor_warns
def test_generated_code_keeps_every_call_in_its_place() -> None:
    """Inductor writes to the token itself instead of to copies: what keeps calls in order is another thing there."""

    def step(replay: ReplayBuffer) -> tuple[Batch, Batch]:
        replay.sample(3)
        before = replay.sample(4)
        replay.update_priorities(before.key, torch.full((4,), 1e6))
        return before, replay.sample(4)

    check_alike(filled, step, [()] * 2, "inductor")
