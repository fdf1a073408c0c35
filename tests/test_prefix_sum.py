"""The inclusive prefix sum: exact at every length, on the host code and through the kernels."""

from __future__ import annotations

import re
from itertools import accumulate

import numpy as np
import pytest
import torch
from guards import guarded
from interpreted import INTERPRETED

from gpu_replay.ops import prefix_sum
from gpu_replay.ops.prefix_sum import block_sums, blocks_per_program, inclusive_prefix_sum, scan_block

EXTREMES = (-(2**63), 2**63 - 1)


KERNELS = [*(["interpreted"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["host", *KERNELS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the numbers are; on the CPU the host code and the kernels take turns."""
    if request.param == "interpreted":
        monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    return "cuda" if request.param == "cuda" else "cpu"


LENGTHS = (1, 2, 127, 128, 129, 255, 257, 4095, 4096, 4097, 8192, 8193, 100_003)


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
def test_sums_of_numbers_of_all_sizes(length: int, device: str) -> None:
    check(np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True), device)


@pytest.mark.parametrize("length", [1, 129, 4097])
@pytest.mark.parametrize("value", [0, 1, -1, *EXTREMES])
def test_sums_wrap_as_64_bits_do(value: int, length: int, device: str) -> None:
    check(np.full(length, value, dtype=np.int64), device)


def test_the_sum_of_nothing_is_nothing(device: str) -> None:
    found = inclusive_prefix_sum(torch.empty(0, dtype=torch.int64, device=device))
    assert (found.shape, found.dtype) == ((0,), torch.int64)


def test_the_argument_may_have_gaps_and_stays_as_it_was(device: str) -> None:
    values = torch.arange(3000, device=device)
    assert inclusive_prefix_sum(values[::3]).tolist() == values[::3].cpu().cumsum(0).tolist()
    assert torch.equal(values.cpu(), torch.arange(3000))


@pytest.mark.parametrize("length", [3, 4, 5, 16, 17, 64, 65, 257])
def test_sums_of_sums_of_sums(length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of four 257 numbers recurse as 4096 ** 4 + 1 would."""
    monkeypatch.setattr(prefix_sum, "scan_block", lambda length: 4)
    monkeypatch.setattr(prefix_sum, "blocks_per_program", lambda block: 8)
    check(np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=re.escape(f"needs int64 values; found {dtype}. Convert them first.")):
        inclusive_prefix_sum(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 1, 1)])
def test_other_numbers_of_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"needs one dimension; found shape {shape}.")):
        inclusive_prefix_sum(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("block", [1, 16, 128, 4096])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 129, 4096, 8193])
def test_sums_of_blocks(length: int, block: int, device: str) -> None:
    values = np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True)
    with guarded():
        found = block_sums(torch.from_numpy(values).to(device), block)
    parts = [values[start : start + block].tolist() for start in range(0, length, block)]
    assert found.tolist() == [wrapped(sum(part)) for part in parts]


def test_a_program_scans_a_power_of_two_from_128_to_4096() -> None:
    found = {length: scan_block(length) for length in (0, 1, 127, 128, 129, 2048, 2049, 4096, 4097, 10**9)}
    assert list(found.values()) == [128, 128, 128, 128, 256, 2048, 4096, 4096, 4096, 4096]


def test_a_program_sums_at_most_4096_values() -> None:
    assert {block: blocks_per_program(block) for block in (1, 16, 128, 4096, 8192)} == {
        1: 4096,
        16: 256,
        128: 32,
        4096: 1,
        8192: 1,
    }
