"""Draws: by mass, uniformly, by rank on a device, and the newest.

By mass: a target is an integer in [0, total). Stratum `i` of `B` is [i * (T // B) + i * (T % B) // B, the same of
i + 1); the target inside it is its start plus floor(u * width) for a 53-bit double `u`: one multiplication and no
addition in floating point, so that no device can round differently. The slot drawn is the one whose inclusive prefix
sum, in slot order, first exceeds the target; a slot of mass 0 cannot be it. Schaul et al. 2016, "Prioritized Experience
Replay", section 3.3.

Starts of a trajectory buffer: a tree of ones next to the tree of masses makes a uniform draw the same search: rank `r`
among the eligible starts is a target in its total. Rotated by the mass before the oldest slot, targets run from the
oldest key to the newest.

Uniformly, without replacement: row `i` of a batch is the image of `i` under a random permutation of the stored
transitions: a Feistel network over a rectangle that just covers them, walked on until the image falls inside. It costs
O(B) whatever is stored, needs no memory, and gives the same integers everywhere. Luby and Rackoff 1988; Black and
Rogaway 2002, "Ciphers with arbitrary finite domains".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops import masses as tree_loops
from gpu_replay.loops import random as random_loops
from gpu_replay.ops.counters import Counter, blocks_for
from gpu_replay.ops.launch import Launch, per_arguments, per_program, reciprocal
from gpu_replay.ops.masses import MassTree


class DrawRange(NamedTuple):
    """The mass of all slots, and that of the slots before target 0."""

    total: int
    offset: int = 0


def slots_in(tree: MassTree, drawn: DrawRange, targets: np.ndarray) -> np.ndarray:
    """Host: the (B,) slots on which (B,) targets in [0, total) fall; the targets are overwritten."""
    slots, (flat, starts) = np.empty(targets.size, dtype=np.int64), tree.host[:2]
    tree_loops.locate.compiled()(flat, starts, drawn.offset, drawn.total, targets, slots)
    return slots


def targets_in(total: int, doubles: np.ndarray, *, stratified: bool) -> np.ndarray:
    """Place one target in each of `B` equal parts of the total mass, or each anywhere.

    total:   mass units, > 0.
    doubles: (B,) float64 in [0, 1), 53 random bits each, the only source of randomness.
    returns: (B,) int64, each in [0, total); if stratified, ascending.
    """
    targets = np.empty(doubles.size, dtype=np.int64)
    tree_loops.targets.compiled()(total, doubles, stratified, targets)
    return targets


def weights_of(ratio: np.ndarray, beta: float) -> np.ndarray:
    """ratio ** beta as (B,) float32, of (B,) float64 ratios, which are overwritten."""
    np.log2(ratio, ratio)
    ratio *= beta
    return np.exp2(ratio, np.empty(ratio.size, np.float32))


# measured over 200,000 keys: pairs of places are uniform to the noise after 8 rounds from 31 transitions on, and after
# 16 to 24 rounds over 5 or 6, where the two halves of the network have two or three values each
ROUNDS = 8
ROUNDS_OF_FEW = 32
FEW = 64
# each round hashes with a random multiplier and a random addend (multiply-shift, Dietzfelbinger 1996)
PERMUTATION_WORDS = 2 * ROUNDS_OF_FEW


def slots_of(ages: np.ndarray, first: int, capacity: int) -> np.ndarray:
    """Host: slots of the live keys `first + ages`."""
    slots = ages + first
    slots %= capacity
    return slots


def permuted_ranks(count: int, batch: int, words: np.ndarray) -> np.ndarray:
    """The first `batch` places of a random permutation of [0, count), count < 2**31.

    words:   (PERMUTATION_WORDS,) uint64, the only source of randomness.
    returns: (batch,) int64, distinct; batch <= count.
    """
    # the sides of a rectangle that just covers them
    wide = math.isqrt(count - 1) + 1
    high = -(-count // wide)
    ranks, taken = np.empty(batch, dtype=np.int64), 2 * ROUNDS if count >= FEW else PERMUTATION_WORDS
    random_loops.permuted_ranks.compiled()(count, wide, high, words[:taken].view(np.int64), ranks)
    return ranks


# parts into which one step of the search for a rank divides the rest
BASE = 32


def digits_for(slots: int) -> int:
    """Steps of a search for one of this many ranks."""
    digits = 1
    while BASE**digits < slots:
        digits += 1
    return digits


def make_draw(
    by: Literal["mass", "uniform", "rank"],
    counters: Tensor,
    drawn: int,
    batch: int,
    capacity: int,
    *,
    tree: MassTree | None = None,
    starts: MassTree | None = None,
    stratified: bool = True,
    normalize_over_buffer: bool = False,
    replacement: bool = False,
) -> tuple[Callable[..., None], int, int]:
    """Device: a function that draws `drawn` rows and takes the newest for the rest of the batch, by one launch; the
    blocks of random words that it takes, and how many minima of masses it leaves.

    Its arguments: () or, to draw by rank, the sums of the masses of the ranks up to each, the ages in order of rank and
    their number; (batch,) slots, keys, probabilities and masses, and the minima, to be filled.

    tree:    of masses, to draw by mass, and where transitions may have none; or of order codes.
    starts:  of ones for eligible starts, for uniform draws and the newest; None where all stored slots can be drawn, or
             `tree` alone will do.
    """
    from gpu_replay.kernels.draw import draw_kernel

    by_priority = by != "uniform" and drawn > 0
    by, replacement = by if by_priority else "uniform", replacement or by_priority or not drawn
    interpreted = counters.device.type == "cpu"
    levels: tuple[Tensor, ...] = ()
    if by == "uniform":
        levels = () if starts is None else starts.levels
    elif by == "mass" and tree is not None:
        levels = tree.levels
    newest = starts.levels if starts is not None and by_priority and drawn < batch else ()
    held = tree.levels[:1] if tree is not None and starts is None and drawn < batch else ()
    # none where all rows are the newest
    blocks = blocks_for(drawn if replacement else PERMUTATION_WORDS)
    # a draw a thread; programs of one warp where it searches, so that a small batch spreads over a GPU
    searches = by != "uniform" or starts is not None
    draws = per_program(32 if searches else 128, batch, interpreted)
    programs = -(-batch // draws)
    launch = Launch(
        draw_kernel,
        programs,
        levels=levels,
        starts=newest,
        held=held,
        counters_ptr=counters,
        drawn=drawn,
        batch=batch,
        capacity=capacity,
        per_drawn=reciprocal(max(drawn, 1)),
        per_capacity=reciprocal(capacity),
        num_warps=1 if searches else 4,
        BY=by,
        DRAWS=draws,
        DIGITS=digits_for(capacity) if by == "rank" else 0,
        STRATIFIED=by_priority and stratified,
        REPLACEMENT=replacement,
        LOWEST_OF_ALL=by_priority and normalize_over_buffer,
    )
    minima = programs if by_priority else 0
    if by != "mass" or not normalize_over_buffer or tree is None:
        return launch, blocks, minima

    def draw(*arguments: tuple[Tensor, ...]) -> None:
        counters[Counter.LOWEST] = tree.lowest()
        launch(*arguments)

    return draw, blocks, minima


Result = TypeVar("Result")


class DeviceRandom:
    """Device: the random stream of a buffer as samplers of somebody's own take it."""

    def __init__(self, counters: Tensor) -> None:
        # blocks of the stream that were taken since `begin`
        self.counters, self._blocks = counters, 0
        self._launches = per_arguments(self._launch)

    def begin(self) -> None:
        """The next numbers are the first of the next draw."""
        self._blocks = 0

    def advancing(self, gather: Callable[..., Result]) -> Callable[..., Result]:
        """What ends a sample, after the numbers that it took; the stream goes back if that fails."""

        def end(*arguments: Any) -> Result:
            self.counters[Counter.RANDOM] += self._blocks
            try:
                return gather(*arguments)
            except BaseException:
                self.counters[Counter.RANDOM] -= self._blocks
                raise

        return end

    def doubles(self, count: int) -> Tensor:
        """The next (count,) float64 in [0, 1); one launch."""
        numbers = torch.empty(count, dtype=torch.float64, device=self.counters.device)
        if count:
            self._launches(count)(numbers, count, self._blocks)
            self._blocks += blocks_for(count)
        return numbers

    def _launch(self, count: int) -> Launch:
        from gpu_replay.kernels.draw import doubles_kernel

        draws = per_program(128, count, self.counters.device.type == "cpu")
        return Launch(doubles_kernel, -(-count // draws), counters_ptr=self.counters, DRAWS=draws)


# a chance of 1 as a mass
_SURE = 2.0**62


def make_chosen_draw(
    choose: Callable[[Tensor, int, DeviceRandom], tuple[Tensor, Tensor]],
    random: DeviceRandom,
    drawn: int,
    batch: int,
    capacity: int,
    starts: MassTree | None,
) -> Callable[..., None]:
    """Device: a function that draws as that of `make_draw`, by a sampler of somebody's own, in torch; it leaves one
    minimum, and takes no random words but those of `random`.

    choose: (drawn,) int64 places, counted from the oldest, and their float64 chances, of a total.
    starts: of ones for eligible starts; None where all stored slots can be drawn.
    """
    counters, ages = random.counters, torch.arange(capacity, device=random.counters.device)
    newest = torch.arange(drawn - batch, 0, device=counters.device)

    def draw(_: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        slots, keys, probability, masses, lowest = outputs
        added = counters[Counter.ADDED].clone()
        oldest = torch.maximum(counters[Counter.FIRST], added - capacity)
        # a graph that is replayed after a `clear` finds nothing
        total = (added - oldest if starts is None else counters[Counter.ELIGIBLE]).clamp(min=1)
        random.begin()
        places, chances = choose(total, drawn, random)
        places = torch.cat((places, (newest + total).clamp(min=0)))
        if starts is not None:
            # ages of slots, from the oldest in the ring on
            counted = starts.masses[(ages + added) % capacity].cumsum(0)
            places = torch.searchsorted(counted, places, right=True).clamp(max=capacity - 1)
            oldest = added
        torch.remainder(oldest + places, capacity, out=slots)
        torch.sub(added - 1, (added - 1 - slots) % capacity, out=keys)
        probability.fill_(1.0)
        probability[:drawn] = chances
        masses.zero_()
        masses[:drawn] = (chances * _SURE).to(torch.int64).clamp(min=1)
        lowest[:1] = masses[:drawn].min()

    return draw
