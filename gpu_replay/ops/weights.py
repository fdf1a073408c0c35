"""Importance weights on the device: no launch of their own, but a part of the one that gathers the rows drawn.

A weight needs the smallest mass of its batch, which is known once all of it is drawn. The gather makes them beside what
it waits for anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_replay.ops.counters import blocks_for
from gpu_replay.ops.draw import per_program


class PendingWeights(NamedTuple):
    """What the launch after a draw by priority does beside gathering: weights, and moving schedule and stream on.

    masses:   (B,) int64 of the rows just drawn, 0 where a row was not drawn.
    weight:   (B,) float32, empty until that launch.
    schedule: (3,) float64 start, change and steps, used instead of `beta`, or None.
    blocks:   of the random stream that were used.
    """

    masses: Tensor
    weight: Tensor
    counters: Tensor
    schedule: Tensor | None
    beta: float
    blocks: int


# arguments of a launch that makes no weights
NO_WEIGHTS: tuple[tuple[Tensor, ...], tuple[int, float]] = ((), (0, 0.0))


def weight_programs(batch: int, interpreted: bool) -> tuple[int, int]:
    """The programs of a launch that make the weights of a batch, and the draws of each; none for no batch."""
    # one draw per thread: more would need more registers than the gather that they are part of
    draws = per_program(128, batch, interpreted) if batch else 0
    return (-(-batch // draws) if batch else 0), draws


def launch_arguments(weighing: PendingWeights) -> tuple[tuple[Tensor, ...], tuple[int, float]]:
    """Pointers and numbers that such a launch is given."""
    masses, weight, _, schedule, beta, blocks = weighing
    return (masses, weight) if schedule is None else (masses, weight, schedule), (blocks, beta)


def pending_weights(
    masses: Tensor, counters: Tensor, schedule: Tensor | None, beta: float, drawn: int, shifts: int = 0
) -> PendingWeights:
    """Device: weights of the masses just drawn, for the launch that gathers the rows to make; no launch of its own.

    schedule: see PendingWeights. shifts: random words taken after those of the `drawn`.
    """
    weight = torch.empty(masses.numel(), dtype=torch.float32, device=masses.device)
    return PendingWeights(masses, weight, counters, schedule, beta, blocks_for(drawn) + blocks_for(shifts))
