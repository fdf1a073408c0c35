"""The storage of a trajectory buffer: the ring of steps, the metadata of each step, and final observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gpu_replay.engines.placement import MakeMemory
from gpu_replay.engines.saved_state import StateLayout
from gpu_replay.engines.storage import Storage, check_capacity, estimate
from gpu_replay.fields import Field, check_fields
from gpu_replay.graphs.custom_ops import STEPS, Output
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.eligibility import Streams, StreamShape, stream_bytes
from gpu_replay.ops.frames import window_outputs
from gpu_replay.ops.mass_tree import tree_bytes
from gpu_replay.samplers import Sampler, check_sampler
from gpu_replay.validation import check_choice, check_int

REWARD = Field((), torch.float32)
Autoreset = Literal["next_step", "same_step", "disabled"]
Padding = Literal["reset", "zero"]

_RESERVED = ("reward", "terminated", "truncated", "discount", "next_obs", "final_obs", "mask")
# most frames of a stack and steps of a window: memory for each of them is not counted
_MOST_FRAMES, _MOST_STEPS = 2**16, 2**24
# bytes that may go to final observations in any case, and bytes per step of a long ring
_FINALS_AT_LEAST = 3 * 2**20
_FINALS_PER_STEP = 32


def observation_names(fields: Mapping[str, Field]) -> tuple[str, ...]:
    """The fields that are stacked and sampled as `next_` too: `obs`, or all `obs.NAME`."""
    return tuple(name for name in fields if name == "obs" or name.startswith("obs."))


def stream_shape(
    capacity: object,
    num_envs: object,
    fields: Mapping[str, Field],
    stack: object,
    n_step: object,
    autoreset: object,
    final_capacity: object,
    *,
    hindsight: bool = False,
) -> StreamShape:
    """The shape of a ring with these settings, or TypeError / ValueError.

    final_capacity: None for one final observation per slot where they are small or few, else fewer, one per
                    environment at least: of frames of 84x84 bytes 445, and 4.5 per 1,000 steps of a ring of more than
                    98,000.
    """
    asked, envs = check_capacity(capacity), check_int("num_envs", num_envs, 1)
    if asked < envs:
        raise ValueError(f"capacity {asked} does not hold one step of num_envs={envs} environments. Raise it.")
    steps = asked // envs
    slots = steps * envs
    row = sum(fields[name].row_bytes for name in observation_names(fields))
    finals = min(slots, max(envs, max(_FINALS_AT_LEAST, slots * _FINALS_PER_STEP) // row))
    if final_capacity is not None:
        finals = min(check_int("final_capacity", final_capacity, 0), slots)
    next_step = check_choice("autoreset", autoreset, get_args(Autoreset)) == "next_step"
    kept_finals = 0 if next_step else finals
    frames, window = check_int("stack", stack, 1, _MOST_FRAMES), check_int("n_step", n_step, 1, _MOST_STEPS)
    for name, length in (("stack", frames), ("n_step", window)):
        if length > steps:
            raise ValueError(
                f"{name}={length} is longer than the ring: capacity {asked} holds {steps} steps of each of the {envs} "
                f"environments. Raise the capacity to at least {length * envs}, or lower {name}."
            )
    return StreamShape(envs, steps, frames, window, next_step, kept_finals, hindsight)


def stream_layout(
    *, fields: Mapping[str, Field], sampler: Sampler, relabel: object = None, **settings: Any
) -> StateLayout:
    """The settings that determine the state of a trajectory buffer made with these arguments."""
    names = ("capacity", "num_envs", "stack", "n_step", "autoreset", "final_capacity")
    arguments = {name: settings[name] for name in names}
    shape = stream_shape(fields=check_stream_fields(fields), hindsight=relabel is not None, **arguments)
    return StateLayout(shape.slots, check_sampler(sampler), shape)


def check_stream_fields(fields: object) -> dict[str, Field]:
    """The fields of one step as a dict of their own, or an error that says which one is wrong."""
    checked = check_fields(fields)
    for name in checked:
        if name in _RESERVED or name.startswith(("next_obs.", "final_obs.")):
            raise ValueError(
                f"field name {name!r} is reserved in a trajectory buffer ({', '.join(_RESERVED)}): it makes these itself."
            )
    observations = observation_names(checked)
    if not observations:
        raise ValueError(f"fields need 'obs' (or several 'obs.NAME'); found {', '.join(checked)}.")
    if "obs" in observations and len(observations) > 1:
        raise ValueError(f"fields have 'obs' as well as {observations[1]!r}; use one observation or named ones only.")
    if not any(name == "action" or name.startswith("action.") for name in checked):
        raise ValueError(f"fields need 'action'; found {', '.join(checked)}.")
    return checked


def trajectory_estimate(
    shape: StreamShape, fields: Mapping[str, Field], sampler: Sampler, backend: Backend
) -> dict[str, int]:
    """Bytes that a trajectory buffer will take, by name."""
    sizes = estimate(shape.slots, {**fields, "reward": REWARD}, sampler, backend)
    # rows of steps are not packed
    sizes.pop("alignment", None)
    sizes["streams"] = stream_bytes(shape, backend)
    if shape.finals:
        sizes["final_obs"] = shape.finals * sum(fields[name].row_bytes for name in observation_names(fields))
    if sampler.counts_starts:
        sizes["marks"] = tree_bytes(shape.slots, backend)
    return sizes


def stream_sizes(
    capacity: int, num_envs: int, fields: Mapping[str, Field], autoreset: Autoreset, sampler: Sampler, backend: Backend
) -> dict[str, int]:
    """Bytes that a trajectory buffer would take, by name; raises as the buffer itself does."""
    checked = check_stream_fields(fields)
    shape = stream_shape(capacity, num_envs, checked, 1, 1, autoreset, None)
    return trajectory_estimate(shape, checked, sampler, backend)


def stream_outputs(fields: Mapping[str, Field], stack: int, *, sequences: bool = False) -> Mapping[str, Output]:
    """The tensors of a batch of windows, or of sequences, besides those of every draw, in order."""
    outputs = window_outputs(fields, observation_names(fields), stack)
    if not sequences:
        return outputs
    outputs["mask"] = torch.bool, ()
    return {name: (dtype, (STEPS, *shape)) for name, (dtype, shape) in outputs.items()}


class TrajectoryStorage(Storage):
    """The fields and rewards of every stored step, its flags and depth, and final observations.

    observations: names of the fields that are stacked.
    finals:       for each of them the (shape.finals, *field.shape) kept final observations.
    """

    def __init__(
        self,
        shape: StreamShape,
        fields: dict[str, Field],
        device: torch.device,
        *,
        gamma: float,
        padding: Padding,
        random_shift: int,
        memory: MakeMemory | None = None,
    ) -> None:
        # rewards of whole windows are read for each start: they stay with the flags
        super().__init__(shape.slots, {**fields, "reward": REWARD}, device, memory=memory, on_device=("reward",))
        # windows are summed up to their full length and masked: memory never written must hold numbers
        self.tensors["reward"].zero_()
        self.gamma = gamma
        self.padding = padding
        self.random_shift = random_shift
        self.observations = observation_names(fields)
        self.streams = Streams(shape, device)
        self.finals: dict[str, Tensor] = {}
        if shape.finals:
            for name in self.observations:
                field = fields[name]
                self.finals[name] = torch.zeros((shape.finals, *field.shape), dtype=field.dtype, device=device)

    def stream_tensors(self, written: int) -> dict[str, Tensor]:
        """Views of the tensors kept beside the fields for the first `written` slots, by name."""
        return self.streams.views(written) | {f"final.{name}": tensor for name, tensor in self.finals.items()}

    def reset_from(self, written: int) -> None:
        """Make the slots from this one on as if they had never been written."""
        super().reset_from(written)
        self.streams.flags[written:].zero_()
        self.streams.depth[written:].zero_()
        self.streams.spans[written:].fill_(-1)
        if not written:
            self.streams.parted.fill_(-1)
            self.streams.owner.fill_(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.streams.nbytes + sum(tensor.nbytes for tensor in self.finals.values())
