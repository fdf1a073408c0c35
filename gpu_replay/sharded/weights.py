"""Each rank samples from its own buffer, and one small message corrects the weights to those of the whole memory.

Let the buffer of rank `r` of `R` have the total mass `T_r`, let `T` be their sum and `N` the number of all rows that can
be drawn. One buffer with all rows would sample `i` with P(i) = mass(i) / T, with the weight (N P(i)) ** -beta. Here every
rank samples equally many rows, so a row of any rank is `i` with q(i) = (1 / R) mass(i) / T_r. Its weight is therefore

    w(i) = P(i) / q(i) * (N P(i)) ** -beta = (R T_r / T) * (N mass(i) / T) ** -beta

and the expected weighted mean over all rows equals that of one buffer, for every beta. Dividing by the largest weight
cancels all factors that the ranks share. The rank's own buffer gives its rows the weight v(i) = (l_r / mass(i)) ** beta,
of some l_r, and the probability p(i) = mass(i) / T_r. So any of its rows tells

    g_r = T_r l_r ** -beta = T_r mass(i) ** -beta / v(i),     and     w(i) / max w = v(i) g_r / max(g):

the ranks exchange only log2(g_r). Nothing is summed over the ranks, so masses need no bound beyond that of each buffer.
By rank, and with samplers of one's own, a buffer's share is that of its rows, n_r / N, instead of T_r / T, and n_r p(i)
takes the place of the mass; with Uniform all masses are 1.
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
    counts = buffer._counters
    if buffer._tracks_eligibility:
        return counts[Counter.ELIGIBLE]
    return counts[Counter.ADDED] - torch.maximum(counts[Counter.FIRST], counts[Counter.ADDED] - buffer.capacity)


def log_scale_of(buffer: Buffer, batch: Batch, chance: int, exponent: Tensor) -> Tensor:
    """log2(g_r) by the row of the largest weight among the first `chance`, which were drawn by chance; float64 scalar."""
    if not chance:
        return torch.zeros_like(exponent)
    top, base = batch.weight[:chance].argmax(), buffer.sampler.base
    weight, probability = (batch[name][top].to(torch.float64) for name in ("weight", "probability"))
    if base.summed:
        masses = buffer._state.masses.masses
        mass = masses[batch.key[top].clamp(min=0) % buffer._state.slots].to(torch.float64)
    elif base.kernel == "uniform":
        mass = torch.ones_like(weight)
    else:
        mass = drawable(buffer) * probability
    total = mass / probability
    # on a device all rows of a batch may be missing, with weight 0
    found = total.log2() - exponent * mass.log2() - weight.log2()
    return torch.where(weight > 0, found, -torch.inf)


def correct(batch: Batch, chance: int, log_scale: Tensor, log_scales: Tensor) -> None:
    """Change one rank's rows, in place, to the weights and probabilities over all ranks."""
    factor = (log_scale - log_scales.max()).exp2().nan_to_num(0.0)
    for name, change in (("weight", factor), ("probability", 1.0 / log_scales.numel())):
        rows = batch[name][:chance]
        rows.copy_(rows.to(torch.float64) * change)
