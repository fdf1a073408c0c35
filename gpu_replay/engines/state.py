"""Trees and counters of one buffer, in the memory of its device, and what makes them anew from a saved state.

The bounds of a saved state are checked, and what is stored may become rows of another kind or under another sampler.
The files of a checkpoint carry checksums. A state that somebody edited may draw nonsense, but no address that a loop or
a kernel makes of its numbers lies outside of the buffer's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.storage import Storage
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import NO_KEY, Counter, new_counters
from gpu_replay.ops.masses import DeviceMasses, MassRule, MassTree
from gpu_replay.ops.ranks import device_ranks_bytes, host_ranks_bytes
from gpu_replay.ops.ring import StreamShape, commit
from gpu_replay.ops.steps import Flag
from gpu_replay.samplers import Sampler

# where tensors have sizes and no memory
META = torch.device("meta")
_SOURCES = {"running": Counter.MAX_MASS, "stored": Counter.HIGHEST}


class SamplerState:
    """The priorities of all slots, which of them can be drawn, and the counters.

    streams:       of a trajectory buffer, where stored slots exist that cannot be drawn, and that no update may make
                   eligible; they have mass 0.
    rule:          how priorities become masses, or order codes for draws by rank.
    tree:          of these, without sums for draws by rank; None for samplers without priorities.
    eligible_tree: of ones for eligible starts; None where all stored slots can be drawn, or `tree` alone will do.
    """

    def __init__(self, sampler: Sampler, storage: Storage, backend: Backend, seed: int) -> None:
        self.sampler, self.base = sampler, sampler.base
        self.slots, self.streams = storage.capacity, storage.streams
        slots, device = storage.capacity, storage.device
        self.rule = self.base.rule(slots)
        self.tree = MassTree(slots, device, backend, summed=self.base.summed) if self.base.prioritized else None
        counts_starts = self.streams is not None and sampler.needs_start_tree
        self.eligible_tree = MassTree(slots, device, backend) if counts_starts else None
        self.counters = new_counters(device, seed)
        # of transitions, no fewer than were excluded and are live
        self.excluded = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.counters.nbytes + sum(tree.nbytes for tree in self.trees)

    @property
    def trees(self) -> list[MassTree]:
        """The trees that exist."""
        return [tree for tree in (self.tree, self.eligible_tree) if tree is not None]

    @property
    def initial(self) -> tuple[int, int]:
        """The counter that has the mass of new transitions, -1 for none, and what it is without that, or before any."""
        setting = self.base.initial
        if self.tree is None:
            # every start counts one
            return -1, 1
        return _SOURCES.get(str(setting), -1), self.rule.mass(1.0 if isinstance(setting, str) else float(setting))

    def initial_mass(self) -> int:
        """The mass that a start without a priority of its own gets now; on CUDA this waits for the device."""
        source, mass = self.initial
        if source == Counter.HIGHEST:
            self.counters[source] = self.masses.masses.max()
        return (int(self.counters[source]) if source >= 0 else 0) or mass

    @property
    def masses(self) -> MassTree:
        """The tree of masses or codes, for samplers with priorities."""
        return self.trees[0]

    @property
    def eligible(self) -> MassTree:
        """A trajectory buffer's tree with 0 for steps that are not eligible: of ones if it has that, else of masses."""
        return self.trees[-1]

    @property
    def summed(self) -> MassTree | None:
        """The tree of masses; None for draws that know no masses."""
        return self.tree if self.base.summed else None

    def clear(self) -> None:
        """Make nothing eligible; keys and statistics go on."""
        self.counters[Counter.FIRST] = self.counters[Counter.ADDED]
        self.counters[Counter.ELIGIBLE] = 0
        for tree in self.trees:
            tree.clear()
        self.excluded = 0

    def left(self, stored: int, needed: int) -> int:
        """Transitions of those stored that were not excluded, exact only below `needed`; then it waits for the device.

        All that can be drawn have a mass.
        """
        if self.tree is not None and self.excluded and stored - self.excluded < needed:
            self.excluded = stored - int((self.tree.masses > 0).sum())
        return stored - self.excluded

    def exclude(self, keys: Tensor) -> None:
        """Take the mass of the rows of (m,) live keys, and mark those of steps; keys that are not live are counted.

        keys: on the device. Waits for nothing; the last line changes all that changes.
        """
        keys, streams = keys.sort().values, self.streams
        live, stale = self._live(keys)
        # of a repeated key one is taken
        chosen = live & (keys.diff(prepend=keys[:1] - 1) != 0)
        slots = torch.where(chosen, keys % self.slots, 0)
        changes: list[tuple[Tensor, int, Tensor, Tensor]] = []
        for tree in self.trees:
            masses = torch.where(chosen, tree.masses[slots], 0)
            changes += [(level, 0, slots // tree.fanout**each, -masses) for each, level in enumerate(tree.levels)]
            tree.mark_all_changed()
        counts, more = [self.counters[Counter.STALE]], [stale]
        if streams is not None:
            marks = torch.where(chosen, ~streams.flags[slots] & Flag.EXCLUDED, 0)
            changes.append((streams.flags, 0, slots, marks))
            counts.append(self.counters[Counter.ELIGIBLE])
            more.append(-(chosen & (self.eligible.masses[slots] > 0)).sum())
        else:
            self.excluded += len(keys)
        commit(None, starmap(Tensor.index_add_, changes), map(Tensor.add_, counts, more))

    def write(self, stores: Mapping[str, Tensor], keys: Tensor, values: Mapping[str, Tensor]) -> None:
        """Store rows of some fields under (m,) live keys, the last of a repeated key; other keys are counted.

        stores: of the fields, as the device sees them. Waits for nothing; the last line changes all that changes.
        """
        if not keys.numel():
            return
        live, stale = self._live(keys)
        # rows of one key all write the last of them, and rows without a live key what another row writes
        ordered, place = keys.sort(stable=True)
        last = place[torch.searchsorted(ordered, keys, right=True) - 1]
        source = torch.where(live, last, last[live.byte().argmax(0, keepdim=True)])
        slots, some = keys[source] % self.slots, live.any()
        # with no live key at all, what is stored
        made = [(name, torch.where(some, rows.detach()[source], stores[name][slots])) for name, rows in values.items()]
        changes = [(stores[name], 0, slots, rows) for name, rows in made]
        commit(None, starmap(Tensor.index_copy_, changes), map(Tensor.add_, [self.counters[Counter.STALE]], [stale]))

    def _live(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(m,) bool: which of these keys are live; and how many are not, and are meant as keys."""
        added = self.counters[Counter.ADDED]
        live = (keys >= torch.maximum(self.counters[Counter.FIRST], added - self.slots)) & (keys < added)
        return live, (~live & (keys != NO_KEY)).sum()

    def rebuild(self, written: int) -> None:
        """Recompute everything that is derived from the restored leaves of the first `written` slots."""
        for tree in self.trees:
            tree.masses[written:].zero_()
        if self.tree is not None:
            self.tree.build()
        if self.eligible_tree is not None:
            if self.tree is not None:
                self.eligible_tree.masses.copy_(self.tree.masses > 0)
            self.eligible_tree.build()
        if self.streams is not None:
            self.counters[Counter.ELIGIBLE] = int((self.eligible.masses > 0).sum())
        elif self.tree is not None:
            added, first = (int(self.counters[each]) for each in (Counter.ADDED, Counter.FIRST))
            stored = min(added - first, self.slots)
            self.excluded = stored
            self.left(stored, stored)


def sizes_of(storage: Storage, sampler: Sampler, backend: Backend) -> dict[str, int]:
    """Bytes that a buffer will take, by name, but for a few constants: those of its storage, "priorities", "ranks" and
    "marks".

    storage: on the meta device, where all the rest is made too.
    """
    slots, base = storage.capacity, sampler.base
    state = SamplerState(sampler, storage, backend, 0)
    sizes = storage.sizes
    if state.tree is not None:
        # on a device each slot also has a stamp, which finds the last of repeated keys
        stamps = 0 if backend == "host" else DeviceMasses(state.tree, state.rule, state.initial).stamps.nbytes
        sizes["priorities"] = state.tree.nbytes + stamps
        if not base.summed and backend == "host":
            sizes["ranks"] = host_ranks_bytes(slots)
        elif not base.summed:
            sizes["ranks"] = device_ranks_bytes(slots)
    return sizes if state.eligible_tree is None else sizes | {"marks": state.eligible_tree.nbytes}


# no counter comes near it in a lifetime, and sums of a few of them still are int64
_MOST = 2**62
# what of a state has another form where rows or samplers are of another kind
SPECIFIC = ("masses", "marks", "streams.pending")


@dataclass(frozen=True)
class StateLayout:
    """Settings that determine the layout of a state: slots, the sampler, and the shape of a stream, if any."""

    slots: int
    sampler: Sampler
    stream: StreamShape | None = None

    @property
    def rule(self) -> MassRule:
        """How priorities become masses or codes."""
        return self.sampler.base.rule(self.slots)

    @property
    def num_envs(self) -> int:
        """Slots that are written together."""
        return 1 if self.stream is None else self.stream.num_envs

    def specific(self, written: int) -> dict[str, Tensor]:
        """Memory on the CPU for what the state of such a buffer keeps in a form of its own."""
        sizes: dict[str, tuple[int, ...]] = {"masses": (written,)} if self.sampler.base.prioritized else {}
        if self.stream is not None:
            sizes = (sizes or {"marks": (written,)}) | {"streams.pending": (self.stream.lines, self.num_envs)}
        return {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name, size in sizes.items()}


def check_state(layout: StateLayout, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for numbers, in tensors of the right shapes, that could lead out of a buffer's memory."""
    added, first, envs, shape = counters["ADDED"], counters["FIRST"], layout.num_envs, layout.stream
    largest = layout.rule.limit
    for name, count in counters.items():
        _require(0 <= count < _MOST or name == "TOP", f"counter {name} is {count}")
    _require(first <= added and not added % envs and not first % envs, f"FIRST is {first} and ADDED {added}")
    _require(not layout.sampler.base.prioritized or counters["TOP"] <= largest, f"TOP is {counters['TOP']}")
    bounds: dict[str, tuple[int, int | None]] = {
        "times_sampled": (0, None),
        "masses": (0, largest),
        "marks": (0, 1),
    }
    if shape is not None:
        bounds |= {
            "streams.flags": (0, 2 * Flag.EXCLUDED - 1),
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
    found = targets & (ages >= depth.clamp(max=shape.stack - 1)) & (flags & Flag.EXCLUDED == 0)
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


def turned(before: StateLayout, after: StateLayout, masses: Tensor) -> Tensor:
    """Masses or codes of one layout as those of another, and 0 where there is no priority to tell them from."""
    both = before.sampler.base.prioritized and after.sampler.base.prioritized
    if both and before.rule == after.rule:
        return masses
    if not both or before.sampler.base.alpha == 0 or not masses.numel():
        return torch.zeros_like(masses)
    flat = masses.reshape(-1).numpy()
    priorities = before.rule.priorities(np.maximum(flat, 1))
    return torch.from_numpy(np.where(flat > 0, after.rule.masses(priorities)[0], 0)).view(masses.shape)


def change_kind(
    before: StateLayout,
    after: StateLayout,
    counters: Mapping[str, int],
    saved: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    initial: Callable[[], int],
) -> None:
    """Let a restored state be that of other rows or of another sampler, in place; priorities stay where both keep them.

    saved:   what buffers of other kinds keep in other forms, as it was saved, on the CPU: `SPECIFIC`.
    tensors: of this buffer's state; those of `SPECIFIC` are filled.
    initial: gives the mass of rows that had none, nor one to come, when all others are in `tensors`.
    """
    shape, envs, end = after.stream, after.num_envs, counters["ADDED"] // after.num_envs
    first = max(counters["FIRST"] // envs, end - after.slots // envs)
    numbers = torch.arange(first, end)
    slots = (numbers[:, None] % (after.slots // envs) * envs + torch.arange(envs)).reshape(-1)
    old = next((saved[name] for name in ("masses", "marks") if name in saved), None)
    given = torch.zeros((end - first, envs), dtype=torch.int64) if old is None else old[slots].view(-1, envs)
    if shape is not None:
        # of the last steps priorities may wait until they begin a row
        kept = saved["streams.pending"]
        late = numbers[max(0, end - first - len(kept)) :]
        waiting = torch.zeros_like(given)
        waiting[late - first] = kept[late % len(kept)]
        given = torch.where(given > 0, given, waiting)
    if shape is None and "masses" not in tensors and not bool(given.all()):
        raise ValueError(
            f"rows of this buffer were excluded, and one that samples by {after.sampler} keeps no tree to leave them "
            "out with. Load it with Proportional(alpha=0), which is uniform too."
        )
    given = turned(before, after, given)
    begins = torch.zeros(min(counters["ADDED"], after.slots), dtype=torch.bool)
    if old is not None and before.stream == shape:
        begins = old > 0
    elif shape is None:
        begins[slots] = True
    else:
        flags, depth = (tensors[f"streams.{name}"].cpu() for name in ("flags", "depth"))
        flags &= ~Flag.TARGET & 0xFF
        there = flags[slots].view(-1, envs)
        targets = has_target(shape, there)
        if shape.length:
            flags[slots] |= (targets.reshape(-1) * Flag.TARGET).to(torch.uint8)
        tensors["streams.flags"].copy_(flags)
        begins[slots] = starts(shape, there, depth[slots].view(-1, envs), targets, first).reshape(-1)
    if "marks" in tensors:
        tensors["marks"].copy_(begins)
    if "masses" in tensors:
        leaves = torch.zeros(len(begins), dtype=torch.int64)
        leaves[slots] = given.reshape(-1)
        tensors["masses"].copy_(leaves * begins)
        tensors["masses"].copy_(torch.where(leaves > 0, leaves, initial()) * begins)
    if shape is not None:
        late, waiting = numbers[-shape.lines :], torch.zeros((shape.lines, envs), dtype=torch.int64)
        waiting[late % shape.lines] = given[late - first]
        tensors["streams.pending"].copy_(waiting)
