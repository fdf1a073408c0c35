"""What a trajectory buffer keeps: the ring of steps, what is known about each, and final observations beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_replay.compiled import STEPS, Output
from gpu_replay.fields import Field
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.eligibility import Streams, StreamShape, stream_bytes
from gpu_replay.ops.mass_tree import tree_bytes
from gpu_replay.samplers import PRIORITIZED, Combined, Sampler
from gpu_replay.storage import Storage, base_sampler, estimate
from gpu_replay.trajectory_settings import Padding, observation_names

REWARD = Field((), torch.float32)


def needs_marks(sampler: Sampler) -> bool:
    """Whether eligible starts must be counted in the order of their slots, beside any masses."""
    return isinstance(sampler, Combined) or not isinstance(base_sampler(sampler), PRIORITIZED)


def trajectory_estimate(
    shape: StreamShape, fields: Mapping[str, Field], sampler: Sampler, backend: Backend
) -> dict[str, int]:
    """Bytes that a trajectory buffer will take, by name."""
    sizes = estimate(shape.slots, {**fields, "reward": REWARD}, sampler, backend)
    sizes["streams"] = stream_bytes(shape, backend)
    if shape.finals:
        sizes["final_obs"] = shape.finals * sum(fields[name].row_bytes for name in observation_names(fields))
    if needs_marks(sampler):
        sizes["marks"] = tree_bytes(shape.slots, backend)
    return sizes


def stream_outputs(fields: Mapping[str, Field], stack: int) -> dict[str, Output]:
    """What a batch of a trajectory buffer holds besides what every draw gives, in order."""
    stacks, singles = _outputs(fields, stack)
    return {
        **stacks,
        **singles,
        "reward": (torch.float32, ()),
        **{f"next_{name}": output for name, output in stacks.items()},
        "discount": (torch.float32, ()),
        "terminated": (torch.bool, ()),
        "truncated": (torch.bool, ()),
    }


def sequence_outputs(fields: Mapping[str, Field], stack: int) -> dict[str, Output]:
    """What a batch of sequences holds besides what every draw gives, in order."""
    stacks, singles = _outputs(fields, stack)
    flags = dict.fromkeys(("terminated", "truncated", "mask"), (torch.bool, ()))
    outputs = {**stacks, **singles, "reward": (torch.float32, ()), **flags}
    return {name: (dtype, (STEPS, *shape)) for name, (dtype, shape) in outputs.items()}


def _outputs(fields: Mapping[str, Field], stack: int) -> tuple[dict[str, Output], dict[str, Output]]:
    """The fields that are stacked, and the others, as they leave `sample`."""
    stacked = observation_names(fields)
    frames = (stack,) if stack > 1 else ()
    stacks: dict[str, Output] = {name: (fields[name].output_dtype, (*frames, *fields[name].shape)) for name in stacked}
    singles: dict[str, Output] = {
        name: (field.output_dtype, field.shape) for name, field in fields.items() if name not in stacked
    }
    return stacks, singles


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
    ) -> None:
        super().__init__(shape.slots, {**fields, "reward": REWARD}, device)
        # windows are summed up to their full length and masked: what was never written must be a number
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

    def state_tensors(self, written: int) -> dict[str, Tensor]:
        """Views of what is kept beside the fields while so many slots are written, by name."""
        streams = self.streams
        views = {
            "streams.flags": streams.flags[:written],
            "streams.depth": streams.depth[:written],
            "streams.pending": streams.pending,
        }
        if streams.shape.hindsight:
            views["streams.spans"] = streams.spans[:written]
            views["streams.parted"] = streams.parted
        if streams.shape.finals:
            views["streams.final"] = streams.final[:written]
            views["streams.owner"] = streams.owner
        return views | {f"final.{name}": tensor for name, tensor in self.finals.items()}

    def forget_from(self, written: int) -> None:
        """Make the slots from this one on as if they had never been written."""
        self.streams.flags[written:].zero_()
        self.streams.depth[written:].zero_()
        self.streams.spans[written:].fill_(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.streams.nbytes + sum(tensor.nbytes for tensor in self.finals.values())
