"""Draws: by mass, uniformly, by rank on a device, and the newest.

By mass: a target is an integer in [0, total). Stratum `i` of `B` is [i * (T // B) + i * (T % B) // B, the same of
i + 1); the target inside it is its start plus floor(u * width) for a 53-bit double `u`: one multiplication and no
addition in floating point, so that no device can round differently. The slot drawn is the one whose inclusive prefix
sum, in slot order, first exceeds the target; a slot of mass 0 cannot be it. Schaul et al. 2016, "Prioritized Experience
Replay", section 3.3.

Starts of a trajectory buffer: a tree of ones next to the tree of masses makes a uniform draw the same search: rank `r`
among the eligible starts is a target in its total. Rotated by the mass before the oldest slot, targets run from the
oldest key to the newest, so that leaving out the newest steps means drawing below a smaller total.

Starts that must fit a rule: a row whose start does not is drawn again from all mass, by words of its own, so that rows
keep the proportions of their masses and no total of what fits is needed. Without replacement, and for the newest, the
rows are the first that fit on a walk along the permutation, or back from the newest.

Uniformly, without replacement: row `i` of a batch is the image of `i` under a random permutation of the stored
transitions: a Feistel network over a rectangle that just covers them, walked on until the image falls inside. It costs
O(B) whatever is stored, needs no memory, and gives the same integers everywhere. Luby and Rackoff 1988; Black and
Rogaway 2002, "Ciphers with arbitrary finite domains".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops import random as random_loops
from gpu_replay.loops import tree as tree_loops
from gpu_replay.ops.counters import Counter, blocks_for
from gpu_replay.ops.eligibility import Streams
from gpu_replay.ops.launch import Launch, per_program, reciprocal
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.windows import SequenceRule


class DrawRange(NamedTuple):
    """The part of the mass of one tree that can be drawn.

    total:  mass of all slots; `mass` of those that can be drawn; `offset` of the slots before target 0.
    """

    offset: int
    mass: int
    total: int


# draw from all mass, which the draw reads itself
ALL = DrawRange(0, 0, 0)


def draw_range(tree: MassTree, head: int, skipped: int, *, by_key: bool) -> DrawRange:
    """Host: all mass but that of the newest `skipped` slots.

    head:   slot of the next key; the slots from it on hold the oldest keys.
    by_key: whether targets ascend with keys instead of slots; without effect on what can be drawn.
    """
    total, mass_before, (flat, starts) = tree.total(), tree_loops.mass_before.compiled(), tree.host[:2]
    if not skipped and not by_key:
        return DrawRange(0, total, total)
    before = mass_before(flat, starts, head)
    offset = before % max(total, 1)
    if not skipped:
        return DrawRange(offset, total, total)
    end = (head - skipped) % tree.slots
    newest = before - mass_before(flat, starts, end) + (total if end > head else 0)
    return DrawRange(offset, total - newest, total)


def slots_in(tree: MassTree, drawn: DrawRange, targets: np.ndarray) -> np.ndarray:
    """Host: the (B,) slots on which (B,) targets in [0, mass) fall; the targets are overwritten."""
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


class MassDraw(NamedTuple):
    """(B,) int64 slots, float32 probabilities and float64 ratios: the mass that has the largest weight over theirs.

    mass: what was drawn from; where that is 0 the others are not filled.
    """

    slots: np.ndarray
    probability: np.ndarray
    ratio: np.ndarray
    mass: int


def draw_by_mass(
    tree: MassTree, doubles: np.ndarray, *, stratified: bool, over_buffer: bool = False, within: DrawRange = ALL
) -> MassDraw:
    """Host: draw one slot for each of (B,) float64 in [0, 1).

    over_buffer: whether the largest weight is that of the smallest stored mass or of the batch.
    """
    batch, (flat, starts, _), (offset, mass, total) = doubles.size, tree.host, within
    slots, probability, ratio = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.float32), np.empty(batch)
    mass = tree_loops.draw.compiled()(
        flat, starts, doubles, stratified, over_buffer, offset, mass, total, slots, probability, ratio
    )
    return MassDraw(slots, probability, ratio, mass)


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
    return (ages + first) % capacity


def permuted_ranks(count: int, batch: int, words: np.ndarray, first: int = 0) -> np.ndarray:
    """The `batch` places from the first on of a random permutation of [0, count), count < 2**31.

    words:   (PERMUTATION_WORDS,) uint64, the only source of randomness.
    returns: (batch,) int64, distinct; first + batch <= count.
    """
    # the sides of a rectangle that just covers them
    wide = math.isqrt(count - 1) + 1
    high = -(-count // wide)
    ranks, taken = np.empty(batch, dtype=np.int64), 2 * ROUNDS if count >= FEW else PERMUTATION_WORDS
    random_loops.permuted_ranks.compiled()(count, first, wide, high, words[:taken].view(np.int64), ranks)
    return ranks


# rows of a batch that do not fit are drawn again so often at most; on the host the words of one more draw are kept for
# those that are still missing then
REDRAWS = 64


def slots_at(tree: MassTree, targets: Tensor) -> Tensor:
    """(B,) int64 slots of (B,) int64 targets; on a device a few operations of torch for each level."""
    if not targets.numel():
        return targets
    if tree.backend == "host":
        drawn = draw_range(tree, 0, 0, by_key=False)
        return torch.from_numpy(slots_in(tree, drawn, targets.clone().numpy()))
    rest, node = targets.clone(), torch.zeros_like(targets)
    for level in reversed(tree.levels):
        masses = level.view(-1, tree.fanout)[node]  # (B, fanout)
        prefix = masses.cumsum(1)
        step = (prefix <= rest[:, None]).sum(1).clamp_(max=tree.fanout - 1)[:, None]
        rest -= (prefix - masses).gather(1, step).squeeze(1)
        node = node * tree.fanout + step.squeeze(1)
    return node


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
    tracks_eligibility: bool = False,
    skipped: int = 0,
    stratified: bool = True,
    normalize_over_buffer: bool = False,
    replacement: bool = False,
    rule: SequenceRule | None = None,
    streams: Streams | None = None,
) -> tuple[Callable[..., None], int, int]:
    """Device: a function that draws `drawn` rows and takes the newest for the rest of the batch, by one launch; the
    blocks of random words that it takes, and how many minima of masses it leaves.

    Its arguments: () or, to draw by rank, the sums of the masses of the ranks up to each, the ages in order of rank and
    their number, without the skipped slots; (batch,) slots, keys, probabilities and masses, and the minima, to be
    filled.

    tree:    of masses, to draw by mass.
    starts:  of ones for eligible starts, for uniform draws and the newest; None where all stored slots can be drawn.
    tracks_eligibility: whether stored slots exist that cannot be drawn.
    skipped: slots of the newest keys that are left out; less than all.
    rule:    that starts must fit, in a buffer of these streams; those that do not are drawn again.
    """
    from gpu_replay.kernels.draw import draw_kernel, draw_sequences_kernel

    by_priority = by != "uniform" and drawn > 0
    by, replacement = by if by_priority else "uniform", replacement or by_priority or not drawn
    if tracks_eligibility and starts is None and (by == "uniform" or drawn < batch):
        raise RuntimeError("there is no tree of eligible starts to draw uniformly, or the newest, from.")
    interpreted = counters.device.type == "cpu"
    levels: tuple[Tensor, ...] = ()
    if by == "uniform":
        levels = () if starts is None else starts.levels
    elif by == "mass" and tree is not None:
        levels = tree.levels
    alone = by_priority or rule is not None
    newest = starts.levels if starts is not None and alone and drawn < batch else ()
    # none where all rows are the newest
    blocks_once = blocks_for(drawn if replacement else PERMUTATION_WORDS)
    # a draw a thread; programs of one warp where it searches, so that a small batch spreads over a GPU
    searches = by != "uniform" or tracks_eligibility
    draws = per_program(32 if searches else 128, batch, interpreted)
    programs, blocks = -(-batch // draws), blocks_once
    shared: dict[str, Any] = {"levels": levels, "counters_ptr": counters, "drawn": drawn, "batch": batch}
    shared |= {"capacity": capacity, "per_drawn": reciprocal(max(drawn, 1)), "per_capacity": reciprocal(capacity)}
    shared |= {"num_warps": 1 if searches else 4, "BY": by, "DRAWS": draws}
    shared |= {"DIGITS": digits_for(capacity) if by == "rank" else 0}
    shared |= {"STRATIFIED": by_priority and stratified, "LOWEST_OF_ALL": by_priority and normalize_over_buffer}
    if rule is None or streams is None:
        launch = Launch(
            draw_kernel,
            programs,
            **shared,
            starts=newest,
            skipped=skipped,
            REPLACEMENT=replacement,
            SKIPS=skipped > 0,
        )
    else:
        # all places of the stream that a sample on the host may take
        blocks, envs = blocks_once * (2 + REDRAWS) if replacement else blocks_once, streams.shape.num_envs
        programs = -(-drawn // draws) if replacement else 1
        launch = Launch(
            draw_sequences_kernel,
            programs + (drawn < batch),
            **shared,
            newest=newest,
            streams=(streams.depth, streams.flags) if rule.strict else (),
            ahead=(rule.length - 1) * envs,
            between=rule.length - 1,
            envs=envs,
            stride=rule.stride,
            per_envs=reciprocal(envs),
            per_stride=reciprocal(rule.stride),
            blocks_once=blocks_once,
            drawing=programs,
            REPLACEMENT=replacement,
        )
    minima = programs if by_priority else 0
    if by != "mass" or not normalize_over_buffer or tree is None:
        return launch, blocks, minima

    def draw(*arguments: tuple[Tensor, ...]) -> None:
        counters[Counter.LOWEST] = tree.lowest()
        launch(*arguments)

    return draw, blocks, minima
