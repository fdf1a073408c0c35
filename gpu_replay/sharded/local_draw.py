"""Local mode: each rank samples from its own shard, and one small message corrects the weights for the whole buffer.

Let shard `r` of `R` have the total mass `T_r`, let `T` be their sum and `N` the number of all stored transitions. One
buffer with all transitions would sample `i` with P(i) = mass(i) / T, with the weight (N P(i)) ** -beta. Here every rank
samples equally many rows, so a row of any rank is `i` with q(i) = (1 / R) mass(i) / T_r. Its weight is therefore

    w(i) = P(i) / q(i) * (N P(i)) ** -beta = (R T_r / T) * (N mass(i) / T) ** -beta

and the expected weighted mean over all rows equals that of one buffer, for every beta. Dividing by the largest weight
cancels all factors that the ranks share. Let l_r be the smallest mass in the batch of rank `r` (or in its shard, by
`normalize`). The largest weight of rank `r` is proportional to g_r = T_r * l_r ** -beta, sampling the shard gives
(l_r / mass(i)) ** beta, and

    w(i) / max w = (l_r / mass(i)) ** beta * g_r / max(g).

So the ranks exchange only log2(g_r). With RankBased a shard's share is n_r / N, of stored transitions, instead of
T_r / T, and n_r p(i) takes the place of the mass; with Uniform beta is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.sharded.shard import Column, ShardDraw


def log_scales_of(table: Tensor) -> Tensor:
    """(R,) float64 log2(g_r) from the table of all ranks' numbers."""
    return table[:, Column.LOG_SCALE].contiguous().view(torch.float64)


def weighed(drawn: ShardDraw, log_scales: Tensor) -> dict[str, Tensor]:
    """Correct one rank's rows, in place, to the weights and probabilities over all ranks.

    log_scales: (R,) float64 log2(g_r) of all ranks.
    """
    factor = (drawn.log_scale - log_scales.max()).exp2()
    tensors = drawn.finish()
    for name, change in (("weight", factor), ("probability", 1.0 / log_scales.numel())):
        rows = tensors[name][: drawn.chance]
        rows.copy_(rows.to(torch.float64) * change)
    return tensors
