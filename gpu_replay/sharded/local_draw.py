"""Local mode: each rank draws from its own shard, and one small all-reduce makes the weights those of the whole.

Let shard `r` of `R` hold the total mass `T_r`, `T` their sum, `N` all stored transitions. One buffer of the whole would
draw transition `i` with P(i) = mass(i) / T, and weigh it by (N P(i)) ** -beta. Here every rank draws the same number of
rows, so that one row of all is `i` with q(i) = (1 / R) mass(i) / T_r. Each row is therefore weighed by

    w(i) = P(i) / q(i) * (N P(i)) ** -beta = (R T_r / T) * (N mass(i) / T) ** -beta

and the expected weighted mean over all rows is that of one buffer, for every beta. Divided by the largest, all factors
that the ranks share drop out: with l_r the smallest mass in the batch of rank `r` (or stored there, as `normalize`
says), the largest weight of rank `r` is proportional to g_r = T_r * l_r ** -beta, the draw of the shard gives
(l_r / mass(i)) ** beta, and

    w(i) / max w = (l_r / mass(i)) ** beta * g_r / max(g).

So log2(g_r) is all that the ranks need of each other, and it is on its way while rows are gathered. By rank, a shard's
share is that of stored transitions, n_r / N instead of T_r / T, and n_r p(i) stands for the mass; uniformly, beta = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.sharded.shard import Column, ShardDraw


def levels_of(table: Tensor) -> Tensor:
    """(R,) float64 log2(g_r) of the rows that the ranks gave."""
    return table[:, Column.LEVEL].contiguous().view(torch.float64)


def weighed(drawn: ShardDraw, levels: Tensor) -> dict[str, Tensor]:
    """The rows of one rank with weights and probabilities of the whole.

    levels: (R,) float64 of all ranks.
    """
    factor = (drawn.level - levels.max()).exp2()
    for name, change in (("weight", factor), ("probability", 1.0 / levels.numel())):
        rows = drawn.tensors[name][: drawn.chance]
        rows.copy_(rows.to(torch.float64) * change)
    return drawn.tensors
