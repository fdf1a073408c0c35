"""Stacks of observations, put together from frames that are stored once: gather, padding, cast, scale and shift.

Frame `i` of a stack of `S` whose newest frame lies in a slot is the one `S - 1 - i` steps before it, unless the episode
began later: then it is the episode's first frame ("reset") or zeros ("zero").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops import _backend
from gpu_replay.ops.batch_memory import LARGE, BatchMemory
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag, Streams, endings
from gpu_replay.ops.frame_tiles import moved_frames
from gpu_replay.ops.launch import Launch
from gpu_replay.ops.ring import as_numpy, as_sampled
from gpu_replay.ops.threads import take_rows, threads_for
from gpu_replay.ops.weights import NO_WEIGHTS, PendingWeights, given_for, part_for

# bytes of a piece that is gathered and converted while it is in the cache
_PIECE = 2**19
# after such a step others are of another episode
_ENDS = Flag.TERMINATED | Flag.TRUNCATED | Flag.CUT


class StackPlan(NamedTuple):
    """Where the frames of stacks lie.

    slots:       (B, S) int64.
    zero_padded: (k,) flat positions in it of frames that are zeros, or None where none are.
    """

    slots: np.ndarray
    zero_padded: np.ndarray | None


@lru_cache(maxsize=64)
def _stack_places(stack: int, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """(1, S) steps from the frames of a stack to the newest, and slots."""
    steps = np.arange(stack - 1, -1, -1, dtype=np.int64)[None, :]
    slots = steps * num_envs
    for places in (steps, slots):
        places.flags.writeable = False
    return steps, slots


def plan_stacks(
    newest: np.ndarray,
    depth: np.ndarray,
    stack: int,
    num_envs: int,
    capacity: int,
    *,
    zero: bool,
    final_frame: np.ndarray | None = None,
) -> StackPlan:
    """Host: the slots of stacks whose newest frames are in (B,) slots.

    depth: (B,) steps of `newest` since the first of its episode. capacity: slots of the ring. zero: how to pad.
    final_frame: (B,) bool of stacks whose newest frame is a kept final observation, not in the ring; the slot before it
                 stands in its place.
    """
    if stack == 1:
        return StackPlan(newest[:, None], None)
    wanted, back = _stack_places(stack, num_envs)
    # most stacks lie within their episode, and apart from the seam of the ring
    if final_frame is None and depth.size and depth.item(depth.argmin()) >= stack - 1:
        slots = newest[:, None] - back
        if newest.item(newest.argmin()) < (stack - 1) * num_envs:
            slots += (slots < 0) * capacity
        return StackPlan(slots, None)
    if final_frame is not None:
        wanted = np.maximum(wanted - final_frame[:, None], 0)
    slots = newest[:, None] - np.minimum(wanted, depth[:, None]) * num_envs
    slots += (slots < 0) * capacity
    if not zero:
        return StackPlan(slots, None)
    return StackPlan(slots, np.flatnonzero(wanted > depth[:, None]))


def gather_stacks(
    frames: np.ndarray,
    field: Field,
    plan: StackPlan,
    final: tuple[np.ndarray, np.ndarray] | None,
    outputs: BatchMemory,
    name: str,
) -> Tensor:
    """Host: (B, S, *shape) stacks from one field's array, (B, *shape) for stacks of one frame.

    final:   (k,) rows of the plan and their (k, *shape) newest frames, which are not in the ring; or None.
    outputs: where the memory of the stacks comes from, for the field `name`.
    """
    batch, stack = plan.slots.shape
    flat = plan.slots.reshape(-1)
    shape = (batch, stack, *field.shape) if stack > 1 else (batch, *field.shape)
    if not field.converts:
        out = outputs.array(name, (flat.size, *field.shape), frames.dtype)
        _backend.inner_loops().gather_stacks(frames, plan, out)
        if plan.zero_padded is not None:
            out[plan.zero_padded] = 0
        if final is not None:
            rows, newest = final
            out[rows * stack + stack - 1] = newest
        return _as_field(out.reshape(shape), field)
    converted = outputs.tensor(name, (flat.size, *field.shape), field.output_dtype)
    # large enough that several threads gather it, and torch's own ones convert it, where there are any
    size = _PIECE if threads_for(converted.nbytes) == 1 else 4 * _PIECE
    piece = min(max(1, size // max(1, field.row_bytes)), flat.size)
    raw = np.empty((piece, *frames.shape[1:]), frames.dtype)
    for start in range(0, flat.size, piece):
        stop = min(start + piece, flat.size)
        take_rows(frames, flat[start:stop], raw[: stop - start])
        convert_into(converted[start:stop], _as_field(raw[: stop - start], field), field)
    if plan.zero_padded is not None:
        converted[torch.from_numpy(plan.zero_padded)] = 0
    if final is not None:
        rows, newest = final
        places = torch.from_numpy(rows * stack + stack - 1)
        kept = torch.empty((rows.size, *field.shape), dtype=field.output_dtype, device="cpu")
        convert_into(kept, _as_field(newest, field), field)
        converted[places] = kept
    return converted.reshape(shape)


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


def rows_as_sampled(rows: np.ndarray, field: Field, memory: BatchMemory, name: str) -> Tensor:
    """Host: as `ring.as_sampled`, in memory that is used again where it is large.

    rows: (B, *shape) of the field `name`, referenced nowhere else.
    """
    if not field.converts or rows.size * field.output_dtype.itemsize < LARGE:
        return as_sampled(rows, field)
    out = memory.tensor(f"{name} as sampled", rows.shape, field.output_dtype)
    convert_into(out, _as_field(rows, field), field)
    return out


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
    source, target = as_numpy(pictures), as_numpy(out)
    for place in range(len(shifts)):
        target[place] = source[place].take(rows[place], axis=-2).take(columns[place], axis=-1)
    return out


class StepStore(Protocol):
    """What the gathers need of a trajectory buffer's storage."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """(slots, *shape) of every field, `reward` among them."""

    @property
    def fields(self) -> dict[str, Field]:
        """What they hold."""

    @property
    def observations(self) -> tuple[str, ...]:
        """Names of the fields that are stacked."""

    @property
    def streams(self) -> Streams:
        """What is known of every step."""

    @property
    def finals(self) -> Mapping[str, Tensor]:
        """(finals, *shape) kept final observations of each observation field; empty where none are kept."""

    @property
    def padding(self) -> str:
        """How stacks are filled before the first frame: "reset" or "zero"."""

    @property
    def random_shift(self) -> int:
        """Pixels that pictures are moved by at most."""


def plan_gather_windows(
    storage: StepStore, batch: int, powers: Tensor, counters: Tensor, *, shifted: bool, weighed: bool
) -> Callable[[Tensor, Tensor | None, PendingWeights | None], dict[str, Tensor]]:
    """Device: all that a batch holds of the eligible starts in (B,) slots, and the weights of their draw if asked for;
    one launch a call.

    powers:  (n_step + 1,) float64 of gamma, as `powers_of` gives them.
    shifted: whether pictures are moved, by B words of the random stream, whose place in it, (1,) int64, is given too.
    weighed: whether weights are asked for, all of them with a schedule or all of them without one.
    """
    device = counters.device
    fields, next_stacks = _forms(storage, batch)
    launch = _plan_launch(storage, fields, batch, counters, 1, shifted=shifted, weighed=weighed)
    given = (powers,)

    def gather(slots: Tensor, words: Tensor | None, weighing: PendingWeights | None) -> dict[str, Tensor]:
        out = _outputs(fields, device)
        outputs = tuple(out.values())
        after = _outputs(next_stacks, device)
        reward = torch.empty(batch, dtype=torch.float32, device=device)
        discount = torch.empty(batch, dtype=torch.float32, device=device)
        terminated = torch.empty(batch, dtype=torch.bool, device=device)
        truncated = torch.empty(batch, dtype=torch.bool, device=device)
        windows = _Windows(given, tuple(after.values()), (reward, discount, terminated, truncated))
        launch(slots, outputs, words, weighing, windows)
        out["reward"] = reward
        out.update(after)
        out["discount"], out["terminated"], out["truncated"] = discount, terminated, truncated
        return out

    return gather


def plan_gather_sequences(
    storage: StepStore, batch: int, length: int, powers: Tensor, counters: Tensor, *, shifted: bool, weighed: bool
) -> Callable[[Tensor, Tensor | None, PendingWeights | None], dict[str, Tensor]]:
    """Device: `length` steps from each of (B,) slots on, [B, length, ...], with the windows of each, and the mask of
    those of its episode.

    powers, shifted, weighed: as in `plan_gather_windows`. Besides one launch for the values a few small ones of torch
    find slots and mask.
    """
    shape, device, all_flags = storage.streams.shape, counters.device, storage.streams.flags
    envs, rows = shape.num_envs, (batch, length)
    fields, next_stacks = _forms(storage, *rows)
    launch = _plan_launch(storage, fields, batch * length, counters, length, shifted=shifted, weighed=weighed)

    def gather(starts: Tensor, words: Tensor | None, weighing: PendingWeights | None) -> dict[str, Tensor]:
        slots = (starts[:, None] + torch.arange(0, length * envs, envs, device=device)) % shape.slots
        # steps that are stored after each: the newest one lies before the next
        left = (counters[Counter.ADDED] - 1 - starts) // envs % shape.steps
        left = left[:, None] + torch.arange(1, 1 - length, -1, device=device)
        flags = all_flags.take(slots)
        # a step belongs to the first episode while none before it ended
        ends = flags & _ENDS
        mask = ends.cumsum(dim=1) == ends
        out, after = _outputs(fields, device), _outputs(next_stacks, device)
        reward, discount = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
        windows = _Windows((powers, left.view(-1)), tuple(after.values()), (reward, discount))
        launch(slots.view(-1), tuple(out.values()), words, weighing, windows)
        return {**out, "reward": reward, **after, "discount": discount, **endings(flags), "mask": mask}

    return gather


class _Windows(NamedTuple):
    """What is made of windows: stacks after them, and (B,) rewards, discounts and, if asked for, how they ended.

    given: powers of gamma, and the steps stored from each start on where windows may not be whole.
    """

    given: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]


# a tensor that is made for each batch: its name, shape and dtype
Form = tuple[str, tuple[int, ...], torch.dtype]


def _forms(storage: StepStore, *batch: int) -> tuple[list[Form], list[Form]]:
    """Of all fields but the reward, the stacks of observations first; and of the stacks after windows."""
    stack, stacks, singles = storage.streams.shape.stack, [], []
    for name in storage.observations:
        field = storage.fields[name]
        rows = (*batch, stack) if stack > 1 else batch
        stacks.append((name, (*rows, *field.shape), field.output_dtype))
    for name, field in storage.fields.items():
        if name not in storage.observations and name != "reward":
            singles.append((name, (*batch, *field.shape), field.output_dtype))
    return stacks + singles, [(f"next_{name}", shape, dtype) for name, shape, dtype in stacks]


def _outputs(forms: Iterable[Form], device: torch.device) -> dict[str, Tensor]:
    """Empty tensors of these forms."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in forms}


def _plan_launch(
    storage: StepStore,
    forms: Sequence[Form],
    batch: int,
    counters: Tensor,
    span: int,
    *,
    shifted: bool,
    weighed: bool,
) -> Callable[[Tensor, tuple[Tensor, ...], Tensor | None, PendingWeights | None, _Windows], None]:
    """What fills the outputs of these forms, which begin with the stacks, and what belongs to windows.

    span: items that are moved alike, and that have one weight.
    """
    from gpu_replay.kernels.frames import gather_windows_kernel

    streams, interpreted = storage.streams, counters.device.type == "cpu"
    shape, stacked = streams.shape, len(storage.observations)
    names = [name for name, *_ in forms]
    fields = (storage.fields[name] for name in names)
    layout, together, items, programs = moved_frames(fields, stacked, batch, shape.stack, shifted, interpreted)
    part = part_for(batch // span if weighed else 0, interpreted)
    held = (
        tuple(storage.tensors[name] for name in names),
        tuple(storage.finals[name] for name in storage.observations) if shape.finals else (),
    )
    known = (streams.flags, streams.depth, streams.final)
    numbers = (batch, shape.num_envs, shape.steps, span, together)
    rewards = storage.tensors["reward"]
    launch = Launch(
        gather_windows_kernel,
        part.programs + programs,
        STACKED=stacked,
        LAYOUT=layout,
        ITEMS=items,
        STACK=shape.stack,
        N=shape.n_step,
        TOGETHER=min(shape.n_step, 8),
        NEXT_STEP=shape.next_step,
        ZERO=storage.padding == "zero",
        SHIFT=storage.random_shift if shifted else 0,
        HINDSIGHT=shape.hindsight,
        DRAWS=part.draws,
        # a product of the sum of rewards is rounded before it is added, as on the host
        enable_fp_fusion=False,
    )

    def fill(
        slots: Tensor,
        outputs: tuple[Tensor, ...],
        words: Tensor | None,
        weighing: PendingWeights | None,
        windows: _Windows,
    ) -> None:
        pointers, weights = NO_WEIGHTS if weighing is None else given_for(weighing)
        launch(
            *held,
            outputs,
            windows.after,
            pointers,
            slots,
            known,
            (rewards, *windows.given),
            () if words is None else (words,),
            counters,
            windows.numbers,
            *numbers,
            *weights,
        )

    return fill
