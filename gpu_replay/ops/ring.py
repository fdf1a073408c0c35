"""Rows into the ring and out of it, all fields at once: consecutive slots written, any slots gathered.

Gathered values are cast and scaled where a field says so: `value * scale` in the field's arithmetic dtype, then cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.stratified_draw import edge_blocks_per_program
from gpu_replay.ops.weights import PendingWeights, part_of


def as_numpy(tensor: Tensor | np.ndarray) -> np.ndarray:
    """A NumPy view of a CPU tensor's memory; bfloat16, which NumPy lacks, is seen as int16. An array is its own."""
    if isinstance(tensor, np.ndarray):
        return tensor
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write_rows(
    stores: Mapping[str, np.ndarray], values: Mapping[str, Tensor | np.ndarray], start: int, skipped: int = 0
) -> None:
    """Host: put the rows of every field into the slots from `start` on, in two slices where the ring wraps.

    skipped: rows at the beginning that are left out.
    """
    for name, value in values.items():
        store, rows = stores[name], as_numpy(value)
        if skipped:
            rows = rows[skipped:]
        stop = start + len(rows)
        if stop <= len(store):
            store[start:stop] = rows
            continue
        head = len(store) - start
        store[start:] = rows[:head]
        store[: stop - len(store)] = rows[head:]


def gather_rows(rows: np.ndarray, field: Field, slots: np.ndarray) -> Tensor:
    """Host: (B, *shape) rows of one field's carrier array, as the field wants them sampled."""
    return as_sampled(rows.take(slots, axis=0), field)


def as_sampled(rows: np.ndarray, field: Field) -> Tensor:
    """Host: (B, *shape) rows of a field's carrier dtype, which nobody else holds, as the field wants them sampled."""
    raw = torch.from_numpy(rows)
    if field.dtype == torch.bfloat16:
        raw = raw.view(torch.bfloat16)
    if not field.converts:
        return raw
    if field.scale is None:
        return raw.to(field.output_dtype)
    return raw.to(field.arithmetic_dtype).mul_(field.scale).to(field.output_dtype)


class Tile(NamedTuple):
    """What one program moves: `rows` rows of `columns` values; a row has `chunks` such pieces."""

    rows: int
    columns: int
    chunks: int


def tile_for(field: Field, rows: int, interpreted: bool) -> Tile:
    """The tile for rows of a field: powers of two, together at most 8 KB, in or out, and 4096 values.

    Where a program is dear it takes more, and no more rows than there are; on a GPU the number of rows must not decide,
    since another tile is another kernel to compile.
    """
    # a thread has 8 single values, or as many 16-byte words as fit
    values = 1024 if field.row_bytes % 16 else min(4096, 8192 // max(field.dtype.itemsize, field.output_dtype.itemsize))
    return tile_of(field.elements, values, rows, interpreted)


def tile_of(elements: int, values: int, rows: int, interpreted: bool, most: int = 1024) -> Tile:
    """The tile of at most `values` values and `most` rows, powers of two, for rows of so many elements."""
    if interpreted:
        values, most = 65536, 1 << (rows - 1).bit_length()
    columns = min(values, 1 << (elements - 1).bit_length())
    return Tile(max(1, min(most, values // columns)), columns, -(-elements // columns))


class Layout(NamedTuple):
    """The compile-time part of a launch, per field."""

    widths: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def programs(self, rows: int) -> int:
        return sum(-(-rows // tile.rows) * tile.chunks for tile in self.tiles)

    def constants(self) -> dict[str, object]:
        return {
            "FIELDS": len(self.widths),
            "WIDTHS": self.widths,
            "ROWS": tuple(tile.rows for tile in self.tiles),
            "COLUMNS": tuple(tile.columns for tile in self.tiles),
            "CHUNKS": tuple(tile.chunks for tile in self.tiles),
        }


def layout_of(fields: Sequence[Field], rows: int, interpreted: bool) -> Layout:
    tiles = tuple(tile_for(field, rows, interpreted) for field in fields)
    return Layout(tuple(field.elements for field in fields), tiles)


def launch_gather(
    stores: Mapping[str, Tensor], fields: Mapping[str, Field], slots: Tensor, weighing: PendingWeights | None = None
) -> dict[str, Tensor]:
    """Device: (B, *shape) rows of every field at (B,) slots, and the weights of their draw if asked for; one launch."""
    from gpu_replay.kernels.ring import gather_kernel

    batch = slots.numel()
    kinds = list(fields.values())
    layout = layout_of(kinds, batch, slots.device.type == "cpu")
    outputs = {
        name: torch.empty((batch, *field.shape), dtype=field.output_dtype, device=slots.device)
        for name, field in fields.items()
    }
    part = part_of(weighing)
    gather_kernel[(part.programs + layout.programs(batch),)](
        tuple(stores[name] for name in fields),
        tuple(outputs.values()),
        part.pointers,
        slots,
        slots if weighing is None else weighing.counters,
        batch,
        *part.numbers,
        SCALES=tuple(field.scale for field in kinds),
        WIDE=tuple(field.arithmetic_dtype == torch.float64 for field in kinds),
        **layout.constants(),
        **part.constants,
    )
    return outputs


def launch_write(
    stores: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    values: Mapping[str, Tensor],
    counters: Tensor,
    tree: MassTree | None,
    *,
    highest: bool,
) -> None:
    """Device: put m rows of every field after the newest; with `highest`, look up the largest mass too. One launch."""
    from gpu_replay.kernels.ring import write_kernel

    interpreted = counters.device.type == "cpu"
    first = next(iter(fields))
    rows, capacity = values[first].shape[0], stores[first].shape[0]
    skipped = max(0, rows - capacity)
    layout = layout_of(list(fields.values()), rows - skipped, interpreted)
    fanout, blocks, per_program = 128, 0, 1
    edge_programs = 0
    high = masses = counters
    if highest and tree is not None and tree.high is not None:
        fanout, blocks = tree.fanout, tree.levels[0].numel() // tree.fanout
        per_program = edge_blocks_per_program(blocks, interpreted)
        edge_programs = -(-blocks // per_program)
        high, masses = tree.high, tree.levels[0]
    write_kernel[(layout.programs(rows - skipped) + edge_programs,)](
        tuple(values[name] for name in fields),
        tuple(stores[name] for name in fields),
        counters,
        high,
        masses,
        rows,
        skipped,
        capacity,
        blocks,
        ADDED=int(Counter.ADDED),
        EDGE_HIGH=int(Counter.EDGE_HIGH),
        HIGHEST=edge_programs > 0,
        FANOUT=fanout,
        BLOCKS=per_program,
        **layout.constants(),
    )
