"""The numbers that advance with every call, kept on the device so that a replayed CUDA graph advances them too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops.constants import NO_MASS as NO_MASS
from gpu_replay.loops.constants import Counter as Counter

# what must outlive a call, by its name in checkpoints; the rest belongs to a launch, or follows from the seed
LASTING = {
    "ADDED": Counter.ADDED,
    "FIRST": Counter.FIRST,
    "RANDOM": Counter.RANDOM,
    "STEP": Counter.STEP,
    "TOP": Counter.MAX_MASS,
    "STALE": Counter.STALE,
    "REJECTED": Counter.REJECTED,
    "SATURATED": Counter.SATURATED,
    "FINALS": Counter.FINALS,
}


def counter_values(lasting: dict[str, int], seed: int) -> list[int]:
    """All counters at rest, given the lasting ones by name (0 where missing) and the seed."""
    values = [0] * Counter.COUNT
    for name, place in LASTING.items():
        values[place] = lasting.get(name, 0)
    values[Counter.SEED] = (seed + 2**63) % 2**64 - 2**63
    values[Counter.LOWEST] = NO_MASS
    return values


def new_counters(device: torch.device, seed: int) -> Tensor:
    """(Counter.COUNT,) int64 of an empty buffer."""
    return torch.tensor(counter_values({}, seed), dtype=torch.int64, device=device)


class HostWords:
    """Philox-4x64-10 words by position, from one generator that is kept while positions follow each other.

    Block `b` of the stream is what `numpy.random.Philox(counter=b, key=[seed, stream])` gives first.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._key = np.array([seed & (2**64 - 1), stream], dtype=np.uint64)
        self._next = -1
        self._generator = np.random.Generator(np.random.Philox(key=self._key))

    def words(self, block: int, count: int) -> np.ndarray:
        """`count` uint64 words from the start of a block on; whole blocks are consumed."""
        blocks = blocks_for(count)
        bits: np.random.Philox = self._at(block, blocks).bit_generator  # type: ignore[assignment]
        return np.asarray(bits.random_raw(blocks * 4))[:count]

    def doubles(self, block: int, count: int) -> np.ndarray:
        """(word >> 11) * 2**-53 of the same words: float64 in [0, 1)."""
        blocks = -(-count // 4)
        numbers = self._at(block, blocks).random(blocks * 4)
        return numbers if numbers.size == count else numbers[:count]

    def _at(self, block: int, blocks: int) -> np.random.Generator:
        if block != self._next:
            # an exception in between finds neither the old position nor the new one
            self._next = -1
            self._generator = np.random.Generator(np.random.Philox(counter=[block, 0, 0, 0], key=self._key))
        self._next = block + blocks
        return self._generator


def blocks_for(words: int) -> int:
    """Philox blocks that hold so many words."""
    return -(-words // 4)
