"""On a device a call that raises, or is interrupted, leaves the buffer whole: as it was, or as the call would leave it.

Every launch of a call raises once before it is made, and once after; so does every operation of torch between them,
allocations among them. What was launched cannot be had back: an interrupt in the middle of an `add` comes after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import kernel_device as kernel_device
from launches import kernel_class
from test_interrupted_calls import (
    BEFORE,
    ENVS,
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
from gpu_replay.ops import many_steps

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
        # nothing is said of rows that were never written; a list of ranks that was given up is made anew
        if name != "ranked":
            found[name] = tensor[:stored].clone() if name.startswith("fields.") else tensor.clone()
    if getattr(buffer.sampler, "resort_every", 1) > 1:
        found["counters"][15:17] = 0
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

    adds: whether an interrupt may come after the call instead. afterwards: whether one comes after a launch.
    back: whether all is taken back even after the last launch, of a call that adds step after step.
    """
    before = make()
    done = make()
    total = places_of(lambda: call(done), Places())
    assert total.launches > 0
    assert total.count > total.launches
    for at in range(0, total.count, every):
        error = (Interruption, MemoryError)[at % 2]
        buffer, places = make(), Places(at, error)
        try:
            places_of(lambda buffer=buffer, places=places: call(buffer), places)
        except error:
            outcome = before
            if places.after and not afterwards:
                continue
            # an add goes on; of another call all launches may have been made
            if (adds and error is Interruption and places.launch) or (places.after_last(total) and not back):
                outcome = done
        else:
            # what failed once was made again
            assert adds or back, f"place {at} of {total.count} raised nothing"
            assert places.launch > 0
            outcome = done
        wrong = unlike(buffer, memory(outcome))
        assert not wrong, f"place {at} of {total.count}, {error.__name__}, launch {places.launch}: {wrong}"
        untouched = make()
        if outcome is done:
            call(untouched)
        for _ in range(2):
            same(buffer.sample(2), untouched.sample(2))
        assert len(buffer) == len(untouched)


@named(("add over the seam", "sample", "update"), "add over the seam", argument="call")
@named(SAMPLERS, "proportional")
def test_transitions(call: str, name: str, request: pytest.FixtureRequest) -> None:
    adds, every = "add" in call, 1 if request.config.option.full else 6
    check_every_place(ring(SAMPLERS[name]), RING_CALLS[call], adds=adds, afterwards=call != "sample", every=every)


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
        ("next_step", "rank-outdated"),
        ("same_step", "latest"),
        ("goals", "rank"),
    ],
)
def test_steps(mode: str, name: str, ends: str) -> None:
    for number, (each, call) in enumerate(stream_calls(mode).items()):
        adds = each in ("step", "ending", "cut")
        if adds == (ends == BEFORE[0]):
            afterwards = each not in ("sample", "sequences")
            every = 1 if adds else 3 + 2 * number
            check_every_place(streams(mode, SAMPLERS[name], ends), call, adds=adds, afterwards=afterwards, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["..U..", "T.U......U.T.U"])
@pytest.mark.parametrize(
    ("mode", "name"),
    [("next_step", "proportional"), ("same_step", "stored"), ("goals", "uniform"), ("next_step", "rank-outdated")],
)
def test_many_steps(mode: str, name: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_steps, "_TOGETHER", 8)
    given = many(ends, STREAMS[mode]["fields"])
    sampler = SAMPLERS.get(name, Proportional(initial="stored"))
    check_every_place(streams(mode, sampler, BEFORE[1]), lambda buffer: buffer.extend(**given), every=23, back=True)


@pytest.mark.parametrize("error", [pytest.param(MemoryError, marks=pytest.mark.slow), Interruption])
def test_an_add_that_cannot_go_on_forgets_what_it_overwrote(error: type[BaseException]) -> None:
    """The oldest transitions are lost, but none that can be read or drawn is a mixture of two."""
    buffer = ring(Proportional())()
    # before the second launch
    twin = ring(Proportional())()
    places = Places(places_of(lambda: twin.add(**rows(3, 9)), Places()).count - 2, error, broken=True)
    with pytest.raises(error):
        places_of(lambda: buffer.add(**rows(3, 9)), places)
    assert places.launch == 2
    assert buffer.keys().tolist() == [5, 6]
    for batch in (buffer[buffer.keys()], buffer.sample(50)):
        assert torch.equal(batch.a, batch.key.float())
        assert torch.equal(batch.large, batch.a[:, None] + torch.ones(80))
    check_sums(buffer._state.masses)
    assert buffer.add(**rows(3, 7)).tolist() == [7, 8, 9]
    assert buffer[buffer.keys()].a.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize("mode", STREAMS)
def test_a_step_that_cannot_go_on_forgets_what_it_overwrote(mode: str) -> None:
    fields = STREAMS[mode]["fields"]
    make = streams(mode, Proportional(), "." * 11)
    twin = make()
    counted = places_of(lambda: twin.add(**step(50, ".", fields)), Places())
    assert counted.launches == 2
    # before the second launch
    buffer, places = make(), Places(counted.count - 2, MemoryError, broken=True)
    with pytest.raises(MemoryError):
        places_of(lambda: buffer.add(**step(50, ".", fields)), places)
    assert len(buffer) == buffer.capacity - ENVS
    assert buffer.stats().eligible == int((buffer._state.eligible.masses > 0).sum())
    check_sums(buffer._state.masses)
    for number in range(50, 52):
        buffer.add(**step(number, ".", fields))
    batch = buffer.sample(99)
    observed = batch["obs" if "obs" in fields else "obs.a"].flatten(1)
    steps = [3, 4, 5, 6, 7, 8, 9, 10, 50, 51]
    assert set(observed.flatten().tolist()) <= {float(number) for number in steps}


@pytest.mark.slow
def test_a_reward_function_that_fails_moves_nothing() -> None:
    failing_reward_moves_nothing()
