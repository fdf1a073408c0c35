"""What the soak does with steps, counters as after years, and hostile input; as in `soak_cases.py`, from a seed."""

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

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer

STEP_SAMPLERS = [*SAMPLERS.values(), Proportional(initial="stored", normalize="buffer")]


def counters(seed: int) -> Tally:
    """Both buffers near 2^31, 2^32 and 2^40: the draws of ones that begin at 0."""
    draw = random.Random(seed)
    name, power, mode = map(draw.choice, (list(SAMPLERS), POWERS, list(LONG)))
    with pytest.MonkeyPatch.context() as patch:
        test_transitions_near_the_ends_of_numbers("host", name, power, patch)
        test_steps_near_the_ends_of_numbers("host", name, power, mode, patch)
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


def many_steps(
    draw: random.Random, fields: dict[str, Field], steps: int, envs: int, *, finals: bool = True
) -> dict[str, Any]:
    """So many random steps for `extend`, of fields by their dotted names, and final observations if they are taken."""
    found = stream(np.random.default_rng(draw.getrandbits(40)), steps, envs, draw.choice((0.02, 0.3, 0.9)))
    values = {name: values_of(draw, field, steps * envs).unflatten(0, (steps, envs)) for name, field in fields.items()}
    found = {name: found[name] for name in ("reward", "terminated", "truncated")} | values
    if draw.random() < 0.5:
        found["priority"] = np.array([abs(draw.gauss(0, 9)) for _ in range(steps * envs)]).reshape(steps, envs)
    if finals and draw.random() < 0.6:
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
        given = many_steps(draw, one.fields, steps, envs, finals=one.autoreset != "next_step")
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


# no field, flag or reward takes these, whatever its shape
WRONG: list[Any] = [None, "x", 3, [], [[]], {}, object(), [1, "2"], [[1], [2, 3]], 10**400, 1j, torch.ones(3, 3, 3)]
WRONG += [torch.ones(0), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), np.array(["a"] * 3)]
WRONG += [torch.full((12, 3), 2**70.0), torch.ones(2, dtype=torch.complex64), np.array([object()] * 3)]
WRONG += [np.datetime64("2020"), np.ma.masked_equal([1, 2], 2), [np.ma.masked, 1.0]]
KEYS: list[Any] = [None, "x", [1.5], [True], torch.ones(2), [[1], [2, 3]], 2**70, slice(3), object(), [2**64]]
SIZES: list[Any] = [0, -1, None, "x", 1.5, True, 2**48, [1]]
NUMBERS: list[Any] = [None, "x", [1, 2], [[1]], [math.nan], [math.inf], [1j], [np.ma.masked]]


def hostile(seed: int) -> Tally:
    """Calls of both buffers that must be refused, after which the whole state is what it was."""
    draw = random.Random(seed)
    exact = Proportional(alpha=1.0, eps=0.0)
    nested = {"a": Field((2,), torch.int16), "b": {"c": Field((), torch.float32)}}
    if seed % 2:
        buffer: Any = ReplayBuffer(9, nested, sampler=exact, device="cpu")
        right = {name: values_of(draw, field, 3) for name, field in buffer.fields.items()}
        many, names, more = None, list(buffer.fields), [[1, 2], [1, math.nan, 2]]
        for _ in range(draw.randint(1, 5)):
            buffer.add(**right)
    else:
        fields = {"obs": nested, "action": Field((), torch.int64)}
        settled = settings(draw) | {"sampler": exact, "autoreset": "same_step"}
        buffer = TrajectoryReplayBuffer(2 * draw.randint(9, 30), 2, fields, **settled)
        many = many_steps(draw, buffer.fields, 12, 2)
        buffer.extend(**many)
        many = {name: value for name, value in many.items() if not name.startswith("final_")}
        right, more = {name: value[0] for name, value in many.items()}, [[1, 2, 3], [1, math.nan], [math.inf, 1]]
        names = [*buffer.fields, "reward", "terminated", "truncated"]

    def spoilt(given: dict[str, Any]) -> dict[str, Any]:
        """With one wrong value, a name too much, a name too few, or wrong priorities."""
        name, way = draw.choice(names), draw.randrange(4)
        if way == 0:
            return {other: value for other, value in given.items() if other != name}
        unknown = draw.choice(("obs.d", "Action", "final_x"))
        wrong = draw.choice([*WRONG[1:], *more] if given is right else WRONG[1:])
        return given | [{unknown: given[name]}, {name: draw.choice(WRONG)}, {"priority": wrong}][way - 1]

    calls: list[Callable[[], object]] = [
        *[lambda: buffer.add(**spoilt(right))] * 4,
        lambda: buffer.sample(draw.choice(SIZES)),
        lambda: buffer.sample(3, beta=draw.choice([-1, math.nan, math.inf, "x", [1]])),
        lambda: buffer.update_priorities(draw.choice(KEYS), [1.0]),
        lambda: buffer.update_priorities([0], draw.choice(NUMBERS)),
        lambda: buffer[draw.choice([*KEYS, 999, -1, [0, 999]])],
        lambda: buffer.load_state_dict(draw.choice([*WRONG, buffer.state_dict() | {"counters": {}}])),
        lambda: buffer.save(draw.choice(["/proc/none", "/dev/null", "\0"])),
    ]
    if many is not None:
        final = [3, "x", {"a": 1}, object(), [None], torch.ones(3)]
        calls += [
            lambda: buffer.add(**many),
            lambda: buffer.add(**right, final_obs=draw.choice(final)),
            lambda: buffer.extend(**spoilt(many)),
            lambda: buffer.extend(**(many | {name: many[name][:-1] for name in [draw.choice(list(buffer.fields))]})),
            lambda: buffer.extend(**many, final_obs=draw.choice(final)),
            lambda: buffer.begin_episodes(draw.choice(["x", [1, 2, 3], [0.5, 1.0], torch.ones(3, dtype=torch.bool)])),
            lambda: buffer.sample_sequences(draw.choice(SIZES), 2),
            lambda: buffer.sample_sequences(2, draw.choice([*SIZES, 10**6])),
            lambda: buffer.sample_sequences(2, 2, draw.choice([-1, 1.5, "x", 10**6])),
            lambda: buffer.sample_sequences(2, 2, stride=draw.choice([0, -1, 1.5, "x"])),
            lambda: buffer.sample_sequences(2, 2, strict=draw.choice([1, "x", None])),
        ]
    before = whole_state(buffer)
    for _ in range(10):
        with refusing():
            draw.choice(calls)()
    assert whole_state(buffer) == before
    return Tally(cases=10, faults=10, bytes=len(before))
