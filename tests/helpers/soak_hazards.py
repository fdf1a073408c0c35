"""What the soak does with signals, threads, processes and ranks; as in `soak_cases.py`, from a seed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import ranks_of
from soak_cases import REFUSED, SAMPLERS, Tally, values_of
from soak_steps import many_steps, settings
from test_sharded_failures import check_one_sided, one_sided
from test_threads import WIDE, Adder, check_whole, rows
from twins import check_batches

from gpu_replay import Field, ReplayBuffer, TrajectoryReplayBuffer

Call = Callable[[Any], object]
# rows of a gather on several threads, of which each holds its own checksum
SUMMED = {
    "image": Field((3072,), torch.uint8, torch.float32),
    "plain": Field((3072,), torch.uint8),
    "sums": Field((2,), torch.int64),
}


class Alarm(BaseException):
    """Raised by a signal, between any two operations of Python."""


@contextmanager
def alarms() -> Iterator[Callable[[Call, Any, float], bool]]:
    """Gives `interrupted(call, buffer, seconds)`: makes a call, and says whether the signal ended it."""
    armed = False

    def ring(*_: object) -> None:
        if armed:
            raise Alarm

    def interrupted(call: Call, buffer: Any, seconds: float) -> bool:
        nonlocal armed
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
                call(buffer)
            finally:
                armed = False
        except Alarm:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seen(buffer: Any) -> dict[str, Any]:
    """All that a buffer shows of itself, but for its next draws."""
    keys = buffer.keys()
    found = {"stats": repr(buffer.stats()), "counters": repr(buffer.state_dict()["counters"]), "keys": keys.tolist()}
    if len(keys):
        stored = buffer[keys] if isinstance(buffer, ReplayBuffer) else next(buffer.batches(len(keys)))
        found |= {name: values.tolist() for name, values in stored.items()}
    with suppress(RuntimeError):
        found["priorities"] = buffer.priorities(keys).tolist()
    return found


def refused(call: Callable[[], object]) -> type[Exception] | None:
    """The kind of error that a call raises."""
    try:
        call()
    except REFUSED as error:
        return type(error)
    return None


def calls_of(draw: random.Random, buffer: Any) -> dict[str, Call]:
    """One call of each kind, with arguments of its own."""
    numbers, size = np.random.default_rng(draw.getrandbits(40)), draw.randint(1, 6)
    keys = numbers.integers(buffer.added - buffer.capacity - 2, buffer.added + 1, size)
    given = numbers.random(size) * 9
    found: dict[str, Call] = {
        "sample": lambda each: each.sample(size),
        "update": lambda each: each.update_priorities(keys, given),
        "look": lambda each: each.stats(),
        "read": lambda each: list(each.batches(4)),
    }
    if draw.random() < 0.2:
        found["clear"] = lambda each: each.clear()
    if isinstance(buffer, TrajectoryReplayBuffer):
        steps = many_steps(draw, buffer.fields, draw.randint(1, 9), buffer.num_envs)
        one = {name: value[0] for name, value in steps.items()}
        found["add"] = found["one more"] = lambda each: each.add(**one)
        found["extend"] = lambda each: each.extend(**steps)
        found["sequences"] = lambda each: each.sample_sequences(2, 2, 1)
        found["begin"] = lambda each: each.begin_episodes()
    else:
        count = draw.choice((1, 2, 5, buffer.capacity + 1))
        new = {name: values_of(draw, field, count) for name, field in buffer.fields.items()}
        more = {"priority": numbers.random(count)} if draw.random() < 0.5 else {}
        found["add"] = found["one more"] = lambda each: each.add(**new, **more)
    return found


def interrupts(seed: int) -> Tally:
    """A signal in the middle of each call: the buffer is that of before the call, or of after it, and draws as that."""
    draw = random.Random(seed)
    small = {"obs": Field((3,), torch.float32), "action": Field((), torch.int64)}

    def made() -> Any:
        if seed % 2:
            return ReplayBuffer(
                9, small | {"large": Field((90,), torch.uint8)}, sampler=sampler, seed=seed, device="cpu"
            )
        return TrajectoryReplayBuffer(turn * 2, 2, small, **more)

    more, sampler = settings(draw), draw.choice(SAMPLERS)
    turn = more["stack"] + more["n_step"] + draw.randint(2, 9)
    buffer, twin, tally = made(), made(), Tally()
    with alarms() as interrupted:
        for number in range(120):
            calls = calls_of(draw, twin)
            name = draw.choice(list(calls)) if number >= len(calls) else list(calls)[number]
            before, began = seen(twin), time.perf_counter()
            raised = refused(lambda name=name, calls=calls: calls[name](twin))
            # what is called for the first time may be compiled
            seconds = draw.uniform(0, 1.2) * (time.perf_counter() - began) if number >= len(calls) else 9.0
            ended = False

            def interrupt(call: Call = calls[name], seconds: float = seconds) -> None:
                nonlocal ended
                ended = interrupted(call, buffer, seconds)

            again = refused(interrupt)
            assert ended or again is raised, f"{name} raised {again}, and {raised} in the twin"
            if ended and seen(buffer) == before:
                refused(lambda name=name, calls=calls: calls[name](buffer))
            after, wanted = seen(buffer), seen(twin)
            unlike = {each: (after.get(each), wanted[each]) for each in wanted if after.get(each) != wanted[each]}
            assert not unlike, f"{'interrupted ' * ended}{name}: {unlike}"
            drawn: list[Any] = []
            kinds = [refused(lambda each=each, drawn=drawn: drawn.append(each.sample(3))) for each in (twin, buffer)]
            assert kinds[0] is kinds[1], f"after {name} they drew {kinds}"
            if drawn:
                check_batches(*drawn)
            tally += Tally(cases=1, faults=ended)
    return tally


def threads(seed: int) -> Tally:
    """Adders, learners, readers and savers at once; every number of a row is the key of that row."""
    capacity = 64 + seed % 200
    buffer = ReplayBuffer(capacity, WIDE, sampler=SAMPLERS[seed % len(SAMPLERS)], device="cpu", seed=seed)
    buffer.add(**rows(0, 64, "cpu"))
    sizes, tally = itertools.cycle(range(1, 24)), Tally()

    def add() -> None:
        buffer.add(**rows(buffer.added, next(sizes), "cpu"))

    def learn() -> None:
        batch = buffer.sample(24)
        check_whole(batch)
        buffer.update_priorities(batch.key, torch.rand(24))
        tally.update(cases=1, bytes=sum(batch[name].nbytes for name in WIDE))

    def read() -> None:
        with suppress(KeyError):
            check_whole(buffer[[buffer.added - 1]])
        assert buffer.stats().size <= capacity

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"

        def keep() -> None:
            buffer.save(path)
            found = ReplayBuffer.load(path, device="cpu")
            check_whole(found[found.keys()])
            tally["cases"] += 1

        with Adder(add), Adder(learn), Adder(learn), Adder(read), Adder(keep):
            time.sleep(0.5)
    check_whole(buffer[buffer.keys()])
    return tally


def gathers(seed: int) -> Tally:
    """Two buffers in two threads, whose batches are gathered on four threads: every row has its own checksum."""
    tally, before = Tally(), torch.get_num_threads()

    def user(number: int) -> Callable[[], None]:
        draw = torch.Generator().manual_seed(2 * seed + number)
        buffer = ReplayBuffer(1500, SUMMED, sampler=SAMPLERS[(seed + number) % 3], device="cpu", seed=seed)

        def add(count: int) -> None:
            new = torch.randint(0, 256, (2, count, 3072), generator=draw, dtype=torch.uint8)
            buffer.add(image=new[0], plain=new[1], sums=new.sum(2).T)

        def use() -> None:
            batch = buffer.sample(700)
            sums = torch.stack([batch.image.sum(1).long(), batch.plain.sum(1)], dim=1)
            torn = int((sums != batch.sums).any(1).sum())
            assert not torn, f"{torn} of 700 rows are torn"
            tally.update(cases=1, bytes=batch.image.nbytes + batch.plain.nbytes)
            add(5)

        add(1500)
        return use

    users = [user(number) for number in range(2)]
    torch.set_num_threads(4)
    try:
        with Adder(users[0]), Adder(users[1]):
            time.sleep(1.0)
    finally:
        torch.set_num_threads(before)
    return tally


def racing(seed: int) -> Tally:
    """Four processes make buffers below one folder that does not exist yet: each finds its own file there."""

    def make(path: Path) -> None:
        buffer = ReplayBuffer(7, {"n": Field((), torch.int64)}, storage_path=path, device="cpu", seed=seed)
        buffer.add(n=torch.arange(9))
        assert buffer[buffer.keys()].n.tolist() == list(range(2, 9))

    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "first")
        path, children = Path(folder) / "new" / "deep", []
        waiting, begin = os.pipe()
        for rank in range(4):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:
                os.close(begin)
                # ends when the parent closes its end
                os.read(waiting, 1)
                make(path / f"rank{rank}")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(waiting)
        os.close(begin)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0] * 4, f"{sum(map(bool, statuses))} of 4 constructions failed"
    return Tally(cases=4)


def sharded(seed: int) -> Tally:
    """Two ranks that make different calls, or the same with wrong arguments: all raise, and the buffer goes on."""
    with ranks_of(2) as ranks, tempfile.TemporaryDirectory() as folder:
        found = ranks.run(2, one_sided, str(Path(folder) / "c"), ("local", "global")[seed % 2])
        check_one_sided(found)
    return Tally(cases=len(found[0]), faults=len(found[0]))
