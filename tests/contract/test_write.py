"""`write`: stored values of live keys are replaced, the last of a repeated key; -1 is no key.

Random programs write too, see test_programs.py: here stands what they do not say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from pairs import RowPair, StepPair, live_through
from transitions import make

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract
FIELDS = {"hidden": Field((3,), torch.float32), "note": Field((), torch.bfloat16), "flag": Field((), torch.bool)}


def filled(device: str, rows: int = 12, capacity: int = 10, **settings: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, FIELDS, device=device, **settings)
    number = torch.arange(rows)
    buffer.add(hidden=number[:, None].expand(-1, 3).float(), note=number.bfloat16(), flag=number % 2 == 0)
    return buffer


def test_live_keys_are_written_and_others_counted(device: str) -> None:
    buffer = filled(device)
    # 0 and 1 are overwritten, 12 is to come
    keys = torch.tensor([11, 5, 1, 5, -1, 12, 2, -2])
    hidden = torch.arange(24.0).view(8, 3) + 100
    buffer.write(keys.to(buffer.device), hidden=hidden.to(buffer.device), note=torch.arange(8) + 50)
    read = buffer[[2, 5, 11, 3]]
    assert read.hidden.tolist() == [hidden[row].tolist() for row in (6, 3, 0)] + [[3.0] * 3]
    assert read.note.tolist() == [56, 53, 50, 3]
    assert read.flag.tolist() == [True, False, False, False]
    assert buffer.stats().stale_updates == 3
    assert (len(buffer), buffer.added) == (10, 12)


@pytest.mark.parametrize("sampler", [Uniform(), Proportional(), RankBased()], ids=repr)
def test_what_is_drawn_stays_and_is_seen_with_its_new_values(sampler: Any, device: str) -> None:
    one, other = filled(device, sampler=sampler), filled(device, sampler=sampler)
    one.write(one.keys(), flag=[True] * 10)
    batch, expected = one.sample(6), other.sample(6)
    assert batch.key.tolist() == expected.key.tolist()
    assert batch.flag.all()
    assert torch.equal(batch.hidden, expected.hidden)


# within a program, several programs, keys found by a launch of their own, and several launches of those
@pytest.mark.parametrize("count", scale([1, 127, 1024, 1025, 5_000, 40_000], [1, 65, 1025]))
def test_of_many_rows_the_last_of_a_key_counts(count: int, device: str) -> None:
    buffer = make(400, x=Field((), torch.int64), y=Field((2,), torch.float32), device=device)
    buffer.add(x=torch.arange(600), y=torch.zeros(600, 2))
    draw = np.random.default_rng(count)
    keys = draw.integers(150, 620, count)
    buffer.write(keys, x=np.arange(count), y=np.arange(2.0 * count).reshape(-1, 2))
    last = {key: row for row, key in enumerate(keys.tolist()) if 200 <= key < 600}
    everything = buffer[buffer.keys()]
    assert everything.x.tolist() == [last.get(key, key) for key in range(200, 600)]
    assert everything.y.tolist() == [
        [2.0 * last[k], 2.0 * last[k] + 1] if k in last else [0, 0] for k in range(200, 600)
    ]
    assert buffer.stats().stale_updates == int(((keys < 200) | (keys >= 600)).sum())


def test_a_new_observation_is_seen_by_its_neighbours(device: str) -> None:
    fields = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(10, 1, fields, stack=2, device=device)
    for step in range(5):
        buffer.add(obs=[step], action=[step], reward=[0.0], terminated=[False], truncated=[False])
    buffer.write(torch.tensor([2]), obs=torch.tensor([-7]))
    batch = buffer[[1, 2, 3]]
    assert batch.obs.tolist() == [[0, 1], [1, -7], [-7, 3]]
    assert batch.next_obs.tolist() == [[1, -7], [-7, 3], [3, 4]]
    assert batch.action.tolist() == [1, 2, 3]


def test_nested_names_conversions_and_files(device: str, tmp_path: Any) -> None:
    fields = {"obs": {"image": Field((2,), torch.uint8, scale=0.5), "x": Field((), torch.float64)}}
    place = {"storage_path": tmp_path} if device == "cpu" else {"storage_device": "cpu"}
    buffer = ReplayBuffer(4, fields, device=device, **place)
    buffer.add(obs={"image": np.zeros((3, 2), np.uint8), "x": np.zeros(3)})
    # as they are stored: a scale counts on the way out
    buffer.write([1, 2], obs={"image": [[1, 2], [3, 4]]})
    buffer.write(0, **{"obs.x": np.float32([2.5])})
    assert buffer[[0, 1, 2]]["obs.image"].tolist() == [[0, 0], [0.5, 1], [1.5, 2]]
    assert buffer[[0, 1, 2]]["obs.x"].tolist() == [2.5, 0, 0]


def test_nothing_is_written_of_no_keys(device: str) -> None:
    buffer = filled(device)
    buffer.write([], flag=torch.zeros(0, dtype=torch.bool))
    assert buffer[buffer.keys()].flag.tolist() == [key % 2 == 0 for key in range(2, 12)]


REFUSED = {
    "unknown": ([2], {"other": [1.0]}, KeyError, r"unknown 'other'; it takes hidden, note, flag"),
    "no field": ([2], {}, ValueError, "names no field"),
    "rows": ([2, 3], {"flag": [True]}, ValueError, "a row for each of 2 keys; found 1"),
    "rows of fields": ([2, 3], {"flag": [True] * 2, "note": [1.0]}, ValueError, "rows where the others"),
    "shape": ([2], {"hidden": np.zeros((1, 4), np.float32)}, ValueError, "hidden"),
    "dtype": ([2], {"flag": [0.5]}, (TypeError, ValueError), "flag"),
    "keys": ([2.0], {"flag": [True]}, TypeError, "keys must be integers"),
}


@pytest.mark.parametrize("keys, fields, error, words", REFUSED.values(), ids=REFUSED)
def test_refused(keys: Any, fields: dict[str, Any], error: Any, words: str, device: str) -> None:
    buffer = filled(device)
    before = buffer[buffer.keys()]
    with pytest.raises(error, match=words):
        buffer.write(keys, **fields)
    after = buffer[buffer.keys()]
    assert all(torch.equal(before[name], after[name]) for name in FIELDS)
    assert buffer.stats().stale_updates == 0


@pytest.mark.parametrize("name", ["reward", "terminated", "final_obs"])
def test_results_of_steps_are_no_fields(name: str, device: str) -> None:
    pair = live_through(StepPair(12, 2, device=device), 4)
    with pytest.raises(KeyError, match=f"unknown '{name}'; it takes obs, action, note"):
        pair.buffer.write([0], **{name: [0.0]})


def test_no_key_is_ignored_by_updates(device: str) -> None:
    pair = RowPair(6, Proportional(alpha=1.0, eps=0.0), device=device)
    pair.add(8)
    pair.update([-1, 7, -1, 3, 0], [5.0, 2.0, 4.0, 0.5, 1.0])
    pair.check_all()
    assert pair.buffer.stats().stale_updates == 1
    uniform = filled(device)
    uniform.update_priorities([-1, 0, -1], [1.0, 1.0, 1.0])
    assert uniform.stats().stale_updates == 1
