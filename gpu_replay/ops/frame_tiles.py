"""How a device moves the frames of stacks: in pieces that fill lanes, several for one look at where frames lie."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from gpu_replay.fields import Field
from gpu_replay.ops.launch import per_program
from gpu_replay.ops.ring import Layout, Tile, interpreted_tile, layout_of, piece_columns, tile_for

# bytes of a tile, read or written, of 4 warps
_TILE = 8192


def _value_bytes(field: Field) -> int:
    """Bytes of a value, stored or sampled."""
    return max(field.dtype.itemsize, field.output_dtype.itemsize)


def frame_tile(field: Field, rows: int, interpreted: bool) -> Tile:
    """The tile of frames that a program moves at once: at most 8 KB, read or written, with 8 words for each thread.

    Words are as wide as the rows allow. Short frames get 4 words a thread and at most as many frames as threads, since
    each frame then costs a lookup of its source. If a row is long enough, the threads of a warp move words of one row.
    Long frames that fill 85% of the lanes are moved whole, up to 16 KB by twice as many threads: then the programs of a
    batch of hundreds are few enough to run all at once.
    """
    single, word = field.dtype.itemsize, math.gcd(field.row_bytes, 16)
    values = min(_TILE // _value_bytes(field), 1024 * word // single)
    short, width = field.elements <= values // 2, 1 << (field.elements - 1).bit_length()
    if short:
        values = min(values, 512 * word // single)
    if interpreted:
        return interpreted_tile(field.elements, rows)
    frames = 2 * _TILE // (width * _value_bytes(field))
    if not short and word == 16 and frames and field.elements >= 0.85 * width:
        return Tile(frames, width, 1)
    columns = piece_columns(field.elements, min(values, 32 * word // single), values)
    return Tile(min(128, values // columns), columns, -(-field.elements // columns))


def pieces_together(blocks: int, chunks: int, interpreted: bool) -> int:
    """How many pieces of its frames a program moves one after the other, so that it looks up their places once.

    The number leaves at least 2,048 programs, enough to keep a large GPU busy, and divides the pieces evenly.

    blocks: groups of frames; each is moved in `chunks` pieces.
    """
    if interpreted:
        return chunks
    each = max(1, min(chunks, blocks * chunks // 2048))
    return -(-chunks // -(-chunks // each))


class MovedFrames(NamedTuple):
    """How one launch moves a batch.

    layout:   of the stacks and the single fields.
    together: pieces of a frame that a program moves one after the other.
    items:    windows that a program finds.
    programs: of the whole launch.
    warps:    of each program.
    """

    layout: Layout
    together: int
    items: int
    programs: int
    warps: int


@lru_cache(maxsize=256)
def moved_frames(fields: tuple[Field, ...], stacked: int, batch: int, stack: int, interpreted: bool) -> MovedFrames:
    """How a launch moves a batch of fields; the first `stacked` are stacks, moved before their windows and after them.

    The result is computed once and kept, as in `moved_rows`.
    """
    frames = batch * stack
    tiles = [frame_tile(field, frames, interpreted) for field in fields[:stacked]]
    tiles += [tile_for(field, batch, interpreted) for field in fields[stacked:]]
    layout = layout_of(fields, tiles, converted=True)
    # one item per thread
    items = per_program(128, batch, interpreted)
    # stacks before windows, and as many after them
    blocks = [2 * -(-frames // tile.rows) for tile in tiles[:stacked]]
    chunks = [tile.chunks for tile in tiles[:stacked]]
    together = max(map(pieces_together, blocks, chunks, [interpreted] * stacked), default=1)
    moving = sum(count * -(-each // together) for count, each in zip(blocks, chunks, strict=True))
    programs = moving + layout.programs(batch, stacked) + -(-batch // items)
    sizes = [
        each.rows * each.columns * _value_bytes(field) for each, field in zip(tiles, fields[:stacked], strict=False)
    ]
    return MovedFrames(layout, together, items, programs, 8 if max(sizes, default=0) > _TILE else 4)
