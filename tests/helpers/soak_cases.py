"""What the soak repeats, from a seed: random programs, damaged files, interrupts, threads, processes and ranks.

A case is one call whose outcome was compared: with the model of the tests, with rows kept beside, or, for a call or a
file that is wrong, with the state before it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from checkpoints import edit, spoiled
from places import STEPS
from programs import KINDS, any_program, run
from programs import SAMPLERS as BY_NAME
from ranks import ranks_of
from refusals import whole_state
from test_damage import DAMAGE, put_in_place_of
from test_interrupts import MORE, under_signals
from test_places import race
from test_sharded import check_one_sided, one_sided
from test_threads import Adder, adding, made, users

from gpu_replay import CheckpointError, Combined, Field, Proportional, RankBased, ReplayBuffer, Uniform

REFUSED = (ValueError, TypeError, KeyError, RuntimeError, MemoryError, OSError)
SAMPLERS = [Uniform(), BY_NAME["proportional"], Proportional(), RankBased(), Combined(Uniform())]

Tally = Counter[str]
Call = Callable[[Any], object]


def programs(seed: int) -> Tally:
    """Random calls of either buffer, right and wrong, and of its model in lists."""
    draw = random.Random(seed)
    run(any_program(draw, draw.choice(KINDS), draw.choice(list(BY_NAME)), calls=150))
    return Tally(cases=150, bytes=8 * 150)


def hurt(draw: random.Random, path: Path) -> str:
    """Damage a checkpoint in one way; returns which."""
    way = draw.choice((*DAMAGE, "changed", "missing", "edited", "edited", "edited", "link"))
    file = draw.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    if way == "edited":

        def change(body: Any) -> None:
            _, changed = draw.choice([each for each in spoiled(body) if isinstance(each[1], dict)])
            body.clear()
            body.update(changed)

        edit(path, change)
        return way
    if way in DAMAGE:
        put_in_place_of(file, DAMAGE[way](content, draw.random()))
    else:
        file.unlink()
    if way == "link":
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
            # what was damaged can be saved over, or is refused because it is not known to be a checkpoint
            with suppress(CheckpointError):
                buffer.save(path)
                assert whole_state(ReplayBuffer.load(path, device="cpu")) == whole_state(buffer)
            shutil.rmtree(path)
            tally += Tally(cases=2, faults=1, bytes=buffer.nbytes)
    return tally


def interrupts(seed: int) -> Tally:
    """A signal in the middle of each call of a buffer, beside a twin without."""
    draw = random.Random(seed)
    faults = under_signals(draw.choice(("transitions", *STEPS)), draw.choice(list(MORE)), seed, rounds=120)
    return Tally(cases=120, faults=faults)


def threads(seed: int) -> Tally:
    """Adders, learners, readers and savers of two buffers at once, whose batches are gathered on four threads."""
    tally, before, capacity = Tally(), torch.get_num_threads(), 1500 + seed % 200

    def counted(use: Callable[[], Any]) -> Adder:
        return Adder(lambda: tally.update(cases=1, bytes=use() or 0))

    torch.set_num_threads(4)
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            for number in range(2):
                buffer = made("cpu", SAMPLERS[(seed + number) % len(SAMPLERS)], capacity, capacity)
                running.enter_context(adding(buffer, "cpu"))
                for name in ("learn", "learn", "read", "keep"):
                    # enough for a gather on several threads
                    running.enter_context(counted(users(buffer, Path(folder) / str(number), 1200)[name]))
            time.sleep(1.5)
    finally:
        torch.set_num_threads(before)
    return tally


def racing(seed: int) -> Tally:
    """Four processes make files below one folder that does not exist yet: each finds its own there."""
    with tempfile.TemporaryDirectory() as folder:
        assert race(Path(folder), 5) == []
    return Tally(cases=20)


def sharded(seed: int) -> Tally:
    """Two ranks that make different calls, or the same with wrong arguments: all raise, and the buffer goes on."""
    with ranks_of(2) as ranks, tempfile.TemporaryDirectory() as folder:
        found = ranks.run(2, one_sided, str(Path(folder) / "c"), ("local", "global")[seed % 2])
        check_one_sided(found)
    return Tally(cases=len(found[0]), faults=len(found[0]))
