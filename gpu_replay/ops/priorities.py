"""Launchers that give transitions their masses: new ones as they enter, old ones when their priority is updated."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.ops.draws import per_program, reciprocal
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
        self.rule = (
            torch.tensor([rule.alpha, rule.eps, rule.clip], dtype=torch.float64, device=device),
            torch.tensor([initial, rule.limit], dtype=torch.int64, device=device),
        )
        self.stamps = torch.full((tree.slots,), -1, dtype=torch.int32, device=device)

    @property
    def extremes(self) -> tuple[Tensor, ...]:
        """The extremes that an update makes dirty."""
        return tuple(each for each in (self.tree.low, self.tree.high) if each is not None)

    @property
    def nbytes(self) -> int:
        """Bytes beside the tree's."""
        return sum(part.nbytes for part in self.rule) + self.stamps.nbytes


def blocks_per_program(rows: int, fanout: int, interpreted: bool) -> int:
    """Blocks of `fanout` slots of one program that inserts; as many as hold the rows under the interpreter."""
    return min(1024, 1 << (-(-rows // fanout)).bit_length()) if interpreted else 8


def keys_together(batch: int, interpreted: bool) -> int:
    """Keys of the one program that updates a whole batch; 0 of a batch that takes several, and a launch before them.

    On a GPU few keys and many are different code to compile: 256, 512 or 1024. One that holds many more than there are
    would make masses for nothing, and one of thousands of keys would leave the rest of the GPU idle.
    """
    if batch > 1024:
        return 0
    if interpreted:
        return 1 << (batch - 1).bit_length()
    return next(keys for keys in (256, 512, 1024) if batch <= keys)


def update_warps(together: int) -> int:
    """Warps of a program that has so many keys, or 0 of several: a thread for each, but no more than AMD's GPUs have.

    Where a thread has several, what it loads goes from thread to thread through shared memory.
    """
    return min(16, max(4, together // 32))


def launch_insert(
    masses: DeviceMasses | None,
    counters: Tensor,
    times_sampled: Tensor,
    rows: int,
    priorities: Tensor | None,
    source: int | None,
    keys: Tensor | None = None,
) -> Tensor:
    """Device: count in `rows` transitions that were just written and return their (rows,) keys; one launch.

    source: where the initial mass is found if it is there; else it is the one given to `masses`.
    keys:   (rows,) int64 to return them in, so that nothing is allocated here.
    """
    from gpu_replay.kernels.priorities import insert_kernel

    device, capacity = counters.device, times_sampled.numel()
    skipped = max(0, rows - capacity)
    if keys is None:
        keys = torch.empty(rows, dtype=torch.int64, device=device)
    tree = None if masses is None else masses.tree
    fanout = _FANOUT_WITHOUT_TREE if tree is None else tree.fanout
    blocks = blocks_per_program(rows - skipped, fanout, device.type == "cpu")
    segment = -(-(-(-(rows - skipped) // fanout) + 1) // blocks)
    programs = max(2 * segment, -(-skipped // (blocks * fanout)))
    insert_kernel[(programs,)](
        () if tree is None else tree.levels,
        () if masses is None else masses.extremes,
        () if masses is None else masses.rule,
        counters,
        times_sampled,
        keys,
        counters if priorities is None else priorities,
        rows,
        skipped,
        capacity,
        segment,
        FANOUT=fanout,
        SHIFT=fanout.bit_length() - 1,
        BLOCKS=blocks,
        GIVEN=priorities is not None,
        ORDERED=masses is not None and masses.ordered,
        SOURCE=-1 if source is None else source,
    )
    return keys


def launch_update(
    masses: DeviceMasses | None, counters: Tensor, capacity: int, keys: Tensor, priorities: Tensor, *, sparse: bool
) -> None:
    """Device: new masses for live keys, the last of a repeated key; one launch, two for more keys than a program takes.

    sparse: whether stored slots without mass exist, which no update may give any.
    """
    from gpu_replay.kernels.priorities import settle_kernel, update_kernel

    batch, interpreted, per_capacity = keys.numel(), keys.device.type == "cpu", reciprocal(capacity)
    together = keys_together(batch, interpreted) if masses is not None else 0
    draws = together or per_program(128, batch, interpreted)
    grid = (-(-batch // draws),)
    tree = None if masses is None else masses.tree
    try:
        if masses is not None and not together:
            settle_kernel[grid](keys, counters, masses.stamps, batch, capacity, per_capacity, DRAWS=draws)
        update_kernel[grid](
            keys,
            priorities,
            () if tree is None else tree.levels,
            () if masses is None else masses.extremes,
            () if masses is None else masses.rule,
            counters if masses is None else masses.stamps,
            counters,
            batch,
            capacity,
            per_capacity,
            SHIFT=0 if tree is None else tree.fanout.bit_length() - 1,
            SPARSE=sparse,
            ORDERED=masses is not None and masses.ordered,
            SETTLES=together > 0,
            num_warps=update_warps(together),
            DRAWS=draws,
        )
    except BaseException:
        # stamps that no second launch took away would win over those of later updates
        if masses is not None and not together:
            masses.stamps.fill_(-1)
        raise
