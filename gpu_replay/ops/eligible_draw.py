"""Draws from the starts that are eligible, by mass, uniformly, or the newest; on request without the newest steps.

A tree of ones beside the tree of masses ("marks") makes a uniform draw the same search: rank `r` among the eligible
starts is a target in its total. Rotated by the mass before the oldest slot, targets run from the oldest key to the
newest, so that leaving out the newest steps means drawing below a smaller total.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import Counter, blocks_for
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.stratified_draw import edge_blocks_per_program
from gpu_replay.ops.uniform_draw import FEW, PERMUTATION_WORDS, ROUNDS, ROUNDS_OF_FEW


class DrawRange(NamedTuple):
    """What can be drawn from one tree.

    prefix: 0 and the inclusive prefix sums of the root.
    total:  mass of all slots; `mass` of those within reach; `offset` of the slots before target 0.
    """

    tree: MassTree
    prefix: np.ndarray
    total: int
    mass: int
    offset: int

    def slots(self, targets: np.ndarray) -> np.ndarray:
        """The slots on which (B,) targets in [0, mass) fall; the targets are overwritten."""
        if self.offset:
            targets += self.offset
            targets -= (targets >= self.total) * self.total
        slots: np.ndarray = self.tree.loops.locate(self.tree, self.prefix, targets)
        return slots


def reach(tree: MassTree, head: int, skipped: int, *, by_key: bool) -> DrawRange:
    """Host: all mass but that of the newest `skipped` slots.

    head:   slot of the next key; the slots from it on hold the oldest keys.
    by_key: whether targets ascend with keys instead of slots; without effect on what can be drawn.
    """
    root = tree.arrays[-1]
    prefix = np.empty(root.size + 1, dtype=np.int64)
    prefix[0] = 0
    np.add.accumulate(root, 0, None, prefix[1:])
    total = prefix.item(root.size)
    if not skipped and not by_key:
        return DrawRange(tree, prefix, total, total, 0)
    before = _mass_before(tree, prefix, head)
    if not skipped:
        return DrawRange(tree, prefix, total, total, before % max(total, 1))
    end = (head - skipped) % tree.slots
    newest = before - _mass_before(tree, prefix, end) + (total if end > head else 0)
    return DrawRange(tree, prefix, total, total - newest, before % max(total, 1))


def _mass_before(tree: MassTree, prefix: np.ndarray, slot: int) -> int:
    """The mass of the slots below `slot`."""
    mass, node = 0, slot
    for level in tree.arrays[:-1]:
        begin = node // tree.fanout * tree.fanout
        mass += int(level[begin:node].sum())
        node //= tree.fanout
    return mass + prefix.item(node)


def starts_per_program(batch: int, interpreted: bool) -> int:
    """Draws of one program: one for each of four warps; as many as there are where a program is dear."""
    return min(1024, 1 << (batch - 1).bit_length()) if interpreted else 4


class EligibleDraw(NamedTuple):
    """What the draw kernels give back; `batch` numbers each.

    slots, keys: int64.
    masses:      int64, 0 where a row was not drawn by mass; None of a draw that was not by mass.
    probability: float32.
    weight:      float32 ones; None of a draw by mass, where the gather that follows makes them of the masses.
    words:       (1,) int64, where in the random stream the words for shifts begin; None without shifts.
    """

    slots: Tensor
    keys: Tensor
    masses: Tensor | None
    probability: Tensor
    weight: Tensor | None
    words: Tensor | None


def launch_eligible_draw(
    tree: MassTree | None,
    marks: MassTree | None,
    counters: Tensor,
    times_sampled: Tensor,
    drawn: int,
    batch: int,
    *,
    skipped: int = 0,
    shifted: bool = False,
    stratified: bool = True,
    lowest_of_all: bool = False,
    replacement: bool = False,
) -> EligibleDraw:
    """Device: `drawn` starts by chance and the newest for the rest of the batch; one launch.

    tree:    of masses, to draw by mass; None for uniform draws.
    marks:   of ones; needed where `drawn < batch` and for uniform draws.
    skipped: slots of the newest keys that are left out; less than all.
    shifted: whether `batch` random words are taken after the draw's own. A draw by mass moves nothing on: what weighs
             it must know of them too.
    stratified, lowest_of_all: of draws by mass. replacement: of uniform draws.
    """
    if tree is not None and drawn > 0:
        return _launch_by_mass(
            tree,
            marks if drawn < batch else None,
            counters,
            times_sampled,
            drawn,
            batch,
            skipped,
            shifted=shifted,
            stratified=stratified,
            lowest_of_all=lowest_of_all,
        )
    if marks is None:
        raise RuntimeError("there is no tree of marks to draw uniformly, or the newest, from.")
    words = drawn if replacement else PERMUTATION_WORDS
    moved = (blocks_for(words) if drawn else 0) + blocks_for(batch if shifted else 0)
    return _launch_marked(
        marks,
        counters,
        times_sampled,
        drawn,
        batch,
        skipped,
        moved,
        shifted=shifted,
        replacement=replacement or drawn == 0,
    )


def _launch_by_mass(
    tree: MassTree,
    marks: MassTree | None,
    counters: Tensor,
    times_sampled: Tensor,
    drawn: int,
    batch: int,
    skipped: int,
    *,
    shifted: bool,
    stratified: bool,
    lowest_of_all: bool,
) -> EligibleDraw:
    from gpu_replay.kernels.eligible_draw import draw_by_mass_kernel

    device = counters.device
    interpreted = device.type == "cpu"
    slots = torch.empty(batch, dtype=torch.int64, device=device)
    keys = torch.empty(batch, dtype=torch.int64, device=device)
    masses = torch.empty(batch, dtype=torch.int64, device=device)
    probability = torch.empty(batch, dtype=torch.float32, device=device)
    words = torch.empty(1, dtype=torch.int64, device=device) if shifted else None
    draws = starts_per_program(batch, interpreted)
    programs = -(-batch // draws)
    blocks = tree.levels[0].numel() // tree.fanout
    per_program = edge_blocks_per_program(blocks, interpreted)
    edge_programs = -(-blocks // per_program) if lowest_of_all else 0
    draw_by_mass_kernel[(programs + edge_programs,)](
        tree.levels,
        () if marks is None else marks.levels,
        counters if tree.low is None else tree.low,
        counters,
        times_sampled,
        slots,
        keys,
        masses,
        probability,
        counters if words is None else words,
        drawn,
        batch,
        tree.slots,
        skipped,
        blocks,
        programs,
        LEVELS=len(tree.levels),
        MARK_LEVELS=0 if marks is None else len(marks.levels),
        FANOUT=tree.fanout,
        DRAWS=draws,
        BLOCKS=per_program,
        STRATIFIED=stratified,
        SKIPS=skipped > 0,
        LOWEST_OF_ALL=lowest_of_all,
        SHIFTED=shifted,
        ADDED=int(Counter.ADDED),
        RANDOM=int(Counter.RANDOM),
        SEED=int(Counter.SEED),
        EDGE_LOW=int(Counter.EDGE_LOW),
    )
    return EligibleDraw(slots, keys, masses, probability, None, words)


def _launch_marked(
    marks: MassTree,
    counters: Tensor,
    times_sampled: Tensor,
    drawn: int,
    batch: int,
    skipped: int,
    moved: int,
    *,
    shifted: bool,
    replacement: bool,
) -> EligibleDraw:
    from gpu_replay.kernels.eligible_draw import draw_marked_kernel

    device = counters.device
    slots = torch.empty(batch, dtype=torch.int64, device=device)
    keys = torch.empty(batch, dtype=torch.int64, device=device)
    probability = torch.empty(batch, dtype=torch.float32, device=device)
    weight = torch.empty(batch, dtype=torch.float32, device=device)
    words = torch.empty(1, dtype=torch.int64, device=device) if shifted else None
    draws = starts_per_program(batch, device.type == "cpu")
    draw_marked_kernel[(-(-batch // draws),)](
        marks.levels,
        counters,
        times_sampled,
        slots,
        keys,
        probability,
        weight,
        counters if words is None else words,
        drawn,
        batch,
        marks.slots,
        skipped,
        moved,
        LEVELS=len(marks.levels),
        FANOUT=marks.fanout,
        ROUNDS=ROUNDS,
        ROUNDS_OF_FEW=ROUNDS_OF_FEW,
        FEW=FEW,
        DRAWS=draws,
        REPLACEMENT=replacement,
        SKIPS=skipped > 0,
        SHIFTED=shifted,
        ADDED=int(Counter.ADDED),
        RANDOM=int(Counter.RANDOM),
        SEED=int(Counter.SEED),
        STEP=int(Counter.STEP),
        TICKET=int(Counter.TICKET),
    )
    return EligibleDraw(slots, keys, None, probability, weight, words)
