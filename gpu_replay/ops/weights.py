"""The end of a sample on the device: no launch of its own, but a part of the one that gathers its rows.

A weight needs the smallest mass of its batch, which is known once all of it is drawn. The gather makes weights and
counts the sample while it waits for memory anyway, so that a sample changes nothing before its last launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gpu_replay.ops.launch import per_program


class Finish(NamedTuple):
    """What the launch that ends a sample counts: see `kernels/weights.py`.

    counted: (slots,) int32 how often each slot was sampled and, with a schedule, (3,) float64 its start, change and
             steps; () of rows that are read alone.
    blocks:  of random words that the sample takes.
    minima:  masses that the draw leaves, the smallest of which has the largest weight.
    """

    counted: tuple[Tensor, ...] = ()
    blocks: int = 0
    minima: int = 0


READ = Finish()
# (slots, sample, beta) -> the fields of the rows at (B,) slots. Only at the end of a sample it is given `sample`, its
# slots, masses, weights (which it fills) and minima, and `beta`, the exponent of the weights if there is no schedule.
Gather = Callable[..., dict[str, Tensor]]


def weight_programs(batch: int, interpreted: bool) -> tuple[int, int]:
    """The programs of a launch that finish a batch, and the draws of each; none for no batch."""
    # one draw per thread: more would need more registers than the gather that they are part of
    draws = per_program(128, batch, interpreted) if batch else 0
    return (-(-batch // draws) if batch else 0), draws
