"""Importance weights on the device: no launch of their own, but a part of the one that gathers the rows drawn.

A weight needs the smallest mass of its batch, which is known once all of it is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import blocks_for
from gpu_replay.ops.draws import per_program


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
    """The share of a `PendingWeights` in a launch: programs, pointers, numbers, and draws of a program."""

    programs: int
    pointers: tuple[Tensor, ...]
    numbers: tuple[int, float, float]
    draws: int


def part_of(weighing: PendingWeights | None) -> LaunchPart:
    """How a launch is told to make weights, or to make none."""
    if weighing is None:
        return LaunchPart(0, (), (0, 0.0, 0.0), 0)
    masses, schedule = weighing.masses, weighing.schedule
    # one draw per thread: more would need more registers than the gather that they are part of
    draws = per_program(128, masses.numel(), masses.device.type == "cpu")
    # a launch passes numbers as float32: two of them hold 48 bits. Above 1e30 all weights but 1 are 0 anyway
    beta = min(weighing.beta, 1e30)
    leading = float(np.float32(beta))
    pointers = (masses, weighing.weight) if schedule is None else (masses, weighing.weight, schedule)
    return LaunchPart(-(-masses.numel() // draws), pointers, (weighing.blocks, leading, beta - leading), draws)


def weighing_of(
    masses: Tensor, counters: Tensor, schedule: Tensor | None, beta: float, drawn: int, shifts: int = 0
) -> PendingWeights:
    """Device: weights of the masses just drawn, for the launch that gathers the rows to make; no launch of its own.

    schedule: see PendingWeights. shifts: random words taken after those of the `drawn`.
    """
    weight = torch.empty(masses.numel(), dtype=torch.float32, device=masses.device)
    return PendingWeights(masses, weight, counters, schedule, beta, blocks_for(drawn) + blocks_for(shifts))
