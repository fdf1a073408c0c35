"""Inclusive prefix sums of int64 numbers: draws by rank search those of the masses of all ranks (`DeviceRanks`).

On a device two launches whatever the length: one sums up parts of the numbers, the other scans each part from the sum
of those before it. This moves 24 bytes a number where one launch could do with 16, but whose programs would have to
wait for each other's sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops._backend import choose

# parts at most, which the multiprocessors of a large GPU hold all at once, and the numbers of a block
_PARTS, _BLOCK = 1024, 1024


def inclusive_prefix_sum(values: Tensor) -> Tensor:
    """(N,) int64 sums of the first 1, 2, ..., N of (N,) int64 values; N may be 0. Overflow wraps."""
    if choose(values.device) == "host":
        return torch.from_numpy(values.numpy().cumsum())
    from gpu_replay.kernels.prefix_sum import scan_parts_kernel, sum_parts_kernel

    values, length = values.contiguous(), values.numel()
    out = torch.empty_like(values)
    if length:
        # blocks of each part, and parts
        blocks = -(-length // (_PARTS * _BLOCK))
        parts = -(-length // (blocks * _BLOCK))
        sums = torch.empty(parts, dtype=torch.int64, device=values.device)
        with torch.cuda.device_of(values):
            sum_parts_kernel[(parts,)](values, sums, length, blocks, BLOCK=_BLOCK)
            scan_parts_kernel[(parts,)](values, sums, out, length, blocks, PARTS=_PARTS, BLOCK=_BLOCK)
    return out
