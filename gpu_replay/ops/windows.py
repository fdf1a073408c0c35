"""Rewards, discounts and endings of n-step windows, and stacks of observations put together from frames stored once.

Frame `i` of a stack of `S` whose newest frame lies in a slot is the one `S - 1 - i` steps before it, unless the episode
began later: then it is the episode's first frame ("reset") or zeros ("zero"). A device moves frames in pieces that fill
lanes, several for one look at where frames lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.loops.windows import gather_bytes, gather_words
from gpu_replay.ops.launch import Launch, allocator, per_program, reciprocal
from gpu_replay.ops.ring import (
    READ,
    BatchMemory,
    Finish,
    Gather,
    Layout,
    Tile,
    as_torch,
    convert,
    interpreted_tile,
    layout_of,
    piece_columns,
    tile_for,
    weight_programs,
)
from gpu_replay.ops.steps import Streams

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


def moved_frames(
    fields: tuple[Field, ...], stacked: int, batch: int, stack: int, interpreted: bool
) -> tuple[Layout, int, int, int, int]:
    """How a launch moves a batch of fields; the first `stacked` are stacks, moved before their windows and after them.

    returns: the layout of the stacks and the single fields; pieces of a frame that a program moves one after the other;
             windows that a program finds; programs of the whole launch, and warps of each.
    """
    frames = batch * stack
    tiles = [frame_tile(field, frames, interpreted) for field in fields[:stacked]]
    tiles += [tile_for(field, batch, interpreted) for field in fields[stacked:]]
    layout = layout_of(fields, tiles, converted=True)
    # one item per thread
    items = per_program(128, batch, interpreted)
    # groups of frames, before windows and as many after them, and the pieces of each
    groups = [(2 * -(-frames // tile.rows), tile.chunks) for tile in tiles[:stacked]]
    together = max(pieces_together(blocks, chunks, interpreted) for blocks, chunks in groups)
    moving = sum(blocks * -(-chunks // together) for blocks, chunks in groups)
    programs = moving + layout.programs(batch, stacked) + -(-batch // items)
    largest = max(tiles[each].rows * tiles[each].columns * _value_bytes(fields[each]) for each in range(stacked))
    return layout, together, items, programs, 8 if largest > _TILE else 4


# bytes of a piece that is gathered and converted while it is in the cache
_PIECE = 2**21


def make_gather_stacks(
    ring: np.ndarray, pool: np.ndarray | None, field: Field
) -> Callable[[np.ndarray], tuple[Tensor, Tensor]]:
    """Host: a function of (2 * B, S) places of frames, as `loops/windows.py` says, the stacks before the windows first.
    It makes the (B, S, *shape) stacks before and after windows, without the axis of frames where S is 1.

    ring, pool: (slots, *shape) stored frames and (finals, *shape) kept final observations, or None.
    """
    rows = ring.reshape(len(ring), -1).view(np.uint8)
    # words of 8 bytes where rows are made of these
    by_bytes = rows.shape[1] % 8 or not rows.view(np.int64).flags.aligned
    word, loop = (np.uint8, gather_bytes) if by_bytes else (np.int64, gather_words)
    frames, view = rows.view(word), as_torch(field)
    finals = frames[:0] if pool is None else pool.reshape(len(pool), -1).view(word)
    gather, outputs = partial(loop.compiled(), frames, finals), BatchMemory()

    def gather_stacks(frame_slots: np.ndarray) -> tuple[Tensor, Tensor]:
        (count, stack), batch = frame_slots.shape, len(frame_slots) // 2
        shape = (count, stack, *field.shape) if stack > 1 else (count, *field.shape)
        if not field.converts:
            out = outputs.array("", shape, ring.dtype)
            gather(frame_slots, 0, batch, 0, out.reshape(-1).view(word).reshape(-1, frames.shape[1]))
            return view(out[:batch]), view(out[batch:])
        converted = outputs.tensor("", shape, field.output_dtype)
        sides = converted[:batch], converted[batch:]
        piece = max(1, min(_PIECE // max(1, 2 * stack * field.row_bytes), batch))
        memory = np.empty((2 * piece, *shape[1:]), ring.dtype)
        for begin in range(0, batch, piece):
            end = min(begin + piece, batch)
            raw = memory[: 2 * (end - begin)]
            gather(frame_slots, begin, end, begin, raw.reshape(-1).view(word).reshape(-1, frames.shape[1]))
            for side, part in zip(sides, view(raw).chunk(2), strict=True):
                convert(part, field, side[begin:end])
        return sides

    return gather_stacks


class StepStore(Protocol):
    """The parts of a trajectory buffer's storage that gathers and new goals need.

    tensors, fields: (slots, *shape) of every field, `reward` among them, and what they hold.
    observations: names of the fields that are stacked; `singles`: of the others that were given.
    streams:      the metadata of every step.
    finals:       (finals, *shape) kept final observations of each observation field; empty where none are kept.
    padding:      how stacks are filled before the first frame.
    gamma:        the discount of a step.
    """

    tensors: dict[str, Tensor]
    fields: dict[str, Field]
    observations: tuple[str, ...]
    singles: tuple[str, ...]
    streams: Streams
    finals: dict[str, Tensor]
    padding: Literal["reset", "zero"]
    gamma: float


def make_gather_windows(
    storage: StepStore,
    batch: int,
    powers: Tensor,
    counters: Tensor,
    finish: Finish = READ,
) -> Gather:
    """Device: all that a batch holds of the eligible starts in (B,) slots, or of the sequences from them on; one launch
    a call. With `finish` it also ends their sample.

    powers:  (n_step + 1,) float64 of gamma, as `powers_of` gives them.
    """
    from gpu_replay.kernels.windows import gather_windows_kernel

    streams, device, span = storage.streams, counters.device, storage.streams.shape.ahead + 1
    sequences = storage.streams.shape.length > 0
    interpreted, shape, stacked = device.type == "cpu", streams.shape, len(storage.observations)
    # the observations first
    fields = {name: storage.fields[name] for name in storage.observations} | storage.fields
    del fields["reward"]
    moved = moved_frames(tuple(fields.values()), stacked, batch * span, shape.stack, interpreted)
    layout, together, items, programs, warps = moved
    weights, draws = weight_programs(batch if finish.counted else 0, interpreted)
    # dtype, and shape without the batch dimension
    kinds = {name: (field.output_dtype, field.shape) for name, field in fields.items()}
    if shape.stack > 1:
        kinds |= {name: (kinds[name][0], (shape.stack, *kinds[name][1])) for name in storage.observations}
    after = {f"next_{name}": kinds[name] for name in storage.observations}
    number, flag = (torch.float32, ()), (torch.bool, ())
    results = {"reward": number, "discount": number, "terminated": flag, "truncated": flag}
    results |= {"mask": flag} if sequences else {}
    launch = Launch(
        gather_windows_kernel,
        weights + programs,
        sources=tuple(storage.tensors[name] for name in fields),
        pools=tuple(storage.finals[name] for name in storage.observations) if shape.finals else (),
        streams=(streams.flags, streams.depth, streams.final),
        rewards=(storage.tensors["reward"], powers),
        counters_ptr=counters,
        counted=finish.counted,
        minima=finish.minima,
        blocks_drawn=finish.blocks,
        batch=batch * span,
        num_envs=shape.num_envs,
        steps=shape.steps,
        span=span,
        per_span=reciprocal(span),
        together=together,
        num_warps=warps,
        STACKED=stacked,
        LAYOUT=layout,
        ITEMS=items,
        STACK=shape.stack,
        N=shape.n_step,
        TOGETHER=min(shape.n_step, 8),
        NEXT_STEP=shape.next_step,
        ZERO=storage.padding == "zero",
        SEQUENCES=sequences,
        DRAWS=draws,
        # a product of the sum of rewards is rounded before it is added, as on the host
        enable_fp_fusion=False,
    )
    rows, ordered = (batch, span) if sequences else (batch,), kinds | {"reward": number} | after | results
    new = [(name, allocator((*rows, *sides), dtype, device)) for name, (dtype, sides) in ordered.items()]

    def gather(slots: Tensor, sample: tuple[Tensor, ...] = (), beta: float = 0.0) -> dict[str, Tensor]:
        out = {}
        for name, make in new:
            out[name] = make()
        tensor = out.__getitem__
        launch(tuple(map(tensor, kinds)), tuple(map(tensor, after)), tuple(map(tensor, results)), slots, sample, beta)
        return out

    return gather
