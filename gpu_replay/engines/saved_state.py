"""Checks the bounds of a saved state, and lets stored steps begin rows of another kind.

The files of a checkpoint carry checksums. A state that somebody edited may draw nonsense, but no address that a loop or
a kernel makes of its numbers lies outside of the buffer's memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.eligibility import Flag, StreamShape
from gpu_replay.ops.mass import OrderRule
from gpu_replay.samplers import Sampler

# no counter comes near it in a lifetime, and sums of a few of them still are int64
_MOST = 2**62
# the largest code of `OrderRule`
_LAST_CODE = OrderRule().mass(np.finfo(np.float64).max)


def check_state(
    sampler: Sampler, slots: int, shape: StreamShape | None, counters: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for numbers, in tensors of the right shapes, that could lead out of the memory of a buffer with
    this sampler, of so many slots; shape: of its stream, if it has one.
    """
    added, first, rule = counters["ADDED"], counters["FIRST"], sampler.base.rule(slots)
    envs, largest = 1 if shape is None else shape.num_envs, min(rule.limit, _LAST_CODE) if rule.ordered else rule.limit
    for name, count in counters.items():
        _require(0 <= count < _MOST or name == "TOP", f"counter {name} is {count}")
    _require(first <= added and not added % envs and not first % envs, f"FIRST is {first} and ADDED {added}")
    _require(not sampler.base.prioritized or counters["TOP"] <= largest, f"TOP is {counters['TOP']}")
    bounds: dict[str, tuple[int, int | None]] = {
        "times_sampled": (0, None),
        "masses": (0, largest),
        "marks": (0, 1),
    }
    if shape is not None:
        bounds |= {
            "streams.flags": (0, 2 * Flag.TARGET - 1 if shape.length else Flag.TARGET - 1),
            "streams.depth": (0, added // envs),
            "streams.pending": (0, largest),
            "streams.final": (0, shape.finals - 1),
            "streams.owner": (-1, added - 1),
            "streams.spans": (-1, None),
            "streams.parted": (-1, None),
        }
        if not shape.next_step and not shape.finals:
            kept = bool((tensors["streams.flags"] & Flag.FINAL).any())
            _require(not kept, "its flags name final observations, of which it keeps none")
    for name, (low, high) in bounds.items():
        if name in tensors and tensors[name].numel():
            least, most = tensors[name].min().item(), tensors[name].max().item()
            _require(low <= least and (high is None or most <= high), f"{name} has values from {least} to {most}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the state contradicts itself: {what}.")


def starts(shape: StreamShape, flags: Tensor, depth: Tensor, targets: Tensor, first: int) -> Tensor:
    """(steps, envs) bool: which steps, the oldest stored of which is number `first`, begin a row of this buffer.

    targets: as `has_target` gives them.
    """
    steps, stored = len(flags), max(0, len(flags) - shape.ahead)
    ages = torch.arange(steps)[:, None]
    found = targets & (ages >= depth.clamp(max=shape.stack - 1))
    if shape.length and steps:
        dead, cut = flags & Flag.DEAD != 0, (flags & Flag.CUT != 0) & (ages < steps - 1)
        settled = targets | dead | cut | (flags & Flag.TRUNCATED != 0 if not shape.next_step else False)
        # steps are settled in their order
        settled = settled.flip(0).cummax(0).values.flip(0)[shape.ahead :]
        found[:stored] &= settled & ((first + ages[:stored]) % shape.stride == 0)
        if shape.strict:
            found[:stored] &= (depth[shape.ahead :] >= shape.ahead) & ~dead[shape.ahead :]
        found[stored:] = False
    return found


def has_target(shape: StreamShape, flags: Tensor) -> Tensor:
    """(steps, envs) bool: which steps, from the oldest stored one on, begin a window that is stored."""
    steps = len(flags)
    ages = torch.arange(steps)[:, None]
    ended = flags & (Flag.TERMINATED | Flag.TRUNCATED)
    # the observation after a truncated step: that of a dead one, or one that is kept
    followed = (flags & Flag.CUT == 0) & (ages < steps - 1) if shape.next_step else (flags & Flag.FINAL != 0)
    closes = (flags & Flag.TERMINATED != 0) | ((ended != 0) & followed)
    going = (ended == 0) & (flags & Flag.CUT == 0)
    open_windows = flags & Flag.DEAD == 0
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


def change_rows(
    shape: StreamShape, counters: Mapping[str, int], tensors: Mapping[str, Tensor], pending: Tensor, initial: int
) -> None:
    """Let the stored steps of a restored state begin rows of another kind, in place; priorities stay.

    shape:   of the stream with the new rows.
    tensors: of the state but for `streams.pending`, which is filled from those of the old rows, (lines, num_envs).
    initial: the mass of starts that had none, nor a priority to come.
    """
    envs, end = shape.num_envs, counters["ADDED"] // shape.num_envs
    first = max(counters["FIRST"] // envs, end - shape.steps)
    numbers = torch.arange(first, end)
    slots = (numbers[:, None] % shape.steps * envs + torch.arange(envs)).reshape(-1)
    kept, name = pending.cpu(), "masses" if "masses" in tensors else "marks"
    leaves = tensors[name].cpu()
    # of the last steps priorities may wait until they begin a row
    given = torch.zeros((end - first, envs), dtype=torch.int64)
    late = min(end - first, len(kept))
    given[end - first - late :] = kept[numbers[end - first - late :] % len(kept)]
    old = leaves[slots].view(-1, envs)
    given = torch.where(old > 0, old, given)
    flags = tensors["streams.flags"].cpu() & (0xFF - Flag.TARGET)
    here = flags[slots].view(-1, envs)
    targets = has_target(shape, here)
    if shape.length:
        flags[slots] |= (targets.reshape(-1) * Flag.TARGET).to(torch.uint8)
    tensors["streams.flags"].copy_(flags)
    begins = starts(shape, here, tensors["streams.depth"].cpu()[slots].view(-1, envs), targets, first)
    masses = torch.where(given > 0, given, initial if name == "masses" else 1) * begins
    leaves.zero_()
    leaves[slots] = masses.reshape(-1)
    tensors[name].copy_(leaves)
    waiting, late = torch.zeros((shape.lines, envs), dtype=torch.int64), min(end - first, shape.lines)
    waiting[numbers[end - first - late :] % shape.lines] = given[end - first - late :]
    tensors["streams.pending"].copy_(waiting)
