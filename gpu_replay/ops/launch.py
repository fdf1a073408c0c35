"""Cached kernel launches: constant arguments are resolved once.

Triton's own way to a launch compares every argument, and every global constant that a kernel names, with what they
were, and makes a key of them to look its compiled code up by: three quarters of the host's time for a launch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from gpu_replay.fields import ALIGNMENT

# keeps the launches that a function makes, by its arguments: those of the sizes that were asked for last
per_arguments = lru_cache(maxsize=64)
# whether launches go past Triton's own way at all; a variable for a Triton in which that does not work
VARIABLE = "GPU_REPLAY_PLAIN_LAUNCH"
DIRECT = os.environ.get(VARIABLE) in (None, "", "0")


def aligned(*tensors: Tensor) -> bool:
    """Whether all of them begin where memory that torch allocates does, as far as a kernel can tell.

    Raises TypeError for a tensor without memory, as there are within torch.func.
    """
    try:
        for tensor in tensors:
            if tensor.data_ptr() % ALIGNMENT:
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
    """The reciprocal by which kernels divide: see `kernels/random.py`."""
    return (2**63 - 1) // divisor


def addresses(value: Any) -> Any:
    """Tensors as their addresses, also in tuples, which Triton's launcher takes as they are.

    Pinned memory stays a tensor: Triton asks the driver for the address that the device has for it.
    """
    if isinstance(value, tuple):
        return tuple(map(addresses, value))
    return value.data_ptr() if isinstance(value, Tensor) and not value.is_pinned() else value


# what code that Inductor makes allocates with, by type of device
EMPTY_STRIDED = {
    name: make for name in ("cuda", "cpu") if (make := getattr(torch._C._dynamo.guards, f"_empty_strided_{name}", None))
}


def allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes tensors of one kind on the current device of this type; their content is anything.

    `torch.empty` looks at its arguments for as long again as memory takes.
    """
    make = EMPTY_STRIDED.get(device.type)
    if make is None:
        return lambda: torch.empty(shape, dtype=dtype, device=device)
    strides = tuple(math.prod(max(1, side) for side in shape[place + 1 :]) for place in range(len(shape)))
    return partial(make, shape, strides, dtype)


class Launch:
    """One kernel with its grid and the arguments that all of its launches share; a call brings the others.

    All launches but the first go straight to the code that Triton compiled for it. So their arguments must be of the
    same kinds: tuples as long, tensors of the same dtypes, numbers of as many bits, and addresses that are multiples of
    16 bytes where those of the first were. `aligned=False` says that tensors from outside may begin anywhere: then
    Triton looks for other code. While hooks are told of launches (Triton's own profiler), all go Triton's own way.
    """

    __slots__ = ("_after", "_before", "_grid", "_kernel", "_run", "_settings")

    def __init__(self, kernel: Any, programs: int, **shared: Any) -> None:
        """shared: arguments by the kernel's parameters, compile-time ones (in capitals, and last) among them, and
        options of the compiler. The parameters that it lacks stand side by side.
        """
        names = kernel.arg_names
        run_time = [name for name in names if not name.isupper()]
        given = [place for place, name in enumerate(run_time) if name not in shared] or [len(run_time)]
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._before = tuple(shared.pop(name) for name in run_time[: given[0]])
        self._after = tuple(shared.pop(name) for name in run_time[given[-1] + 1 :])
        self._settings = shared
        self._run: Callable[..., bool] | None = None

    def __call__(self, *arguments: Any, aligned: bool = True) -> None:
        """Launch the kernel with the arguments that are not shared."""
        if aligned and self._run is not None and self._run(*arguments):
            return
        compiled = self._kernel[self._grid](*self._before, *arguments, *self._after, **self._settings)
        # the interpreter and asynchronous compilation return no compiled kernel
        if aligned and DIRECT and self._run is None and hasattr(compiled, "packed_metadata"):
            self._run = self._straight(compiled)

    def _straight(self, compiled: Any) -> Callable[..., bool]:
        """What Triton does once it has found the compiled code, on the device that is current now; returns whether it
        did, which it does not while hooks are told.
        """
        from triton import knobs
        from triton.runtime import driver

        device, stream_of, run = driver.active.get_current_device(), driver.active.get_current_stream, compiled.run
        sizes = tuple(self._settings[name] for name in self._kernel.arg_names if name in self._settings)
        # the last three are for hooks
        before = compiled.function, compiled.packed_metadata, None, None, None, *addresses(self._before)
        programs, after, hooks = self._grid[0], (*addresses(self._after), *sizes), knobs.runtime

        def again(*arguments: Any) -> bool:
            # chains of hooks, or in other versions a hook or None
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                return False
            run(programs, 1, 1, stream_of(device), *before, *arguments, *after)
            return True

        return again
