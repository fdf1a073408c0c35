"""What is refused, and says why: errors are for people, and nothing is stored or changed by a call that raised.

Calls that any buffer must refuse, in whatever state, are `REFUSALS` of refusals.py; random programs make them too.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle  # noqa: TID251
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import host_only, scale
from refusals import LOSSY, REFUSALS, whole_state
from trajectory_pair import Pair, live_through, play
from transitions import EXACT, NUMBER, fill, make

from gpu_replay import (
    Combined,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract
STEP = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
OBS, ACTION = STEP["obs"], STEP["action"]
SCALAR = Field((), torch.float32)


def filled(kind: str, state: int, sampler: Any = EXACT, device: str = "cpu") -> Any:
    """A buffer that holds nothing, something, or has wrapped."""
    if kind == "rows":
        buffer = make(5, sampler, device=device)
        if state:
            fill(buffer, (0, 3, 9)[state])
        return buffer
    autoreset = ("same_step", "next_step", "disabled")[state]
    pair = Pair(18, 3, fields=STEP, sampler=sampler, device=device, autoreset=autoreset)
    return live_through(pair, (0, 4, 9)[state]).buffer


@pytest.mark.parametrize("kind", ["rows", "steps"])
@pytest.mark.parametrize("state", scale((0, 1, 2), (2,)), ids=["empty", "some", "wrapped"][-scale(3, 1) :])
def test_a_refused_call_names_what_is_wrong_and_changes_nothing(kind: str, state: int, device: str) -> None:
    buffer = filled(kind, state, device=device)
    before = whole_state(buffer)
    known = [refusal for refusal in REFUSALS if kind in refusal.kinds]
    assert len(known) > 60
    for refusal in known:
        refusal.check(buffer)
        assert whole_state(buffer) == before, refusal.name


@pytest.mark.parametrize("kind", ["rows", "steps"])
@pytest.mark.parametrize("sampler", [Uniform(True), Latest(), RankBased(), Combined(Proportional())], ids=repr)
def test_every_sampler_refuses_them(sampler: Any, kind: str, device: str) -> None:
    buffer = filled(kind, 1, sampler, device)
    before = whole_state(buffer)
    for refusal in REFUSALS:
        if kind in refusal.kinds:
            refusal.check(buffer)
    assert whole_state(buffer) == before


OUT_OF_RANGE = [
    (torch.int32, torch.tensor([1, 2**31])),
    (torch.int32, torch.tensor([-(2**31) - 1, 0])),
    (torch.uint8, torch.tensor([0, 256])),
    (torch.uint8, torch.tensor([-1, 0])),
    (torch.uint8, torch.tensor([0, -1], dtype=torch.int8)),
    (torch.int8, torch.tensor([128, 0])),
    (torch.int8, torch.tensor([0, 200], dtype=torch.uint8)),
    (torch.int16, torch.tensor([0, 40_000], dtype=torch.int32)),
    (torch.float16, torch.tensor([1.0, 70_000.0])),
    (torch.float16, torch.tensor([1, 70_000])),
    (torch.float32, torch.tensor([1.0, 1e39], dtype=torch.float64)),
    # not even when they are whole
    *(
        (stored, torch.ones(2, dtype=given))
        for stored in (torch.uint8, torch.int32, torch.int64, torch.bool)
        for given in (torch.float16, torch.float32, torch.float64)
    ),
]


@pytest.mark.parametrize("stored, values", OUT_OF_RANGE, ids=lambda value: str(value).replace("torch.", ""))
def test_values_that_do_not_fit_are_refused(stored: torch.dtype, values: torch.Tensor, device: str) -> None:
    for given in (values.to(device), values.numpy()) if device == "cpu" or values.is_floating_point() else (values,):
        buffer = ReplayBuffer(4, {"good": Field((), torch.int64), "value": Field((), stored)}, device=device)
        with pytest.raises(LOSSY, match="value"):
            buffer.add(good=torch.arange(2), value=given)
        assert (len(buffer), buffer.added) == (0, 0)


BAD_KEYS: list[tuple[Any, str]] = [
    ([4, 99, 98], r"\b99\b"),
    ([4, -1], "-1"),
    # overwritten, dead, still open
    ([4, 1], r"\b1\b"),
    ([4, 9, 99], r"\b9\b"),
    ([10, 12], r"\b12\b"),
]


@pytest.mark.parametrize("keys, named", BAD_KEYS)
def test_the_first_key_that_cannot_be_read_is_named(keys: list[int], named: str, device: str) -> None:
    # t = 1 to 4 are stored; key 9 (t = 3 of the first environment) is dead
    pair = Pair(12, 3, fields=STEP, device=device)
    play(pair, "..T..", ".....", ".....", fields=STEP)
    assert pair.buffer[[4, 10]].key.tolist() == [4, 10]
    with pytest.raises(KeyError, match=named):
        pair.buffer[keys]


def test_message_of_an_ineligible_key_does_not_say_that_it_is_gone(device: str) -> None:
    pair = Pair(12, 3, fields=STEP, device=device)
    play(pair, "..", "..", "..", fields=STEP)
    with pytest.raises(KeyError, match="eligible") as waits:
        pair.buffer[4]
    with pytest.raises(KeyError) as gone:
        pair.buffer[400]
    assert str(waits.value).replace("4", "") != str(gone.value).replace("400", "")


@pytest.mark.parametrize("given, missing", [("image", "vector"), ("vector", "image"), ("sound", "sound")])
def test_a_dictionary_of_final_observations_must_be_whole(given: str, missing: str, device: str) -> None:
    fields = {"obs.image": OBS, "obs.vector": SCALAR, "action": ACTION}
    buffer = TrajectoryReplayBuffer(12, 3, fields, autoreset="same_step", device=device)
    values = {"image": torch.zeros(3, 2), "vector": torch.zeros(3), "sound": torch.zeros(3)}
    step = {"obs.image": values["image"], "obs.vector": values["vector"], "action": torch.arange(3)}
    ends = {"terminated": torch.zeros(3).bool(), "truncated": torch.ones(3).bool(), "reward": torch.zeros(3)}
    with pytest.raises((KeyError, ValueError), match=f"final_obs.{missing}"):
        buffer.add(**step, **ends, **{f"final_obs.{given}": values[given]})
    assert len(buffer) == 0


# what the message names is the setting and its value
HUGE = 10**400
STEPS: list[tuple[Any, dict[str, list[Any]]]] = [
    (ValueError, {"capacity": [0, -5], "num_envs": [0, -1], "stack": [0, -2], "n_step": [0, -2]}),
    # no observation field has a height and a width to be shifted by two pixels
    (ValueError, {"gamma": [-0.1, 1.1, float("nan")], "random_shift": [-1, 2], "final_capacity": [-1]}),
    (TypeError, {"capacity": [12.0, True], "num_envs": [1.5, True, "3"], "gamma": ["0.9", True], "seed": [0.5]}),
    (TypeError, {"stack": [2.0, None, True], "n_step": [2.0, None, True], "random_shift": [1.5]}),
    (TypeError, {"final_capacity": [2.5], "sampler": ["uniform"]}),
    (LOSSY, {"autoreset": ["never", "nextstep", None], "padding": ["edge", 0]}),
]
SAME = {"autoreset": "same_step"}
BUILT: list[tuple[dict[str, Any], Any, str]] = [
    *(
        ((SAME if name == "final_capacity" else {}) | {name: value}, error, rf"(?i){name}.*{value}")
        for error, settings in STEPS
        for name, values in settings.items()
        for value in values
    ),
    ({"capacity": 2}, ValueError, r"(?is)capacity.*2.*3|3.*capacity.*2"),
    ({"capacity": 2**31}, ValueError, r"(?i)capacity"),
    ({"num_envs": 13}, ValueError, r"(?is)12.*13|13.*12"),
    ({"stack": 13}, ValueError, r"stack=13 is longer than the ring.*capacity 12.*at least 39"),
    ({"n_step": 7, "num_envs": 2}, ValueError, r"n_step=7 is longer than the ring.*6 steps of each of the 2"),
    ({"stack": 2**31}, ValueError, "must be at most"),
    ({"n_step": 2**31}, ValueError, "must be at most"),
    ({"sampler": Uniform}, TypeError, r"sampler"),
    ({"fields": {}}, ValueError, r"(?i)field"),
    ({"fields": [OBS, ACTION]}, TypeError, r"(?i)field"),
    ({"fields": {"obs": torch.float32, "action": ACTION}}, TypeError, r"obs"),
    ({"fields": {"action": ACTION}}, (ValueError, KeyError), r"obs"),
    ({"fields": {"obs": OBS}}, (ValueError, KeyError), r"action"),
    ({"fields": {"observation": OBS, "action": ACTION}}, (ValueError, KeyError), r"'?obs\b"),
    ({"fields": {"obs": OBS, "obs.image": OBS, "action": ACTION}}, (ValueError, KeyError), r"obs.image|obs"),
]


@pytest.mark.parametrize("changed, error, message", BUILT)
def test_streams_that_mean_nothing_are_refused(changed: dict[str, Any], error: Any, message: str, device: str) -> None:
    with pytest.raises(error, match=message):
        TrajectoryReplayBuffer(**{"capacity": 12, "num_envs": 3, "fields": STEP, "device": device} | changed)


def rows(capacity: Any = 4, fields: Any = NUMBER, **more: Any) -> Callable[[], Any]:
    return lambda: ReplayBuffer(capacity, fields, **{"device": "cpu", **more})


def rule(kind: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: kind(**settings)


NAN, INF = float("nan"), float("inf")
PRIORITIZED: list[tuple[Any, dict[str, list[Any]]]] = [
    (ValueError, {"alpha": [-0.1, NAN, HUGE], "beta": [-1.0, HUGE], "initial": ["largest", INF, -1.0, HUGE]}),
    (ValueError, {"normalize": ["none"]}),
    (TypeError, {"alpha": ["1"], "beta": [None], "stratified": [1]}),
]
SETTINGS: list[tuple[Callable[[], Any], Any, str]] = [
    *((rows(size), ValueError, "(?i)capacity") for size in (0, -1, 2**31)),
    *((rows(size), TypeError, "(?i)capacity") for size in (True, 2.5, "9")),
    (rows(fields={}), ValueError, "(?i)field"),
    (rows(fields=[SCALAR]), TypeError, "(?i)field"),
    (rows(fields={"obs": torch.float32}), TypeError, "obs"),
    (lambda: Field((2,), torch.complex64) and rows(fields={"obs": Field((2,), torch.complex64)})(), LOSSY, "complex64"),
    (lambda: Field((2,), np.float32), TypeError, "dtype"),
    (lambda: Field(4, torch.float32), LOSSY, "4"),
    (lambda: Field((3, -1), torch.float32), ValueError, "-1"),
    *((lambda scale=scale: Field((), torch.uint8, None, scale), ValueError, "scale") for scale in (NAN, HUGE)),
    *(
        (rule(kind, **{name: value}), error, f"{kind.__name__} {name}")
        for kind in (Proportional, RankBased)
        for error, settings in PRIORITIZED
        for name, values in settings.items()
        for value in values
    ),
    (rule(Proportional, eps=-1e-9), ValueError, "eps.*-1e-09"),
    (rule(Proportional, clip=0.0), ValueError, "clip.*0.0"),
    (rule(Uniform, replacement="no"), TypeError, "replacement"),
    (lambda: Combined(Uniform(), newest=0), ValueError, "newest"),
    (lambda: Combined(Uniform(), newest=1.5), TypeError, "newest"),
    (lambda: Combined("uniform"), TypeError, "base"),
    (lambda: LinearSchedule(0.4, 1.0, 0), ValueError, "steps"),
    (lambda: LinearSchedule(0.4, INF, 10), ValueError, "end"),
    (lambda: LinearSchedule("0.4", 1.0, 10), TypeError, "start"),
    *((lambda start=start: LinearSchedule(start, 1.0, 5), ValueError, "must be finite") for start in (HUGE, -HUGE)),
    (rows(sampler="uniform"), TypeError, "sampler"),
    (rows(sampler=Uniform), TypeError, "sampler"),
    (rows(seed=0.5), TypeError, "seed"),
    (rows(device="abacus"), (ValueError, RuntimeError, TypeError), "abacus"),
]


@pytest.mark.parametrize("call, error, message", SETTINGS)
def test_settings_that_mean_nothing_are_refused(call: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# `__class__` and the like are found in place of a field of that name
RESERVED = ["self", "key", "weight", "probability", "priority", "keys", "values", "items", "to", "cat", "to_dict"]
RESERVED += ["pin_memory", "to_tensordict", "_tensors", "__class__", "__len__"]
RESERVED_IN_STEPS = ["reward", "terminated", "truncated", "discount", "next_obs", "final_obs", "mask"]


@pytest.mark.parametrize("name", [*RESERVED, *RESERVED_IN_STEPS])
def test_names_that_would_hide_something_are_reserved(name: str) -> None:
    with pytest.raises((ValueError, KeyError), match=rf"'{name}' is reserved|{name}.*reserved"):
        TrajectoryReplayBuffer(4, 1, STEP | {name: SCALAR}, device="cpu")
    if name in RESERVED:
        with pytest.raises(ValueError, match=f"'{name}' is reserved"):
            ReplayBuffer(4, {name: SCALAR}, device="cpu")
    # inside of a dictionary they can be reached
    buffer = ReplayBuffer(4, {"obs": {name: SCALAR}}, device="cpu")
    buffer.add(obs={name: [7]})
    assert buffer.sample(1)["obs"][name].tolist() == [7]


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", 3, None])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="must be a string"):
        ReplayBuffer(4, {name: SCALAR})


@pytest.mark.parametrize("sampler", [Uniform(), Proportional()], ids=repr)
def test_what_does_not_fit_is_refused_with_a_table_of_fields(sampler: Any, device: str) -> None:
    fields = {"obs": Field((1024, 1024, 3), torch.uint8), "action": ACTION}
    with pytest.raises(MemoryError) as refused:
        TrajectoryReplayBuffer(2**31 - 1, 64, fields, sampler=sampler, stack=4, device=device)
    for name in ("obs", "action", "reward"):
        assert re.search(rf"(?m)^.*\b{name}\b.*\d", str(refused.value)), f"no line for {name}"


# what is asked of buffers of too little: of nothing, of more than is stored


EVERY = [Uniform(), Uniform(True), EXACT, RankBased(), Latest(), Combined(Uniform()), Combined(RankBased(), newest=2)]


@pytest.mark.parametrize("sampler", EVERY, ids=repr)
def test_nothing_to_draw_is_a_runtime_error_however_much_is_stored(sampler: Any, device: str) -> None:
    with pytest.raises(RuntimeError, match="holds no transitions"):
        make(5, sampler, device=device).sample(2)
    pair = Pair(12, 2, sampler=sampler, fields=STEP, device=device, n_step=5)
    # six steps of each environment fit, of which a window needs six: five are not enough
    for steps in ("", ".....", ".", "c"):
        play(pair, steps, steps, fields=STEP)
        if steps == ".":
            assert set(pair.buffer.sample(2).key.tolist()) <= {0, 1}
            continue
        with pytest.raises(RuntimeError, match="holds no eligible"):
            pair.buffer.sample(2)
    windows = Pair(12, 2, sampler=sampler, fields=STEP, device=device)
    # enough for a sample, not for five steps; at last longer than the ring
    for steps, length in (("", 1), ("....", 5), (".", 7)):
        play(windows, steps, steps, fields=STEP)
        with pytest.raises(RuntimeError, match=rf"sample_sequences\(.*{length if steps else ''}"):
            windows.buffer.sample_sequences(2, (length + 1) // 2, burn_in=length // 2)
        assert not steps or len(windows.buffer.sample(2)) == 2


def test_more_than_there_is_says_how_many_there_are_and_what_to_do(device: str) -> None:
    for kind in ("rows", "steps"):
        buffer = filled(kind, 2, Uniform(), device)
        found = buffer.stats().eligible
        with pytest.raises(ValueError, match=rf"needs 99 .* holds {found}.*draw with Uniform\(replacement=True\)"):
            buffer.sample(99)
        with pytest.raises(ValueError, match=rf"newest needs 99 .* holds {found}.*lower the batch size\.$"):
            filled(kind, 2, Latest(), device).sample(99)
        with pytest.raises(ValueError, match=r"newest=3.*at least 3"):
            filled(kind, 2, Combined(EXACT, newest=3), device).sample(2)
        with pytest.raises(ValueError, match=rf"needs 40 .* holds {found}"):
            filled(kind, 2, Combined(EXACT, newest=40), device).sample(50)
    pair = Pair(20, 2, sampler=Uniform(), fields=STEP, device=device)
    play(pair, ".....", ".....", fields=STEP)
    with pytest.raises(ValueError, match=r"sample_sequences\(5, 4, 0\).*needs 5.*holds 4"):
        pair.buffer.sample_sequences(5, 4)
    with pytest.raises(ValueError, match=r"stride=2.*needs 5.*holds 2"):
        pair.buffer.sample_sequences(5, 4, stride=2)
    play(pair, "T.T.", "T.T.", fields=STEP)
    with pytest.raises(RuntimeError, match="strict=True"):
        pair.buffer.sample_sequences(1, 9, strict=True)


# processes, instances, spaces and transforms


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_calls_within_a_transform_of_torch_are_refused(transform: str) -> None:
    """There tensors have no memory that could be read."""
    buffer = make(4, Proportional(), device="cpu", a=SCALAR)
    keys = buffer.add(a=torch.ones(3))

    def stores(value: torch.Tensor) -> torch.Tensor:
        buffer.add(a=value.reshape(1))
        return value.sum()

    def updates(value: torch.Tensor) -> torch.Tensor:
        buffer.update_priorities(keys[:1], value.reshape(1))
        return value.sum()

    transformed, given = (
        (torch.func.grad, torch.tensor(2.0)) if transform == "grad" else (torch.func.vmap, torch.ones(2))
    )
    for call in (stores, updates):
        with pytest.raises(TypeError, match=r"memory.*torch\.func"):
            transformed(call)(given)
    assert buffer.added == 3


@host_only
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_buffer_is_not_given_to_a_process_that_is_started(method: str) -> None:
    buffer, context = filled("rows", 1), multiprocessing.get_context(method)
    for arguments in ((buffer,), ({"nested": [buffer]},)):
        child = context.Process(target=print, args=arguments)
        with pytest.raises(RuntimeError, match="its copy would add rows that nobody sees.*through a queue"):
            child.start()
    # pickling elsewhere goes on
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert torch.equal(other.sample(3).key, copy.deepcopy(buffer).sample(3).key)


@host_only
@pytest.mark.parametrize("kind", ["rows", "steps"])
def test_load_of_an_instance_is_refused(kind: str, tmp_path: Path) -> None:
    buffer = filled(kind, 1)
    buffer.save(tmp_path / "c")
    name = type(buffer).__name__
    with pytest.raises(TypeError, match=rf"{name}\.load\(.*load_state_dict"):
        buffer.load(tmp_path / "c")
    assert type(buffer).load(tmp_path / "c", "cpu").added == buffer.added


def test_spaces_in_place_of_fields_are_sent_to_from_spaces() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space, action = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
    with pytest.raises(TypeError, match=r"ReplayBuffer\.from_spaces"):
        ReplayBuffer(8, space, action)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"TrajectoryReplayBuffer\.from_spaces"):
        TrajectoryReplayBuffer(8, 2, space, action)  # type: ignore[call-arg]
