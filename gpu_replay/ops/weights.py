"""Importance weights on the device: no launch of their own, but a part of the one that gathers the rows drawn.

A weight needs the smallest mass of its batch, which is known once all of it is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import Counter, blocks_for


def weights_per_program(batch: int, interpreted: bool) -> int:
    """Draws that one program weighs; no more than there are where a program is dear.

    On a GPU one per thread: more at once would need more registers than the gather that they are part of.
    """
    return min(1024, 1 << (batch - 1).bit_length()) if interpreted else 128


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


class LaunchPart(NamedTuple):
    """The share of a `PendingWeights` in a launch: programs, pointers, numbers and compile-time numbers."""

    programs: int
    pointers: tuple[Tensor, ...]
    numbers: tuple[int, float, float]
    constants: dict[str, int]


def part_of(weighing: PendingWeights | None) -> LaunchPart:
    """How a launch is told to make weights, or to make none."""
    if weighing is None:
        return LaunchPart(0, (), (0, 0.0, 0.0), {})
    masses, schedule = weighing.masses, weighing.schedule
    draws = weights_per_program(masses.numel(), masses.device.type == "cpu")
    # a launch passes numbers as float32: two of them hold 48 bits. Above 1e30 all weights but 1 are 0 anyway
    beta = min(weighing.beta, 1e30)
    leading = float(np.float32(beta))
    return LaunchPart(
        -(-masses.numel() // draws),
        (masses, weighing.weight) if schedule is None else (masses, weighing.weight, schedule),
        (weighing.blocks, leading, beta - leading),
        {
            "DRAWS": draws,
            "SCHEDULED": schedule is not None,
            "RANDOM": int(Counter.RANDOM),
            "STEP": int(Counter.STEP),
            "TICKET": int(Counter.TICKET),
            "EDGE_LOW": int(Counter.EDGE_LOW),
        },
    )


def weighing_of(
    masses: Tensor, counters: Tensor, schedule: Tensor | None, beta: float, drawn: int, shifts: int = 0
) -> PendingWeights:
    """Device: weights of the masses just drawn, for the launch that gathers the rows to make; no launch of its own.

    schedule: see PendingWeights. shifts: random words taken after those of the `drawn`.
    """
    weight = torch.empty(masses.numel(), dtype=torch.float32, device=masses.device)
    return PendingWeights(masses, weight, counters, schedule, beta, blocks_for(drawn) + blocks_for(shifts))
