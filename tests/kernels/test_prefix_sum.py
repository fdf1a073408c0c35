"""The inclusive prefix sum: exact at every length, on the host code and through the kernels."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from guards import guarded
from interpreted import INTERPRETED

from gpu_replay.ops import ranks
from gpu_replay.ops.ranks import inclusive_prefix_sum

EXTREMES = (-(2**63), 2**63 - 1)


KERNELS = [*(["interpreted"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["host", *KERNELS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the numbers are; on the CPU the host code and the kernels take turns."""
    if request.param == "interpreted":
        monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    return "cuda" if request.param == "cuda" else "cpu"


LENGTHS = (0, 1, 2, 127, 128, 129, 1023, 1024, 1025, 2049, 100_003)


def wrapped(total: int) -> int:
    """A sum of any size as 64 bits hold it."""
    return (total + 2**63) % 2**64 - 2**63


def check(values: np.ndarray, device: str) -> None:
    with guarded():
        found = inclusive_prefix_sum(torch.from_numpy(values).to(device))
    assert found.dtype == torch.int64
    assert found.device.type == device
    assert found.tolist() == [wrapped(total) for total in accumulate(values.tolist())]


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_of_numbers_of_all_sizes_wrap_as_64_bits_do(length: int, device: str) -> None:
    check(np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True), device)
    if length in (1, 129):
        for value in (0, 1, -1, *EXTREMES):
            check(np.full(length, value, dtype=np.int64), device)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 31, 32, 33, 63, 64, 65, 129])
def test_sums_over_many_blocks_and_parts(length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight parts at most, in blocks of four: 129 numbers are scanned as four million would be."""
    monkeypatch.setattr(ranks, "_PARTS", 8)
    monkeypatch.setattr(ranks, "_BLOCK", 4)
    check(np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True), device)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_part_of_a_tensor_is_summed(device: str) -> None:
    """Its numbers lie apart, or begin where whole words do not."""
    values = torch.arange(600, device=device)
    for part in (values[1:300], values[::2]):
        assert inclusive_prefix_sum(part).tolist() == list(accumulate(part.tolist()))
