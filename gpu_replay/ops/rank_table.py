"""The masses of ranks: integers that fall as 1 / rank ** alpha, made once, so that every device draws from the same.

Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

import numpy as np

# the total of all ranks stays below 2**62, and a mass is a whole float64
_TOTAL_BITS = 61
_MASS_BITS = 52


def cumulative_masses(slots: int, alpha: float) -> np.ndarray:
    """(slots,) int64: entry `r` is the sum of the masses of the ranks from 1 to r + 1.

    With `n` ranked transitions their total is entry n - 1, and rank `r + 1` is drawn where the first entry above a
    target in [0, total) is entry `r`.
    """
    return np.cumsum(rank_masses(slots, alpha))


def rank_masses(slots: int, alpha: float) -> np.ndarray:
    """(slots,) int64 masses of the ranks from 1 on, at least 1 each."""
    share = np.arange(1, slots + 1, dtype=np.float64)
    np.log2(share, out=share)
    share *= -alpha
    np.exp2(share, out=share)
    bits = min(_MASS_BITS, int(np.floor(_TOTAL_BITS - np.log2(share.sum()))))
    share *= float(2**bits)
    share += 0.5
    # the cast truncates, which is the floor of a positive number
    masses = share.astype(np.int64)
    np.maximum(masses, 1, out=masses)
    return masses
