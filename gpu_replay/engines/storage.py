"""What a buffer stores, as preallocated tensors: the ring of transitions, or of steps with their metadata and final
observations, and the settings of that.

On the host the small fields of a transition lie side by side in one record: a transition is then one trip to memory
instead of one for each field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gpu_replay.engines.memory import MakeMemory, ReadAhead
from gpu_replay.fields import REWARD, Field, as_numpy, check_fields
from gpu_replay.hindsight import Hindsight, check_hindsight
from gpu_replay.ops.ring import StreamShape
from gpu_replay.ops.steps import Streams
from gpu_replay.samplers import Sequences
from gpu_replay.validation import check_bool, check_choice, check_float, check_int

Autoreset = Literal["next_step", "same_step", "disabled"]
Padding = Literal["reset", "zero"]

_RESERVED_NAMES = ("reward", "terminated", "truncated", "discount", "next_obs", "final_obs", "mask")
# most frames of a stack and steps of a window: memory for each of them is not counted
_MOST_FRAMES, _MOST_STEPS = 2**16, 2**24
# bytes that may go to final observations in any case, bytes per step of a long ring, and steps for one of them
_FINALS_AT_LEAST = 3 * 2**20
_FINALS_PER_STEP = 32
_STEPS_PER_FINAL = 32
MAX_CAPACITY = 2**31 - 1
# bytes of a field's row up to which it shares a record: a larger one is a trip to memory of its own anyway
_SMALL_ROW = 256


def check_capacity(capacity: object) -> int:
    """The capacity as an int, or TypeError / ValueError."""
    return check_int("capacity", capacity, 1, MAX_CAPACITY)


def record_dtype(fields: Mapping[str, Field]) -> np.dtype[Any] | None:
    """Small fields side by side, widest types first; None if there are fewer than two."""
    small = [(name, field) for name, field in fields.items() if field.row_bytes <= _SMALL_ROW]
    if len(small) < 2:
        return None
    small.sort(key=lambda item: -item[1].dtype.itemsize)
    parts = [
        (name, as_numpy(torch.empty(0, dtype=field.dtype, device="cpu")).dtype, field.shape) for name, field in small
    ]
    return np.dtype(parts, align=True)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the host NumPy allocates it, which asks for huge pages: fewer misses of the TLB."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class Storage:
    """One preallocated tensor `[capacity, *shape]` per field, and how often each slot was sampled.

    records: (capacity,) structured, the small fields of each transition; None where none lie side by side. The tensors
             of those fields are views of it. Only on the host, with `packed`.

    memory:  makes the memory of fields of these sizes, where they are not on the device.

    Allocates all memory at once. On the meta device it has `sizes` and no memory, and fields of one row: the bytes of a
    tensor are counted in 63 bits.
    """

    def __init__(
        self,
        capacity: int,
        fields: dict[str, Field],
        device: torch.device,
        *,
        packed: bool = False,
        memory: MakeMemory | None = None,
    ) -> None:
        self.capacity = capacity
        self.fields = fields
        self.device = device
        record = record_dtype(fields) if packed else None
        together = () if record is None else record.names or ()
        padding = 0 if record is None else record.itemsize - sum(fields[name].row_bytes for name in together)
        self._padding = capacity * padding
        alone = [name for name in fields if name not in together]
        sizes = [] if record is None else [capacity * record.itemsize]
        sizes += [capacity * fields[name].row_bytes for name in alone]
        # kept: it owns a file or pinned pages
        self._memory = None if memory is None else memory(sizes)
        take = partial(allocate, device=device) if self._memory is None else self._memory.take
        self.records: np.ndarray | None = None
        if record is not None and device.type != "meta":
            self.records = take((sizes[0],), torch.uint8).numpy().view(record)
        self.tensors: dict[str, Tensor] = {}
        rows = 1 if device.type == "meta" else capacity
        for name, each in fields.items():
            if self.records is not None and name in together:
                # the record has the same dtype, or one of the same width for bfloat16, which NumPy lacks
                self.tensors[name] = torch.from_numpy(self.records[name]).view(each.dtype)
            else:
                self.tensors[name] = take((rows, *each.shape), each.dtype)
        self.times_sampled = torch.zeros(capacity, dtype=torch.int32, device=device)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name: of each field, "alignment" of records, "times_sampled" and, of a trajectory buffer, more."""
        sizes = {name: self.capacity * field.row_bytes for name, field in self.fields.items()}
        sizes |= {"alignment": self._padding} if self._padding else {}
        return sizes | {"times_sampled": self.times_sampled.nbytes}

    def read_ahead(self) -> ReadAhead | None:
        """The read-ahead for fields in a mapped file; None if they are in memory."""
        return None if self._memory is None else self._memory.read_ahead(self.capacity)

    def stream_tensors(self, written: int) -> dict[str, Tensor]:
        """Views of the tensors kept apart from fields for the first `written` slots, by name; none for transitions."""
        return {}

    # of a trajectory buffer
    streams: Streams | None = None

    def reset_after(self, added: int) -> None:
        """Make all slots that so many transitions leave unwritten as if they had never been written."""
        self.times_sampled[min(added, self.capacity) :].zero_()


def check_live(keys: Tensor, first: int, added: int, eligible: Tensor | bool = True) -> None:
    """Raise KeyError that names the first of these keys that is not live, or not eligible.

    keys: (B,) int64; those from `first` to `added` are live. eligible: (B,) bool, or True: all are.
    """
    refused = keys[~((keys >= first) & (keys < added) & eligible)]
    if not len(refused):
        return
    key, contents = int(refused[0]), f"the keys from {first} to {added - 1}" if added > first else "nothing"
    if not first <= key < added:
        raise KeyError(f"key {key} is not live; the buffer holds {contents}.")
    raise KeyError(
        f"key {key} is stored but not eligible: a part of its stack or window is missing, its step only carries a "
        "final observation, or it was excluded; keys(eligible=True) are those of windows."
    )


def observation_names(fields: Mapping[str, Field]) -> tuple[str, ...]:
    """The fields that are stacked and sampled as `next_` too: `obs`, or all `obs.NAME`."""
    return tuple(name for name in fields if name == "obs" or name.startswith("obs."))


@dataclass(frozen=True)
class StreamSettings:
    """Arguments of a trajectory buffer's constructor, except the fields, the sampler, the seed and the places.

    A checkpoint's config, the shape of the ring, and copies of a buffer follow from these; `str` shows those with
    `repr`.
    """

    capacity: int = field(repr=False)
    num_envs: int
    stack: int = 1
    n_step: int = 1
    gamma: float = 0.99
    autoreset: Autoreset = "next_step"
    padding: Padding = field(default="reset", repr=False)
    final_capacity: int | None = field(default=None, repr=False)
    terminal_obs: bool = field(default=False, repr=False)
    relabel: Hindsight | None = field(default=None, repr=False)
    sequences: Sequences | None = None

    def __str__(self) -> str:
        shown = [each.name for each in dataclass_fields(self) if each.repr and getattr(self, each.name) is not None]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    @property
    def shape(self) -> StreamShape:
        """The shape of the ring of checked settings."""
        steps, next_step = self.capacity // self.num_envs, self.autoreset == "next_step"
        finals, hindsight = self.final_capacity or 0, self.relabel is not None
        terminal = bool(finals) and (self.terminal_obs or hindsight)
        rows = () if self.sequences is None else (self.sequences.length, self.sequences.strict, self.sequences.stride)
        return StreamShape(self.num_envs, steps, self.stack, self.n_step, next_step, finals, terminal, hindsight, *rows)

    def checked(self, fields: Mapping[str, Field]) -> StreamSettings:
        """These settings for a ring of these fields, with the capacities that it will have, or TypeError / ValueError.

        final_capacity: None: as many as fit in the larger of 3 MiB and 32 bytes a slot, at least slots / 32 and
                        num_envs, at most one per slot. For 84x84 frames: 445, or slots / 32 if that is more.
        """
        asked, envs = check_capacity(self.capacity), check_int("num_envs", self.num_envs, 1)
        if asked < envs:
            raise ValueError(f"capacity {asked} does not hold one step of num_envs={envs} environments. Raise it.")
        steps = asked // envs
        slots, observations = steps * envs, [fields[name] for name in observation_names(fields)]
        row = sum(each.row_bytes for each in observations)
        fitting = max(_FINALS_AT_LEAST, slots * _FINALS_PER_STEP) // row
        finals = min(slots, max(envs, slots // _STEPS_PER_FINAL, fitting))
        if self.final_capacity is not None:
            finals = min(check_int("final_capacity", self.final_capacity, 0), slots)
        if check_choice("autoreset", self.autoreset, get_args(Autoreset)) == "next_step":
            finals = 0
        elif check_bool("terminal_obs", self.terminal_obs) and not finals:
            raise ValueError("terminal_obs=True needs places for final observations; found final_capacity=0. Raise it.")
        check_choice("padding", self.padding, get_args(Padding))
        frames = check_int("stack", self.stack, 1, _MOST_FRAMES)
        window = check_int("n_step", self.n_step, 1, _MOST_STEPS)
        rows = check_sequences(self.sequences)
        for name, length in (("stack", frames), ("n_step", window)):
            if length > steps:
                raise ValueError(
                    f"{name}={length} is longer than the ring: capacity {asked} holds {steps} steps of each of the "
                    f"{envs} environments. Raise the capacity to at least {length * envs}, or lower {name}."
                )
        if rows is not None and (needed := rows.length + window + frames - 1) > steps:
            raise ValueError(
                f"{rows} never fits the ring: with n_step={window} and stack={frames} a row needs {needed} steps of an "
                f"environment; capacity {asked} holds {steps} of each of the {envs} environments. Raise the capacity "
                f"to at least {needed * envs}, or ask for shorter sequences."
            )
        if self.relabel is not None:
            check_hindsight(self.relabel).check(fields, window)
        if self.relabel is not None and rows is not None:
            raise ValueError("relabel rewrites single steps: make a buffer without sequences, or without relabel.")
        return replace(
            self,
            capacity=slots,
            num_envs=envs,
            stack=frames,
            n_step=window,
            gamma=check_float("gamma", self.gamma, high=1.0),
            final_capacity=finals,
        )


def check_sequences(sequences: object) -> Sequences | None:
    """The setting, or TypeError for anything else."""
    if sequences is not None and not isinstance(sequences, Sequences):
        length = sequences if isinstance(sequences, (int, np.integer)) and not isinstance(sequences, bool) else "length"
        raise TypeError(f"sequences must be Sequences({length}), or None for single steps; found {sequences!r}.")
    return sequences


def check_stream_fields(fields: object) -> dict[str, Field]:
    """The fields of one step as a dict of their own, or an error that says which one is wrong."""
    checked = check_fields(fields)
    for name in checked:
        if name in _RESERVED_NAMES or name.startswith(("next_obs.", "final_obs.")):
            raise ValueError(
                f"field name {name!r} is reserved in a trajectory buffer ({', '.join(_RESERVED_NAMES)}): it makes "
                "these itself."
            )
    observations = observation_names(checked)
    if not observations:
        raise ValueError(f"fields need 'obs' (or several 'obs.NAME'); found {', '.join(checked)}.")
    if "obs" in observations and len(observations) > 1:
        raise ValueError(f"fields have 'obs' as well as {observations[1]!r}; use one observation or named ones only.")
    if not any(name == "action" or name.startswith("action.") for name in checked):
        raise ValueError(f"fields need 'action'; found {', '.join(checked)}.")
    return checked


class TrajectoryStorage(Storage):
    """The fields and rewards of every stored step, its flags and depth, and final observations.

    observations: names of the fields that are stacked; `singles`: of the others that were given.
    finals:       for each of them the (shape.finals, *field.shape) kept final observations.
    """

    streams: Streams

    def __init__(
        self, settings: StreamSettings, fields: dict[str, Field], device: torch.device, memory: MakeMemory | None = None
    ) -> None:
        shape = settings.shape
        super().__init__(shape.slots, fields, device, memory=memory)
        # rewards of whole windows are read for each start: they stay with the flags; and these are summed up to their
        # full length and masked: memory never written must hold numbers
        self.fields = {**fields, "reward": REWARD}
        rows = 1 if device.type == "meta" else shape.slots
        self.tensors["reward"] = allocate((rows,), REWARD.dtype, device).zero_()
        self.gamma, self.padding, self.relabel = settings.gamma, settings.padding, settings.relabel
        self.observations = observation_names(fields)
        self.singles = tuple([name for name in fields if name not in self.observations])
        self.streams = Streams(shape, device)
        self.finals: dict[str, Tensor] = {}
        if shape.finals:
            for name in self.observations:
                field = fields[name]
                rows = 1 if device.type == "meta" else shape.finals
                self.finals[name] = torch.zeros((rows, *field.shape), dtype=field.dtype, device=device)

    def stream_tensors(self, written: int) -> dict[str, Tensor]:
        """Views of the tensors kept apart from the fields for the first `written` slots, by name."""
        return self.streams.views(written) | {f"final.{name}": tensor for name, tensor in self.finals.items()}

    def reset_after(self, added: int) -> None:
        """Make all slots that so many steps leave unwritten as if they had never been written."""
        super().reset_after(added)
        written, streams = min(added, self.capacity), self.streams
        streams.flags[written:].zero_()
        streams.depth[written:].zero_()
        streams.episode_length[written:].fill_(-1)
        if not written:
            streams.clipped_length.fill_(-1)
            streams.owner.fill_(-1)
        streams.note_followed(added)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name, "streams" and "final_obs" among them."""
        finals = self.streams.shape.finals * sum(self.fields[name].row_bytes for name in self.observations)
        return super().sizes | {"streams": self.streams.nbytes} | ({"final_obs": finals} if finals else {})
