"""Inclusive prefix sums of int64 numbers, and sums of blocks.

On a device a scan of any length is one launch that reads and writes each number once: every program scans one block and
adds the sum of all blocks before, which it gathers from what their programs have told. Draws by rank search the sums of
the masses of all ranks (`DeviceRanks`); block sums are one level of a mass tree, made from the level below
(`MassTree.build`).

Merrill and Garland 2016, "Single-pass Parallel Prefix Scan with Decoupled Look-back".
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops._backend import choose

# times that a program looks for the sum of a block, some 20 microseconds, before it makes that sum itself
_LOOKS = 32


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
    """Values scanned by one program: a power of two from 128 to 2048."""
    return min(2048, max(128, 1 << (length - 1).bit_length())) if length > 0 else 128


def scan_warps(block: int, width: int) -> int:
    """Warps of `width` threads that scan one block: 8 values a thread, so that four blocks fit a multiprocessor."""
    return max(1, block // (8 * width))


def scan_window(programs: int) -> int:
    """Blocks whose sums a program of a scan looks at at once, one a thread; 0 where there is no other block."""
    return 256 if programs > 1 else 0


def warp_width(device: torch.device) -> int:
    """Threads of one warp: 64 on AMD's data centre GPUs, else 32."""
    if device.type != "cuda":
        return 32
    return int(getattr(torch.cuda.get_device_properties(device), "warp_size", 32))


def blocks_per_program(block: int) -> int:
    """Blocks of `block` values that one program sums: together at most 4096 values."""
    return max(1, 4096 // block)


def block_sums(values: Tensor, block: int, out: Tensor | None = None) -> Tensor:
    """Device: int64 sums of each run of `block` values, the last run perhaps shorter; one launch.

    out:     where they go, and behind them zeros; by default it has no more than the ceil(N / block) sums.
    returns: it.
    """
    from gpu_replay.kernels.prefix_sum import block_sums_kernel

    if out is None:
        out = torch.empty(-(-values.numel() // block), dtype=torch.int64, device=values.device)
    rows, count = blocks_per_program(block), out.numel()
    with torch.cuda.device_of(values):
        block_sums_kernel[(-(-count // rows),)](values, out, values.numel(), count, BLOCK=block, ROWS=rows)
    return out


def _scan(values: Tensor, out: Tensor) -> None:
    from gpu_replay.kernels.prefix_sum import scan_kernel

    length = values.numel()
    if length == 0:
        return
    block = scan_block(length)
    programs = -(-length // block)
    window = scan_window(programs)
    # what the programs tell each other; zeros are a launch of torch
    state = torch.zeros(2 * programs, dtype=torch.int64, device=values.device) if window else values
    with torch.cuda.device_of(values):
        warps = scan_warps(block, warp_width(values.device))
        scan_kernel[(programs,)](values, state, out, length, BLOCK=block, WINDOW=window, LOOKS=_LOOKS, num_warps=warps)
