"""The inclusive prefix sum: exact at every length, on the host code and through the kernels."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from devices import thinned
from guards import guarded
from interpreted import INTERPRETED
from sparse_memory import programs_in

from gpu_replay.ops import prefix_sum
from gpu_replay.ops.prefix_sum import inclusive_prefix_sum, scan

interpreted_alone = pytest.mark.skipif(not INTERPRETED, reason="programs of a GPU come in an order of its own")
EXTREMES = (-(2**63), 2**63 - 1)


KERNELS = [*(["interpreted"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["host", *KERNELS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the numbers are; on the CPU the host code and the kernels take turns."""
    if request.param == "interpreted":
        monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    return "cuda" if request.param == "cuda" else "cpu"


LENGTHS = (0, 1, 2, 127, 128, 129, 255, 257, 2047, 2048, 2049, 4096, 4097, 100_003)


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


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four, of which a program looks at eight at once: 129 numbers are scanned as a million would be."""
    monkeypatch.setattr(prefix_sum, "scan_block", lambda length: 4)
    monkeypatch.setattr(prefix_sum, "_WINDOW", 8)
    monkeypatch.setattr(prefix_sum, "_LOOKS", 1)


@pytest.mark.parametrize("length", [3, 4, 5, 16, 17, 64, 65, 129])
@pytest.mark.usefixtures("short_blocks")
def test_sums_over_many_blocks(length: int, device: str) -> None:
    check(np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True), device)


@interpreted_alone
@pytest.mark.usefixtures("short_blocks")
def test_programs_that_come_late_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    with programs_in(lambda count: range(count)[::-1]):
        check(np.random.default_rng(1).integers(*EXTREMES, 70, endpoint=True), "cpu")


def words(stage: int, total: int) -> list[int]:
    """What the kernel writes of a sum: its stage above each half."""
    return [(stage << 32) + (half & 0xFFFFFFFF) for half in (total, total >> 32)]


@interpreted_alone
@pytest.mark.parametrize("seed", range(8))
def test_whatever_other_programs_have_said_by_then_a_program_finds_its_sums(seed: int) -> None:
    """Nothing, a block's sum, all sums up to it, or one word of a later stage than the other."""
    from gpu_replay.kernels.prefix_sum import scan_kernel

    random = np.random.default_rng(seed)
    blocks, block = 21, 4
    values = random.integers(*EXTREMES, blocks * block - seed % 3, endpoint=True)
    sums = [wrapped(total) for total in accumulate(values.tolist())]
    state = torch.zeros((2, blocks), dtype=torch.int64)
    for place in range(blocks - 1):
        own = sum(values[place * block : (place + 1) * block].tolist())
        said = [words(0, 0), words(1, own), words(2, sums[(place + 1) * block - 1])]
        # the first block has no sums before it
        low, high = random.choice([0, 2] if place == 0 else [0, 1, 1, 1, 2], 2)
        if random.random() < 0.7:
            high = low
        state[:, place] = torch.tensor([said[low][0], said[high][1]])
    before, out = state.clone(), torch.zeros(values.size, dtype=torch.int64)
    last = blocks - 1
    with programs_in(lambda count: [last]):
        scan_kernel[(blocks,)](
            torch.from_numpy(values), state, out, values.size, EVERY=1, BLOCK=block, WINDOW=8, LOOKS=2
        )
    assert out.tolist() == [0] * (last * block) + sums[last * block :]
    # and it has said the same to those after it; nothing that was said is taken back
    assert state[:, last].tolist() == words(2, sums[-1])
    assert bool((state >= before).all())


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@thinned("length, every", [1, 31, 32, 129, 2048, 4224, 8193], [2, 32, 128])
def test_sums_up_to_the_end_of_each_run(length: int, every: int, device: str) -> None:
    """As a level of a tree needs them; values after the last whole run count for nothing."""
    values = np.random.default_rng(length).integers(*EXTREMES, length, endpoint=True)
    with guarded():
        found = scan(torch.from_numpy(values).to(device), every)
    assert found.tolist() == [wrapped(total) for total in accumulate(values.tolist())][every - 1 :: every]
