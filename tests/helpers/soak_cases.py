"""What the soak repeats, from a seed: random programs, damaged files, interrupts, threads, processes and ranks.

A case is one call whose outcome was compared: with the model of the tests, with rows kept beside, or, for a call or a
file that is wrong, with the state before it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import edit
from places import ENVS, STEPS, given, make
from programs import KINDS, any_program, run
from programs import SAMPLERS as BY_NAME
from ranks import ranks_of
from test_sharded_failures import check_one_sided, one_sided
from test_threads import WIDE, Adder, check_whole, rows
from twins import check_batches

from gpu_replay import CheckpointError, Combined, Field, Proportional, RankBased, ReplayBuffer, Uniform

REFUSED = (ValueError, TypeError, KeyError, RuntimeError, MemoryError, OSError)
SAMPLERS = [Uniform(), BY_NAME["proportional"], Proportional(), RankBased(), Combined(Uniform())]

# rows of a gather on several threads, of which each holds its own checksum
SUMMED = {
    "image": Field((3072,), torch.uint8, torch.float32),
    "plain": Field((3072,), torch.uint8),
    "sums": Field((2,), torch.int64),
}

Tally = Counter[str]
Call = Callable[[Any], object]


def programs(seed: int) -> Tally:
    """Random calls of either buffer, right and wrong, and of its model in lists."""
    draw = random.Random(seed)
    run(any_program(draw, draw.choice(KINDS), draw.choice(list(BY_NAME)), calls=150))
    return Tally(cases=150, bytes=8 * 150)


def whole_state(buffer: Any) -> str:
    """Everything that a call that raised must leave as it was."""
    state = buffer.state_dict()
    tensors = {name: tensor.tolist() for name, tensor in state.pop("tensors").items()}
    return json.dumps([state, tensors])


def hurt(draw: random.Random, path: Path) -> str:
    """Damage a checkpoint in one way; returns which."""
    way = draw.choice(("cut", "flip", "flip", "missing", "longer", "edited", "edited", "edited", "link"))
    file = draw.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    if way == "edited":

        def change(body: Any) -> None:
            """Walk to a random leaf and write something else there."""
            while True:
                place = draw.choice(list(body) if isinstance(body, dict) else range(len(body)))
                if not isinstance(body[place], (dict, list)) or not body[place] or draw.random() < 0.1:
                    break
                body = body[place]
            strange = [None, -1, 0, 1, 7, 2**31, 2**63, 1e308, "", "x", "../x", [], {}, [0], True, draw.getrandbits(70)]
            body[place] = draw.choice(strange)

        edit(path, change)
        return way
    file.unlink()
    place = draw.randrange(len(content))
    if way == "cut":
        file.write_bytes(content[:place])
    elif way == "flip":
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
    elif way == "longer":
        file.write_bytes(content + b"\0" * draw.randint(1, 99))
    elif way == "link":
        file.symlink_to("/dev/zero")
    return way


def damage(seed: int) -> Tally:
    """A checkpoint that was damaged is refused, or gives what was saved; or, edited by hand, a buffer that works."""
    draw = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        schema = {"a": Field((3,), torch.int16), "n": Field((), torch.int64)}
        buffer = ReplayBuffer(draw.randint(1, 30), schema, sampler=draw.choice(SAMPLERS), device="cpu", seed=seed)
        for _ in range(8):
            numbers = torch.arange(buffer.added, buffer.added + 5)
            buffer.add(a=numbers[:, None].expand(5, 3).short(), n=numbers)
            buffer.save(path)
            way = hurt(draw, path)
            try:
                found = ReplayBuffer.load(path, device="cpu")
            except (CheckpointError, MemoryError):
                tally["refused"] += 1
            else:
                if way != "edited":
                    assert whole_state(found) == whole_state(buffer), way
                # settings that were edited may ask for larger batches
                with suppress(*[ValueError] * (way == "edited")):
                    for _ in range(3 * bool(len(found))):
                        batch = found.sample(1)
                        assert batch.n.tolist() == batch.key.tolist() or way == "edited"
                        found.update_priorities(batch.key, [2.0])
            if draw.random() < 0.5:
                shutil.rmtree(path)
            else:
                # what was damaged can be saved over, or is refused because it is not known to be a checkpoint
                with suppress(CheckpointError):
                    buffer.save(path)
                    assert whole_state(ReplayBuffer.load(path, device="cpu")) == whole_state(buffer)
                shutil.rmtree(path)
            tally += Tally(cases=2, faults=1, bytes=buffer.nbytes)
    return tally


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
    priorities, new = numbers.random(size) * 9, given(buffer, draw.choice((1, 2, 5, buffer.capacity + 1)))
    found: dict[str, Call] = {
        "sample": lambda each: each.sample(size),
        "update": lambda each: each.update_priorities(keys, priorities),
        "look": lambda each: each.stats(),
        "read": lambda each: list(each.batches(4)),
    }
    if draw.random() < 0.2:
        found["clear"] = lambda each: each.clear()
    found["add"] = found["one more"] = lambda each: each.add(**new)
    if not isinstance(buffer, ReplayBuffer):
        steps = [given(buffer, ahead=ENVS * number) for number in range(draw.randint(1, 9))]
        many = {name: torch.stack([step[name] for step in steps]) for name in steps[0] if name != "priority"}
        found["extend"] = lambda each: each.extend(**many)
        found["sequences"] = lambda each: each.sample_sequences(2, 2, 1)
        found["begin"] = lambda each: each.begin_episodes()
    return found


def interrupts(seed: int) -> Tally:
    """A signal in the middle of each call: the buffer is that of before the call, or of after it, and draws as that."""
    draw = random.Random(seed)
    kind, sampler = draw.choice(("transitions", *STEPS)), draw.choice(SAMPLERS)
    capacity = draw.randint(8, 15) * ENVS if kind in STEPS else 9
    buffer, twin = (make(kind, sampler=sampler, capacity=capacity, seed=seed) for _ in range(2))
    tally = Tally()
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
