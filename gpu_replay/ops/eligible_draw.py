"""Draws from the starts that are eligible, by mass, uniformly, or the newest; on request without the newest steps.

A tree of ones beside the tree of masses, the eligible tree, makes a uniform draw the same search: rank `r` among the
eligible starts is a target in its total. Rotated by the mass before the oldest slot, targets run from the oldest key to
the newest, so that leaving out the newest steps means drawing below a smaller total.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gpu_replay.ops.counters import blocks_for
from gpu_replay.ops.draws import DeviceDraws, Draw, leaf_blocks, lowest_masses, new_draws, per_program, reciprocal
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.uniform_draw import uniform_blocks


class DrawRange(NamedTuple):
    """What can be drawn from one tree.

    prefix: 0 and the inclusive prefix sums of the root.
    total:  mass of all slots; `mass` of those that can be drawn; `offset` of the slots before target 0.
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


def draw_range(tree: MassTree, head: int, skipped: int, *, by_key: bool) -> DrawRange:
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


def plan_eligible_draw(
    tree: MassTree | None,
    eligible_tree: MassTree | None,
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
) -> Draw:
    """Device: `drawn` starts by chance and the newest for the rest of the batch; one launch a call.

    tree:          of masses, to draw by mass; None for uniform draws.
    eligible_tree: of ones; needed where `drawn < batch` and for uniform draws.
    skipped: slots of the newest keys that are left out; less than all.
    shifted: whether `batch` random words are taken after the draw's own. A draw by mass moves nothing on: what weighs
             it must know of them too.
    stratified, lowest_of_all: of draws by mass. replacement: of uniform draws.
    """
    from gpu_replay.kernels.eligible_draw import draw_by_mass_kernel, draw_eligible_kernel

    device, by_mass = counters.device, tree is not None and drawn > 0
    interpreted = device.type == "cpu"
    # one draw for each of four warps
    draws = per_program(4, batch, interpreted)
    programs = -(-batch // draws)
    trees: tuple[Any, ...]
    numbers: tuple[int, ...]
    if tree is not None and by_mass:
        leaves = leaf_blocks(tree, interpreted)
        newest = () if eligible_tree is None or drawn == batch else eligible_tree.levels
        trees = (tree.levels, newest, lowest_masses(tree) if lowest_of_all else ())
        numbers = (tree.slots, skipped, reciprocal(drawn), reciprocal(tree.slots), leaves.blocks, programs)
        launch = Launch(
            draw_by_mass_kernel,
            programs + lowest_of_all * leaves.programs,
            FANOUT=tree.fanout,
            DRAWS=draws,
            BLOCKS=leaves.per_program,
            STRATIFIED=stratified,
            SKIPS=skipped > 0,
        )
    elif eligible_tree is not None:
        trees = (eligible_tree.levels,)
        moved = uniform_blocks(drawn, replacement) + blocks_for(batch if shifted else 0)
        numbers = (eligible_tree.slots, skipped, reciprocal(eligible_tree.slots), moved)
        launch = Launch(
            draw_eligible_kernel,
            programs,
            FANOUT=eligible_tree.fanout,
            DRAWS=draws,
            REPLACEMENT=replacement or drawn == 0,
            SKIPS=skipped > 0,
        )
    else:
        raise RuntimeError("there is no tree of eligible starts to draw uniformly, or the newest, from.")

    def draw() -> DeviceDraws:
        found = new_draws(batch, device, by_priority=by_mass, shifted=shifted)
        launch(*trees, counters, found.outputs(times_sampled), found.word_outputs, drawn, batch, *numbers)
        return found

    return draw
