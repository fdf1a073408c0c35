"""Inclusive prefix sums of int64 numbers, and the block sums that are their first half.

A scan of any length is made in three steps: sum every block, scan those sums in the same way, then scan inside each
block from the sum before it. The first step alone builds one level of a mass tree from the level below
(`MassTree.build`); draws by rank on a device search the sums of the masses of all ranks (`DeviceRanks`).

Blelloch 1990, "Prefix sums and their applications".
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops._backend import choose


def inclusive_prefix_sum(values: Tensor) -> Tensor:
    """(N,) int64 sums of the first 1, 2, ..., N values; N may be 0. Overflow wraps.

    Raises TypeError for another dtype, ValueError for another number of dimensions.
    """
    if values.dtype != torch.int64:
        raise TypeError(f"inclusive_prefix_sum needs int64 values; found {values.dtype}. Convert them first.")
    if values.dim() != 1:
        raise ValueError(f"inclusive_prefix_sum needs one dimension; found shape {tuple(values.shape)}.")
    if choose(values.device) == "host":
        return torch.from_numpy(values.numpy().cumsum())
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    _scan(values.contiguous(), out)
    return out


def scan_block(length: int) -> int:
    """Values scanned by one program: a power of two from 128 to 4096."""
    return min(4096, max(128, 1 << (length - 1).bit_length())) if length > 0 else 128


def scan_warps(block: int, width: int) -> int:
    """Warps of `width` threads that scan one block: 16 values a thread, since more would take most of its registers."""
    return max(1, block // (16 * width))


def warp_width(device: torch.device) -> int:
    """Threads of one warp: 64 on AMD's data centre GPUs, else 32."""
    if device.type != "cuda":
        return 32
    return int(getattr(torch.cuda.get_device_properties(device), "warp_size", 32))


def blocks_per_program(block: int) -> int:
    """Blocks of `block` values that one program sums: together at most 4096 values."""
    return max(1, 4096 // block)


def block_sums(values: Tensor, block: int) -> Tensor:
    """Device: (ceil(N / block),) int64 sums of each run of `block` values, the last run perhaps shorter; one launch."""
    from gpu_replay.kernels.prefix_sum import block_sums_kernel

    count = -(-values.numel() // block)
    sums = torch.empty(count, dtype=torch.int64, device=values.device)
    rows = blocks_per_program(block)
    with torch.cuda.device_of(values):
        block_sums_kernel[(-(-count // rows),)](values, sums, values.numel(), count, BLOCK=block, ROWS=rows)
    return sums


def _scan(values: Tensor, out: Tensor) -> None:
    from gpu_replay.kernels.prefix_sum import scan_kernel

    length = values.numel()
    if length == 0:
        return
    block = scan_block(length)
    programs = -(-length // block)
    before = values
    if programs > 1:
        sums = block_sums(values, block)
        before = torch.empty_like(sums)
        _scan(sums, before)
    with torch.cuda.device_of(values):
        warps = scan_warps(block, warp_width(values.device))
        scan_kernel[(programs,)](values, before, out, length, BLOCK=block, FIRST=programs == 1, num_warps=warps)
