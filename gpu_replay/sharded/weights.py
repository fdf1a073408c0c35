"""Each rank samples from its own buffer, and one small message corrects the weights to those of the whole memory.

Let the buffer of rank `r` of `R` have the total mass `T_r`, let `T` be their sum and `N` the number of all rows that
can be drawn. One buffer with all rows would sample `i` with P(i) = mass(i) / T, with the weight (N P(i)) ** -beta. Here
every rank samples equally many rows, so a row of any rank is `i` with q(i) = (1 / R) mass(i) / T_r. Its weight is then

    w(i) = P(i) / q(i) * (N P(i)) ** -beta = (R T_r / T) * (N mass(i) / T) ** -beta

and the expected weighted mean over all rows equals that of one buffer, for every beta. Dividing by the largest weight
cancels all factors that the ranks share. The rank's own buffer gives its rows the probability p(i) = mass(i) / T_r and
the weight v(i) = (l_r / mass(i)) ** beta, of some l_r. So any of its rows tells

    g_r = T_r l_r ** -beta = T_r (T_r p(i)) ** -beta / v(i),     and     w(i) / max w = v(i) g_r / max(g):

the ranks exchange only log2(g_r). Nothing is summed over the ranks, so masses need no bound beyond that of each buffer.
By rank, uniformly, and with samplers of one's own a buffer's share is that of its rows, and their number takes the
place of T_r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.base.buffer import Buffer
from gpu_replay.batch import Batch
from gpu_replay.ops.counters import Counter
from gpu_replay.samplers import LinearSchedule


def exponent_of(buffer: Buffer, beta: float | None) -> Tensor:
    """The beta of the next sample, a float64 scalar on the device."""
    planned = buffer.sampler.base.beta if beta is None else beta
    if isinstance(planned, LinearSchedule):
        share = (buffer._counters[Counter.STEP].to(torch.float64) / planned.steps).clamp(max=1.0)
        return planned.start + (planned.end - planned.start) * share
    return torch.full((), float(planned), dtype=torch.float64, device=buffer.device)


def drawable(buffer: Buffer) -> Tensor:
    """The number of rows that can be drawn, an int64 scalar on the device."""
    counts, state = buffer._counters, buffer._state
    if buffer._tracks_eligibility:
        return counts[Counter.ELIGIBLE]
    if state.tree is not None and state.excluded:
        return (state.tree.masses > 0).sum()
    return counts[Counter.ADDED] - torch.maximum(counts[Counter.FIRST], counts[Counter.ADDED] - buffer.capacity)


def size_of(buffer: Buffer) -> Tensor:
    """What the share of a buffer is proportional to, its T_r: a float64 scalar on the device."""
    tree = buffer._state.summed
    return (drawable(buffer) if tree is None else tree.levels[-1].sum()).to(torch.float64)


def log_scale_of(buffer: Buffer, batch: Batch, chance: int, exponent: Tensor) -> Tensor:
    """log2(g_r) by the row of the largest weight among the first `chance`, which were drawn by chance: float64."""
    if not chance:
        return torch.zeros_like(exponent)
    # a place without dimensions would be read by the host
    top, size = batch.weight[:chance].argmax(keepdim=True), size_of(buffer)
    weight, probability = (batch[name][top][0].to(torch.float64) for name in ("weight", "probability"))
    return size.log2() - exponent * (size * probability).log2() - weight.log2()


def correct(batch: Batch, chance: int, log_scale: Tensor, log_scales: Tensor) -> None:
    """Change one rank's rows, in place, to the weights and probabilities over all ranks."""
    factor = (log_scale - log_scales.max()).exp2().nan_to_num(0.0)
    for name, change in (("weight", factor), ("probability", 1.0 / log_scales.numel())):
        rows = batch[name][:chance]
        rows.copy_(rows.to(torch.float64) * change)
