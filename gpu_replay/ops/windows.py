"""Rewards, discounts and endings of n-step windows, and stacks of observations put together from frames stored once.

Frame `i` of a stack of `S` whose newest frame lies in a slot is the one `S - 1 - i` steps before it, unless the episode
began later: then it is the episode's first frame ("reset") or zeros ("zero"). A device moves frames in pieces that fill
lanes, several for one look at where frames lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

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


# bytes of a piece that is gathered and converted while it is in the cache
_PIECE = 2**21


class FrameStore(NamedTuple):
    """Host: the frames of one observation field.

    ring, pool: (slots, words) and (finals, words) stored frames and kept final observations, seen as words.
    dtype:      of the values in them, as NumPy sees it.
    gather:     the loop that copies them, compiled.
    field:      what they hold; `view` makes tensors over such values.
    """

    ring: np.ndarray
    pool: np.ndarray
    dtype: np.dtype[Any]
    gather: Callable[..., None]
    field: Field
    view: Callable[[np.ndarray], Tensor]

    @classmethod
    def of(cls, ring: np.ndarray, pool: np.ndarray | None, field: Field) -> FrameStore:
        """The store of a ring (slots, *shape) and a pool of final observations (finals, *shape), or None."""
        rows = ring.reshape(len(ring), -1).view(np.uint8)
        # words of 8 bytes where rows are made of these
        by_bytes = rows.shape[1] % 8 or not rows.view(np.int64).flags.aligned
        word, gather = (np.uint8, gather_bytes) if by_bytes else (np.int64, gather_words)
        pool_rows = rows[:0] if pool is None else pool.reshape(len(pool), -1)
        return cls(rows.view(word), pool_rows.view(word), ring.dtype, gather.compiled(), field, as_torch(field))


def gather_stacks(
    frames: FrameStore, frame_slots: np.ndarray, outputs: BatchMemory, name: str
) -> tuple[Tensor, Tensor]:
    """Host: (B, S, *shape) stacks of one field before and after windows, without the axis of frames where S is 1.

    frame_slots: (2 * B, S) as `loops/windows.py` says, the stacks before the windows first.
    outputs: where the memory of the stacks of the field `name` comes from.
    """
    ring, pool, dtype, gather, field, view = frames
    (rows, stack), batch = frame_slots.shape, len(frame_slots) // 2
    shape = (rows, stack, *field.shape) if stack > 1 else (rows, *field.shape)
    if not field.converts:
        out = outputs.array(name, shape, dtype)
        gather(ring, pool, frame_slots, 0, batch, 0, out.reshape(-1).view(ring.dtype).reshape(-1, ring.shape[1]))
        return view(out[:batch]), view(out[batch:])
    converted = outputs.tensor(name, shape, field.output_dtype)
    sides = converted[:batch], converted[batch:]
    piece = max(1, min(_PIECE // max(1, 2 * stack * field.row_bytes), batch))
    memory = np.empty((2 * piece, *shape[1:]), dtype)
    for begin in range(0, batch, piece):
        end = min(begin + piece, batch)
        raw = memory[: 2 * (end - begin)]
        gather(ring, pool, frame_slots, begin, end, begin, raw.reshape(-1).view(ring.dtype).reshape(-1, ring.shape[1]))
        for side, part in zip(sides, view(raw).chunk(2), strict=True):
            convert(part, field, side[begin:end])
    return sides


class StepStore(Protocol):
    """The parts of a trajectory buffer's storage that gathers read.

    tensors, fields: (slots, *shape) of every field, `reward` among them, and what they hold.
    observations: names of the fields that are stacked.
    streams:      the metadata of every step.
    finals:       (finals, *shape) kept final observations of each observation field; empty where none are kept.
    padding:      how stacks are filled before the first frame.
    """

    tensors: dict[str, Tensor]
    fields: dict[str, Field]
    observations: tuple[str, ...]
    streams: Streams
    finals: dict[str, Tensor]
    padding: Literal["reset", "zero"]


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
    apart = {*storage.observations, "reward"}
    names = [*storage.observations, *(name for name in storage.fields if name not in apart)]
    fields = tuple(storage.fields[name] for name in names)
    moved = moved_frames(fields, stacked, batch * span, shape.stack, interpreted)
    layout, together, items, programs, warps = moved
    weights, draws = weight_programs(batch if finish.counted else 0, interpreted)
    next_names = [f"next_{name}" for name in storage.observations]
    results = ["reward", "discount", "terminated", "truncated", *(["mask"] if sequences else [])]
    launch = Launch(
        gather_windows_kernel,
        weights + programs,
        sources=tuple(storage.tensors[name] for name in names),
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
    outputs = window_outputs(storage.fields, storage.observations, shape.stack)
    outputs |= {"mask": (torch.bool, ())} if sequences else {}
    rows = (batch, span) if sequences else (batch,)
    new = [(name, allocator((*rows, *sides), dtype, device)) for name, (dtype, sides) in outputs.items()]

    def gather(slots: Tensor, sample: tuple[Tensor, ...] = (), beta: float = 0.0) -> dict[str, Tensor]:
        out = {}
        for name, make in new:
            out[name] = make()
        tensor = out.__getitem__
        frames, after, windows = tuple(map(tensor, names)), tuple(map(tensor, next_names)), tuple(map(tensor, results))
        launch(frames, after, windows, slots, sample, beta)
        return out

    return gather


def window_outputs(
    fields: Mapping[str, Field], observations: Collection[str], stack: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype, and shape without the batch dimension, of all that a batch of windows holds except its draw, in order."""
    frames = (stack,) if stack > 1 else ()
    stacks = {name: (fields[name].output_dtype, (*frames, *fields[name].shape)) for name in observations}
    singles = {name: (field.output_dtype, field.shape) for name, field in fields.items() if name not in stacks}
    singles.pop("reward", None)
    after = {f"next_{name}": output for name, output in stacks.items()}
    number, flag = (torch.float32, ()), (torch.bool, ())
    return {**stacks, **singles, "reward": number, **after, "discount": number, "terminated": flag, "truncated": flag}
