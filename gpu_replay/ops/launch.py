"""Cached kernel launches: constant arguments are resolved once.

Triton's own way to a launch compares every argument, and every global constant that a kernel names, with what they
were, and makes a key of them to look its compiled code up by: three quarters of the host's time for a launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

# keeps the launches that a function plans, by its arguments: those of the sizes that were asked for last
plans = lru_cache(maxsize=64)
# Triton compiles code that moves whole words for multiples of this address
_ALIGNMENT = 16
# whether launches go past Triton's own way at all; a variable for a Triton in which that does not work
VARIABLE = "GPU_REPLAY_PLAIN_LAUNCH"
DIRECT = os.environ.get(VARIABLE) in (None, "", "0")


def aligned(*tensors: Tensor) -> bool:
    """Whether all of them begin where memory that torch allocates does, as far as a kernel can tell.

    Raises TypeError for a tensor without memory, as there are within torch.func.
    """
    try:
        for tensor in tensors:
            if tensor.data_ptr() % _ALIGNMENT:
                return False
    except RuntimeError as error:
        raise TypeError(
            "values and priorities must be tensors with their numbers in memory; torch cannot read one: "
            f"{error} Within torch.func.grad or vmap return it, and call the buffer with the result."
        ) from error
    return True


def per_program(gpu: int, count: int, interpreted: bool, most: int = 1024) -> int:
    """Items of one program, a power of two: `gpu` on a GPU whatever the count, as another number is a kernel more.

    Under the interpreter, where each program instance costs about 1 ms, all of `count`, but no more than `most`.
    """
    return min(most, 1 << (count - 1).bit_length()) if interpreted else gpu


def reciprocal(divisor: int) -> int:
    """The reciprocal by which kernels divide: see `kernels/division.py`."""
    return (2**63 - 1) // divisor


class Launch:
    """One kernel with its grid and compile-time settings, launched by each call.

    All launches but the first go straight to the code that Triton compiled for it. So their arguments must be of the
    same kinds: tuples as long, tensors of the same dtypes, numbers of as many bits, and addresses that are multiples of
    16 bytes where those of the first were. `aligned=False` says that tensors from outside may begin anywhere: then
    Triton looks for other code.
    """

    __slots__ = ("_again", "_grid", "_kernel", "_settings", "_sizes")

    def __init__(self, kernel: Any, programs: int, **settings: Any) -> None:
        """settings: the kernel's `constexpr` parameters, which come last in it, and options of the compiler."""
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._settings = settings
        self._sizes = tuple(settings[name] for name in kernel.arg_names if name in settings)
        self._again: Callable[..., object] | None = None

    def __call__(self, *arguments: Any, aligned: bool = True) -> None:
        """Launch the kernel; the arguments are those before its settings."""
        if aligned and self._again is not None:
            self._again(*arguments, *self._sizes)
            return
        compiled = self._kernel[self._grid](*arguments, **self._settings)
        if aligned and DIRECT and hasattr(compiled, "packed_metadata"):
            # nothing of the kind comes from the interpreter, or while Triton compiles beside the program
            self._again = compiled[self._grid]
