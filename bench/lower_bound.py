"""Prioritized replay as a plain C program on one core, `lower_bound.c`: the least time that a call could take.

It is compiled when it is measured, for this machine. It checks nothing and reuses the memory of its batches, which no
buffer for users can do; the ratio to it says what is left to gain.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .records import CannotMeasure
from .subjects import ALPHA, BETA, DTYPES, EPS, Rows, Sampled, Subject, Task, tensors

NAME = "C on one core"
_SOURCE = Path(__file__).resolve().with_name("lower_bound.c")
_COMPILE = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")
_ORDER = ("obs", "action", "reward", "next_obs", "terminated")


@cache
def compiled() -> ctypes.CDLL:
    """The C program as a library. Raises CannotMeasure without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise CannotMeasure(f"{NAME} skipped: there is no C compiler; install one that is called `cc`.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lower_bound.so"
        subprocess.run([compiler, *_COMPILE, str(_SOURCE), "-o", str(file), "-lm"], check=True)
        library = ctypes.CDLL(str(file))
    library.replay_make.restype = ctypes.c_void_p
    library.replay_make.argtypes = [ctypes.c_int64, *[ctypes.c_float] * 3]
    library.replay_free.argtypes = [ctypes.c_void_p]
    for name, pointers in (("add", len(_ORDER)), ("sample", len(_ORDER) + 2), ("update", 2)):
        getattr(library, f"replay_{name}").argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * pointers]
    return library


def make(capacity: int) -> Subject:
    """The C program, with the memory of each batch size kept and used again."""
    library = compiled()
    replay, batches = library.replay_make(capacity, ALPHA, BETA, EPS), {}

    def inputs(rows: Rows) -> Any:
        # the arrays are kept beside their addresses
        return rows, [len(rows["obs"]), *(rows[name].ctypes.data for name in _ORDER)]

    def sample(batch: int) -> Sampled:
        if batch not in batches:
            slots, weight = np.empty(batch, np.int64), np.empty(batch, np.float32)
            fields = {name: np.empty((batch, *DTYPES[name][0]), DTYPES[name][1]) for name in _ORDER}
            order = [slots, *fields.values(), weight]
            places = [array.ctypes.data for array in order]
            batches[batch] = (places, batch), tensors({**fields, "weight": weight}), order
        drawn, found, _ = batches[batch]
        library.replay_sample(replay, batch, *drawn[0])
        return drawn, found

    def update(drawn: Any, priorities: Tensor) -> None:
        places, batch = drawn
        library.replay_update(replay, batch, places[0], priorities.data_ptr())

    def add(given: Any) -> None:
        library.replay_add(replay, *given[1])

    subject = Task(capacity, 1).subject(add, sample, update, inputs)
    weakref.finalize(subject, library.replay_free, replay)
    return subject
