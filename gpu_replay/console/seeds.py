"""Independent seeds derived from the seed of a run."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Stream = Literal["training", "evaluation", "confirmation", "final", "network", "actions", "replay", "play", "actor"]


def stream_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """A 63-bit seed for the `index`-th use of a stream; different for each stream, index and run seed."""
    words = np.random.SeedSequence((seed, get_args(Stream).index(stream), index)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
