"""A call that raises, wherever and for whatever reason, leaves the buffer whole: as it was, its next draws too.

On the host every line that a call runs in the package, and every operation that it calls, raises once. The last line of
a call is one operation that does all that is not put back; after it there is nothing left to do but return. Lines of
the standard library raise too, after which another thread uses the buffer: no lock may be held for ever. What raises in
the code of its threads alone may lose a `save`, which leaves the old checkpoint or the new one.

On a device every launch of a call raises once before it is made, and once after; so does every operation of torch
between them, allocations among them. The last launch of a call is its last step; those before it change nothing that is
stored or drawn from. An `extend` is one call after the other, and leaves the steps before.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import copy
import faulthandler
import io
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import read_seed, saved
from children import ended, forked, in_a_child, needs_fork
from devices import host_only
from launches import kernel_class
from places import ENVS, STEPS, given, make
from programs import SAMPLERS
from torch.utils._python_dispatch import TorchDispatchMode
from transitions import same
from trees import check_sums
from twins import check_batches

import gpu_replay
from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.checkpoint import files, shards
from gpu_replay.console import progress
from gpu_replay.engines import device_trajectory
from gpu_replay.ops.counters import Counter
from gpu_replay.sharded.group import Group

# no buffer of before is finalized in the middle of a call
pytestmark = pytest.mark.usefixtures("collector_off")
COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
on_the_host = [
    pytest.mark.contract,
    host_only,
    pytest.mark.skipif(not COMPILED, reason="a loop that runs as Python can be interrupted half-way"),
]
PACKAGE = str(Path(gpu_replay.__file__).parent)
# the code of the standard library's threads
OF_THREADS = {each.__file__ for each in (threading, concurrent.futures._base, concurrent.futures.thread)}
NOWHERE = sys.maxsize
KINDS = ("transitions", "next_step", "same_step", "goals")
REFUSES = r"interrupted.* Call clear\(\), or load a state"
Call = Callable[..., Any]


class Interruption(BaseException):
    """What no code expects."""


# buffers, their calls, and what is in their memory


def new(kind: str, name: str, **more: Any) -> Any:
    finals = {"final_capacity": 2} if kind == "same_step" else {}
    return make(kind, sampler=SAMPLERS[name], capacity=9 * ENVS if kind in STEPS else 5, **finals, **more)


def used(kind: str, name: str, adds: int = 12) -> Any:
    """A buffer that was used; after twelve adds its ring is full."""
    buffer = new(kind, name)
    for _ in range(adds):
        buffer.add(**given(buffer, 3))
    buffer.sample(2)
    return buffer


def calls_of(buffer: Any, many: int = 14) -> dict[str, Call]:
    """Calls of such a buffer, by name; those that add begin with "add". An `extend` is of so many steps."""
    key = buffer.added
    keys, priorities = [key - 1, key - 4, key - 4, 0], [9.0, 8.0, 7.0, 6.0]
    written = {name: torch.full((4, *field.shape), 5).to(field.dtype) for name, field in buffer.fields.items()}
    calls: dict[str, Call] = {
        "sample": lambda each: each.sample(3),
        "update": lambda each: each.update_priorities(keys, priorities),
        "write": lambda each: each.write(keys, **written),
    }
    if buffer._state.trees:
        calls["exclude"] = lambda each: each.exclude(keys)
    if isinstance(buffer, ReplayBuffer):
        few, seam, more = (given(buffer, rows) for rows in (1, 4, 8))
        calls |= {"add": lambda each: each.add(**few), "add over the seam": lambda each: each.add(**seam)}
        return calls | {"add more than fit": lambda each: each.add(**more)}
    nothing, one, everything = (torch.arange(ENVS) < count for count in (0, 1, ENVS))
    plain = given(buffer) | {"terminated": nothing, "truncated": nothing}
    large = torch.tensor([3.0, 1e9, 0.5])
    steps = [given(buffer, ahead=ENVS * number) for number in range(14)]
    long = {name: torch.stack([step[name] for step in steps]) for name in steps[0] if name != "priority"}
    long["priority"] = torch.arange(14.0 * ENVS).view(14, ENVS)
    calls |= {
        "add a step": lambda each: each.add(**plain | {"priority": large}),
        "add an ending": lambda each: each.add(**plain | {"terminated": one}),
        "add a cut": lambda each: each.add(**plain | {"truncated": everything, "priority": large}),
        "extend": lambda each, count=many: each.extend(**{name: values[:count] for name, values in long.items()}),
    }
    return calls


def memory(buffer: Any) -> dict[str, torch.Tensor]:
    """All numbers that say what the buffer holds and what it will draw."""
    # nothing is said of rows that were never written
    stored, tensors = min(buffer.added, buffer.capacity), buffer._state_tensors(buffer.capacity)
    found = {name: (each[:stored] if name.startswith("fields.") else each).clone() for name, each in tensors.items()}
    if "streams.owner" in found:
        # nor of final observations that no stored step has
        unread = found["streams.owner"] < buffer.added - len(buffer)
        for name in found.keys() & {f"final.{field}" for field in buffer.fields}:
            found[name][unread] = 0
    found["counters"] = buffer._counters.clone()
    # what was looked up for an `add` that did not follow
    found["counters"][Counter.HIGHEST] = 0
    if buffer._state.tree is not None and hasattr(masses := buffer._sampling.masses, "stamps"):
        found["stamps"] = masses.stamps.clone()
    return found


def unlike(buffer: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """What differs in the memory of a buffer, whose sums must be right."""
    for tree in buffer._state.trees:
        check_sums(tree)
    found = memory(buffer)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def check_loaded_or_empty(buffer: Any, *states: dict[str, torch.Tensor], or_empty: bool = True) -> None:
    """Fail unless a buffer whose load raised has its old state or the new one, or holds nothing and can be used."""
    if not all(unlike(buffer, each) for each in states):
        return
    assert or_empty
    assert len(buffer) == buffer.stats().eligible == 0
    for _ in range(8):
        buffer.add(**given(buffer, 3))
        for tree in buffer._state.trees:
            check_sums(tree)
    assert buffer.sample(2).key.min() >= buffer.added - len(buffer)


def chosen(*quick: tuple[str, str], names: Any = SAMPLERS) -> pytest.MarkDecorator:
    """Kinds and samplers; all but a few are slow."""
    pairs = [(kind, name) for kind in KINDS for name in names]
    return pytest.mark.parametrize(
        "kind, name", [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]
    )


# on the host


def places_of(
    call: Any, at: int = NOWHERE, error: Any = Interruption, everywhere: bool = False, among: Any = bool
) -> int:
    """Make a call, and raise at so many places of the package; returns how many it passed.

    everywhere: in all modules, those of the standard library among them; in those whose files are `among` these.

    A place is a line, before it runs, and a function that is not written in Python, before it is called: operations on
    arrays among them. Everywhere it is also the entry of a function and the return from one that is not written in
    Python, where the interpreter handles signals; what the same line of the same caller passes again counts once.
    """
    count, seen, passed = 0, set(), set()

    def watched(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file != __file__ and among(file) if everywhere else file.startswith(PACKAGE)

    def pass_by(frame: FrameType, *what: object) -> None:
        nonlocal count
        if everywhere:
            place = *what, *((each.f_code, each.f_lineno) for each in (frame, frame.f_back) if each)
            if place in passed:
                return
            passed.add(place)
        count += 1
        # once: what puts things back is not interrupted
        if count == at + 1:
            raise error

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place, text = (frame, frame.f_lineno), linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            # a `with` block is left in its first line: the lock is already free for all that can come then
            leaves = place in seen and "with " in text
            seen.add(place)
            # an error at a `try` itself leaves the `with` blocks around it entered; nothing is called there
            if not leaves and not (everywhere and text.strip() == "try:"):
                pass_by(frame, event)
        return line

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        if not watched(frame):
            return None
        if everywhere:
            pass_by(frame, event)
        return line

    def called(frame: FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        begins = event == "c_call" and name not in ("__enter__", "__exit__")
        if (begins or (everywhere and event == "c_return")) and watched(frame):
            pass_by(frame, event, name)

    before = sys.gettrace()
    sys.setprofile(called)
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
        sys.setprofile(None)
        # a generator ends, and releases what it holds, when nobody keeps its frame
        seen.clear()
    return count


def check_every_place(kind: str, name: str, adds: int, call: Call, every: int) -> None:
    """Raise at every so many places of a call of a buffer, each time compare, and draw the same as an untouched one."""
    buffer, untouched, fresh = (used(kind, name, adds) for _ in range(3))
    before, state = memory(buffer), buffer.state_dict()
    # a second call, since the first one passes more places
    call(fresh)
    total = places_of(lambda: call(fresh))
    assert total > 20
    for at in range(0, total, every):
        error = (MemoryError, KeyboardInterrupt, Interruption)[at % 3]
        try:
            places_of(lambda: call(buffer), at, error)
        except error:
            assert not (wrong := unlike(buffer, before)), f"place {at} of {total} changed {wrong}"
        else:
            # it knew more than the first time
            assert at > total // 2
            buffer.load_state_dict(state)
            break
    for _ in range(2):
        same(buffer.sample(2), untouched.sample(2))
    call(buffer)
    call(untouched)
    assert not unlike(buffer, memory(untouched))


class TestHost:
    pytestmark = on_the_host

    @chosen(*((kind, "proportional") for kind in KINDS), ("transitions", "rank"), ("same_step", "combined-rank"))
    def test_an_exception_anywhere_changes_nothing(self, kind: str, name: str, full: bool) -> None:
        steps = kind in STEPS
        # also where the ring was not full before, and where other episodes have ended
        for adds in (12, 11, 4) if full and steps else (12,):
            for number, (each, call) in enumerate(calls_of(used(kind, name, adds)).items()):
                every = 197 if each == "extend" else 29 + number if steps else 9
                check_every_place(kind, name, adds, call, (3 if each == "extend" else 1) if full else every)

    @needs_fork
    @pytest.mark.parametrize("name", ["sample", "stacks", "sample with goals", "write", "add and save", "load"])
    def test_an_interrupt_anywhere_leaves_no_lock_held(self, name: str, full: bool, tmp_path: Path) -> None:
        every = 1 if full else 11 if name.startswith(("s", "w")) else 97

        def work() -> int:
            with large_calls(tmp_path) as calls:
                return interrupt_everywhere(calls[name], calls.values(), lambda total: range(0, total, every))

        assert in_a_child(work) > 150

    @needs_fork
    def test_an_interrupt_of_ranks_that_work_together_leaves_no_thread_behind(self) -> None:
        def work() -> int:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            group = Group(None, torch.device("cpu"), 20.0)

            def together() -> None:
                assert group.run_on_all(lambda: 7, "save") == 7

            return interrupt_everywhere(together, [together], range)

        assert in_a_child(work) > 50

    @needs_fork
    def test_an_interrupt_of_threads_leaves_the_old_checkpoint_or_the_new_one(self, full: bool, tmp_path: Path) -> None:
        path, held = tmp_path / "checkpoint", 1

        def save(seed: int, at: int = NOWHERE) -> int:
            """Save, and raise at one of the places of the threads' code; returns how many there are."""
            with suppress(KeyboardInterrupt):
                return places_of(
                    lambda: saved(path, seed), at, KeyboardInterrupt, everywhere=True, among=OF_THREADS.__contains__
                )
            return at

        saved(path, held)
        total = in_a_child(lambda: save(1))
        assert total > 200
        for at in range(0, total, 1 if full else total // 12):
            # it may wait for a lock that nobody gives back, until the alarm; what lies on the disk counts
            ended(forked(lambda at=at: (signal.alarm(3), save(at + 2, at))))
            held = read_seed(path, held, at + 2)
        saved(path, 0)
        assert read_seed(path, 0) == 0

    @pytest.mark.parametrize("call", ["clear", "load"])
    @chosen(*((kind, "proportional") for kind in KINDS[::2]), names=("proportional", "uniform", "rank"))
    def test_an_interrupted_clear_or_load_is_whole_or_empty(self, kind: str, name: str, call: str, full: bool) -> None:
        state, done, counted = used(kind, name).state_dict(), used(kind, name, 5), used(kind, name, 5)
        before = memory(done)

        def change(buffer: Any) -> None:
            buffer.clear() if call == "clear" else buffer.load_state_dict(state)

        change(done)
        changed, total = memory(done), places_of(lambda: change(counted))
        for at in range(0, total, 1 if full or call == "clear" else 7):
            buffer = used(kind, name, 5)
            with pytest.raises(KeyboardInterrupt):
                places_of(lambda buffer=buffer: change(buffer), at, KeyboardInterrupt)
            check_loaded_or_empty(buffer, before, changed, or_empty=call == "load")

    @pytest.mark.parametrize("again", ["clear", "load"])
    @pytest.mark.parametrize("kind", ["transitions", "next_step"])
    def test_after_an_interrupt_that_comes_twice_calls_are_refused(
        self, kind: str, again: str, monkeypatch: Any
    ) -> None:
        state, buffer = used(kind, "proportional").state_dict(), used(kind, "proportional", 5)
        calls, waiting = {**calls_of(buffer), "len": len, "keys": lambda each: each.keys()}, ThreadPoolExecutor(1)
        for first in (lambda: buffer.load_state_dict(state), buffer.clear):
            late = []

            def interrupt(*_: Any, late: list[Any] = late) -> None:
                # a call of another thread that already waits for the lock must not get in either
                late.append(waiting.submit(buffer.update_priorities, 0, [1.0]))
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                for owner, name in ((buffer._storage, "reset_after"), (buffer._made_engine.sampling, "on_clear")):
                    patch.setattr(owner, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    first()
            refused = [call for name, call in calls.items() if name not in ("clear", "load")]
            for call in (*[partial(call, buffer) for call in refused], *[each.result for each in late]):
                with pytest.raises(RuntimeError, match=REFUSES):
                    call()
            buffer.clear() if again == "clear" else buffer.load_state_dict(state)
            assert len(buffer) == 0 if again == "clear" else not unlike(buffer, memory(used(kind, "proportional")))

    @chosen(("transitions", "proportional"), ("same_step", "proportional"), names=("proportional", "uniform", "rank"))
    def test_a_signal_tears_no_row(self, kind: str, name: str, full: bool) -> None:
        # rows that take as long to copy as a signal takes to come
        fields = {**new(kind, name).fields, "large": Field((8000,), torch.float32)}
        assert under_signals(kind, name, 5, 300 if full else 100, fields=fields) > 25


NUMBERED = {"obs": Field((64, 64), torch.uint8, torch.float32, 0.5), "n": Field((), torch.int64)}


def numbered(buffer: Any, rows: int) -> dict[str, torch.Tensor]:
    """Rows of 4 KB that hold their keys."""
    keys = torch.arange(buffer.added, buffer.added + rows)
    return {"obs": (keys % 251).to(torch.uint8)[:, None, None].expand(rows, 64, 64), "n": keys}


def check_numbered(batch: Any) -> None:
    newest = batch.obs[:, -1] if batch.obs.dim() == 4 else batch.obs
    assert torch.equal(batch.n, batch.key)
    assert torch.equal(newest, (batch.key % 251 / 2)[:, None, None].expand(-1, 64, 64))


@contextmanager
def large_calls(folder: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    """Calls that move 1 MB with two threads of torch, a sample with goals, and checkpoints whose bars nobody sees."""
    rows = ReplayBuffer(300, NUMBERED, sampler=Proportional(), device="cpu")
    fields = {**NUMBERED, "action": Field((), torch.int64)}
    steps = TrajectoryReplayBuffer(300, 1, fields, stack=2, autoreset="next_step", device="cpu")
    rows.add(**numbered(rows, 300))
    many = {name: value[:, None] for name, value in numbered(steps, 200).items()}
    no, path = torch.zeros(200, 1, dtype=torch.bool), folder / "checkpoint"
    steps.extend(**many, action=many["n"], reward=many["n"].float(), terminated=no, truncated=no)

    goals = make("goals")
    for _ in range(24):
        goals.add(**given(goals))

    def with_goals() -> None:
        goals.sample(4)
        goals.add(**given(goals))

    def write() -> None:
        stored = rows[rows.keys()]
        rows.write(stored.key, n=stored.n)

    def add_and_save() -> None:
        rows.add(**numbered(rows, 5))
        rows.save(path)

    def load() -> None:
        found = ReplayBuffer.load(path, device="cpu")
        check_numbered(found[found.keys()])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            mock.patch.object(shards, "SHARED_SHARD_BYTES", 100_000),
            mock.patch.object(progress, "SHOWN_FROM", 0),
            mock.patch.object(files, "show", progress.bytes_bar),
            redirect_stderr(io.StringIO()),
        ):
            yield {
                "sample": lambda: check_numbered(rows.sample(260)),
                "stacks": lambda: check_numbered(steps.sample(64)),
                "sample with goals": with_goals,
                "add and save": add_and_save,
                "load": load,
                "write": write,
            }
    finally:
        torch.set_num_threads(threads)


def interrupt_everywhere(call: Any, others: Iterable[Any], chosen: Callable[[int], Iterable[int]]) -> int:
    """Interrupt a call at the chosen ones of its places, but for those in the code of threads; returns their number.

    After each the others are made in another thread, which waits for any lock that is still held, and all threads that
    the call started must end; torch's modes are as they were. A process that waits for a minute ends with exit code 1.
    """

    def use() -> None:
        for each in others:
            each()

    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    for _ in range(2):
        use()
        call()
    settings = {"everywhere": True, "among": lambda file: file not in OF_THREADS}
    running, total = _thread._count(), places_of(call, **settings)
    try:
        for at in chosen(total):
            faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
            with suppress(KeyboardInterrupt):
                places_of(call, at, KeyboardInterrupt, **settings)
            assert torch.is_grad_enabled()
            with ThreadPoolExecutor(1) as other:
                other.submit(use).result()
            while _thread._count() > running:
                time.sleep(0.001)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return total


def interrupted(call: Callable[[], Any], seconds: float) -> bool:
    """Make a call; whether a signal that came after so many seconds ended it."""
    armed = True

    def ring(*_: object) -> None:
        if armed:
            raise Interruption

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
            call()
        finally:
            armed = False
    except Interruption:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def under_signals(kind: str, name: str, seed: int, rounds: int, **settings: Any) -> int:
    """A signal in the middle of each call: the buffer is that of before the call, or of after it, and draws as that.

    Returns how many calls were interrupted.
    """
    draw, faults = random.Random(seed), 0
    buffer, twin = (new(kind, name, seed=seed, **settings) for _ in range(2))

    def made(call: Call, of: Any) -> tuple[type[Exception] | None, Any]:
        """The kind of error that a call raises, and what it returns."""
        try:
            return None, call(of)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            return type(error), None

    for number in range(rounds):
        calls = calls_of(twin) | {"read": lambda each: list(each.batches(4))}
        calls |= {"clear": lambda each: each.clear()} if draw.random() < 0.1 else {}
        each = draw.choice(list(calls)) if number >= len(calls) else list(calls)[number]
        before, began, ends = memory(twin), time.perf_counter(), []
        raised, _ = made(calls[each], twin)
        # what is called for the first time may be compiled
        seconds = draw.uniform(0, 1.2) * (time.perf_counter() - began) if number >= len(calls) else 9.0
        ended = interrupted(lambda call=calls[each], ends=ends: ends.append(made(call, buffer)[0]), seconds)
        assert ended or ends == [raised], f"{each} raised {ends}, and {raised} in the twin"
        if ended and not unlike(buffer, before):
            made(calls[each], buffer)
        wrong = unlike(buffer, memory(twin))
        assert not wrong, f"{'interrupted ' * ended}{each}: {wrong}"
        (kinds, drawn), (others, expected) = (made(lambda each: each.sample(3), of) for of in (buffer, twin))
        assert kinds is others, f"after {each} they drew {kinds}, {others}"
        if drawn is not None:
            check_batches(drawn, expected)
        faults += ended
    return faults


# on a device


class Places(TorchDispatchMode):
    """Raises at one of the places of a call: launches of its kernels, and operations of torch between them.

    at:       the place, counted from 0. broken: whether all later ones of the call raise as well.
    before:   the launch before which it raises instead, counted from 0.
    count, launches: of the places and of the launches that were made so far.
    """

    within: list[Places] = []  # noqa: RUF012 - the one in progress, if any

    def __init__(self, at: int = NOWHERE, error: Any = Interruption, *, broken: bool = False, before: int = -1) -> None:
        super().__init__()
        self.at, self.error, self.broken, self.before = at, error, broken, before
        self.count = self.launches = 0
        self._launching = False

    def made(self, call: Callable[[], Any]) -> Places:
        """Make a call."""
        self.within.append(self)
        try:
            with self:
                call()
        finally:
            self.within.pop()
        return self

    def _pass_by(self) -> None:
        self.count += 1
        if self.count == self.at + 1 or (self.broken and self.count > self.at):
            raise self.error

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        if not self._launching:
            self._pass_by()
        return function(*given, **(named or {}))

    def launched(self, run: Callable[[], Any]) -> None:
        self._pass_by()
        if self.launches == self.before:
            raise self.error
        self._launching = True
        try:
            run()
        finally:
            self._launching = False
        self.launches += 1
        self._pass_by()


@pytest.fixture(name="kernels")
def kernels_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers on the CPU run interpreted kernels, which pass by the places of the call in progress."""
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    run = kernel_class().run

    def launch(*given: Any, **named: Any) -> None:
        if Places.within:
            Places.within[-1].launched(lambda: run(*given, **named))
        else:
            run(*given, **named)

    monkeypatch.setattr(kernel_class(), "run", launch)


def check_launches(empty: Callable[[], Any], first: Any, each: str, call: Call, every: int = 1) -> None:
    """Raise at every so many places of a call; compare with a buffer that did not make it, or with one that did.

    empty: makes a buffer, which then gets the state of the first.
    """
    saved = first.state_dict()

    def again() -> Any:
        buffer = empty()
        buffer.load_state_dict(saved)
        return buffer

    made = again()
    total = Places().made(lambda: call(made))
    assert total.count > total.launches > 0
    for at in range(0, total.count, every):
        buffer, untouched, places = again(), again(), Places(at, (Interruption, MemoryError)[at % 2])
        with pytest.raises(places.error):
            places.made(lambda buffer=buffer: call(buffer))
        if each == "extend" and (added := buffer.added - untouched.added):
            call(untouched, added // ENVS)
        elif each != "extend" and places.launches == total.launches:
            call(untouched)
        wrong = unlike(buffer, memory(untouched))
        assert not wrong, f"{each}: place {at} of {total.count} after {places.launches} launches: {wrong}"
        for _ in range(2):
            same(buffer.sample(2), untouched.sample(2))
        assert len(buffer) == len(untouched)


def holding(rows: int) -> ReplayBuffer:
    """A buffer whose sums have two levels."""
    buffer = ReplayBuffer(1100, {"n": Field((), torch.int64)}, sampler=Proportional(), device="cpu")
    if rows:
        buffer.add(n=torch.arange(rows), priority=torch.arange(1.0, rows + 1))
    return buffer


@pytest.mark.usefixtures("kernels")
class TestDevice:
    @chosen(("transitions", "proportional"), ("same_step", "proportional"))
    def test_an_exception_anywhere_leaves_a_whole_buffer(
        self, kind: str, name: str, full: bool, monkeypatch: Any
    ) -> None:
        # an `extend` brings so many steps to the device at once
        monkeypatch.setattr(device_trajectory, "_TOGETHER", 2 * ENVS)
        first = used(kind, name)
        for number, (each, call) in enumerate(calls_of(first, 14 if full else 3).items()):
            if each != "write" and (full or each in ("add over the seam", "add an ending", "extend")):
                every = (23 if full else 41) if each == "extend" else 1 if full and "add" in each else 9 + number
                check_launches(lambda: new(kind, name), first, each, call, every)

    @pytest.mark.parametrize("kind", ["transitions", "next_step"])
    def test_a_write_makes_all_values_before_the_first_change(self, kind: str) -> None:
        """So only an interrupt can leave it between two fields, each of which is then the old one or the new one."""
        first, written = used(kind, "proportional"), new(kind, "proportional")
        state, call, before = first.state_dict(), calls_of(first)["write"], memory(first)
        written.load_state_dict(state)
        total = Places().made(lambda: call(written)).count
        # a copy for each field; then stale keys are counted
        changing, after = len(written.fields) + 1, memory(written)
        assert total > 2 * changing
        for at in range(total):
            buffer = new(kind, "proportional")
            buffer.load_state_dict(state)
            with pytest.raises(Interruption):
                Places(at).made(lambda buffer=buffer: call(buffer))
            changed = unlike(buffer, before)
            assert bool(changed) == (at > total - changing)
            assert not set(changed) & {*unlike(buffer, after)}

    def test_a_write_without_a_live_key_changes_nothing(self) -> None:
        buffer, untouched = holding(1105), holding(1105)
        buffer.write([-1, 0, 4, -1], n=[7, 7, 7, 7])
        assert unlike(buffer, memory(untouched)) == ["counters"]
        assert buffer.stats().stale_updates == 2

    @pytest.mark.slow
    def test_an_update_of_two_launches(self) -> None:
        """Stamps of the first, without the second, would win over later updates."""
        keys, values = torch.arange(1100) // 2, torch.arange(1100.0)
        check_launches(lambda: holding(0), holding(1100), "update", lambda each: each.update_priorities(keys, values))

    def test_a_load_without_memory_is_whole_or_empty(self, full: bool) -> None:
        """New rows under the sums of others would be drawn as often as those were."""
        saved, done, before = holding(700).state_dict(), holding(1000), memory(holding(1000))
        done.load_state_dict(saved)
        loaded, total = memory(done), Places().made(lambda: done.load_state_dict(saved))
        assert total.count > 20
        for at in range(0, total.count, 1 if full else 7):
            buffer = holding(1000)
            with pytest.raises(MemoryError):
                Places(at, MemoryError).made(lambda buffer=buffer: buffer.load_state_dict(saved))
            check_loaded_or_empty(buffer, before, loaded)

    def test_a_launch_that_cannot_be_made_is_not_made_again(self) -> None:
        buffer, untouched = (used("transitions", "proportional", 9) for _ in range(2))
        rows = given(buffer, 3)
        with mock.patch.object(kernel_class(), "run", side_effect=MemoryError) as tried, pytest.raises(MemoryError):
            buffer.add(**rows)
        assert tried.call_count == 1
        assert not unlike(buffer, memory(untouched))
        for each in (buffer, untouched):
            each.add(**rows)
        same(buffer.sample(3), untouched.sample(3))

    def test_a_load_that_ends_twice_leaves_a_buffer_that_refuses_calls(self) -> None:
        saved, buffer, twin = holding(700).state_dict(), holding(1000), holding(1000)
        places = Places().made(lambda: twin.load_state_dict(saved))
        with pytest.raises(MemoryError):
            Places(places.count - 5, MemoryError, broken=True).made(lambda: buffer.load_state_dict(saved))
        more = {"read": lambda each: each[[0]], "stats": lambda each: each.stats(), "copy": copy.deepcopy}
        for call in (calls_of(twin) | more).values():
            with pytest.raises(RuntimeError, match=REFUSES):
                call(buffer)
        buffer.load_state_dict(saved)
        assert not unlike(buffer, memory(holding(700)))

    @pytest.mark.parametrize("kind", ["transitions", "next_step"])
    def test_an_add_that_was_interrupted_after_its_launch_is_counted(self, kind: str) -> None:
        """Else a draw without replacement finds fewer transitions than it was promised, or none."""
        buffer, twin = (make(kind, sampler=Uniform(), capacity=4 * ENVS) for _ in range(2))
        for adds in range(1, 8):
            rows = given(buffer, 3)
            places = Places().made(lambda rows=rows: twin.add(**rows))
            with pytest.raises(Interruption):
                Places(places.count - 1).made(lambda rows=rows: buffer.add(**rows))
            if adds % 2:
                # nor is it forgotten by an `add` that ends
                rows = given(buffer, 1)
                buffer.add(**rows)
                twin.add(**rows)
            if adds % 3 == 1 and (most := twin.stats().eligible):
                same(buffer.sample(most), twin.sample(most))
                with pytest.raises(ValueError, match=f"the buffer holds {most}"):
                    buffer.sample(most + 1)

    def test_final_observations_stay_until_their_step_is_overwritten(self) -> None:
        """Those of the next step are written before it is; the oldest step can be drawn until then."""
        settings = {"sampler": Uniform(replacement=True), "capacity": 3 * ENVS, "stack": 1, "n_step": 1}
        buffer = make("same_step", final_capacity=2, **settings)
        ends = {"terminated": torch.zeros(ENVS, dtype=torch.bool), "truncated": torch.ones(ENVS, dtype=torch.bool)}
        rows = given(buffer) | ends
        launches = Places().made(lambda: buffer.add(**rows)).launches
        for _ in range(6):
            rows, before = given(buffer) | ends, memory(buffer)
            with pytest.raises(MemoryError):
                Places(error=MemoryError, before=launches - 1).made(lambda rows=rows: buffer.add(**rows))
            assert not unlike(buffer, before)
            buffer.add(**rows)
