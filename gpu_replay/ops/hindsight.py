"""Which rows of a batch get another goal, and where that goal is stored: looked up without walking along an episode.

The goal that a step achieved is seen in the observation after it, which lies one step later in the ring, or among the
final observations that are kept apart. An episode's first step, or its environment once that step is overwritten,
says how many of its steps have such an observation (`Streams.episode_length`, `Streams.clipped_length`); of the newest
episode all have but the newest step. So the steps to choose from are an interval that is known at once.

Andrychowicz et al. 2017, "Hindsight Experience Replay".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import blocks_for
from gpu_replay.ops.draw import PERMUTATION_WORDS
from gpu_replay.ops.launch import Launch, per_program
from gpu_replay.ops.ring import convert
from gpu_replay.ops.steps import Streams, powers_of
from gpu_replay.ops.windows import StepStore

Strategy = Literal["future", "geometric", "final", "episode"]
# a double times the sum of all masses is exact to one of them
_ALL_GOALS = 2.0**52


class GoalRows(NamedTuple):
    """Distinct rows of a batch, in random order, and where their new goals are.

    rows:   (K,) int64.
    known:  (K,) bool, false where the observation after the row's own step is not stored: such a row stays as it is.
            None: all are known.
    slots:  (K,) int64 of the steps in whose observations the goals stand; any slot where there is none.
    places: (K,) int64 rows of kept final observations in which they stand instead, -1 where they do not; or None where
            none are kept.
    """

    rows: Tensor
    known: Tensor | None
    slots: Tensor
    places: Tensor | None


def goal_sums(gamma: float | None, steps: int) -> np.ndarray:
    """(m,) int64, m <= steps: at k - 1 the sum of masses of the goals from 1 to k steps ahead, that of k in proportion
    to gamma ** (k - 1); none without gamma. Goals beyond m would have a mass of 0.
    """
    if gamma is None:
        return np.zeros(0, dtype=np.int64)
    # from there on powers are below 2**-53
    most = steps if gamma == 1 else min(steps, 2 + int(53 * math.log(2) / -math.log(gamma)))
    powers = powers_of(gamma, most - 1)
    masses = (powers * (_ALL_GOALS / powers.sum())).astype(np.int64)
    return np.cumsum(masses[masses > 0])


def goal_blocks(count: int, strategy: Strategy) -> int:
    """Philox blocks that choosing `count` rows and their goals takes: those of a permutation, and a word for a goal."""
    return blocks_for(PERMUTATION_WORDS) + (0 if strategy == "final" else blocks_for(count))


def put_goals(
    tensors: dict[str, Tensor], chosen: GoalRows, raw: Tensor, storage: StepStore, achieved: str, desired: str
) -> tuple[Tensor, Tensor]:
    """Write new goals into K rows of a batch in place, into all frames of their stacks.

    raw:     (K, *shape) the goals achieved in the chosen steps, as stored; referenced nowhere else.
    achieved, desired: the fields of goals.
    returns: (K, *goal) as sampled, the goals achieved after the steps, and those that the rows have now.
    """
    rows, pool, stack = chosen.rows, storage.finals.get(achieved), storage.streams.shape.stack
    if pool is not None and chosen.places is not None:
        pooled = (chosen.places >= 0).reshape(-1, *(1 for _ in raw.shape[1:]))
        raw = torch.where(pooled, pool.index_select(0, chosen.places.clamp(min=0)), raw)
    goals = convert(raw, storage.fields[desired])
    wide = goals if stack == 1 else goals.unsqueeze(1).expand(-1, stack, *goals.shape[1:])
    for name in (desired, f"next_{desired}"):
        masked_put(tensors[name], rows, chosen.known, wide)
    # rows that keep their goal are shown with it
    after, now = (tensors[name].index_select(0, rows) for name in (f"next_{achieved}", desired))
    return (after, now) if stack == 1 else (after[:, -1].contiguous(), now[:, -1].contiguous())


def masked_put(target: Tensor, rows: Tensor, known: Tensor | None, values: Tensor) -> None:
    """target[rows] = values where they are known, (K,) bool, or everywhere; (K, *shape) values at (K,) rows."""
    if known is not None:
        mask = known.reshape(-1, *(1 for _ in values.shape[1:]))
        values = torch.where(mask, values, target.index_select(0, rows))
    target.index_copy_(0, rows, values)


def make_choose_goals(
    streams: Streams, batch: int, counters: Tensor, count: int, strategy: Strategy, sums: Tensor, after: int
) -> Callable[[Tensor], GoalRows]:
    """Device: choose `count` rows of a batch in (B,) slots, and their goals; one launch a call.

    sums:  `goal_sums`. after: blocks of the random stream that come before its words.
    """
    from gpu_replay.kernels.goals import choose_goals_kernel

    shape, device = streams.shape, counters.device
    draws = per_program(128, count, device.type == "cpu")
    launch = Launch(
        choose_goals_kernel,
        -(-count // draws),
        streams=(streams.flags, streams.depth, streams.episode_length, streams.clipped_length, streams.final),
        counters_ptr=counters,
        sums_ptr=sums,
        count=count,
        batch=batch,
        envs=shape.num_envs,
        steps=shape.steps,
        finals=shape.finals,
        sums=len(sums),
        after=after,
        LAST=strategy == "final",
        EPISODE=strategy == "episode",
        HALVINGS=len(sums).bit_length(),
        DRAWS=draws,
    )

    def choose_goals(drawn: Tensor) -> GoalRows:
        rows = torch.empty(count, dtype=torch.int64, device=device)
        known = torch.empty(count, dtype=torch.bool, device=device)
        slots = torch.empty(count, dtype=torch.int64, device=device)
        places = torch.empty(count, dtype=torch.int64, device=device) if shape.finals else None
        launch(drawn, (rows, known, slots) if places is None else (rows, known, slots, places))
        return GoalRows(rows, known, slots, places)

    return choose_goals
