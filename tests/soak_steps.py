"""What the soak does with trajectory buffers, and with counters as after years; as in `soak_cases.py`, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from soak_cases import DTYPES, Tally, laid_out, refusing, values_of, whole_state
from test_extend import stream
from test_long_counters import POWERS, test_steps_near_the_ends_of_numbers, test_transitions_near_the_ends_of_numbers
from test_long_counters import SETTINGS as LONG
from transitions import SAMPLERS
from twins import check_batches

from gpu_replay import Field, Proportional, TrajectoryReplayBuffer
from gpu_replay.ops import _backend, numpy_loops

STEP_SAMPLERS = [*SAMPLERS.values(), Proportional(initial="stored", normalize="buffer")]


def counters(seed: int) -> Tally:
    """Both buffers near 2^31, 2^32 and 2^40, in both loops: the draws of ones that begin at 0."""
    draw = random.Random(seed)
    codes = ["numpy"] if _backend.inner_loops() is numpy_loops else ["numpy", "numba"]
    code, name, power, mode = map(draw.choice, (codes, list(SAMPLERS), POWERS, list(LONG)))
    with pytest.MonkeyPatch.context() as patch:
        test_transitions_near_the_ends_of_numbers(code, name, power, patch)
        test_steps_near_the_ends_of_numbers(code, name, power, mode, patch)
    return Tally(cases=5 + 17)


def schema(draw: random.Random) -> dict[str, Any]:
    """Random nested fields of a step."""

    def field() -> Field:
        return Field(tuple(draw.choices((1, 2, 3), k=draw.randint(0, 3))), draw.choice(DTYPES))

    if draw.random() < 0.4:
        return {"obs": field(), "action": field()}
    return {"obs": {"a": field(), "b": {"c": field()}}, "action": {"left": field()}, "note": field()}


def settings(draw: random.Random) -> dict[str, Any]:
    return {
        "stack": draw.randint(1, 4),
        "n_step": draw.randint(1, 5),
        "padding": draw.choice(("reset", "zero")),
        "autoreset": draw.choice(("next_step", "same_step", "disabled")),
        "final_capacity": draw.choice((None, 1, 7)),
        "sampler": draw.choice(STEP_SAMPLERS),
        "seed": draw.getrandbits(20),
        "device": "cpu",
    }


def many_steps(draw: random.Random, fields: dict[str, Field], steps: int, envs: int) -> dict[str, Any]:
    """So many random steps for `extend`, of fields by their dotted names."""
    found = stream(np.random.default_rng(draw.getrandbits(40)), steps, envs, draw.choice((0.02, 0.3, 0.9)))
    values = {name: values_of(draw, field, steps * envs).unflatten(0, (steps, envs)) for name, field in fields.items()}
    found = {name: found[name] for name in ("reward", "terminated", "truncated")} | values
    if draw.random() < 0.5:
        found["priority"] = np.array([abs(draw.gauss(0, 9)) for _ in range(steps * envs)]).reshape(steps, envs)
    if draw.random() < 0.6:
        found |= {f"final_{name}": values[name].flip(0) for name in values if name.startswith("obs")}
    return found


def extends(seed: int) -> Tally:
    """Nested fields in every layout, added one step after the other and many at once: the same state and draws."""
    draw = random.Random(seed)
    nested, more, envs = schema(draw), settings(draw), draw.randint(1, 4)
    turn = more["stack"] + more["n_step"] + draw.randint(0, 30)
    one, other = (TrajectoryReplayBuffer(turn * envs, envs, nested, **more) for _ in range(2))
    tally = Tally()
    for _ in range(4):
        steps = draw.randint(1, 40)
        given = many_steps(draw, one.fields, steps, envs)
        laid = {
            name: laid_out(draw, value.clone()) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        keys = other.extend(**laid)
        for step in range(steps):
            assert one.add(**{name: value[step] for name, value in given.items()}).tolist() == keys[step].tolist()
        live = one.keys()[-7:]
        numbers = torch.rand(len(live), generator=torch.Generator().manual_seed(seed))
        for buffer in (one, other):
            buffer.update_priorities(live, numbers)
        length, strict, stride = draw.randint(1, 5), draw.random() < 0.3, draw.randint(1, 2)
        calls: list[Callable[[Any], Any]] = [
            lambda buffer, length=length, strict=strict, stride=stride: buffer.sample_sequences(
                2, length, 1, strict=strict, stride=stride
            ),
            lambda buffer: buffer.sample(3),
        ]
        for call in calls:
            try:
                drawn = call(one)
            except (ValueError, RuntimeError):
                # too few of them, for both; the draws go on where they were
                with refusing():
                    call(other)
            else:
                check_batches(call(other), drawn)
        tally += Tally(cases=steps + 3, bytes=sum(torch.as_tensor(value).nbytes for value in given.values()))
    first, second = one.state_dict(), other.state_dict()
    assert first["counters"] == second["counters"]
    for name, tensor in first["tensors"].items():
        assert torch.equal(tensor, second["tensors"][name]) or name.startswith("final."), name
    return tally


def hostile_steps(seed: int) -> Tally:
    """Calls of a trajectory buffer that must be refused, after which the whole state is what it was."""
    draw = random.Random(seed)
    envs = 2
    nested = {
        "obs": {"a": Field((2,), torch.int16), "b": {"c": Field((), torch.float32)}},
        "action": Field((), torch.int64),
    }
    more = settings(draw) | {"sampler": Proportional(alpha=1.0, eps=0.0), "autoreset": "same_step"}
    buffer = TrajectoryReplayBuffer(envs * draw.randint(9, 30), envs, nested, **more)
    right = many_steps(draw, buffer.fields, 12, envs)
    buffer.extend(**right)
    right = {name: value for name, value in right.items() if not name.startswith("final_")}
    one = {name: value[0] for name, value in right.items()}
    wrong: list[Any] = [None, "x", 3, [], [[]], {}, object(), [1, "2"], [[1], [2, 3]], 10**400, 1j, torch.ones(3, 3)]
    wrong += [torch.full((12, 3), 2**70.0), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")]
    wrong += [
        np.array(["a"] * 2),
        np.ma.masked_equal([1, 2], 2),
        [np.ma.masked, 1.0],
        torch.ones(2, dtype=torch.complex64),
    ]
    keys: list[Any] = [None, "x", [1.5], [True], torch.ones(2), [[1], [2, 3]], 2**70, slice(3), object(), [2**64]]
    sizes: list[Any] = [0, -1, None, "x", 1.5, True, 2**48, [1]]
    numbers: list[Any] = [None, "x", [1, 2], [[1]], [math.nan], [math.inf], [1j], [np.ma.masked]]

    def spoilt(given: dict[str, Any]) -> dict[str, Any]:
        """With one wrong value, a name too much, or a name too few."""
        name = draw.choice([*buffer.fields, "reward", "terminated", "truncated"])
        way = draw.randrange(4)
        if way == 0:
            return {other: value for other, value in given.items() if other != name}
        return given | (
            {draw.choice(("obs.d", "Action", "final_x")): given[name]} if way == 1 else {name: draw.choice(wrong)}
        )

    def unequal() -> dict[str, Any]:
        """Steps of which one field has fewer."""
        name = draw.choice(list(buffer.fields))
        return right | {name: right[name][:-1]}

    before = whole_state(buffer)
    calls: list[Callable[[], object]] = [
        lambda: buffer.add(**spoilt(one)),
        lambda: buffer.add(**right),
        lambda: buffer.add(**(one | {"priority": draw.choice([*wrong[1:], [1, 2, 3], [1, math.nan], [math.inf, 1]])})),
        lambda: buffer.add(**(one | {"final_obs": draw.choice([3, "x", {"a": 1}, object(), torch.ones(3)])})),
        lambda: buffer.extend(**spoilt(right)),
        lambda: buffer.extend(**unequal()),
        lambda: buffer.extend(**(right | {"priority": draw.choice([*wrong[1:], torch.full((12, envs), math.nan)])})),
        lambda: buffer.extend(**(right | {"final_obs": draw.choice([3, "x", {"a": 1}, [None], torch.ones(3)])})),
        lambda: buffer.begin_episodes(draw.choice(["x", [1, 2, 3], [0.5, 1.0], torch.ones(3, dtype=torch.bool)])),
        lambda: buffer.sample(draw.choice(sizes)),
        lambda: buffer.sample(3, beta=draw.choice([-1, math.nan, math.inf, "x", [1]])),
        lambda: buffer.sample_sequences(draw.choice(sizes), 2),
        lambda: buffer.sample_sequences(2, draw.choice([*sizes, 10**6])),
        lambda: buffer.sample_sequences(2, 2, draw.choice([-1, 1.5, "x", 10**6])),
        lambda: buffer.sample_sequences(2, 2, stride=draw.choice([0, -1, 1.5, "x"])),
        lambda: buffer.sample_sequences(2, 2, strict=draw.choice([1, "x", None])),
        lambda: buffer.update_priorities(draw.choice(keys), [1.0]),
        lambda: buffer.update_priorities([0], draw.choice(numbers)),
        lambda: buffer[draw.choice([*keys, 99, -1, [0, 99]])],
        lambda: buffer.load_state_dict(draw.choice([*wrong, buffer.state_dict() | {"counters": {}}])),
        lambda: buffer.save(draw.choice(["/proc/none", "/dev/null", "\0"])),
    ]
    for _ in range(10):
        with refusing():
            draw.choice(calls)()
    assert whole_state(buffer) == before
    return Tally(cases=10, faults=10, bytes=len(before))
