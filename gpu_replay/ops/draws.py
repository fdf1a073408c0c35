"""What all draw kernels share on the host: how much a program does, and the tensors that a draw fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_replay.ops.mass_tree import MassTree


def per_program(gpu: int, count: int, interpreted: bool, most: int = 1024) -> int:
    """Items of one program, a power of two: `gpu` on a GPU whatever the count, as another number is a kernel more.

    Under the interpreter, where each program instance costs about 1 ms, all of `count`, but no more than `most`.
    """
    return min(most, 1 << (count - 1).bit_length()) if interpreted else gpu


def reciprocal(divisor: int) -> int:
    """What a kernel takes to divide by it: see `kernels/division.py`."""
    return (2**63 - 1) // divisor


class LeafBlocks(NamedTuple):
    """The blocks of a tree's leaves, the programs that look for an extreme in them, and the blocks of each."""

    blocks: int
    programs: int
    per_program: int


def leaf_blocks(tree: MassTree, interpreted: bool) -> LeafBlocks:
    """How a launch looks for the smallest or largest mass of a tree."""
    blocks = tree.levels[0].numel() // tree.fanout
    each = per_program(32, blocks, interpreted, most=256)
    return LeafBlocks(blocks, -(-blocks // each), each)


def lowest_masses(tree: MassTree) -> tuple[Tensor, ...]:
    """The smallest mass of each block of leaves, for a launch that looks for the smallest of all."""
    if tree.low is None:
        raise RuntimeError("this tree was made without its smallest masses.")
    return (tree.low,)


class DeviceDraws(NamedTuple):
    """What a draw kernel gives back; `batch` numbers each.

    slots, keys: int64.
    probability: float32.
    value:       of a draw by priority the masses, int64, 0 where a row was not drawn by it, of which the gather that
                 follows makes weights; of a uniform draw the weights, float32 ones.
    words:       (1,) int64, where in the random stream the words for shifts begin; None without shifts.
    weight:      float32, where the draw itself made the weights of a draw by priority; else None.
    """

    slots: Tensor
    keys: Tensor
    probability: Tensor
    value: Tensor
    words: Tensor | None = None
    weight: Tensor | None = None

    def outputs(self, times_sampled: Tensor) -> tuple[Tensor, ...]:
        """What `store_draws` in the kernels writes to."""
        return self.slots, self.keys, self.probability, self.value, times_sampled

    @property
    def word_outputs(self) -> tuple[Tensor, ...]:
        """The words, if there are any."""
        return () if self.words is None else (self.words,)


# one draw as a launch, again and again
Draw = Callable[[], DeviceDraws]


def new_draws(batch: int, device: torch.device, *, by_priority: bool, shifted: bool = False) -> DeviceDraws:
    """Empty tensors for a draw by priority or a uniform one."""
    slots = torch.empty(batch, dtype=torch.int64, device=device)
    keys = torch.empty(batch, dtype=torch.int64, device=device)
    probability = torch.empty(batch, dtype=torch.float32, device=device)
    value = torch.empty(batch, dtype=torch.int64 if by_priority else torch.float32, device=device)
    words = torch.empty(1, dtype=torch.int64, device=device) if shifted else None
    return DeviceDraws(slots, keys, probability, value, words)
