"""Proportional draws: targets in the total mass, the slots they fall on, probabilities and importance weights.

A target is an integer in [0, total). Stratum `i` of `B` is [i * (T // B) + i * (T % B) // B, the same of i + 1); the
target inside it is its start plus floor(u * width) for a 53-bit double `u`: one multiplication and no addition in
floating point, so that no device can round differently. The slot drawn is the one whose inclusive prefix sum, in slot
order, first exceeds the target; a slot of mass 0 cannot be it.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gpu_replay.ops.draws import DeviceDraws, Draw, leaf_blocks, lowest_masses, new_draws, per_program, reciprocal
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.weights import NO_WEIGHTS, given_for, weighed_together, weighing_of

# below this width the largest double under 1 times the width stays under the width
_EXACT = 2**52


class Strata:
    """Room for the targets of batches of one size: making arrays and views of them costs as much as an operation."""

    def __init__(self, batch: int) -> None:
        # as arrays: scalar operands cost as much again as an operation
        self.numbers, self.parts = np.arange(batch + 1, dtype=np.int64), np.array(batch)
        self.bounds, self.width = np.empty(batch + 1, dtype=np.int64), np.empty(batch, dtype=np.int64)
        self.begin, self.end = self.bounds[:-1], self.bounds[1:]
        # of a total: up to this a multiple of it fits, up to that widths are exact
        self.fits, self.exact = (2**63 - 1) // batch, _EXACT * batch - 1


def stratified_targets(total: int, doubles: np.ndarray, room: Strata | None = None) -> np.ndarray:
    """Place one target in each of `B` equal parts of the total mass.

    total:   mass units, > 0.
    doubles: (B,) float64 in [0, 1), 53 random bits each, the only source of randomness.
    room:    for batches of this size, used by one call at a time.
    returns: (B,) int64, ascending, each in [0, total).
    """
    strata = Strata(doubles.size) if room is None else room
    bounds, width, begin = strata.bounds, strata.width, strata.begin
    if total <= strata.fits:
        np.multiply(strata.numbers, np.array(total), bounds)
        np.floor_divide(bounds, strata.parts, bounds)
    else:
        whole, part = divmod(total, doubles.size)
        np.multiply(strata.numbers, part, bounds)
        bounds //= strata.parts
        bounds += strata.numbers * whole
    np.subtract(strata.end, begin, width)
    # an operation that casts as well takes twice as long
    targets = (doubles * width.astype(np.float64)).astype(np.int64)
    if not doubles.size <= total <= strata.exact:
        # a wide product may round up to the width; a stratum without width, when there are more draws than mass, takes
        # the unit it starts in
        width -= 1
        np.minimum(targets, width, out=targets)
        np.maximum(targets, 0, out=targets)
    targets += begin
    return targets


# `B` draws from a tree on the host, nothing where there is no mass: (B,) int64 slots and masses, (B,) float32
# probabilities, (B,) float64 ratios, the mass that has the largest weight over these masses, and the total mass
MassDraw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]


def draw_slots(tree: MassTree, doubles: np.ndarray, stratified: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Host: draw one slot for each of (B,) float64 in [0, 1).

    returns: (B,) int64 slots, (B,) int64 masses of them, and the total mass; with a total of 0 the first two are empty.
    """
    slots, masses, _, _, total = tree.loops.draw(tree, doubles, stratified, 0)
    return slots, masses, total


def importance_weights(masses: np.ndarray, lowest: int, beta: float) -> np.ndarray:
    """(lowest / mass) ** beta as (B,) float32: (N * P) ** -beta over the largest that it could be."""
    return weights_of(np.true_divide(np.array(lowest), masses), beta)


def weights_of(ratio: np.ndarray, beta: float) -> np.ndarray:
    """(B,) float32 of (B,) float64 ratios, which are overwritten."""
    np.log2(ratio, ratio)
    np.multiply(ratio, np.array(beta), ratio)
    np.exp2(ratio, ratio)
    return ratio.astype(np.float32)


def smallest(masses: np.ndarray) -> int:
    """The smallest of (B,) masses. Finding its place costs half of a reduction at these sizes."""
    return int(masses.item(masses.argmin()))


def plan_stratified_draw(
    tree: MassTree,
    counters: Tensor,
    times_sampled: Tensor,
    drawn: int,
    batch: int,
    *,
    stratified: bool,
    lowest_of_all: bool,
    weighed: tuple[Tensor | None, float] | None = None,
) -> Draw:
    """Device: `drawn` draws by mass, and the newest for the rest of the batch; one launch a call.

    weighed: schedule and exponent of the weights, see `PendingWeights`, if the draw is to make them and to move both
             schedule and stream on, of a batch for which `weighed_together` is not 0. Else a gather does so.
    """
    from gpu_replay.kernels.stratified_draw import stratified_draw_kernel

    device = counters.device
    interpreted = device.type == "cpu"
    # few draws, so that a small batch spreads over a GPU
    draws = per_program(8, batch, interpreted)
    programs, leaves = -(-batch // draws), leaf_blocks(tree, interpreted)
    lowest = lowest_masses(tree) if lowest_of_all else ()
    numbers = (drawn, batch, tree.slots, reciprocal(drawn), reciprocal(tree.slots), leaves.blocks, programs)
    together = 0 if weighed is None else weighed_together(batch, interpreted)
    if weighed is not None and not together:
        raise RuntimeError(f"a draw makes the weights of 1024 rows at most, not of {batch}.")
    launch = Launch(
        stratified_draw_kernel,
        programs + lowest_of_all * leaves.programs,
        FANOUT=tree.fanout,
        DRAWS=draws,
        BLOCKS=leaves.per_program,
        STRATIFIED=stratified,
        WEIGHED=together,
    )

    def draw() -> DeviceDraws:
        found = new_draws(batch, device, by_priority=True)
        pending, moves = NO_WEIGHTS
        if weighed is not None:
            weighing = weighing_of(found.value, counters, *weighed, drawn)
            pending, moves = given_for(weighing)
            found = found._replace(weight=weighing.weight)
        launch(tree.levels, lowest, counters, found.outputs(times_sampled), pending, *numbers, *moves)
        return found

    return draw
