"""Stacks of observations, put together from frames that are stored once: gather, padding, cast, scale and shift.

Frame `i` of a stack of `S` whose newest frame lies in a slot is the one `S - 1 - i` steps before it, unless the episode
began later: then it is the episode's first frame ("reset") or zeros ("zero").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops.ring import carrier

# bytes of a piece that is gathered and converted while it is in the cache
_PIECE = 2**19


class StackPlan(NamedTuple):
    """Where the frames of stacks lie.

    slots:  (B, S) int64.
    absent: (k,) flat positions in it of frames that are zeros, or None where none are.
    """

    slots: np.ndarray
    absent: np.ndarray | None


def plan_stacks(
    newest: np.ndarray,
    depth: np.ndarray,
    stack: int,
    num_envs: int,
    turn: int,
    *,
    zero: bool,
    late: np.ndarray | None = None,
) -> StackPlan:
    """Host: the slots of stacks whose newest frames are in (B,) slots.

    depth: (B,) steps of `newest` since the first of its episode. turn: slots of the ring. zero: how to pad.
    late:  (B,) bool of stacks whose newest frame is one later and not in the ring; its place is left to be filled.
    """
    if stack == 1:
        return StackPlan(newest[:, None], None)
    wanted = np.arange(stack - 1, -1, -1, dtype=np.int64)[None, :]
    if late is not None:
        wanted = np.maximum(wanted - late[:, None], 0)
    slots = newest[:, None] - np.minimum(wanted, depth[:, None]) * num_envs
    slots += (slots < 0) * turn
    if not zero or depth.size == 0 or np.minimum.reduce(depth) >= stack - 1:
        return StackPlan(slots, None)
    return StackPlan(slots, np.flatnonzero(wanted > depth[:, None]))


def gather_stacks(
    frames: np.ndarray, field: Field, plan: StackPlan, late: tuple[np.ndarray, np.ndarray] | None = None
) -> Tensor:
    """Host: (B, S, *shape) stacks from one field's carrier array, (B, *shape) for stacks of one frame.

    late: (k,) rows of the batch and their (k, *shape) newest frames, which are not in the ring; or None.
    """
    batch, stack = plan.slots.shape
    flat = plan.slots.reshape(-1)
    shape = (batch, stack, *field.shape) if stack > 1 else (batch, *field.shape)
    if not field.converts:
        out = np.empty((flat.size, *field.shape), dtype=frames.dtype)
        # slots exist, so clipping changes none; it is the mode that writes straight into `out`
        frames.take(flat, 0, out, "clip")
        _complete(out, plan, late)
        return _as_field(out.reshape(shape), field)
    converted = torch.empty((flat.size, *field.shape), dtype=field.output_dtype)
    piece = max(1, _PIECE // max(1, field.row_bytes))
    for start in range(0, flat.size, piece):
        stop = min(start + piece, flat.size)
        convert_into(converted[start:stop], _as_field(frames.take(flat[start:stop], axis=0), field), field)
    if plan.absent is not None:
        converted[torch.from_numpy(plan.absent)] = 0
    if late is not None:
        rows, newest = late
        places = torch.from_numpy(rows * stack + stack - 1)
        kept = torch.empty((rows.size, *field.shape), dtype=field.output_dtype)
        convert_into(kept, _as_field(newest, field), field)
        converted[places] = kept
    return converted.reshape(shape)


def _complete(out: np.ndarray, plan: StackPlan, late: tuple[np.ndarray, np.ndarray] | None) -> None:
    stack = plan.slots.shape[1]
    if plan.absent is not None:
        out[plan.absent] = 0
    if late is not None:
        rows, newest = late
        out[rows * stack + stack - 1] = newest


def _as_field(array: np.ndarray, field: Field) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field.dtype == torch.bfloat16 else tensor


def convert_into(out: Tensor, raw: Tensor, field: Field) -> None:
    """Put raw values into `out` as the field wants them sampled."""
    if field.scale is None:
        out.copy_(raw)
    elif out.dtype == field.arithmetic_dtype:
        torch.mul(raw, field.scale, out=out) if raw.dtype == out.dtype else out.copy_(raw).mul_(field.scale)
    else:
        out.copy_(raw.to(field.arithmetic_dtype).mul_(field.scale))


def shifts_from(words: np.ndarray, most: int) -> np.ndarray:
    """(B, 4) shifts in [-most, most] from (B,) random words: rows and columns of obs, then those of next_obs."""
    parts = words[:, None] >> np.array([0, 16, 32, 48], dtype=np.uint64) & np.uint64(0xFFFF)
    return (parts * np.uint64(2 * most + 1) >> np.uint64(16)).astype(np.int64) - most


def shift_pictures(pictures: Tensor, shifts: np.ndarray) -> Tensor:
    """Host: each (..., height, width) of a batch moved by its (rows, columns), edges repeated.

    pictures: (B, ..., height, width). shifts: (B, 2).

    Kostrikov, Yarats and Fergus 2020, "Image Augmentation Is All You Need" (DrQ).
    """
    height, width = pictures.shape[-2:]
    out = torch.empty_like(pictures)
    rows = np.clip(np.arange(height) + shifts[:, :1], 0, height - 1)
    columns = np.clip(np.arange(width) + shifts[:, 1:], 0, width - 1)
    source, target = carrier(pictures), carrier(out)
    for place in range(len(shifts)):
        target[place] = source[place].take(rows[place], axis=-2).take(columns[place], axis=-1)
    return out
