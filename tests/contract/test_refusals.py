"""What is refused, and says why: errors are for people, and nothing is stored or changed by a call that raised.

Calls that any buffer must refuse, in whatever state, are `REFUSALS` of refusals.py; random programs make them too, name
the one that changed something, and ask for more than there is and for keys that are not live.
"""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only, scale
from hindsight_oracle import DESIRED, GOALS, hindsight, reward_of
from programs import any_program, run
from refusals import LOSSY, REFUSALS, whole_state
from transitions import NUMBER

from gpu_replay import (
    Combined,
    Field,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    ReplayMixture,
    Sequences,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract
STEP = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
OBS, ACTION = STEP["obs"], STEP["action"]
SCALAR = Field((), torch.float32)


def filled(kind: str, sampler: str = "proportional", device: str = "cpu", calls: int = 20, **known: Any) -> Any:
    """A buffer that has lived through a random program."""
    settings = {"fields": 1, "relabel": None, "stack": 2, "n_step": 2} | known if kind == "steps" else {}
    program = any_program(random.Random(calls), kind, sampler, calls=calls, capacity=5, place="memory", **settings)
    return run(program, device).buffer


SAMPLED = ("proportional", "replacement", "latest", "combined-rank")
LIVED = (("same_step", 0), ("next_step", 6), ("disabled", 25))


@pytest.mark.parametrize("kind", ["rows", "steps"])
@pytest.mark.parametrize("sampler", scale(SAMPLED, SAMPLED[:1]))
def test_a_refused_call_names_what_is_wrong_and_changes_nothing(sampler: str, kind: str, device: str) -> None:
    known = [refusal for refusal in REFUSALS if kind in refusal.kinds]
    assert len(known) > 80
    for autoreset, calls in scale(LIVED, LIVED[-1:]):
        buffer = filled(kind, sampler, device, calls, autoreset=autoreset, final_capacity=None)
        before = whole_state(buffer)
        for refusal in known:
            refusal.check(buffer)
        assert whole_state(buffer) == before


# settings: what the message names is the setting and its value


def rows(capacity: Any = 4, fields: Any = NUMBER, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, fields, **{"device": "cpu", **more})


def steps(**changed: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(**{"capacity": 12, "num_envs": 3, "fields": STEP, "device": "cpu"} | changed)


def finals(**changed: Any) -> TrajectoryReplayBuffer:
    return steps(autoreset="same_step", **changed)


def goals(**changed: Any) -> TrajectoryReplayBuffer:
    return steps(**{"fields": GOALS, "relabel": hindsight(), **changed})


RESULTS = ("obs", "action", "reward", "terminated", "truncated")
HUGE, NAN, INF = 10**400, float("nan"), float("inf")
# scales that the dtype in which they are applied, or the one that is sampled, cannot hold
NO_SCALES: list[tuple[Any, ...]] = [((), torch.uint8, None, scale) for scale in (NAN, INF, HUGE, 1e39, -1e39, 1e-46)]
NO_SCALES += [((), torch.uint8, torch.float16, 1e5), ((), torch.float32, torch.bfloat16, np.float64(3.4e38))]
NO_SCALES += [((), torch.float64, torch.float32, 1e39), ((), torch.float64, None, -HUGE)]
WRONG: list[tuple[Any, Any, dict[str, list[Any]]]] = [
    (steps, ValueError, {"capacity": [0], "num_envs": [0], "stack": [0], "n_step": [0]}),
    (steps, ValueError, {"gamma": [-0.1, 1.1, NAN]}),
    (steps, TypeError, {"num_envs": [1.5], "gamma": ["0.9"], "stack": [2.0], "n_step": [True]}),
    (steps, LOSSY, {"autoreset": ["never"], "padding": ["edge"], "sampler": ["uniform", Uniform]}),
    (finals, ValueError, {"final_capacity": [-1]}),
    (finals, TypeError, {"terminal_obs": [1]}),
    (rows, ValueError, {"capacity": [0, -1]}),
    (rows, TypeError, {"capacity": [True, 2.5], "seed": [0.5]}),
    (rows, (ValueError, RuntimeError, TypeError), {"device": ["abacus"]}),
    *(
        (kind, error, settings)
        for kind in (Proportional, RankBased)
        for error, settings in (
            (ValueError, {"alpha": [-0.1, NAN, HUGE], "beta": [-1.0, HUGE], "normalize": ["none"]}),
            (ValueError, {"initial": ["largest", INF, -1.0, HUGE]}),
            (TypeError, {"alpha": ["1"], "beta": [None], "stratified": [1]}),
            # sums and products with them would overflow
            (ValueError, {"alpha": [10**101], "beta": [10**101]}),
        )
    ),
    (Proportional, ValueError, {"eps": [-1e-9, 10**101], "clip": [0.0]}),
    (Uniform, TypeError, {"replacement": ["no"]}),
    (hindsight, TypeError, {"achieved": [3], "reward_fn": [None], "terminated_fn": [1.0]}),
    (hindsight, ValueError, {"ratio": [1.01, -0.1], "strategy": ["random"]}),
    (partial(hindsight, "geometric"), ValueError, {"gamma": [None, 0.0, -0.5, 1.01, NAN]}),
    (partial(hindsight, "geometric"), TypeError, {"gamma": ["0.9", True]}),
    (hindsight, ValueError, {"gamma": [0.9]}),
    (goals, TypeError, {"relabel": [reward_of]}),
    (goals, ValueError, {"n_step": [2]}),
    (partial(Sequences, 2), TypeError, {"strict": [1]}),
    (partial(Sequences, 2), ValueError, {"stride": [0]}),
    (Sequences, ValueError, {"length": [0]}),
    (Sequences, TypeError, {"length": [1.5]}),
]
BUILT: list[tuple[Callable[[], Any], Any, str]] = [
    *(
        (
            lambda make=make, given={name: value}: make(**given),
            error,
            rf"(?is){name}" + (f".*{value}" if isinstance(value, (int, float, str)) and value != HUGE else ""),
        )
        for make, error, settings in WRONG
        for name, values in settings.items()
        for value in values
    ),
    (lambda: finals(terminal_obs=True, final_capacity=0), ValueError, "final_capacity=0. Raise it"),
    (lambda: steps(capacity=2), ValueError, r"(?is)capacity.*2.*3|3.*capacity.*2"),
    *((lambda make=make: make(capacity=2**31), ValueError, "capacity") for make in (rows, steps)),
    (lambda: steps(num_envs=13), ValueError, r"(?is)12.*13|13.*12"),
    (lambda: steps(stack=13), ValueError, r"stack=13 is longer than the ring.*capacity 12.*at least 39"),
    (lambda: steps(n_step=7, num_envs=2), ValueError, r"n_step=7 is longer than the ring.*6 steps of each of the 2"),
    (lambda: steps(stack=2**31), ValueError, "must be at most"),
    *((lambda make=make: make(fields={}), ValueError, "(?i)field") for make in (rows, steps)),
    (lambda: rows(fields={"obs": {}}), ValueError, "at least one Field"),
    (lambda: rows(fields=[OBS, ACTION]), TypeError, "(?i)field"),
    (lambda: rows(fields={"obs": torch.float32}), TypeError, "obs"),
    *((lambda name=name: rows(fields={name: SCALAR}), ValueError, "a string") for name in ("", "a.", ".a", 3)),
    (lambda: steps(fields={"action": ACTION}), (ValueError, KeyError), r"obs"),
    (lambda: steps(fields={"obs": OBS}), (ValueError, KeyError), r"action"),
    (lambda: steps(fields=STEP | {"obs.image": OBS}), (ValueError, KeyError), r"obs.image|obs"),
    (lambda: rows(fields={"obs": Field((2,), torch.complex64)}), LOSSY, "complex64"),
    (lambda: Field((2,), np.float32), TypeError, "dtype"),
    (lambda: Field((3, -1), torch.float32), ValueError, "-1"),
    *((lambda kind=kind: Field(*kind), ValueError, "Field scale must be 0 or of a size") for kind in NO_SCALES),
    (lambda: rows(fields={"obs": Field((10**30, 2), torch.uint8)}), ValueError, "at most 281,474,976,710,656 elements"),
    (lambda: steps(random_shift=0), TypeError, "no setting .random_shift. any more: .*eight lines of torch"),
    *(
        (lambda name=name: rows(**{name: 3}), TypeError, f"no setting '{name}'; did you mean a TrajectoryReplayBuffer")
        for name in ("num_envs", "stack", "n_step", "sequences")
    ),
    *(
        (lambda kind=kind: kind.load("anywhere", Uniform()), TypeError, r"found Uniform\(.*did you mean sampler=\?")
        for kind in (ReplayBuffer, TrajectoryReplayBuffer)
    ),
    (lambda: ReplayMixture([rows()], [1.0]).sample_sequences(2, 3), TypeError, r"sequences=Sequences\("),
    (lambda: steps(sequences=80), TypeError, r"must be Sequences\(80\), or None .* found 80"),
    (lambda: steps(sequences="L"), TypeError, r"must be Sequences\(length\).* found 'L'"),
    (
        lambda: steps(capacity=60, n_step=3, stack=2, sequences=Sequences(17)),
        *(ValueError, r"n_step=3 and stack=2 a row needs 21 steps .* 20 of each.* capacity to at least 63"),
    ),
    (
        lambda: goals(capacity=90, sequences=Sequences(3)),
        ValueError,
        "relabel rewrites single steps.*without sequences, or without relabel",
    ),
    (
        lambda: ReplayMixture([steps(), steps(sequences=Sequences(3))], [0.5, 0.5]),
        *(ValueError, r"kind of row \(sequences=\); number 1 has Sequences\(length=3.*first one None. Make them alike"),
    ),
    (lambda: Combined(Uniform(), newest=0), ValueError, "newest"),
    (lambda: Combined("uniform"), TypeError, "base"),
    (lambda: LinearSchedule(0.4, 1.0, 0), ValueError, "steps"),
    (lambda: LinearSchedule(0.4, INF, 10), ValueError, "end"),
    (lambda: LinearSchedule(0, 1e308, 100), ValueError, "end must be from -1e.100 to 1e.100; found 1e.308"),
    (lambda: LinearSchedule(-1e308, 1, 100), ValueError, "start"),
    (lambda: LinearSchedule(0.4, 1.0, HUGE), ValueError, "steps must be at most"),
    (lambda: rows(device=1.5), ValueError, "device 1.5 is not one that torch knows"),
    (
        lambda: steps(num_envs=1, autoreset="disabled").extend(**dict.fromkeys(RESULTS, np.ones((9, 2)))),
        ValueError,
        r"value\[:, None\]",
    ),
    (lambda: rows().load("anywhere"), TypeError, r"ReplayBuffer\.load\(.*load_state_dict"),
    *((lambda n=n: hindsight(desired=n), ValueError, "two fields") for n in ("achieved_goal", "obs.achieved_goal")),
    (lambda: goals(relabel=hindsight(achieved="reached")), ValueError, "relabel needs the field 'obs.reached'"),
    (lambda: goals(fields=GOALS | {DESIRED: Field((3,), torch.int16)}), ValueError, r"one shape and dtype.*\(3,\)"),
    (lambda: goals(fields=GOALS | {DESIRED: Field((2,), torch.int32)}), ValueError, "one shape and dtype.*int32"),
]


@pytest.mark.parametrize("call, error, message", BUILT)
def test_settings_that_mean_nothing_are_refused(call: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# `__class__` and the like are found in place of a field of that name
RESERVED = ["self", "key", "weight", "probability", "priority", "keys", "values", "items", "to", "cat", "to_dict"]
RESERVED += ["minibatches", "pin_memory", "to_tensordict", "__dict__", "__class__", "__len__"]
RESERVED_IN_STEPS = ["reward", "terminated", "truncated", "discount", "next_obs", "final_obs", "mask"]


@pytest.mark.parametrize("name", [*RESERVED, *RESERVED_IN_STEPS])
def test_names_that_would_hide_something_are_reserved(name: str) -> None:
    with pytest.raises((ValueError, KeyError), match=rf"'{name}' is reserved|{name}.*reserved"):
        TrajectoryReplayBuffer(4, 1, STEP | {name: SCALAR}, autoreset="next_step", device="cpu")
    if name in RESERVED:
        with pytest.raises(ValueError, match=f"'{name}' is reserved"):
            ReplayBuffer(4, {name: SCALAR}, device="cpu")


@pytest.mark.parametrize("sampler", [Uniform(), Proportional()], ids=repr)
def test_what_does_not_fit_is_refused_with_a_table_of_fields(sampler: Any, device: str) -> None:
    fields = {"obs": Field((1024, 1024, 3), torch.uint8), "action": ACTION}
    known: dict[str, Any] = {"capacity": 2**31 - 1, "fields": fields, "sampler": sampler, "device": device}
    for make in (partial(ReplayBuffer, **known), partial(TrajectoryReplayBuffer, num_envs=64, stack=4, **known)):
        with pytest.raises(MemoryError, match="(?is)free|available") as refused:
            make()
        for name in ("obs", "action", *["reward"] * (make.func is TrajectoryReplayBuffer)):
            assert re.search(rf"(?m)^.*\b{name}\b.*\d", str(refused.value)), f"no line for {name}"


@host_only
def test_a_buffer_is_not_given_to_a_process_that_is_started() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print, args=({"nested": [filled("rows")]},))
    with pytest.raises(RuntimeError, match="its copy would add rows that nobody sees.*through a queue"):
        child.start()
