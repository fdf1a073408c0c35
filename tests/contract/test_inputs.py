"""What `add` takes and how it leaves again: arrays of every origin, layout and type, conversions, modes, forks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED, scale
from pairs import RowPair, StepPair, play
from programs import SAMPLERS
from refusals import LOSSY
from tolerances import close
from torch import Tensor
from transitions import EXACT, fill, make, same

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract
KINDS = ("rows", "steps")
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STORED = [torch.bool, *INTEGERS, *FLOATS]
# kernels move bytes: one type of each width is enough where they are interpreted
DTYPES = scale(STORED, STORED[::3])
ACTION = {"action": Field((), torch.int64)}


def short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def empty(kind: str, field: Field, rows: int, device: str) -> Any:
    """A buffer of so many rows, or steps of so many environments, each with an observation."""
    settings: dict[str, Any] = {"fields": {"obs": field, **ACTION}, "sampler": EXACT, "device": device}
    if kind == "rows":
        return ReplayBuffer(rows, **settings)
    return TrajectoryReplayBuffer(rows, rows, autoreset="same_step", **settings)


def put(buffer: Any, obs: Any, **more: Any) -> Tensor:
    """Add observations, each an episode of its own."""
    rows = buffer.capacity
    ends = {"reward": np.zeros(rows), "terminated": np.ones(rows, bool), "truncated": np.zeros(rows, bool)}
    return buffer.add(obs=obs, action=np.arange(rows), **(ends if hasattr(buffer, "num_envs") else {}) | more)


def read_only(values: Tensor) -> np.ndarray:
    frozen = values.numpy().copy()
    frozen.flags.writeable = False
    return frozen


def in_records(values: Tensor) -> np.ndarray:
    """The same numbers in packed records, at addresses that no number of theirs divides."""
    records = np.zeros(len(values), [("before", np.uint8), ("x", np.float32, values.shape[1:])])
    records["x"] = values.numpy()
    return records["x"]


def negated(values: Tensor) -> Tensor:
    """The same numbers, in memory with the other sign."""
    lazy = torch.complex(torch.ones_like(values), -values).conj().imag
    assert lazy.is_neg()
    return lazy


# of float32 [4, 3, 2]: the same numbers in other forms
FORMS: dict[str, Callable[..., Any]] = {
    "numpy": lambda v: v.numpy(),
    "cpu": lambda v: v,
    "list": lambda v: v.tolist(),
    "transposed": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
    "plane of numpy": lambda v: np.stack([v.numpy(), v.numpy()], 1)[:, -1],
    "backwards": lambda v: v.flip(0).numpy()[::-1],
    "other bytes first": lambda v: v.numpy().astype(">f4"),
    "read only": read_only,
    "in records": in_records,
    "with a graph": lambda v: v.clone().requires_grad_() * 1,
    "negated": negated,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_are_stored_whatever_their_form(kind: str, form: str, device: str) -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2) + 0.5
    for place in dict.fromkeys(("cpu", device)):
        buffer = empty(kind, Field((3, 2), torch.float32), 4, device)
        given, priority = FORMS[form](values), FORMS[form](values)[:, 0, 0] if form != "list" else [1.0] * 4
        moved = [each.to(place) if isinstance(each, Tensor) else each for each in (given, priority)]
        keys = put(buffer, moved[0], priority=moved[1])
        assert (keys.tolist(), keys.device.type) == ([0, 1, 2, 3], device)
        found = buffer[keys].obs
        assert torch.equal(found.cpu(), values)
        assert not found.requires_grad
        buffer.update_priorities(keys, moved[1])
        assert buffer.priorities(keys).tolist() == ([1.0] * 4 if form == "list" else values[:, 0, 0].tolist())


def test_numbers_of_numpy_in_settings(device: str) -> None:
    sampler = Combined(Proportional(alpha=np.float32(1.0), beta=np.float16(0.5), eps=0.0), newest=np.uint8(2))
    buffer = make(np.int64(400), sampler, device=device)
    fill(buffer, 300)
    assert buffer.sample(299).key[-2:].tolist() == [298, 299]


GIVEN: list[Any] = [
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.complex64, np.object_, np.str_),
    *(torch.uint16, torch.uint32, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.complex64),
]
# only the kind is a reason to refuse: fractions into whole numbers, but 0 and 1 are truths
NUMBERS = dict.fromkeys((np.float16, np.float32, np.float64, *FLOATS), 2)
NUMBERS |= dict.fromkeys((np.complex64, np.object_, np.str_, torch.complex64), 3)


@pytest.mark.parametrize("stored", DTYPES, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_type_are_stored_by_value_or_refused(kind: str, stored: torch.dtype, device: str) -> None:
    for given in scale(GIVEN, GIVEN[::4]):
        truths, of_torch = given is np.bool_ or stored is torch.bool, isinstance(given, torch.dtype)
        numbers = np.array([1, 0, 1] if truths else [1, 2, 4])
        values = torch.from_numpy(numbers).to(given).to(device) if of_torch else numbers.astype(given)
        number = NUMBERS.get(given, 1)
        buffer = empty(kind, Field((), stored), 3, device)
        # a GPU does not look at whole numbers that it holds: all of their type must fit
        whole = of_torch and device != "cpu" and number == 1
        narrow = whole and stored in INTEGERS and stored not in (given, torch.int64)
        if narrow or number > (2 if stored is torch.bool or stored.is_floating_point else 1):
            with pytest.raises(LOSSY, match="obs"):
                put(buffer, values)
            assert len(buffer) == 0
            continue
        put(buffer, values)
        assert buffer[[0, 1, 2]].obs.double().tolist() == numbers.astype(np.float64).tolist()
        if stored is torch.bool and of_torch and device != "cpu":
            # looking would stall the device
            assert buffer[put(buffer, values * 7)].obs.tolist() == [True, False, True]
        if stored is torch.float32 and given is not np.bool_:
            keys = put(buffer, np.zeros(3), priority=values)
            assert buffer.priorities(keys).tolist() == numbers.tolist()
            buffer.update_priorities(keys.flip(0), values)
            assert buffer.priorities(keys.flip(0)).tolist() == numbers.tolist()
        if (kind, stored) == ("steps", torch.float32):
            # ALE gives rewards of int32, Gymnasium of float64
            ends = {"terminated": np.zeros(3, bool), "truncated": np.ones(3, bool), "final_obs": values}
            batch = buffer[put(buffer, np.zeros(3), reward=values, **ends)]
            assert (batch.reward.dtype, batch.reward.tolist()) == (torch.float32, numbers.tolist())
            assert batch.next_obs.tolist() == numbers.tolist()


# wide integers that fit, wide floats that are rounded, and special floats, which are data
FITTING = [
    (torch.int32, torch.tensor([-(2**31), 2**31 - 1, 0])),
    (torch.float32, torch.tensor([0, 2**32 - 1, 1]).to(torch.uint32)),
    (torch.float32, torch.tensor([0.1, 1 / 3, 2.0], dtype=torch.float64)),
    (torch.float32, torch.tensor([float("nan"), -float("inf"), -0.0])),
]
OUT_OF_RANGE = [
    (torch.int32, torch.tensor([1, 2**31])),
    (torch.int32, torch.tensor([-(2**31) - 1, 0])),
    (torch.uint8, torch.tensor([0, 256])),
    (torch.uint8, torch.tensor([-1, 0])),
    (torch.int8, torch.tensor([0, 200], dtype=torch.uint8)),
    (torch.float16, torch.tensor([1.0, 70_000.0])),
    (torch.float32, torch.tensor([1.0, 1e39], dtype=torch.float64)),
]


@pytest.mark.parametrize("stored, values", [*FITTING, *OUT_OF_RANGE], ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_values_at_the_edges_of_a_type(kind: str, stored: torch.dtype, values: Tensor, device: str) -> None:
    buffer = empty(kind, Field((), stored), len(values), device)
    fits = any(values is each for _, each in FITTING)
    if device != "cpu" and values.is_floating_point():
        # a GPU does not look at numbers that it holds: what is too large becomes infinite
        put(buffer, values.to(device))
        assert repr(buffer[buffer.keys()].obs.tolist()) == repr(values.to(stored).tolist())
        buffer = empty(kind, Field((), stored), len(values), device)
    for given in (values.numpy(), *([values] if device == "cpu" else [])):
        with nullcontext() if fits else pytest.raises(LOSSY, match="obs"):
            put(buffer, given)
        if fits:
            found = buffer[buffer.keys()].obs
            assert repr(found.tolist()) == repr(values.to(stored).tolist())
        else:
            assert buffer.added == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", scale([(), (1,), (3,), (2, 5), (17,), (4, 4, 3)], [(), (17,), (4, 4, 3)]), ids=str)
def test_every_dtype_and_shape_comes_back_unchanged(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Rows from 1 to 384 bytes, aligned to nothing: stacks, their filling, and what comes after them."""
    fields = {"obs": Field(shape, dtype), **ACTION}
    pair = StepPair(16, 2, fields=fields, stack=3, padding="zero", device=device)
    play(pair, "..U...", "......", fields=fields)
    pair.check_contents()
    values = pair.buffer[[0, 4, 8]].obs[:, -1]
    rows = ReplayBuffer(5, fields, device=device)
    rows.add(obs=values, action=torch.arange(3))
    batch = rows.sample(3)
    assert batch.obs.dtype == dtype
    assert torch.equal(batch.obs, values[batch.key])


def test_many_fields_of_odd_sizes_keep_their_rows_together(device: str) -> None:
    sides = [1, 2, 3, 5, 8, 13, 31, 33, 64, 127, 129]
    fields = {f"part{side}": Field((side,), STORED[1 + side % 9]) for side in sides}
    buffer = ReplayBuffer(10, fields, device=device)
    for rows in torch.arange(23).split(9):
        buffer.add(**{name: rows[:, None].expand(-1, *each.shape).to(each.dtype) for name, each in fields.items()})
    batch = buffer.sample(10)
    for side in sides:
        assert torch.equal(batch[f"part{side}"].long(), batch.key[:, None].expand(-1, side)), side


# how values leave


SCALED = [
    *(Field((3,), torch.uint8, output, scale) for output in FLOATS for scale in (None, 1 / 255)),
    Field((3,), torch.int16, torch.float32, 0.5),
    Field((3,), torch.bfloat16, torch.float32, 0.5),
    Field((3,), torch.uint8, torch.int64),
    Field((3,), torch.float32, torch.float16),
    Field((3,), torch.float32, None, -2.0),
    # a whole number of more than 64 bits, and the largest and the smallest that a half float and a double can be
    Field((3,), torch.bool, torch.float32, 10**30),
    Field((3,), torch.bool, torch.float16, 65_504),
    Field((3,), torch.uint8, torch.float64, 1e-300),
    Field((3,), torch.bool, torch.float32),
]


@pytest.mark.parametrize("field", SCALED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sample_dtype_and_scale(kind: str, field: Field, device: str) -> None:
    buffer = empty(kind, field, 4, device)
    values = torch.tensor([[0, 1, 2], [3, 50, 127], [1, 0, 1], [255, 254, 128]])
    stored = values.bool() if field.dtype is torch.bool else values.to(field.dtype)
    put(buffer, stored.to(device))
    batch = buffer.sample(16)
    # multiplied in float32, float64 for doubles, and rounded once
    output = field.sample_dtype or field.dtype
    wide = stored[batch.key.cpu()].to(torch.float64 if output is torch.float64 else torch.float32)
    expected = (wide * (1.0 if field.scale is None else field.scale)).to(output)
    assert batch.obs.dtype == output
    if INTERPRETED and output is torch.bfloat16:
        # the interpreter cuts where a GPU rounds
        assert close(batch.obs, expected, "cut")
    else:
        assert torch.equal(batch.obs.cpu(), expected)


# whose memory it is


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_snapshot(kind: str, device: str) -> None:
    buffer = empty(kind, Field((2,), torch.int64), 6, device)
    put(buffer, torch.arange(12).reshape(6, 2))
    batches = buffer.sample(4), buffer[[0, 1, 2]]
    before = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    given = torch.zeros(6, 2, dtype=torch.int64, device=device)
    buffer.update_priorities(put(buffer, given), torch.full((6,), 9.0, device=device))
    buffer.sample(4)
    for batch, old in zip(batches, before, strict=True):
        same(batch, old)
    # what was added and what was drawn are the caller's to change
    for own in (given, buffer.sample(4).obs, buffer[buffer.keys()].obs):
        own.fill_(-1)
    assert not buffer[buffer.keys()].obs.any()


# modes of torch, and processes


@pytest.mark.parametrize("sampler", [RankBased(), Combined(Proportional(normalize="buffer"))], ids=repr)
def test_a_default_device_changes_nothing(sampler: Any, tmp_path: Any) -> None:
    """All of a life of both buffers where torch makes tensors elsewhere."""
    flags = {"terminated": np.zeros(2, bool), "truncated": np.ones(2, bool), "reward": np.ones(2, np.float32)}
    fields = {"obs": Field((2,), torch.float32, torch.float16), **ACTION}
    found = []
    for place in ("meta", "cpu"):
        with torch.device(place):
            buffer = ReplayBuffer(4, fields, sampler=sampler, device="cpu")
            rows = np.arange(6.0)
            buffer.add(obs=np.stack([rows, rows], 1), action=np.arange(6), priority=rows)
            buffer.update_priorities([3, 4], [1.0, 2.0])
            steps = TrajectoryReplayBuffer(8, 2, fields, stack=2, autoreset="same_step", sampler=sampler, device="cpu")
            for number in range(5):
                last = [np.full(2, 9.0, np.float32), [8.0, 8.0]] if number % 2 else np.full((2, 2), 7.0)
                steps.add(obs=np.full((2, 2), float(number)), action=np.arange(2), **flags, final_obs=last)
            buffer.save(tmp_path / place)
            loaded = ReplayBuffer.load(tmp_path / place, device="cpu")
            drawn = [buffer.sample(3), loaded.sample(3), steps.sample(3)]
            found.append([*map(repr, drawn), *(str(dict(batch.items())) for batch in drawn), str(buffer.stats())])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["annealed", "rank", "combined-proportional"])
def test_a_buffer_made_in_inference_mode_works_outside(name: str, device: str) -> None:
    with torch.inference_mode():
        pair = RowPair(4, SAMPLERS[name], device=device)
        pair.add(6)
        pair.sample(4)
    for _ in range(2):
        pair.add(1)
        pair.sample(3)
        pair.check_all()
        pair.renew("state")


CALLS: list[Callable[[ReplayBuffer], Any]] = [
    lambda buffer: fill(buffer, 1),
    lambda buffer: buffer.sample(1),
    lambda buffer: buffer.update_priorities([0], [1.0]),
    len,
    lambda buffer: buffer.save("/nowhere"),
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_calls_in_a_forked_process_are_refused_and_say_what_to_do() -> None:
    buffer = make(4, Uniform())
    fill(buffer, 3)
    reader, writer = os.pipe()
    # the lock is held while the process is forked: the child does not wait for it
    with buffer._lock:
        child = os.fork()
    if child == 0:
        said = []
        for call in CALLS:
            try:
                said.append(f"gave {call(buffer)}")
            except BaseException as error:
                said.append(repr(error))
        os.write(writer, json.dumps([fill(make(4), 2).tolist(), *said]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        own, *said = json.load(pipe)
    assert (own, len(said)) == ([0, 1], len(CALLS))
    assert [each for each in said if not re.search(r"RuntimeError.*queue.*examples/async_actors\.py", each)] == []
    assert fill(buffer, 1).tolist() == [3]
