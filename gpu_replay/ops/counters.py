"""The numbers that advance with every call, kept on the device so that a replayed CUDA graph advances them too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_replay.loops.constants import NO_KEY as NO_KEY
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
    "FLAWED": Counter.FLAWED,
    "NONFINITE": Counter.NONFINITE,
    "TERMINALS": Counter.TERMINALS,
    "LOST_TERMINALS": Counter.LOST_TERMINALS,
}
# those that checkpoints of earlier versions lack
ADDED_LATER = ("FLAWED", "NONFINITE", "TERMINALS", "LOST_TERMINALS")


def counter_values(lasting: dict[str, int], seed: int) -> list[int]:
    """All counters at rest, given the lasting ones by name (0 where missing) and the seed."""
    values = [0] * Counter.COUNT
    for name, place in LASTING.items():
        values[place] = lasting.get(name, 0)
    values[Counter.SEED] = (seed + 2**63) % 2**64 - 2**63
    return values


def new_counters(device: torch.device, seed: int) -> Tensor:
    """(Counter.COUNT,) int64 of an empty buffer."""
    return torch.tensor(counter_values({}, seed), dtype=torch.int64, device=device)


class HostWords:
    """Philox-4x64-10 words of one stream, from one generator that is kept while positions follow each other.

    block: the next one, by which a draw sets where it begins. Block `b` is what `numpy.random.Philox(counter=b,
           key=[seed, 0])` gives first.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self, seed: int, block: int = 0) -> None:
        self.block = block
        self._key = np.array([seed & (2**64 - 1), 0], dtype=np.uint64)
        # where the generator stands
        self._reached = -1
        self._generator = np.random.Generator(np.random.Philox(key=self._key))

    def words(self, count: int) -> np.ndarray:
        """The next `count` uint64 words; whole blocks are consumed."""
        blocks = blocks_for(count)
        bits: np.random.Philox = self._advanced(blocks).bit_generator  # type: ignore[assignment]
        return np.asarray(bits.random_raw(blocks * 4))[:count]

    def doubles(self, count: int) -> np.ndarray:
        """(word >> 11) * 2**-53 of the same words: float64 in [0, 1)."""
        blocks = -(-count // 4)
        numbers = self._advanced(blocks).random(blocks * 4)
        return numbers if numbers.size == count else numbers[:count]

    def _advanced(self, blocks: int) -> np.random.Generator:
        """The generator at the next block, of which the caller takes so many."""
        if self.block != self._reached:
            # an exception in between finds neither the old position nor the new one
            self._reached = -1
            self._generator = np.random.Generator(np.random.Philox(counter=[self.block, 0, 0, 0], key=self._key))
        self._reached = self.block = self.block + blocks
        return self._generator


def blocks_for(words: int) -> int:
    """Philox blocks that hold so many words."""
    return -(-words // 4)
