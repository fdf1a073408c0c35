"""Recycles the arrays behind large batches that no tensor references any more.

Memory fresh from the operating system costs more than what is copied into it: each of its pages is found and cleared
when it is first touched. A buffer therefore keeps the arrays behind its last large batches, and fills one again once no
tensor uses it. Whether one does is not guessed: every tensor, view and autograd graph over an array holds a reference
to it, and the interpreter counts those.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from torch import Tensor

# bytes below which memory comes from the heap, which reuses it anyway
LARGE = 2**17
# bytes from which NumPy asks for huge pages; memory that is not touched costs nothing, so arrays of at least a quarter
# of that are made as large: filling them is an eighth faster
_HUGE = 2**22
# arrays kept for each name: a loop that holds its batch while it draws the next one needs two
_KEPT = 2


def _references(arrays: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(arrays[place])


# references to an array that only its list holds: interpreters differ in what they count for a call
_UNUSED = _references([np.empty(0)], 0)


class BatchMemory:
    """Arrays for batches, by name. One thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, list[np.ndarray]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of this shape with any content, not shared with any earlier batch.

        name: of the field it is for; arrays are reused within a name.
        """
        count = dtype.itemsize * math.prod(shape)
        if count < LARGE:
            return np.empty(shape, dtype)
        return self._bytes(name, count).view(dtype).reshape(shape)

    def copy(self, name: str, values: np.ndarray) -> np.ndarray:
        """A contiguous copy of an array, not shared with any earlier batch."""
        if values.nbytes < LARGE:
            return values.copy()
        array = self.array(name, values.shape, values.dtype)
        array[...] = values
        return array

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape with any content, not shared with any earlier batch."""
        count = dtype.itemsize * math.prod(shape)
        if count < LARGE:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._bytes(name, count)).view(dtype).view(shape)

    def _bytes(self, name: str, count: int) -> np.ndarray:
        kept = self._kept.setdefault(name, [])
        size = max(count, _HUGE) if count >= _HUGE // 4 else count
        for place in range(len(kept)):
            if kept[place].size == size and _references(kept, place) == _UNUSED:
                return kept[place][:count]
        made = np.empty(size, dtype=np.uint8)
        if len(kept) == _KEPT:
            # a batch that still uses the oldest keeps it alive
            del kept[0]
        kept.append(made)
        return made[:count]
