"""How a device moves the frames of stacks: in pieces that fill lanes, several for one look at where frames lie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from gpu_replay.fields import Field
from gpu_replay.ops.draw import per_program
from gpu_replay.ops.ring import Layout, Tile, layout_of, piece_columns, tile_for, tile_of


def frame_tile(field: Field, rows: int, shifted: bool, interpreted: bool) -> Tile:
    """What a program moves of frames at once: at most 8 KB, in or out, and for a thread 8 words as wide as rows allow.

    Of short frames 4 words, and no more frames than threads, since a thread then looks up where several come from. The
    threads of a warp move words of one row, where it is as long.
    shifted: whether each value has an address of its own, and a thread so 16 single ones: of 32 Triton 3.6 keeps all
             addresses at once, in 254 registers.
    """
    single = field.dtype.itemsize
    word = 2 * single if shifted else math.gcd(field.row_bytes, 16)
    values = min(8192 // max(single, field.output_dtype.itemsize), 1024 * word // single)
    if field.elements <= values // 2:
        values = min(values, 512 * word // single)
    if interpreted:
        return tile_of(field.elements, values, rows, interpreted)
    columns = piece_columns(field.elements, min(values, 32 * word // single), values)
    return Tile(min(128, values // columns), columns, -(-field.elements // columns))


def pieces_together(blocks: int, chunks: int, interpreted: bool) -> int:
    """Pieces of its frames that a program moves one after the other, for one look at where they lie.

    As many as leave 2,048 programs, enough to keep a large GPU busy, and dealt out evenly.

    blocks: of frames, each of which is moved in so many chunks.
    """
    if interpreted:
        return chunks
    each = max(1, min(chunks, blocks * chunks // 2048))
    return -(-chunks // -(-chunks // each))


class MovedFrames(NamedTuple):
    """A layout of stacks and single fields, the pieces of frames that a program moves, the items of one that finds
    windows, and the programs of all."""

    layout: Layout
    together: int
    items: int
    programs: int


def moved_frames(
    fields: Iterable[Field], stacked: int, batch: int, stack: int, shifted: bool, interpreted: bool
) -> MovedFrames:
    """How a launch moves a batch of fields, of which the first `stacked` are stacks, before windows and after them.

    Made once, as `moved_rows`.
    """
    return _moved_frames(tuple(fields), stacked, batch, stack, shifted, interpreted)


@lru_cache(maxsize=256)
def _moved_frames(
    fields: tuple[Field, ...], stacked: int, batch: int, stack: int, shifted: bool, interpreted: bool
) -> MovedFrames:
    pictures = [field.shape[-2:] if shifted and len(field.shape) >= 2 else (0, 0) for field in fields[:stacked]]
    frames = batch * stack
    tiles = [
        frame_tile(field, frames, picture != (0, 0), interpreted)
        for field, picture in zip(fields, pictures, strict=False)
    ]
    tiles += [tile_for(field, batch, interpreted) for field in fields[stacked:]]
    layout = layout_of(fields, tiles, converted=True)._replace(
        heights=tuple(height for height, _ in pictures), sides=tuple(side for _, side in pictures)
    )
    # one item per thread
    items = per_program(128, batch, interpreted)
    # stacks before windows, and as many after them
    blocks = [2 * -(-frames // tile.rows) for tile in tiles[:stacked]]
    chunks = [tile.chunks for tile in tiles[:stacked]]
    together = max(map(pieces_together, blocks, chunks, [interpreted] * stacked), default=1)
    moving = sum(count * -(-each // together) for count, each in zip(blocks, chunks, strict=True))
    return MovedFrames(layout, together, items, moving + layout.programs(batch, stacked) + -(-batch // items))
