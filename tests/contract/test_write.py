"""`write`: stored values of live keys are replaced, of many rows the last of a key; what it takes.

That a key -1 is none, what is drawn then and what neighbours see, random programs hold: `test_programs.py`; what is
refused is in `refusals.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import scale
from transitions import make

from gpu_replay import Field, ReplayBuffer

pytestmark = pytest.mark.contract


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


def test_values_with_gradients_are_copies(device: str) -> None:
    buffer, hidden = make(10, hidden=Field((3,), torch.float32), device=device), torch.ones(2, 3, requires_grad=True)
    buffer.add(hidden=torch.zeros(9, 3))
    for rows in (hidden, hidden * 2):
        buffer.write([5, 6], hidden=rows)
        assert torch.equal(buffer[[5, 6]].hidden.cpu(), rows.detach())
        assert not any(tensor.requires_grad for tensor in buffer.state_dict()["tensors"].values())
