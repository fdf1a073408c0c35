"""Inclusive prefix sums of int64 numbers.

On a device a scan of any length is one launch that reads and writes each number once: every program scans one block and
adds the sum of all blocks before, which it gathers from what their programs have told. Draws by rank search the sums of
the masses of all ranks (`DeviceRanks`); each level of a mass tree is made from those of the level below
(`MassTree.build`).

Merrill and Garland 2016, "Single-pass Parallel Prefix Scan with Decoupled Look-back".
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops._backend import choose

# times that a program looks for the sum of a block, some 20 microseconds, before it makes that sum itself
_LOOKS = 32
# blocks that a program looks at at once, one a thread
_WINDOW = 256


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
    return scan(values.contiguous())


def scan_block(length: int) -> int:
    """Values scanned by one program: a power of two from 128 to 2048."""
    return min(2048, max(128, 1 << (length - 1).bit_length())) if length > 0 else 128


def scan(values: Tensor, every: int = 1) -> Tensor:
    """Device: (N // every,) int64 sums of the first `every`, 2 * `every`, ... values; one launch, and zeros of torch.

    values: (N,) int64 without gaps. every: a power of two, at most 128.
    """
    from gpu_replay.kernels.prefix_sum import scan_kernel

    length = values.numel()
    out = torch.empty(length // every, dtype=torch.int64, device=values.device)
    if not length:
        return out
    block = scan_block(length)
    programs = -(-length // block)
    # what the programs tell each other, where there are several
    state = torch.zeros(2 * programs, dtype=torch.int64, device=values.device) if programs > 1 else values
    sizes = {"EVERY": every, "BLOCK": block, "WINDOW": _WINDOW if programs > 1 else 0, "LOOKS": _LOOKS}
    with torch.cuda.device_of(values):
        # 8 values a thread of a warp of 32, so that four blocks fit a multiprocessor
        scan_kernel[(programs,)](values, state, out, length, **sizes, num_warps=max(1, block // 256))
    return out
