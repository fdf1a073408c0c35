"""Buffers in functions under `torch.compile`: a call ends the graph, runs as in eager code, and the function goes on.

Each test plays the same calls to two buffers with one seed, compiled and not, and compares what comes back and what
they leave behind. The backend `aot_eager` needs no compiler and does all that is done before code is generated.
"""

from __future__ import annotations

import gc
import inspect
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import scale
from pairs import columns, lettered
from refusals import whole_state
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transitions import FIELDS as NUMBERED
from transitions import fill, transitions

import gpu_replay
from gpu_replay import Batch, Field, LinearSchedule, Proportional, ReplayBuffer, TrajectoryReplayBuffer

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


def streamed(**more: Any) -> TrajectoryReplayBuffer:
    """Streams of steps in a ring that has turned."""
    settings: dict[str, Any] = {"stack": 2, "n_step": 3, "sampler": SCHEDULED, "seed": 5, **more}
    buffer = TrajectoryReplayBuffer(STEPS * ENVS, ENVS, STEP_FIELDS, **settings)
    for number in range(TURNED):
        buffer.add(**step_of(number))
    return buffer


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend)


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
    """Fail unless compiled calls give what eager ones do, leave the same behind, and compile nothing of the package."""
    counter = CompileCounterWithBackend(backend)
    buffer, eager, quick = make(), make(), compiled(step, counter)
    for arguments in calls:
        assert same(quick(buffer, *arguments), step(eager, *arguments))
    check_left(buffer, eager)
    traced = [node.stack_trace or "" for graph in counter.graphs for node in graph.graph.nodes]
    assert traced
    assert not [each for each in traced if str(Path(gpu_replay.__file__).parent) in each]


def test_a_step_of_transitions_goes_on_after_each_call() -> None:
    """With arrays, single rows, and sizes and exponents that change."""

    def learn(replay: ReplayBuffer, rows: dict[str, Any], one: dict[str, Any], beta: float) -> tuple[Any, ...]:
        scaled = rows | {"reward": rows["reward"] * 2 + 1}
        keys = replay.add(**scaled, priority=scaled["reward"].abs())
        key = replay.add(**one)
        batch = replay.sample(len(keys) + 1, beta=beta)
        error = (batch.obs.float().sum((1, 2)) - batch.reward).abs()
        replay.update_priorities(batch.key, error)
        return keys, key, batch, error.mean() * 3

    def one(number: int) -> dict[str, Any]:
        return {name: value[0].numpy() for name, value in transitions([number], FIELDS).items()}

    calls = [(transitions(range(at, at + at % 5 + 1), FIELDS), one(90 + at), at / 20) for at in range(12)]
    check_alike(filled, learn, calls)


def test_a_step_of_streams_goes_on_after_each_call() -> None:
    """With final observations."""

    def learn(replay: TrajectoryReplayBuffer, step: dict[str, Tensor]) -> tuple[Tensor, Batch, Tensor]:
        keys = replay.add(**step, priority=step["reward"].abs(), final_obs=step["obs"] + 90)
        batch = replay.sample(6)
        replay.update_priorities(batch.key, batch.next_obs[:, -1].sum(1).abs())
        replay.write(keys, obs=step["obs"] + 1.0)
        return keys, batch, replay.sample(4).obs.sum() * 2

    settings: dict[str, Any] = {"autoreset": "same_step", "terminal_obs": True}
    check_alike(lambda: streamed(**settings), learn, [(step_of(number),) for number in range(TURNED, TURNED + 4)])


KEYS, PRIORITIES = [60, 61], [1.5, 2.5]
CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "__contains__": lambda replay, _: 60 in replay,
    "__getitem__": lambda replay, _: replay[KEYS],
    "__len__": lambda replay, _: len(replay),
    "added": lambda replay, _: replay.added,
    "batches": lambda replay, _: tuple(replay.batches(20)),
    "clear": lambda replay, _: replay.clear(),
    "epoch": lambda replay, _: tuple(replay.epoch(20)),
    "exclude": lambda replay, _: replay.exclude(KEYS),
    "keys": lambda replay, _: replay.keys(),
    "load_state_dict": lambda replay, _: replay.load_state_dict(replay.state_dict()),
    "masses": lambda replay, _: replay.masses(),
    "priorities": lambda replay, _: replay.priorities(KEYS),
    "sample": lambda replay, _: replay.sample(6, beta=0.3),
    "save": lambda replay, path: replay.save(path),
    "state_dict": lambda replay, _: len(replay.state_dict()),
    "stats": lambda replay, _: replay.stats().size,
    "total_mass": lambda replay, _: replay.total_mass(),
    "update_priorities": lambda replay, _: replay.update_priorities(KEYS, PRIORITIES),
    "write": lambda replay, _: replay.write(KEYS, action=torch.tensor([7, 8])),
}
STEPS_TOO: dict[str, Callable[[Any, Path], Any]] = {
    "begin_episodes": lambda replay, _: replay.begin_episodes(),
    "extend": lambda replay, _: replay.extend(**{name: value[None] for name, value in step_of(40).items()}),
}
# what makes graphs of its own, pictures, and what went
NOT_CALLED = {"add", "capture", "plot", "sample_sequences"}


@pytest.mark.parametrize("name", [*CALLS, *STEPS_TOO])
def test_any_call_may_be_made_in_a_compiled_function(name: str, tmp_path: Path) -> None:
    call = {**CALLS, **STEPS_TOO}[name]

    def step(replay: Replay, number: Tensor) -> tuple[Any, Tensor]:
        before = number * 2
        return call(replay, tmp_path / "saved"), before + 1

    kinds: tuple[tuple[type, Callable[[], Any]], ...] = ((ReplayBuffer, filled), (TrajectoryReplayBuffer, streamed))
    # once where both have the same method
    for make in {getattr(kind, name): make for kind, make in kinds if hasattr(kind, name)}.values():
        check_alike(make, step, [(torch.ones(3),)] * 2)


def test_all_calls_are_tried() -> None:
    for kind, calls in ((ReplayBuffer, CALLS), (TrajectoryReplayBuffer, {**CALLS, **STEPS_TOO})):
        public = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
        assert public - NOT_CALLED == {name for name in calls if name[0] != "_"} - {"added"}


def test_many_buffers_and_sizes_meet_one_function() -> None:
    """More than Dynamo would compile it for."""

    def learn(replay: ReplayBuffer, rows: dict[str, Tensor]) -> Tensor:
        replay.add(**rows)
        return replay.sample(len(rows["reward"])).reward.sum()

    counter = CompileCounterWithBackend("aot_eager")
    quick = compiled(learn, counter)
    for number in range(2 * torch._dynamo.config.recompile_limit):
        buffer, eager = filled(seed=number), filled(seed=number)
        rows = transitions(range(number + 2), FIELDS)
        assert torch.equal(quick(buffer, rows), learn(eager, rows))
        check_left(buffer, eager)
    assert counter.frame_count <= 3


def test_a_call_that_eager_code_refuses_raises_the_same() -> None:
    buffer, draw = ReplayBuffer(10, FIELDS), compiled(lambda replay: replay.sample(4))
    with pytest.raises(RuntimeError, match=r"sample\(4\): the buffer holds no transitions"):
        draw(buffer)
    fill(buffer, 8)
    assert len(draw(buffer)) == 4


def test_a_graph_without_a_break_is_refused_with_what_to_do() -> None:
    buffer = filled()
    for call in (lambda: buffer.sample(4).reward + 1, lambda: buffer.keys() + 1):
        with pytest.raises(Exception, match=r"call a buffer outside of the compiled function, or use buffer\.capture"):
            torch.compile(call, fullgraph=True, backend="eager")()


def test_a_buffer_that_was_compiled_for_is_freed() -> None:
    def drawn() -> weakref.ref[ReplayBuffer]:
        buffer = filled()
        compiled(lambda: buffer.sample(4).key.sum())()
        return weakref.ref(buffer)

    gone = drawn()
    gc.collect()
    assert gone() is None


# inductor imports setuptools, which looks for distutils and takes another one where a warning is an error
inductor_warns = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@inductor_warns
def test_generated_code_keeps_every_call_in_its_place() -> None:
    def step(replay: ReplayBuffer) -> tuple[Batch, Tensor]:
        replay.sample(3)
        before = replay.sample(4)
        replay.update_priorities(before.key, torch.full((4,), 1e6))
        return before, replay.sample(4).reward * 2

    check_alike(filled, step, [()] * 2, "inductor")
