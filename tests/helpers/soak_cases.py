"""What the soak does again and again, from a seed: random use, hostile input, damaged files and disks.

A case is one call whose outcome was compared: with the plain-Python oracles of the tests, with rows kept beside, or,
for a call or a file that is wrong, with the state before it.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import edit
from model import mass_of
from programs import KINDS, any_program, run
from programs import SAMPLERS as BY_NAME
from saving_process import load, save

from gpu_replay import (
    CheckpointError,
    Combined,
    Field,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)

REFUSED = (ValueError, TypeError, KeyError, RuntimeError, MemoryError, OSError)
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAMPLERS = [Uniform(), BY_NAME["proportional"], Proportional(), RankBased(), Combined(Uniform())]

Tally = Counter[str]


def sequences(seed: int) -> Tally:
    """Random calls of either buffer and of its model in lists."""
    draw = random.Random(seed)
    run(any_program(draw, draw.choice(KINDS), draw.choice(list(BY_NAME)), calls=150))
    return Tally(cases=150, bytes=8 * 150)


def values_of(draw: random.Random, field: Field, count: int) -> torch.Tensor:
    """Random values of a field, of any bits that are numbers."""
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    shape = (count, *field.shape)
    if field.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if field.dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 10 ** draw.uniform(-3, 3)).to(field.dtype)
    limits = torch.iinfo(field.dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=field.dtype)


def laid_out(draw: random.Random, value: torch.Tensor) -> Any:
    """The same values in other memory: strided, reversed, overlapping, read-only, of another library."""
    way = draw.randrange(6)
    if way == 0:
        return value.repeat_interleave(2, dim=0)[::2]
    if way == 1:
        return torch.stack([value, value], dim=-1)[..., draw.randrange(2)]
    if value.dtype == torch.bfloat16 or way == 2:
        return value.requires_grad_() if value.dtype.is_floating_point and draw.random() < 0.3 else value
    array = value.numpy()
    if way == 3:
        return array[::-1].copy()[::-1]
    if way == 4:
        array = array.copy()
        array.flags.writeable = False
        return array
    return np.asfortranarray(array)


def fields(seed: int) -> Tally:
    """A random schema, rows of every layout, and a list of what was given."""
    draw = random.Random(seed)
    schema = {
        f"f{number}": Field(tuple(draw.choices((1, 2, 3, 7), k=draw.randint(0, 3))), draw.choice(DTYPES))
        for number in range(draw.randint(1, 5))
    }
    capacity = draw.choice((1, 2, 7, 30, 100))
    buffer = ReplayBuffer(capacity, schema, sampler=draw.choice(SAMPLERS), device="cpu", seed=seed)
    given: dict[str, torch.Tensor] = {name: values_of(draw, field, 0) for name, field in schema.items()}
    tally = Tally()
    for _ in range(20):
        count = draw.choice((1, 2, 5, capacity, 3 * capacity))
        new = {name: values_of(draw, field, count) for name, field in schema.items()}
        keys = buffer.add(**{name: laid_out(draw, value.clone()) for name, value in new.items()})
        given = {name: torch.cat([given[name], new[name]]) for name in schema}
        total = len(given["f0"])
        assert keys.tolist() == list(range(total - count, total))
        live = range(max(0, total - capacity), total)
        drawn = buffer.sample(min(len(live), draw.randint(1, 9)))
        buffer.update_priorities(drawn.key, torch.rand(len(drawn)))
        for batch in (buffer[list(live)], drawn):
            assert set(batch.key.tolist()) <= set(live)
            for name in schema:
                assert torch.equal(batch[name], given[name][batch.key]), name
                tally["bytes"] += batch[name].nbytes
        tally["cases"] += 3
    return tally


def priorities(seed: int) -> Tally:
    """Priorities from denormal numbers to the largest, repeated, stale and future keys; NaN and infinities refused."""
    draw = random.Random(seed)
    capacity = draw.randint(1, 60)
    settings = Proportional(alpha=draw.choice((0.0, 0.3, 1.0)), eps=draw.choice((0.0, 1e-6)))
    both = [
        ReplayBuffer(capacity, {"n": Field((), torch.int64)}, sampler=sampler, device="cpu")
        for sampler in (settings, RankBased())
    ]
    known: dict[int, float] = {}
    for _ in range(20):
        first, count = both[0].added, draw.randint(1, capacity)
        numbers = [draw.choice((1, -1)) * min(10 ** draw.uniform(-323, 308.2), 1.79e308) for _ in range(count)]
        for buffer in both:
            buffer.add(n=torch.arange(first, first + count), priority=np.array(numbers))
        known |= dict(zip(range(first, first + count), map(abs, numbers), strict=True))
        keys = [draw.randrange(-3, first + count + 3) for _ in range(9)] + [2**62, -(2**62)]
        numbers = [draw.choice((0.0, 5e-324, 1e308, draw.random())) for _ in keys]
        live = range(max(0, first + count - capacity), first + count)
        for buffer in both:
            buffer.update_priorities(np.array(keys), np.array(numbers))
        known |= {key: number for key, number in zip(keys, numbers, strict=True) if key in live}
        for bad in (math.nan, math.inf, -math.inf):
            with refusing():
                draw.choice(both).update_priorities(np.array([live[-1]]), np.array([bad]))
        masses, ordered = both[0].masses().tolist(), both[1].priorities(list(live)).tolist()
        for key, number in zip(live, ordered, strict=True):
            expected = mass_of(known[key], settings, capacity)
            assert abs(masses[key % capacity] - expected) <= 1 + 1e-12 * expected, (key, known[key])
            assert number == known[key], key
        assert both[0].total_mass() == sum(masses)
    return Tally(cases=20 * 7, faults=20 * 3, bytes=16 * 20 * capacity)


@contextmanager
def refusing() -> Iterator[None]:
    """Fail unless what is done raises an error for people."""
    try:
        yield
    except REFUSED as error:
        if str(error):
            return
        raise AssertionError("an error without a message") from error
    raise AssertionError("this was not refused")


def whole_state(buffer: ReplayBuffer | TrajectoryReplayBuffer) -> str:
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


def disk(seed: int) -> Tally:
    """A disk that takes no more, and a folder that may not be written: the old checkpoint stays."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "c"
        save(str(path), 1)
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            if seed % 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (draw.randint(1, 100_000), resource.RLIM_INFINITY))
            else:
                os.setuid(65534) if os.getuid() == 0 else os.chmod(path, 0o555)
            with suppress(OSError):
                save(str(path), 2)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the save should have failed"
        os.chmod(path, 0o755)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        assert load(path) == 1
    return Tally(cases=1, faults=1, bytes=sum(map(len, before.values())))
