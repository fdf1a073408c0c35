"""Launchers that give transitions their masses: new ones as they enter, old ones when their priority is updated."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree

_FANOUT_WITHOUT_TREE = 128


class DeviceMasses:
    """What the mass kernels need beside the tree: the rule's numbers and, for updates, one stamp per slot."""

    def __init__(self, tree: MassTree, rule: Rule, initial: int) -> None:
        device = tree.levels[0].device
        self.tree = tree
        # whether the leaves are order codes
        self.ordered = rule.ordered
        self.numbers = torch.tensor([rule.alpha, rule.eps, rule.clip], dtype=torch.float64, device=device)
        self.masses = torch.tensor([initial, rule.limit], dtype=torch.int64, device=device)
        self.stamps = torch.full((tree.slots,), -1, dtype=torch.int32, device=device)

    @property
    def edges(self) -> tuple[Tensor, ...]:
        """The extremes that an update must mark."""
        return tuple(edge for edge in (self.tree.low, self.tree.high) if edge is not None)

    @property
    def nbytes(self) -> int:
        """Bytes beside the tree's."""
        return self.numbers.nbytes + self.masses.nbytes + self.stamps.nbytes


def blocks_per_program(rows: int, fanout: int, interpreted: bool) -> int:
    """Blocks of `fanout` slots that one program admits; as many as hold the rows where a program is dear."""
    return min(1024, 1 << (-(-rows // fanout)).bit_length()) if interpreted else 8


def keys_per_program(batch: int, interpreted: bool) -> int:
    """Keys of one program; as many as there are where a program is dear. On a GPU one per thread."""
    return min(1024, 1 << (batch - 1).bit_length()) if interpreted else 128


def keys_together(batch: int, interpreted: bool) -> int:
    """Keys of the one program that updates a whole batch; 0 of a batch that takes several, and a launch before them.

    On a GPU few keys and many are different code to compile. One that holds many more than there are would make masses
    for nothing, and one of thousands of keys would leave the rest of the GPU idle.
    """
    if batch > 1024:
        return 0
    if interpreted:
        return 1 << (batch - 1).bit_length()
    return 256 if batch <= 256 else 1024


def launch_admit(
    masses: DeviceMasses | None,
    counters: Tensor,
    times_sampled: Tensor,
    rows: int,
    priorities: Tensor | None,
    source: int | None,
) -> Tensor:
    """Device: count in `rows` transitions that were just written and return their (rows,) keys; one launch.

    source: where the initial mass is found if it is there; else it is the one given to `masses`.
    """
    from gpu_replay.kernels.priorities import admit_kernel

    device, capacity = counters.device, times_sampled.numel()
    skipped = max(0, rows - capacity)
    keys = torch.empty(rows, dtype=torch.int64, device=device)
    tree = None if masses is None else masses.tree
    fanout = _FANOUT_WITHOUT_TREE if tree is None else tree.fanout
    blocks = blocks_per_program(rows - skipped, fanout, device.type == "cpu")
    segment = -(-(-(-(rows - skipped) // fanout) + 1) // blocks)
    programs = max(2 * segment, -(-skipped // (blocks * fanout)))
    admit_kernel[(programs,)](
        () if tree is None else tree.levels,
        () if masses is None else masses.edges,
        counters,
        times_sampled,
        keys,
        counters if priorities is None else priorities,
        counters if masses is None else masses.numbers,
        counters if masses is None else masses.masses,
        rows,
        skipped,
        capacity,
        segment,
        LEVELS=0 if tree is None else len(tree.levels),
        EDGES=0 if masses is None else len(masses.edges),
        FANOUT=fanout,
        SHIFT=fanout.bit_length() - 1,
        BLOCKS=blocks,
        GIVEN=priorities is not None,
        ORDERED=masses is not None and masses.ordered,
        SOURCE=-1 if source is None else int(source),
        ADDED=int(Counter.ADDED),
        MAX_MASS=int(Counter.MAX_MASS),
        PENDING_MAX_MASS=int(Counter.PENDING_MAX_MASS),
        REJECTED=int(Counter.REJECTED),
        SATURATED=int(Counter.SATURATED),
        TICKET=int(Counter.TICKET),
        EDGE_HIGH=int(Counter.EDGE_HIGH),
    )
    return keys


def launch_update(
    masses: DeviceMasses | None, counters: Tensor, capacity: int, keys: Tensor, priorities: Tensor, *, sparse: bool
) -> None:
    """Device: new masses for live keys, the last of a repeated key; one launch, two for more keys than a program takes.

    sparse: whether stored slots without mass exist, which no update may wake.
    """
    from gpu_replay.kernels.priorities import settle_kernel, update_kernel

    batch, interpreted = keys.numel(), keys.device.type == "cpu"
    together = keys_together(batch, interpreted) if masses is not None else 0
    draws = together or keys_per_program(batch, interpreted)
    grid = (-(-batch // draws),)
    positions = {"ADDED": int(Counter.ADDED), "FIRST": int(Counter.FIRST), "DRAWS": draws}
    tree = None if masses is None else masses.tree
    if masses is not None and not together:
        settle_kernel[grid](keys, counters, masses.stamps, batch, capacity, **positions)
    update_kernel[grid](
        keys,
        priorities,
        () if tree is None else tree.levels,
        () if masses is None else masses.edges,
        counters if masses is None else masses.stamps,
        counters,
        counters if masses is None else masses.numbers,
        counters if masses is None else masses.masses,
        batch,
        capacity,
        LEVELS=0 if tree is None else len(tree.levels),
        EDGES=0 if masses is None else len(masses.edges),
        SHIFT=0 if tree is None else tree.fanout.bit_length() - 1,
        MAX_MASS=int(Counter.MAX_MASS),
        STALE=int(Counter.STALE),
        REJECTED=int(Counter.REJECTED),
        SATURATED=int(Counter.SATURATED),
        SPARSE=sparse,
        ORDERED=masses is not None and masses.ordered,
        SETTLES=together > 0,
        # a program of many keys has more threads, so that none of them has many
        num_warps=8 if together else 4,
        **positions,
    )
