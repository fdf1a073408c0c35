"""`ReplayMixture`: exact shares, each row its buffer's own, priorities to the buffer that the row came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import scale
from pairs import StepPair, live_through
from transitions import EXACT, NUMBER, check_rows, fill, make, same

from gpu_replay import Batch, RankBased, ReplayBuffer, ReplayMixture, Sequences, Uniform

pytestmark = pytest.mark.contract


def parts(device: str, rows: tuple[int, ...] = (20, 30, 10), sampler: Any = EXACT) -> list[ReplayBuffer]:
    buffers = [make(40, sampler, device=device, seed=seed) for seed in range(len(rows))]
    for buffer, count in zip(buffers, rows, strict=True):
        if count:
            fill(buffer, count)
    return buffers


SHARES = [
    ([0.5, 0.25, 0.25], 6, [3, 2, 1]),
    ([0.1, 0.2, 0.7], 4, [0, 1, 3]),
    ([0.5, 0.25, 0.25], 8, [4, 2, 2]),
    ([0.5, 0.25, 0.25], 1, [1, 0, 0]),
    ([1 / 3, 1 / 3, 1 / 3], 8, [3, 3, 2]),
    ([0.29, 0.01, 0.7], 100, [29, 1, 70]),
    ([0.93, 0.035, 0.035], 100, [93, 4, 3]),
    ([0.999, 0.0005, 0.0005], 12, [12, 0, 0]),
]


@pytest.mark.parametrize("shares, size, counts", scale(SHARES, SHARES[:2]))
def test_shares_are_exact(shares: list[float], size: int, counts: list[int], device: str) -> None:
    batch = ReplayMixture(parts(device), shares).sample(size)
    assert batch.source.tolist() == [place for place, count in enumerate(counts) for _ in range(count)]
    assert batch.source.dtype == torch.int64
    check_rows(Batch({name: value for name, value in batch.items() if name != "source"}))


def test_rows_are_those_of_the_buffers_own_samples(device: str) -> None:
    mixture, twins = ReplayMixture(parts(device), [0.4, 0.4, 0.2]), parts(device)
    for _ in range(3):
        batch = mixture.sample(10, beta=0.5)
        expected = Batch.cat([twin.sample(rows, beta=0.5) for twin, rows in zip(twins, (4, 4, 2), strict=True)])
        same(batch[batch.source >= 0], Batch({**expected.to_dict(), "source": batch.source}))
    assert (len(mixture), mixture.shares) == (60, (0.4, 0.4, 0.2))
    assert "0.4 of ReplayBuffer" in repr(mixture)


@pytest.mark.parametrize("sampler", [EXACT, RankBased()], ids=["mass", "rank"])
def test_priorities_go_to_the_buffer_of_their_row(sampler: Any, device: str) -> None:
    buffers = parts(device, (20, 30), sampler)
    mixture = ReplayMixture(buffers, [0.5, 0.5])
    keys, source = torch.tensor([3, 3, 25, 3, 25]), torch.tensor([0, 1, 1, 1, 0])
    mixture.update_priorities(keys, torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0]), source)
    assert buffers[0].priorities([3, 4]).tolist() == [2, 1]
    assert buffers[1].priorities([3, 4, 25]).tolist() == [16, 1, 8]
    # the first buffer has no key 25, and nothing else was too late
    assert [buffer.stats().stale_updates for buffer in buffers] == [1, 0]
    batch = mixture.sample(12)
    mixture.update_priorities(batch.key, np.arange(12.0) + 1, batch.source.tolist())
    given = dict(zip(zip(batch.source.tolist(), batch.key.tolist(), strict=True), range(1, 13), strict=True))
    for (place, key), priority in given.items():
        assert buffers[place].priorities([key]).tolist() == [priority]


def test_a_buffer_without_a_row_is_not_asked(device: str) -> None:
    mixture = ReplayMixture(parts(device, (20, 0)), [0.9, 0.1])
    assert mixture.sample(4).source.tolist() == [0] * 4
    with pytest.raises(RuntimeError, match=r"sample\(1\): the buffer holds no transitions"):
        mixture.sample(10)


def test_nothing_is_sampled_where_one_buffer_has_too_little(device: str) -> None:
    mixture, twins = ReplayMixture(parts(device, (20, 3), Uniform()), [0.5, 0.5]), parts(device, (20, 3), Uniform())
    with pytest.raises(ValueError, match="needs 5 transitions; the buffer holds 3"):
        mixture.sample(10)
    assert mixture.sample(4).key.tolist() == [key for twin in twins for key in twin.sample(2).key.tolist()]


def test_steps_and_sequences(device: str) -> None:
    for sequences in (None, Sequences(4, strict=True)):
        made = (StepPair(40, 2, seed=seed, stack=2, device=device, sequences=sequences) for seed in range(2))
        pairs = [live_through(pair, scale(30, 14), seed, end=0.05) for seed, pair in enumerate(made)]
        batch = ReplayMixture([pair.buffer for pair in pairs], [0.25, 0.75]).sample(8)
        assert batch.source.tolist() == [0] * 2 + [1] * 6
        for place, pair in enumerate(pairs):
            rows = batch[batch.source == place].to_dict()
            rows.pop("source")
            pair.check_rows(Batch(rows), pair.model.view())


def test_refused(device: str) -> None:
    one, other = parts(device, (5, 5))
    for buffers, shares, words in (
        ([one, other], [0.5, 0.4], r"must sum to 1; .* sum to 0.9"),
        ([one, other], [1.0, 0.0], "greater than 0"),
        ([one, other], [1.0], "a share for each"),
        ([], [], "a share for each"),
        ([one, make(5, device=device, number=NUMBER["number"])], [0.5, 0.5], "one fields; number 1"),
        ([make(5, device=device, source=NUMBER["number"])], [1.0], "'source' is reserved"),
        ([one, StepPair(4, 1, device=device).buffer], [0.5, 0.5], "one class; number 1 has TrajectoryReplayBuffer"),
        ([StepPair(4, 1, stack=each, device=device).buffer for each in (1, 2)], [0.5, 0.5], "one stack"),
    ):
        with pytest.raises(ValueError, match=words):
            ReplayMixture(buffers, shares)
    with pytest.raises(TypeError, match="number 1 is a list"):
        ReplayMixture([one, []], [0.5, 0.5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a list of buffers and a list of their shares; found NoneType and float"):
        ReplayMixture(None, 0.5)  # type: ignore[arg-type]
    mixture = ReplayMixture([one, other], [0.5, 0.5])
    before = [one.masses(), other.masses()]
    for keys, priorities, source, error, words in (
        ([1, 2], [9.0, 9.0], [0], ValueError, "source must have shape"),
        ([1, 2], [9.0], [0, 1], ValueError, "priorities must have shape"),
        ([1, 2], [9.0, 9.0], [0.0, 1.0], TypeError, "source must be integers"),
    ):
        with pytest.raises(error, match=words):
            mixture.update_priorities(keys, priorities, source)
    if device == "cpu":
        with pytest.raises(ValueError, match="source must be from 0 to 1"):
            mixture.update_priorities([1, 2], [9.0, 9.0], [0, 2])
        with pytest.raises(ValueError, match="must be finite"):
            mixture.update_priorities([1, 2], [9.0, float("nan")], [0, 1])
    assert all(torch.equal(*pair) for pair in zip(before, [one.masses(), other.masses()], strict=True))
