"""The end of a sample on the device: no launch of its own, but a part of the one that gathers its rows.

A weight needs the smallest mass of its batch, which is known once all of it is drawn. The gather makes weights and counts
the sample beside what it waits for anyway, so that a sample changes nothing before its last launch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu_replay.ops.launch import per_program


class Drawn(NamedTuple):
    """A sample that a launch of `kernels/weights.py` finishes.

    pointers: slots, masses, weights, how often slots were sampled and, instead of `beta`, a schedule; () finishes none.
    """

    pointers: tuple[Tensor, ...] = ()
    blocks: int = 0
    beta: float = 0.0


def weight_programs(batch: int, interpreted: bool) -> tuple[int, int]:
    """The programs of a launch that finish a batch, and the draws of each; none for no batch."""
    # one draw per thread: more would need more registers than the gather that they are part of
    draws = per_program(128, batch, interpreted) if batch else 0
    return (-(-batch // draws) if batch else 0), draws
