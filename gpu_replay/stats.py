"""Diagnostics of a buffer: sizes, priorities, the sampling distribution, ages and reuse."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import NO_MASS
from gpu_replay.ops.masses import UNIT, MassRule
from gpu_replay.ops.ranks import cumulative_masses

# masses converted together, so that a large buffer is not copied to float64 at once
_CHUNK = 2**22


@dataclass(frozen=True)
class Stats:
    """Diagnostics of a buffer at one moment.

    size:                  stored transitions.
    added:                 transitions ever added.
    eligible:              stored transitions that can be sampled.
    min_priority, mean_priority, max_priority: of stored transitions, computed from the masses (after `clip`, to a
                           resolution of 2**-20 in priority ** alpha; nan with alpha 0), exact with RankBased; nan
                           without priorities.
    entropy:               of the sampling distribution, in nats; at most log(size), reached when it is uniform.
    effective_sample_size: 1 / sum(P ** 2), in transitions; at most size.
    mean_age, max_age:     counted in transitions added since; the newest has age 0.
    mean_times_sampled, max_times_sampled: how often stored transitions have been sampled.
    stale_updates:         keys of updates and writes ignored because they were no longer live.
    rejected_priorities:   non-finite priorities ignored on a GPU, where a check would wait for the device.
    saturated_priorities:  priorities too large for a mass of their own: they count as the largest.
    lost_truncations:      truncated endings without a stored final observation, because you gave none or no place was
                           free: windows that end there are never sampled. Give `final_obs=`, or raise `final_capacity`.
    unexpected_resets:     steps after an ending, with `autoreset="next_step"`, that have a reward or a flag; a reset
                           step has neither, so the loop or the environment seems to reset in another way.
    nonfinite_rewards:     rewards that were NaN or infinite; returns that contain them are, too.
    lost_terminal_obs:     final observations of terminated episodes, with `terminal_obs` or `relabel`, that found no
                           place, or lost it to one of a truncated episode: `next_obs` is the last observation there.
                           Raise `final_capacity`.

    Only trajectory buffers count the last four.
    """

    size: int
    added: int
    eligible: int
    min_priority: float
    mean_priority: float
    max_priority: float
    entropy: float
    effective_sample_size: float
    mean_age: float
    max_age: int
    mean_times_sampled: float
    max_times_sampled: int
    stale_updates: int
    rejected_priorities: int
    saturated_priorities: int
    lost_truncations: int
    unexpected_resets: int
    nonfinite_rewards: int
    lost_terminal_obs: int


@dataclass(frozen=True)
class Distribution:
    """Priorities and spread of the sampling distribution."""

    entropy: float
    effective_sample_size: float
    min_priority: float = math.nan
    mean_priority: float = math.nan
    max_priority: float = math.nan


def uniform_distribution(size: int) -> Distribution:
    """The distribution of `size` equally likely transitions."""
    return Distribution(math.log(size) if size else 0.0, float(size))


def chance_distribution(chances: np.ndarray) -> Distribution:
    """The distribution of transitions without priorities that are sampled with these (N,) float64 probabilities."""
    drawn = chances[chances > 0]
    entropy = max(0.0, -float((drawn * np.log(drawn)).sum()))
    return Distribution(entropy, 1 / float((drawn**2).sum()) if drawn.size else 0.0)


def mass_distribution(masses: Tensor, rule: MassRule) -> Distribution:
    """The distribution of (N,) int64 masses; slots of mass 0 are not counted."""
    count, total, m_log_m, squares, priorities = 0, 0, 0.0, 0.0, 0.0
    low, high = math.inf, 0.0
    for chunk in masses.split(_CHUNK):
        positive = chunk[chunk > 0]
        if not positive.numel():
            continue
        count += positive.numel()
        total += int(positive.sum())
        m = positive.to(torch.float64)
        m_log_m += float((m * m.log()).sum())
        squares += float((m * m).sum())
        low, high = min(low, float(m.min())), max(high, float(m.max()))
        if rule.alpha > 0:
            priorities += float(((m / UNIT) ** (1 / rule.alpha) - rule.eps).clamp_(min=0).sum())
    if count == 0:
        return uniform_distribution(0)
    ends = rule.priorities(np.array([low, high]))
    mean = priorities / count if rule.alpha > 0 else math.nan
    entropy = max(0.0, math.log(total) - m_log_m / total)
    return Distribution(entropy, float(total) ** 2 / squares, float(ends[0]), mean, float(ends[1]))


def rank_distribution(codes: Tensor, rule: MassRule, alpha: float) -> Distribution:
    """The distribution of (N,) int64 order codes sampled by rank; slots of code 0 are not counted."""
    count, mean = int((codes > 0).sum()), 0.0
    if not count:
        return uniform_distribution(0)
    least = NO_MASS
    for chunk in codes.split(_CHUNK):
        # divide before summing, since the sum may overflow
        mean += float((rule.priorities(chunk[chunk > 0].cpu().numpy()) / count).sum())
        least = min(least, int(torch.where(chunk > 0, chunk, NO_MASS).min()))
    low, high = map(float, rule.priorities(np.array([least, int(codes.max())])))
    masses = np.diff(cumulative_masses(codes.numel(), alpha)[:count], prepend=0)
    # masses of ranks, not of priorities
    spread = mass_distribution(torch.from_numpy(masses), MassRule.for_slots(count, 0.0, 0.0, None))
    return replace(spread, min_priority=low, mean_priority=min(mean, high), max_priority=high)
