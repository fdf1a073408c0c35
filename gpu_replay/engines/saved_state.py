"""Checks that a saved state is a valid state of a buffer.

A loaded state may have been edited by hand, and inner loops trust it: every slot that can be drawn must lead to memory
that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.eligibility import Flag, StreamShape
from gpu_replay.ops.mass import OrderRule, Rule
from gpu_replay.samplers import Sampler

# no counter comes near it in a lifetime, and sums of a few of them still are int64
_MOST = 2**62
# the largest code of `OrderRule`
_LAST_CODE = OrderRule().mass(np.finfo(np.float64).max)


@dataclass(frozen=True)
class StateLayout:
    """Settings that determine the layout of a state: slots, the sampler, and the shape of a stream, if any."""

    slots: int
    sampler: Sampler
    stream: StreamShape | None = None

    @property
    def rule(self) -> Rule:
        """How priorities become masses or codes."""
        return self.sampler.base.rule(self.slots)

    @property
    def most(self) -> int:
        """The largest mass or code of one slot."""
        return min(self.rule.limit, _LAST_CODE) if self.rule.ordered else self.rule.limit

    @property
    def num_envs(self) -> int:
        """Slots that are written together."""
        return 1 if self.stream is None else self.stream.num_envs

    def written(self, counters: Mapping[str, int]) -> int:
        """Slots that were ever written."""
        return min(counters["ADDED"], self.slots)


def check_state(layout: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where counters and tensors, of the right shapes, cannot be the state of such a buffer."""
    added, first, envs = counters["ADDED"], counters["FIRST"], layout.num_envs
    for name, count in counters.items():
        _require(0 <= count < _MOST or name == "TOP", f"counter {name} is {count}")
    _require(first <= added and not added % envs and not first % envs, f"FIRST is {first} and ADDED {added}")
    _require(not layout.sampler.base.prioritized or counters["TOP"] <= layout.most, f"TOP is {counters['TOP']}")
    small = {name: tensor.cpu() for name, tensor in tensors.items() if not name.startswith(("fields.", "final."))}
    _require_within(small, "times_sampled", 0)
    if layout.stream is not None:
        shape = layout.stream
        bounds: dict[str, tuple[int, int | None]] = {
            "flags": (0, 31),
            "depth": (0, added // envs),
            "pending": (0, layout.most),
            "final": (0, shape.finals - 1),
            "owner": (-1, added - 1),
            "spans": (-1, None),
            "parted": (-1, None),
        }
        for name, bound in bounds.items():
            _require_within(small, f"streams.{name}", *bound)
    with torch.device("cpu"):
        allowed = drawable(layout, counters, small)
    for name, most in (("masses", layout.most), ("marks", 1)):
        if name in small:
            _require_within(small, name, 0, most)
            wrong = (small[name] > 0) & ~allowed
            if layout.stream is None:
                wrong |= (small[name] == 0) & allowed
            _require(not bool(wrong.any()), f"{name} has slots that cannot be drawn, or lacks some that can")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the state contradicts itself: {what}.")


def _require_within(tensors: Mapping[str, Tensor], name: str, low: int, high: int | None = None) -> None:
    if name in tensors and tensors[name].numel():
        least, most = tensors[name].min().item(), tensors[name].max().item()
        holds = low <= least and (high is None or most <= high)
        _require(holds, f"{name} has values from {least} to {most}")


def drawable(layout: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Tensor:
    """(written,) bool: which slots hold a whole transition. The stream tensors among these are looked at."""
    added = counters["ADDED"]
    first = max(counters["FIRST"], added - layout.slots)
    mask = torch.zeros(layout.written(counters), dtype=torch.bool)
    slots = torch.arange(first, added) % layout.slots
    if layout.stream is None:
        mask[slots] = True
    elif slots.numel():
        by_age = [tensors[f"streams.{name}"][slots].view(-1, layout.num_envs) for name in ("flags", "depth")]
        final = tensors["streams.final"][slots].view(-1, layout.num_envs) if layout.stream.finals else None
        mask[slots] = _complete(layout.stream, by_age[0], by_age[1], final).reshape(-1)
    return mask


def _complete(shape: StreamShape, flags: Tensor, depth: Tensor, final: Tensor | None) -> Tensor:
    """(steps, envs) bool: which steps, from the oldest stored one on, begin a window that is stored with its stack."""
    steps = len(flags)
    ages = torch.arange(steps)[:, None]
    ended = flags & (Flag.TERMINATED | Flag.TRUNCATED)
    # the observation after a truncated step: that of a dead one, or one that is kept
    followed = (flags & Flag.CUT == 0) & (ages < steps - 1) if shape.next_step else (flags & Flag.FINAL != 0)
    if not shape.next_step and final is None:
        followed = torch.zeros_like(followed)
    closes = (flags & Flag.TERMINATED != 0) | ((ended != 0) & followed)
    going = (ended == 0) & (flags & Flag.CUT == 0)
    open_windows = (flags & Flag.DEAD == 0) & (ages >= depth.clamp(max=shape.stack - 1))
    complete = torch.zeros_like(open_windows)
    for length in range(min(shape.n_step, steps)):
        stored = steps - length
        open_windows = open_windows[:stored]
        complete[:stored] |= open_windows & closes[length:]
        open_windows &= going[length:]
    if shape.n_step < steps:
        full = steps - shape.n_step
        complete[:full] |= open_windows[:full]
    return complete
