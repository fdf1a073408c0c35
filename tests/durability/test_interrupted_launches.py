"""On a device a call that raises leaves the buffer whole: as it was, or as the call would leave it.

Every launch of a call raises once before it is made, and once after; so does every operation of torch between them,
allocations among them. What was launched cannot be had back: a buffer whose `add` is interrupted in its middle says so
and must be cleared or loaded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import kernel_device as kernel_device
from launches import kernel_class
from test_interrupted_calls import (
    BEFORE,
    RING_CALLS,
    STREAMS,
    failing_reward_moves_nothing,
    many,
    named,
    ring,
    rows,
    step,
    stream_calls,
    streams,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transitions import SAMPLERS, same
from trees import check_sums

from gpu_replay import Field, Proportional, ReplayBuffer
from gpu_replay.engines import device_trajectory

NOWHERE = sys.maxsize


class Interruption(BaseException):
    """What no code expects."""


class Places(TorchDispatchMode):
    """Raises at one of the places of a call: launches of its kernels, and operations of torch between them.

    at:     the place, counted from 0. broken: whether all later launches of the call raise as well.
    launch: number of the last launch that had begun when it raised, 0 for none; `after`: whether that had just ended.
    count, launches: of the places and launches so far.
    """

    def __init__(self, at: int = NOWHERE, error: type[BaseException] = Interruption, *, broken: bool = False) -> None:
        super().__init__()
        self.at, self.error, self.broken = at, error, broken
        self.count = self.launches = self.launch = 0
        self.after = False
        self._launching = self._raised = False

    def _place(self) -> bool:
        self.count += 1
        if self.count != self.at + 1:
            return False
        self._raised, self.launch = True, self.launches
        return True

    def after_last(self, whole: Places) -> bool:
        """Whether it raised after the last launch of the call."""
        return self.after and self.launch == whole.launches

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        if not self._launching and self._place():
            raise self.error
        return function(*given, **(named or {}))

    def launched(self, run: Callable[[], Any]) -> None:
        self.launches += 1
        if self._place() or (self._raised and self.broken):
            raise self.error
        self._launching = True
        try:
            run()
        finally:
            self._launching = False
        if self._place():
            self.after = True
            raise self.error


@pytest.fixture(name="kernels", autouse=True)
def kernels_fixture(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Buffers on the CPU run interpreted kernels, which pass by the places of the call in progress."""
    if device != "cpu":
        pytest.skip("what raises is put in the place of the interpreter")
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    run = kernel_class().run
    monkeypatch.setattr(kernel_class(), "run", lambda *given, **named: _launch(lambda: run(*given, **named)))


_within: list[Places] = []


def _launch(run: Callable[[], Any]) -> None:
    if _within:
        _within[-1].launched(run)
    else:
        run()


def places_of(call: Callable[[], Any], places: Places) -> Places:
    _within.append(places)
    try:
        with places:
            call()
    finally:
        _within.pop()
    return places


def memory(buffer: Any) -> dict[str, Any]:
    """All numbers that say what the buffer holds and what it will draw."""
    found: dict[str, Any] = {"counters": buffer._counters.clone()}
    stored = min(buffer.added, buffer.capacity)
    for name, tensor in buffer._state_tensors(buffer.capacity).items():
        # nothing is said of rows that were never written
        found[name] = tensor[:stored].clone() if name.startswith("fields.") else tensor.clone()
    for number, tree in enumerate(buffer._state.trees):
        found |= {f"tree {number} {level}": nodes.clone() for level, nodes in enumerate(tree.levels)}
    if buffer._draws.masses is not None:
        found["stamps"] = buffer._draws.masses.stamps.clone()
    return found


def unlike(buffer: Any, expected: dict[str, Any]) -> list[str]:
    found = memory(buffer)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def check_every_place(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    *,
    adds: bool = False,
    every: int = 1,
    afterwards: bool = True,
    back: bool = False,
) -> None:
    """Raise at every so many places of a call; compare with an untouched buffer, or with one that made the call.

    adds: whether the call adds by launches that belong together: an exception after the first is no end of it, and an
          interrupt leaves a buffer that says so.
    afterwards: whether an interrupt may come after a launch.
    back: whether all is taken back even after the last launch, of a call that adds step after step.

    An exception comes before a launch alone: one that has been made does not raise.
    """
    before = make()
    done = make()
    total = places_of(lambda: call(done), Places())
    assert total.launches > 0
    assert total.count > total.launches
    for at in range(0, total.count, every):
        error = (Interruption, MemoryError)[at % 2]
        buffer, places = make(), Places(at, error)
        raised = False
        try:
            places_of(lambda buffer=buffer, places=places: call(buffer), places)
        except error:
            raised = True
        if places.after and (error is MemoryError or not afterwards):
            continue
        where = f"place {at} of {total.count}, {error.__name__}, launch {places.launch}"
        if raised and adds and error is Interruption and places.launch:
            check_refuses(buffer)
            continue
        # what failed once was made again
        outcome = before if raised else done
        assert raised or (adds and places.launch > 0) or back, where
        if places.after_last(total) and not back:
            outcome = done
        wrong = unlike(buffer, memory(outcome))
        assert not wrong, f"{where}: {wrong}"
        untouched = make()
        if outcome is done:
            call(untouched)
        for _ in range(2):
            same(buffer.sample(2), untouched.sample(2))
        assert len(buffer) == len(untouched)


def check_refuses(buffer: Any) -> None:
    """Fail unless a buffer makes no call but those that mend it, and then is like any other."""
    keys = torch.zeros(1, dtype=torch.int64)
    calls = (
        lambda: buffer.sample(2),
        lambda: buffer.update_priorities(keys, torch.ones(1)),
        lambda: buffer[keys],
        lambda: len(buffer),
        buffer.stats,
        buffer.state_dict,
        lambda: copy.deepcopy(buffer),
        lambda: buffer.load_state_dict({}),
    )
    for call in calls:
        with pytest.raises((RuntimeError, KeyError)):
            call()
    with pytest.raises(RuntimeError, match=r"interrupted between .* Call clear\(\), or load a state"):
        buffer.sample(2)
    buffer.clear()
    assert len(buffer) == 0
    assert buffer.stats().eligible == 0


@named(("add over the seam", "sample", "update"), "add over the seam", argument="call")
@named(SAMPLERS, "proportional")
def test_transitions(call: str, name: str, request: pytest.FixtureRequest) -> None:
    every = 1 if request.config.option.full else 6
    check_every_place(
        ring(SAMPLERS[name]), RING_CALLS[call], adds="add" in call, afterwards=call != "sample", every=every
    )


def test_what_was_interrupted_is_mended_by_a_saved_state() -> None:
    buffer, twin = ring(Proportional())(), ring(Proportional())()
    saved = twin.state_dict()
    # between the two launches
    places = Places(places_of(lambda: twin.add(**rows(3, 9)), Places()).count - 2)
    with pytest.raises(Interruption):
        places_of(lambda: buffer.add(**rows(3, 9)), places)
    with pytest.raises(RuntimeError, match="interrupted between"):
        buffer.sample(2)
    buffer.load_state_dict(saved)
    buffer.add(**rows(3, 9))
    assert not unlike(buffer, memory(twin))
    same(buffer.sample(4), twin.sample(4))


@pytest.mark.slow
def test_an_update_of_two_launches() -> None:
    """Stamps of the first, without the second, would win over later updates."""

    def make() -> ReplayBuffer:
        buffer = ReplayBuffer(1100, {"n": Field((), torch.int64)}, sampler=Proportional(), device="cpu")
        buffer.add(n=torch.arange(1100))
        return buffer

    keys = torch.arange(1100) // 2
    check_every_place(make, lambda buffer: buffer.update_priorities(keys, torch.arange(1100.0)))


@pytest.mark.slow
@pytest.mark.parametrize("ends", BEFORE)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("next_step", "proportional"),
        ("same_step", "combined-proportional"),
        ("goals", "uniform"),
        ("next_step", "combined-rank"),
        ("same_step", "latest"),
        ("goals", "rank"),
    ],
)
def test_steps(mode: str, name: str, ends: str) -> None:
    for number, (each, call) in enumerate(stream_calls(mode).items()):
        adds = each in ("step", "ending", "cut")
        if adds == (ends == BEFORE[0]):
            every = 1 if adds else 3 + 2 * number
            afterwards = each not in ("sample", "sequences")
            check_every_place(streams(mode, SAMPLERS[name], ends), call, adds=adds, afterwards=afterwards, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["..U..", "T.U......U.T.U"])
@pytest.mark.parametrize(
    ("mode", "name"),
    [("next_step", "proportional"), ("same_step", "stored"), ("goals", "uniform"), ("next_step", "combined-rank")],
)
def test_many_steps(mode: str, name: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trajectory, "_TOGETHER", 8)
    given = many(ends, STREAMS[mode]["fields"])
    sampler = SAMPLERS.get(name, Proportional(initial="stored"))
    check_every_place(streams(mode, sampler, BEFORE[1]), lambda buffer: buffer.extend(**given), every=23, back=True)


@pytest.mark.parametrize("mode", [None, *STREAMS])
def test_an_add_whose_second_launch_cannot_be_made_says_so(mode: str | None) -> None:
    """The oldest rows are lost: nobody can read or draw a mixture of two."""
    given = rows(3, 9) if mode is None else step(50, ".", STREAMS[mode]["fields"])
    make = ring(Proportional()) if mode is None else streams(mode, Proportional(), "." * 11)
    twin, buffer = make(), make()
    counted = places_of(lambda: twin.add(**given), Places())
    assert counted.launches == 2
    places = Places(counted.count - 2, MemoryError, broken=True)
    with pytest.raises(MemoryError):
        places_of(lambda: buffer.add(**given), places)
    assert places.launch == 2
    check_refuses(buffer)
    buffer.add(**given)
    assert buffer.keys().tolist() == list(range(buffer.added - len(buffer), buffer.added))
    check_sums(buffer._state.masses)


@pytest.mark.slow
def test_a_reward_function_that_fails_moves_nothing() -> None:
    failing_reward_moves_nothing()
