"""A state that was saved: whether it can be that of a buffer, and what it becomes with another capacity or sampler.

What is loaded may have been edited by hand, and inner loops trust it: every slot that can be drawn must lead to memory
that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.draw_plan import DrawPlan
from gpu_replay.ops.eligibility import Flag, Streams, StreamShape
from gpu_replay.ops.mass import MassRule, OrderRule, Rule

# no counter comes near it in a lifetime, and sums of a few of them still are int64
_MOST = 2**62
# what a code of `OrderRule` can be at most
_LAST_CODE = OrderRule().mass(np.finfo(np.float64).max)


@dataclass(frozen=True)
class StateLayout:
    """What decides which state a buffer has: its slots, how it draws, and how its ring of steps is divided, if any."""

    slots: int
    plan: DrawPlan
    stream: StreamShape | None = None

    @property
    def rule(self) -> Rule:
        """How priorities become masses or codes."""
        return self.plan.rule(self.slots)

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

    def tensors(self, counters: Mapping[str, int], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the state beside the fields, without their memory; final observations are `like` these."""
        written, meta = self.written(counters), torch.device("meta")
        kept = {"times_sampled": torch.empty(written, dtype=torch.int32, device=meta)}
        if self.plan.prioritized:
            kept["masses"] = torch.empty(written, dtype=torch.int64, device=meta)
        elif self.stream is not None:
            kept["marks"] = torch.empty(written, dtype=torch.int64, device=meta)
        if self.stream is None:
            return kept
        finals = {name: tensor for name, tensor in like.items() if name.startswith("final.")}
        rows = self.stream.finals
        kept |= {
            name: torch.empty((rows, *pool.shape[1:]), dtype=pool.dtype, device=meta) for name, pool in finals.items()
        }
        return kept | Streams(self.stream, meta).views(written)


def check_state(layout: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where counters and tensors, of the right shapes, cannot be the state of such a buffer."""
    added, first, envs = counters["ADDED"], counters["FIRST"], layout.num_envs
    for name, count in counters.items():
        _require(0 <= count < _MOST or name == "TOP", f"counter {name} is {count}")
    _require(first <= added and not added % envs and not first % envs, f"FIRST is {first} and ADDED {added}")
    _require(counters["RANKED"] <= layout.written(counters), f"RANKED is {counters['RANKED']}")
    _require(counters["SORTED"] <= counters["STEP"], f"SORTED is {counters['SORTED']} and STEP {counters['STEP']}")
    _require(not layout.plan.prioritized or counters["TOP"] <= layout.most, f"TOP is {counters['TOP']}")
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
    if "ranked" in small:
        ranked = small["ranked"][: counters["RANKED"]]
        _require_within({"ranked": ranked}, "ranked", 0, layout.slots - 1)
        _require(ranked.unique().numel() == ranked.numel(), "ranked lists a slot twice")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the state contradicts itself: {what}.")


def _require_within(tensors: Mapping[str, Tensor], name: str, low: int, high: int | None = None) -> None:
    if name in tensors and tensors[name].numel():
        least, most = tensors[name].min().item(), tensors[name].max().item()
        holds = low <= least and (high is None or most <= high)
        _require(holds, f"{name} has values from {least} to {most}")


def _slots(layout: StateLayout, first: int, added: int) -> Tensor:
    """The slots of these keys in order."""
    return torch.arange(first, added) % layout.slots


def drawable(layout: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Tensor:
    """(written,) bool: which slots hold a whole transition. The stream tensors among these are looked at."""
    added = counters["ADDED"]
    first = max(counters["FIRST"], added - layout.slots)
    found = torch.zeros(layout.written(counters), dtype=torch.bool)
    slots = _slots(layout, first, added)
    if layout.stream is None:
        found[slots] = True
    elif slots.numel():
        by_age = [tensors[f"streams.{name}"][slots].view(-1, layout.num_envs) for name in ("flags", "depth")]
        final = tensors["streams.final"][slots].view(-1, layout.num_envs) if layout.stream.finals else None
        found[slots] = _complete(layout.stream, by_age[0], by_age[1], final).reshape(-1)
    return found


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
    found = torch.zeros_like(open_windows)
    for length in range(min(shape.n_step, steps)):
        stored = steps - length
        open_windows = open_windows[:stored]
        found[:stored] |= open_windows & closes[length:]
        open_windows &= going[length:]
    if shape.n_step < steps:
        full = steps - shape.n_step
        found[:full] |= open_windows[:full]
    return found


def adapted(
    old: StateLayout, new: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """A state of one buffer as that of another, which has other slots or draws otherwise; the newest slots stay.

    tensors: all but the fields, on the host, checked by `check_state`. What is returned lacks the list of ranks, which
             is made by the next sample.

    Priorities stay as they are where the other sampler has some; without any, all have the first one of new ones.
    """
    counters = {**counters, "RANKED": 0, "SORTED": 0}
    added, moves = counters["ADDED"], old.slots != new.slots
    oldest = max(0, added - min(old.slots, new.slots))
    if new.slots > old.slots:
        counters["FIRST"] = max(counters["FIRST"], oldest)
    sources, targets = _slots(old, oldest, added), _slots(new, oldest, added)

    def moved(tensor: Tensor, empty: int = 0) -> Tensor:
        out = torch.full((new.written(counters),), empty, dtype=tensor.dtype)
        out[targets] = tensor[sources]
        return out

    found = {"times_sampled": moved(tensors["times_sampled"])}
    if old.stream is not None and new.stream is not None:
        found |= {name: tensors[name] for name in tensors if name.startswith(("streams.", "final."))}
        # what is not stored is the first step of no episode
        for name, empty in (("flags", 0), ("depth", 1), ("final", 0), ("spans", -1)):
            if f"streams.{name}" in tensors:
                found[f"streams.{name}"] = moved(tensors[f"streams.{name}"], empty)
        if moves and new.stream.finals:
            counters["FINALS"] = _repack_finals(new, max(counters["FIRST"], oldest), found)
        if moves and new.stream.hindsight and added:
            _move_spans(old.stream, new.stream, oldest // new.num_envs, added // new.num_envs, tensors, found)
    can = drawable(new, counters, found)
    before = next((moved(tensors[name]) for name in ("masses", "marks") if name in tensors), can.long())
    before *= can
    rule = old.rule if old.plan.prioritized else None
    # priorities that starts still wait for, and the largest ever given
    known = new.plan.prioritized and rule is not None
    top = torch.tensor([counters["TOP"] * known])
    counters["TOP"] = int(_priorities_in(top, rule, new))
    if new.stream is not None:
        found["streams.pending"] = _priorities_in(tensors["streams.pending"] * known, rule, new)
        found["marks"] = before.clamp(max=1)
    if new.plan.prioritized:
        found["masses"] = _priorities_in(before, rule, new)
    return counters, found


def _priorities_in(masses: Tensor, rule: Rule | None, new: StateLayout) -> Tensor:
    """What masses by one rule, 0 staying 0, are in another buffer; without a rule, each is the first of new ones."""
    if rule is not None and _alike(rule, new.rule):
        return masses.clamp(max=new.most)
    out, held = torch.zeros_like(masses), masses > 0
    if bool(held.any()):
        initial = new.plan.initial
        given = np.full(int(held.sum()), 1.0 if isinstance(initial, str) else float(initial))
        if rule is not None:
            # with alpha 0 masses say nothing
            known = rule.priorities(masses[held].numpy())
            given = np.where(np.isfinite(known), known, given)
        out[held] = torch.from_numpy(new.rule.masses(given)[0])
    return out


def _alike(one: Rule, other: Rule) -> bool:
    """Whether they make the same of a priority, up to the largest mass."""
    if isinstance(one, MassRule) and isinstance(other, MassRule):
        return replace(one, limit=other.limit) == other
    return one == other


def _repack_finals(new: StateLayout, first: int, found: dict[str, Tensor]) -> int:
    """Put the kept final observations of the steps from this key on into the first rows; returns how many there are.

    found: the stream tensors and final observations, of which those that this concerns are replaced.
    """
    finals = 0 if new.stream is None else new.stream.finals
    owners = found["streams.owner"]
    rows = owners.argsort()
    rows = rows[owners[rows] >= first]
    found["streams.owner"] = torch.full((finals,), -1, dtype=torch.int64)
    found["streams.owner"][: rows.numel()] = owners[rows]
    places = torch.arange(rows.numel(), dtype=torch.int32)
    found["streams.final"] = torch.zeros_like(found["streams.final"])
    found["streams.final"][owners[rows] % new.slots] = places
    for name in [name for name in found if name.startswith("final.")]:
        pool = found[name]
        found[name] = torch.zeros((finals, *pool.shape[1:]), dtype=pool.dtype)
        found[name][: rows.numel()] = pool[rows]
    return rows.numel()


def _move_spans(
    old: StreamShape,
    new: StreamShape,
    oldest: int,
    count: int,
    tensors: Mapping[str, Tensor],
    found: dict[str, Tensor],
) -> None:
    """Keep what is known of the episodes whose first step is older than the `oldest` that has moved along.

    It stands at the place of that first step, or with the environment where the ring is too short; see `Streams`.
    """
    depth, spans = (found[f"streams.{name}"].view(-1, new.num_envs) for name in ("depth", "spans"))
    parted = found["streams.parted"] = tensors["streams.parted"].clone()
    before = tensors["streams.spans"].view(-1, new.num_envs)
    for env in depth[oldest % new.steps].nonzero().view(-1).tolist():
        first = oldest - int(depth[oldest % new.steps, env])
        if first >= count - old.steps:
            parted[env] = before[first % old.steps, env]
        if first >= count - new.steps:
            depth[first % new.steps, env] = 0
            spans[first % new.steps, env] = parted[env]
