"""The registry of kernel microbenchmarks: operations, sizes, the bytes that must move, and who does it.

Every operation is done by this package and by the torch operations that a user would write (`baselines.py`), from the
same inputs. Adding one is one entry of `KERNELS`, and one of `test_gate.TESTS` that says which tests hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import baselines, ours
from .cases import KEY, MASS, PRIORITY, short
from .kernel_checks import Work
from .kernel_inputs import FRAME, STACK, Inputs
from .rows import ROW_BYTES, described

OURS = "gpu_replay"
CAPACITIES = (10**4, 10**5, 10**6, 10**7, 10**8)
BATCHES = (32, 256, 4096, 65_536)
ROWS = 10**6
# rings of frames: on a GPU as many as Atari agents keep, elsewhere what fits a small machine
FRAMES = {"cuda": 10**6, "cpu": 10**5}
FRAME_BYTES = FRAME[0] * FRAME[1]

Maker = Callable[[Inputs], Work]


@dataclass(frozen=True)
class Kernel:
    """An operation.

    over:      the sizes it depends on: "N", "B", "NB", or "" for none.
    bytes:     that must move, from N and B.
    memory:    that everything which is measured takes together, from N and B; a generous estimate.
    baselines: name to who makes it, and the slots up to which it can do it, if not any number.
    cold:      whether caches are emptied before each call, as for work that is all about memory.
    dtype:     of gathered frames, None where there are none.
    fields:    what one stored row holds.
    """

    about: str
    over: str
    bytes: Callable[[int, int], int]
    memory: Callable[[int, int], int]
    ours: Maker
    baselines: Mapping[str, tuple[Maker, int | None]]
    cold: bool = False
    dtype: torch.dtype | None = None
    fields: Mapping[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCase:
    """One operation at one size; `batch` and `capacity` are 0 where the operation has none."""

    operation: str
    capacity: int
    batch: int
    added: int = 0

    @property
    def name(self) -> str:
        """What `--only` looks at: "draw/N=1M/B=256", "prefix-sum/N=1M"."""
        sizes = [f"N={short(self.capacity)}"] * bool(self.capacity) + [f"B={self.batch}"] * bool(self.batch)
        return "/".join([self.operation, *sizes])

    @property
    def kernel(self) -> Kernel:
        """The operation itself."""
        return KERNELS[self.operation]

    @property
    def bytes(self) -> int:
        """Bytes that must move, read and written together, whatever the implementation."""
        return self.kernel.bytes(self.capacity, self.batch)

    @property
    def fields(self) -> Mapping[str, list[Any]]:
        """What one stored row holds: name to [dtype, shape]."""
        return self.kernel.fields

    @property
    def memory(self) -> int:
        """Bytes that all implementations of the case take together, checks included; a generous estimate."""
        return self.kernel.memory(self.capacity, self.batch)

    def makers(self) -> dict[str, Maker]:
        """Who can do it at this size, this package first."""
        kept = {name: make for name, (make, most) in self.kernel.baselines.items() if self._within(most)}
        return {OURS: self.kernel.ours, **kept}

    def left_out(self) -> list[str]:
        """Baselines that cannot do it at this size."""
        return [name for name, (_, most) in self.kernel.baselines.items() if not self._within(most)]

    def _within(self, most: int | None) -> bool:
        return most is None or self.capacity <= most

    def inputs(self, device: torch.device) -> Inputs:
        """The inputs of the case."""
        return Inputs(max(1, self.capacity), max(1, self.batch), device, self.kernel.dtype or torch.uint8)


def _drawn_bytes(slots: int, batch: int) -> int:
    return batch * (MASS + KEY)


def _update_bytes(slots: int, batch: int) -> int:
    return batch * (KEY + PRIORITY + 2 * MASS)


def _frames_kernel(dtype: torch.dtype, label: str) -> Kernel:
    size = dtype.itemsize
    cast = " + cast" if size > 1 else ""
    return Kernel(
        f"stacks of {STACK} frames of 84x84 before and after, at given slots, as {label}",
        over="B",
        bytes=lambda slots, batch: batch * (KEY + 2 * STACK * FRAME_BYTES * (1 + size)),
        memory=lambda slots, batch: slots * (FRAME_BYTES + 64) + 4 * batch * 2 * STACK * FRAME_BYTES * (1 + size),
        ours=ours.frame_gather,
        baselines={
            f"index_select{cast}": (baselines.index_select_frames, None),
            f"index_select of words{cast}": (partial(baselines.index_select_frames, dtype=torch.int64), None),
        },
        cold=True,
        dtype=dtype,
        fields={"obs": ["uint8", list(FRAME)], "action": ["int64", []]},
    )


FLOAT32 = baselines.FLOAT32_SLOTS

KERNELS: dict[str, Kernel] = {
    "empty": Kernel(
        "nothing: an empty kernel, on a CPU one NumPy call on one number",
        over="",
        bytes=lambda slots, batch: 0,
        memory=lambda slots, batch: 0,
        ours=ours.empty,
        baselines={"zero_ of one number": (baselines.smallest, None)},
    ),
    "prefix-sum": Kernel(
        "inclusive prefix sums of N int64",
        over="N",
        bytes=lambda slots, batch: 16 * slots,
        memory=lambda slots, batch: 64 * slots,
        ours=ours.prefix_sum,
        baselines={"cumsum": (baselines.cumsum_of_integers, None)},
        cold=True,
    ),
    "tree-build": Kernel(
        "the sums that draws need, from N masses",
        over="N",
        # the masses once; what is written is the inside of a structure
        bytes=lambda slots, batch: 8 * slots,
        memory=lambda slots, batch: 80 * slots,
        ours=ours.tree_build,
        baselines={"cumsum": (baselines.cumsum, None)},
        cold=True,
    ),
    "draw": Kernel(
        "B slots by mass, stratified, after any change",
        over="NB",
        bytes=_drawn_bytes,
        memory=lambda slots, batch: 120 * slots + 200 * batch,
        ours=ours.draw,
        baselines={
            "cumsum + searchsorted": (baselines.cumsum_searchsorted, None),
            "cumsum + searchsorted, float32": (partial(baselines.cumsum_searchsorted, dtype=torch.float32), FLOAT32),
            "multinomial": (baselines.multinomial, FLOAT32),
            "searchsorted alone": (baselines.searchsorted, None),
        },
    ),
    "update": Kernel(
        "new masses at B slots, ready to draw from",
        over="NB",
        bytes=_update_bytes,
        memory=lambda slots, batch: 120 * slots + 600 * batch,
        ours=ours.update,
        baselines={
            "scatter + cumsum": (baselines.scatter_cumsum, None),
            "scatter + cumsum, float32": (partial(baselines.scatter_cumsum, dtype=torch.float32), FLOAT32),
            "scatter alone": (baselines.scatter, None),
        },
    ),
    "draw-update": Kernel(
        "B slots by mass, then new masses for them",
        over="NB",
        bytes=lambda slots, batch: _drawn_bytes(slots, batch) + _update_bytes(slots, batch),
        memory=lambda slots, batch: 120 * slots + 600 * batch,
        ours=ours.draw_update,
        baselines={
            "cumsum + searchsorted + scatter": (baselines.draw_update, None),
            "cumsum + searchsorted + scatter, float32": (partial(baselines.draw_update, dtype=torch.float32), FLOAT32),
        },
    ),
    "rank-draw": Kernel(
        "B slots by rank, stratified, after B priorities have changed",
        over="NB",
        bytes=_drawn_bytes,
        memory=lambda slots, batch: 200 * slots + 1500 * batch,
        ours=ours.rank_draw,
        baselines={"sort + searchsorted": (baselines.sort_searchsorted, None)},
    ),
    "row-gather": Kernel(
        f"rows of five small fields, {ROW_BYTES} bytes, at given slots",
        over="B",
        bytes=lambda slots, batch: batch * (KEY + 2 * ROW_BYTES),
        memory=lambda slots, batch: 5 * ROW_BYTES * slots + 8 * ROW_BYTES * batch,
        ours=ours.row_gather,
        baselines={
            "index_select per field": (baselines.index_select_fields, None),
            "index_select of packed rows alone": (baselines.index_select_packed, None),
        },
        cold=True,
        fields=described(),
    ),
    "frame-gather": _frames_kernel(torch.uint8, "uint8"),
    "frame-gather-bf16": _frames_kernel(torch.bfloat16, "bfloat16"),
    "frame-gather-f16": _frames_kernel(torch.float16, "float16"),
}


def kernel_cases(
    device_type: str,
    capacities: tuple[int, ...] = CAPACITIES,
    batches: tuple[int, ...] = BATCHES,
    *,
    rows: int = ROWS,
    frames: int | None = None,
    most: int | None = None,
) -> list[KernelCase]:
    """All cases for a kind of device, those of one operation and capacity together; none with more than `most` slots.

    rows, frames: slots of the rings that are only gathered from; as many frames as `FRAMES` says for None.

    A batch is never larger than the ring that it is drawn from.
    """
    cases = []
    for name, kernel in KERNELS.items():
        rings = capacities if "N" in kernel.over else (0,)
        if kernel.over == "B":
            rings = (rows if kernel.dtype is None else frames or FRAMES[device_type],)
        for ring in rings:
            for batch in batches if "B" in kernel.over else (0,):
                cases.append(KernelCase(name, ring, batch))
    return [case for case in cases if case.batch <= case.capacity <= (most or case.capacity)]
