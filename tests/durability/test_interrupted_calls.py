"""A call that raises, wherever and for whatever reason, leaves the buffer as it was, and its next draws too.

Every line that a call runs in the package, and every operation that it calls, raises once. What numbers are in memory
then is compared with those before, and the next draws with those of a buffer of which nothing was asked. The last line
of a call is one operation that does all that is not put back; after it there is nothing left to do but return.
"""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only
from transitions import SAMPLERS, same

import gpu_replay
from gpu_replay import Field, Hindsight, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.loops.compiling import compiler

pytestmark = [
    pytest.mark.contract,
    host_only,
    pytest.mark.skipif(compiler() is None, reason="a loop that runs as Python can be interrupted half-way"),
]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """No buffer of before is finalized in the middle of a call."""
    gc.disable()
    yield
    gc.enable()


PACKAGE = str(Path(gpu_replay.__file__).parent)
FEW = 20


class Interruption(BaseException):
    """What no code expects."""


def places_of(call: Callable[[], Any], at: int = sys.maxsize, error: type[BaseException] = Interruption) -> int:
    """Make a call, and raise at so many places of the package; returns how many it passed.

    A place is a line, before it runs, and a function that is not written in Python, before it is called: operations on
    arrays among them.
    """
    count, seen = 0, set()

    def pass_by() -> None:
        nonlocal count
        count += 1
        # once: what puts things back is not interrupted
        if count == at + 1:
            raise error

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = frame, frame.f_lineno
            # a `with` block is left in its first line: the lock is already free for all that can come then
            leaves = place in seen and "with " in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            seen.add(place)
            if not leaves:
                pass_by()
        return line

    def entered(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def called(frame: FrameType, event: str, function: Any) -> None:
        lock = getattr(function, "__name__", "") in ("__enter__", "__exit__")
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE) and not lock:
            pass_by()

    before = sys.gettrace()
    sys.setprofile(called)
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
        sys.setprofile(None)
    return count


def memory(buffer: Any) -> dict[str, Any]:
    """All numbers that say what the buffer holds and what it will draw."""
    state = buffer._state
    found: dict[str, Any] = {"counters": buffer._counters.tolist()}
    # nothing is said of rows that were never written
    stored = min(buffer.added, buffer.capacity)
    for name, tensor in buffer._state_tensors(buffer.capacity).items():
        found[name] = tensor[:stored].clone() if name.startswith("fields.") else tensor.clone()
    for number, tree in enumerate(state.trees):
        found |= {f"tree {number} {level}": nodes.clone() for level, nodes in enumerate(tree.levels)}
        found[f"extremes {number}"] = [tree.lowest() if tree.low is not None else 0]
        found[f"extremes {number}"] += [tree.highest() if tree.high is not None else 0]
    if isinstance(buffer, TrajectoryReplayBuffer):
        starts = np.flatnonzero(state.eligible.arrays[0])
        found["lengths"] = torch.from_numpy(buffer._engine._lengths[starts])
        found["sums"] = torch.from_numpy(buffer._engine._sums[starts])
    return found


def equal(found: Any, before: Any) -> bool:
    return torch.equal(found, before) if isinstance(found, torch.Tensor) else bool(found == before)


def check_every_place(make: Callable[[], Any], call: Callable[[Any], Any], every: int) -> None:
    """Raise at every so many places of a call of a buffer, each time compare, and draw the same as an untouched one."""
    buffer, untouched = make(), make()
    before = memory(buffer)
    state = buffer.state_dict()
    fresh = make()
    total = places_of(lambda: call(fresh))
    assert total > FEW
    for at in range(0, total, every):
        error = (MemoryError, KeyboardInterrupt, Interruption)[at % 3]
        try:
            places_of(lambda: call(buffer), at, error)
        except error:
            after = memory(buffer)
            wrong = [name for name in before if not equal(after[name], before[name])]
            assert not wrong, f"place {at} of {total} changed {wrong}"
        else:
            # it knew more than the first time
            assert at > total // 2
            buffer.load_state_dict(state)
            break
    for _ in range(2):
        same(buffer.sample(2), untouched.sample(2))
    call(buffer)
    call(untouched)
    after = memory(untouched)
    assert not [name for name, found in memory(buffer).items() if not equal(found, after[name])]


FIELDS = {"a": Field((), torch.float32), "b": Field((2,), torch.float32), "large": Field((80,), torch.float32)}


def rows(count: int, first: int = 0) -> dict[str, Any]:
    a = torch.arange(first, first + count).float()
    return {"a": a, "b": a[:, None] + torch.zeros(2), "large": a[:, None] + torch.ones(80)}


def ring(sampler: Any) -> Callable[[], ReplayBuffer]:
    def make() -> ReplayBuffer:
        buffer = ReplayBuffer(5, FIELDS, sampler=sampler, device="cpu", seed=3)
        buffer.add(**rows(3))
        buffer.add(**rows(4, 3), priority=[1.0, 2.0, 0.5, 3.0])
        buffer.sample(2)
        return buffer

    return make


RING_CALLS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "add": lambda buffer: buffer.add(**rows(1, 9)),
    "add over the seam": lambda buffer: buffer.add(**rows(4, 9), priority=[4.0, 0.5, 1e9, 1.0]),
    "add more than fit": lambda buffer: buffer.add(**rows(8, 9), priority=np.arange(8.0)),
    "sample": lambda buffer: buffer.sample(3),
    "update": lambda buffer: buffer.update_priorities([6, 3, 3, 0], [9.0, 8.0, 7.0, 6.0]),
}


def named(names: Iterable[str], *kept: str, argument: str = "name") -> pytest.MarkDecorator:
    """Samplers, or other names; those that are not kept are slow."""
    return pytest.mark.parametrize(
        argument, [pytest.param(each, marks=() if each in kept else pytest.mark.slow) for each in names]
    )


@pytest.mark.parametrize("call", RING_CALLS)
@named(SAMPLERS, "proportional", "rank")
def test_transitions_after_an_exception_anywhere(name: str, call: str, request: pytest.FixtureRequest) -> None:
    every = 1 if request.config.option.full else 9
    check_every_place(ring(SAMPLERS[name]), RING_CALLS[call], every)


GOALS = {"obs.a": Field((2,), torch.float32), "obs.d": Field((2,), torch.float32), "action": Field((), torch.int64)}
PLAIN = {"obs": Field((2, 2), torch.float32), "action": Field((), torch.int64), "large": Field((80,), torch.float32)}


def reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved - desired).sum(1)


STREAMS: dict[str, dict[str, Any]] = {
    "next_step": {"fields": PLAIN, "n_step": 2, "stack": 2, "random_shift": 1},
    "same_step": {"fields": PLAIN, "n_step": 2, "stack": 2, "autoreset": "same_step", "final_capacity": 2},
    "goals": {"fields": GOALS, "autoreset": "same_step", "relabel": Hindsight("a", "d", reward_fn=reward)},
}
ENVS = 2


def step(number: int, kind: str, fields: dict[str, Field]) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: np.full((ENVS, *field.shape), number, dtype=str(field.dtype).removeprefix("torch."))
        for name, field in fields.items()
    }
    given["reward"] = np.array([number, -number], dtype=np.float32)
    given |= {"terminated": np.array([kind == "T", False]), "truncated": np.full(ENVS, kind == "U")}
    if kind == "U":
        given |= {f"final_{name}": value + 100 for name, value in given.items() if name.startswith("obs")}
    return given


def taken_by(buffer: TrajectoryReplayBuffer, given: dict[str, Any]) -> dict[str, Any]:
    """Without final observations where the buffer takes none."""
    kept = buffer.autoreset != "next_step"
    return {name: value for name, value in given.items() if kept or not name.startswith("final_")}


def streams(mode: str, sampler: Any, ends: str) -> Callable[[], TrajectoryReplayBuffer]:
    settings = STREAMS[mode]

    def make() -> TrajectoryReplayBuffer:
        buffer = TrajectoryReplayBuffer(9 * ENVS, ENVS, sampler=sampler, device="cpu", seed=3, **settings)
        for number, kind in enumerate(ends):
            more = {} if number % 2 else {"priority": [number + 1.0, 0.5]}
            buffer.add(**taken_by(buffer, step(number, kind, settings["fields"])), **more)
        buffer.sample(2)
        return buffer

    return make


def stream_calls(mode: str) -> dict[str, Callable[[Any], Any]]:
    fields = STREAMS[mode]["fields"]
    calls: dict[str, Callable[[Any], Any]] = {
        "step": lambda buffer: buffer.add(**step(50, ".", fields), priority=[3.0, 1e9]),
        "ending": lambda buffer: buffer.add(**step(50, "T", fields)),
        "cut": lambda buffer: buffer.add(**taken_by(buffer, step(50, "U", fields)), priority=[3.0, 0.5]),
        "sample": lambda buffer: buffer.sample(3),
        "update": lambda buffer: buffer.update_priorities([21, 20, 21, 0], [9.0, 8.0, 7.0, 6.0]),
    }
    if mode != "goals":
        calls["sequences"] = lambda buffer: buffer.sample_sequences(2, 2, 1)
    return calls


def many(ends: str, fields: dict[str, Field]) -> dict[str, Any]:
    """What `extend` takes: one step for each letter."""
    steps = [step(60 + number, kind, fields) for number, kind in enumerate(ends)]
    given = {name: np.stack([each[name] for each in steps]) for name in step(0, ".", fields)}
    finals = [
        {name.removeprefix("final_obs."): value for name, value in each.items() if name.startswith("final_")} or None
        for each in steps
    ]
    if "obs" in fields:
        finals = [each and each["final_obs"] for each in finals]
    return {**given, "final_obs": finals, "priority": np.linspace(1, 9, len(ends) * ENVS).reshape(-1, ENVS)}


# how the episodes end before the call: the ring is full, and its oldest step is one that can be drawn
BEFORE = ("..U........", "....T.U..U.")


@pytest.mark.parametrize("ends", BEFORE)
@named(("proportional", "uniform", "combined-proportional", "rank", "latest"), "proportional")
@pytest.mark.parametrize("mode", STREAMS)
def test_steps_after_an_exception_anywhere(mode: str, name: str, ends: str, request: pytest.FixtureRequest) -> None:
    calls = stream_calls(mode)
    for number, call in enumerate(calls.values()):
        every = 1 if request.config.option.full else 29 + number
        check_every_place(streams(mode, SAMPLERS[name], ends), call, every)


@named(["..U..", "T.U......U.T.U"], "T.U......U.T.U", argument="ends")
@named(("proportional", "uniform", "combined-proportional", "stored", "combined-rank"), "proportional")
@pytest.mark.parametrize("mode", STREAMS)
def test_many_steps_after_an_exception_anywhere(
    mode: str, name: str, ends: str, request: pytest.FixtureRequest
) -> None:
    """Also where the ring was not full before."""
    given, full = many(ends, STREAMS[mode]["fields"]), request.config.option.full
    sampler = SAMPLERS.get(name, Proportional(initial="stored"))
    for before in (BEFORE[1], "..U") if full else BEFORE[1:]:
        check_every_place(
            streams(mode, sampler, before), lambda buffer: buffer.extend(**taken_by(buffer, given)), 3 if full else 197
        )


@named(("proportional", "uniform", "rank"), "proportional")
@pytest.mark.parametrize("mode", [None, *STREAMS])
def test_a_clear_that_is_interrupted_anywhere_is_whole(mode: str | None, name: str) -> None:
    make = ring(SAMPLERS[name]) if mode is None else streams(mode, SAMPLERS[name], BEFORE[1])
    cleared = make()
    total = places_of(cleared.clear)
    expected, before = memory(cleared), memory(make())
    for at in range(total):
        buffer = make()
        with pytest.raises(KeyboardInterrupt):
            places_of(buffer.clear, at, KeyboardInterrupt)
        after = memory(buffer)
        wrong = [name for name in expected if not equal(after[name], expected[name])]
        assert not wrong or all(equal(after[name], before[name]) for name in before), f"place {at}: {wrong}"


def test_a_sample_too_large_for_memory_moves_nothing() -> None:
    for sampler in (Uniform(replacement=True), SAMPLERS["proportional"], SAMPLERS["rank"]):
        buffer, untouched = ring(sampler)(), ring(sampler)()
        before = memory(buffer)
        with pytest.raises(MemoryError):
            buffer.sample(2**48)
        assert all(equal(found, before[name]) for name, found in memory(buffer).items())
        for _ in range(3):
            same(buffer.sample(2), untouched.sample(2))


def test_a_reward_function_that_fails_moves_nothing() -> None:
    failing_reward_moves_nothing()


def failing_reward_moves_nothing() -> None:
    """A sample whose `reward_fn` raises leaves draws and counts where they were."""
    failing = [True]

    def fails(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        if failing[0]:
            raise ArithmeticError
        return reward(achieved, desired)

    both = [
        TrajectoryReplayBuffer(18, 2, GOALS, relabel=Hindsight("a", "d", reward_fn=each), device="cpu")
        for each in (fails, reward)
    ]
    for buffer in both:
        for number in range(6):
            buffer.add(**step(number, ".", GOALS))
    with pytest.raises(ArithmeticError):
        both[0].sample(3)
    failing[0] = False
    same(both[0].sample(3), both[1].sample(3))
    assert repr(both[0].stats()) == repr(both[1].stats())


@pytest.mark.parametrize("added", [2, 10])
def test_what_a_failing_reward_function_added_has_not_been_sampled(added: int) -> None:
    asked: list[int] = []

    def fails(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        if asked:
            for number in range(asked.pop()):
                both[0].add(**step(number, ".", GOALS))
            raise ArithmeticError
        return reward(achieved, desired)

    both = [
        TrajectoryReplayBuffer(18, 2, GOALS, relabel=Hindsight("a", "d", reward_fn=each), device="cpu")
        for each in (fails, reward)
    ]
    for buffer in both:
        for number in range(12):
            buffer.add(**step(number, ".", GOALS))
        for _ in range(3):
            buffer.sample(12)
    asked.append(added)
    with pytest.raises(ArithmeticError):
        both[0].sample(12)
    for number in range(added):
        both[1].add(**step(number, ".", GOALS))
    assert repr(both[0].stats()) == repr(both[1].stats())
    same(both[0].sample(3), both[1].sample(3))
