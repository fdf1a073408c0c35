"""Rows into the ring and out of it, all fields at once: consecutive slots written, any slots gathered.

Gathered values are cast and scaled where a field says so: `value * scale` in the field's arithmetic dtype, then cast.

On a device the gather also ends a sample. A weight needs the smallest mass of its batch, which is known once all of it
is drawn; the gather makes weights and counts the sample while it waits for memory anyway, so that a sample changes
nothing before its last launch.

On the host the arrays behind large batches are recycled. Memory fresh from the operating system costs more than what is
copied into it: each of its pages is found and cleared when it is first touched. A buffer therefore keeps the arrays
behind its last large batches, and fills one again once no tensor uses it. Whether one does is not guessed: every
tensor, view and autograd graph over an array holds a reference to it, and the interpreter counts those.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import setitem
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops.launch import Launch, allocator, per_program

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


@dataclass(frozen=True)
class StreamShape:
    """How the ring is divided: `steps` steps of `num_envs` environments; the slot of key `k` is `k % slots`.

    next_step: whether the step after an ending carries the final observation.
    finals:    final observations kept apart from the ring; 0 with `next_step`.
    terminal:  whether those of terminated episodes are kept there too, where truncated ones leave a place.
    hindsight: whether later goals are looked up: episodes are then remembered.
    length:    steps of a row that is a sequence, 0 where rows are single steps; `strict` if all lie in one episode, and
               the stride of their first steps.
    """

    num_envs: int
    steps: int
    stack: int
    n_step: int
    next_step: bool
    finals: int
    terminal: bool = False
    hindsight: bool = False
    length: int = 0
    strict: bool = False
    stride: int = 1

    @property
    def ahead(self) -> int:
        """Steps from the first of a row to its last."""
        return max(self.length - 1, 0)

    @property
    def lines(self) -> int:
        """Steps whose start may not be eligible yet."""
        return self.n_step + 1 + self.ahead

    @property
    def slots(self) -> int:
        """Steps of all environments that fit."""
        return self.num_envs * self.steps


class Finish(NamedTuple):
    """What the launch that ends a sample counts: see `kernels/ring.py`.

    counted: (slots,) int32 how often each slot was sampled and, with a schedule, (3,) float64 its start, change and
             steps; () of rows that are read alone.
    blocks:  of random words that the sample takes.
    minima:  masses that the draw leaves, the smallest of which has the largest weight.
    """

    counted: tuple[Tensor, ...] = ()
    blocks: int = 0
    minima: int = 0


READ = Finish()
# (slots, sample, beta) -> the fields of the rows at (B,) slots. Only at the end of a sample it is given `sample`, its
# slots, masses, weights (which it fills) and minima, and `beta`, the exponent of the weights if there is no schedule.
Gather = Callable[..., dict[str, Tensor]]


def weight_programs(batch: int, interpreted: bool) -> tuple[int, int]:
    """The programs of a launch that finish a batch, and the draws of each; none for no batch."""
    # one draw per thread: more would need more registers than the gather that they are part of
    draws = per_program(128, batch, interpreted) if batch else 0
    return (-(-batch // draws) if batch else 0), draws


Result = TypeVar("Result")
# puts what comes to a place in an array there
put: Callable[[Any, Any, Any], None] = setitem


def contiguous(array: np.ndarray) -> np.ndarray:
    """The values of an array end to end, in memory that a loop may take: contiguous and writable, if need be a copy."""
    flat = array if array.ndim == 1 else array.reshape(-1)
    return flat if flat.flags.carray else flat.copy()


def parts_of(start: int, count: int, size: int, skipped: int = 0) -> list[tuple[slice, slice]]:
    """Host: the slots that `count` rows take from `start` on in a ring of `size`, and which rows: two where it wraps.

    skipped: rows at the beginning that are left out.
    """
    stop, seam = start + count, skipped + size - start
    if stop <= size:
        return [(slice(start, stop), slice(skipped, skipped + count))]
    return [(slice(start, size), slice(skipped, seam)), (slice(0, stop - size), slice(seam, skipped + count))]


def commit(result: Result, *changes: Iterable[object]) -> Result:
    """Host: make these changes all together or not at all; returns `result`.

    changes: iterators that make them as they are read and run no Python code of their own, such as `map` of `put`
             over arrays, places and values, or `starmap` of a loop that is ready.

    An exception in between would leave transitions that are half those that they overwrite. The interpreter handles a
    signal between two of its own instructions, and this is one. The values must fit: nothing may be left that fails.
    """
    return (tuple(chain(*changes)), result)[1]


def gather_rows(rows: np.ndarray, slots: np.ndarray, memory: BatchMemory | None = None, name: str = "") -> np.ndarray:
    """Host: (B, ...) rows of an array at slots that exist.

    memory: where that of large ones comes from, for the field `name`; None: it is new.
    """
    if memory is None or slots.size * rows.nbytes < LARGE * len(rows):
        return rows.take(slots, axis=0)
    out = memory.array(name, (slots.size, *rows.shape[1:]), rows.dtype)
    # clipping changes no slot that exists; it is the mode that writes straight into `out`
    return rows.take(slots, 0, out, "clip")


def as_torch(field: Field) -> Callable[[np.ndarray], Tensor]:
    """What makes a tensor over rows of a field as NumPy sees it: `fields.as_numpy` undone."""
    if field.dtype == torch.bfloat16:
        return lambda rows: torch.from_numpy(rows).view(torch.bfloat16)
    return torch.from_numpy


def as_sampled(field: Field) -> Callable[[np.ndarray], Tensor]:
    """What makes a tensor as the field wants it sampled of (B, *shape) stored rows, referenced nowhere else."""
    view = as_torch(field)
    return (lambda rows: convert(view(rows), field)) if field.converts else view


def convert(rows: Tensor, field: Field, out: Tensor | None = None) -> Tensor:
    """(B, *shape) stored rows of a field, referenced nowhere else, as it wants them sampled; in `out` if given."""
    if not field.converts:
        return rows
    if field.scale is None:
        return rows.to(field.output_dtype) if out is None else out.copy_(rows)
    if out is None or out.dtype != field.arithmetic_dtype:
        scaled = rows.to(field.arithmetic_dtype).mul_(field.scale)
        return scaled.to(field.output_dtype) if out is None else out.copy_(scaled)
    return torch.mul(rows, field.scale, out=out) if rows.dtype == out.dtype else out.copy_(rows).mul_(field.scale)


class Tile(NamedTuple):
    """The tile that one program moves: `rows` rows of `columns` values; a row has `chunks` such pieces."""

    rows: int
    columns: int
    chunks: int


def piece_columns(elements: int, least: int, most: int) -> int:
    """Values of the pieces in which a row is moved, the widest power of two in [least, most] whose padding
    is within 1/64 of the best.

    least, most: powers of two. Of rows that are shorter all are one piece.
    """
    width = 1 << (elements - 1).bit_length()
    sizes = [width >> times for times in range(width.bit_length()) if min(least, width) <= width >> times <= most]
    filled = {size: elements / (-(-elements // size) * size) for size in sizes}
    return max(size for size in sizes if filled[size] >= max(filled.values()) - 1 / 64)


def tile_for(field: Field, rows: int, interpreted: bool) -> Tile:
    """The tile for rows of a field: powers of two, together at most 8 KB, in or out, and 4096 values.

    A row is moved in pieces that it fills, so that few lanes have nothing to move, and whole warps move each of them.
    Under the interpreter, where each program instance costs about 1 ms, a program takes more, and no more rows than
    there are; on a GPU the number of rows must not decide, since another tile is another kernel to compile.
    """
    single, word = field.dtype.itemsize, math.gcd(field.row_bytes, 16)
    # a thread has 8 single values, or as many 16-byte words as fit
    values = 1024 if word < 16 else min(4096, 8192 // max(single, field.output_dtype.itemsize))
    if interpreted:
        return interpreted_tile(field.elements, rows)
    columns = piece_columns(field.elements, min(values, 32 * word // single), values)
    return Tile(min(1024, values // columns), columns, -(-field.elements // columns))


def interpreted_tile(elements: int, rows: int) -> Tile:
    """The tile, under the interpreter, of at most 65,536 values and no more rows than there are, powers of two."""
    columns = min(65536, 1 << (elements - 1).bit_length())
    return Tile(max(1, min(1 << (rows - 1).bit_length(), 65536 // columns)), columns, -(-elements // columns))


class Layout(NamedTuple):
    """The compile-time part of a launch that moves rows: an entry for each field, as kernels read them.

    widths:        values of a row. rows, columns, chunks: of its `Tile`.
    scales, wide:  of values that are converted, and whether in float64.
    """

    widths: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    chunks: tuple[int, ...]
    scales: tuple[float | None, ...] = ()
    wide: tuple[bool, ...] = ()

    def programs(self, count: int, begin: int = 0) -> int:
        """Programs that move `count` rows of the fields from `begin` on."""
        tiles = list(zip(self.rows, self.chunks, strict=True))[begin:]
        return sum(-(-count // rows) * chunks for rows, chunks in tiles)


@lru_cache(maxsize=256)
def moved_rows(fields: tuple[Field, ...], rows: int, interpreted: bool, converted: bool = False) -> tuple[Layout, int]:
    """The layout in which a launch moves this number of rows of fields, and its programs; made once, since making it
    takes longer than a launch.
    """
    layout = layout_of(fields, [tile_for(field, rows, interpreted) for field in fields], converted=converted)
    return layout, layout.programs(rows)


def layout_of(fields: Sequence[Field], tiles: Sequence[Tile], *, converted: bool = False) -> Layout:
    """The layout of fields that are moved in these tiles."""
    columns = tuple(tuple(column) for column in zip(*tiles, strict=True)) or ((), (), ())
    layout = Layout(tuple(field.elements for field in fields), *columns)
    if not converted:
        return layout
    wide = tuple(field.arithmetic_dtype == torch.float64 for field in fields)
    return layout._replace(scales=tuple(field.scale for field in fields), wide=wide)


def make_gather(
    stores: Mapping[str, Tensor], fields: Mapping[str, Field], batch: int, counters: Tensor, finish: Finish = READ
) -> Gather:
    """Device: (B, *shape) rows of every field at (B,) slots; one launch a call. With `finish` it also ends their
    sample.
    """
    from gpu_replay.kernels.ring import gather_kernel

    device, interpreted = counters.device, counters.device.type == "cpu"
    layout, programs = moved_rows(tuple(fields.values()), batch, interpreted, converted=True)
    weights, draws = weight_programs(batch if finish.counted else 0, interpreted)
    launch = Launch(
        gather_kernel,
        weights + programs,
        sources=tuple(stores[name] for name in fields),
        counters_ptr=counters,
        counted=finish.counted,
        minima=finish.minima,
        blocks_drawn=finish.blocks,
        batch=batch,
        LAYOUT=layout,
        DRAWS=draws,
    )
    new = [(name, allocator((batch, *field.shape), field.output_dtype, device)) for name, field in fields.items()]

    def gather(slots: Tensor, sample: tuple[Tensor, ...] = (), beta: float = 0.0) -> dict[str, Tensor]:
        outputs = {}
        for name, make in new:
            outputs[name] = make()
        launch(tuple(outputs.values()), slots, sample, beta)
        return outputs

    return gather
