"""Data-parallel training: ranks that `torchrun` started share one run, each with its own environments and replay.

Settings describe all ranks together: environments, batches, capacity and warm-up are divided among them. Every rank
samples from the steps of its own environments; gradients are averaged, so that all networks stay equal. Rank 0 alone
evaluates and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_replay.console.errors import UserError
from gpu_replay.sharded.buffer import seed_of
from gpu_replay.training.settings import Settings

# reasons to end a run, the most urgent last
_REASONS = ("", "steps", "max_seconds", "solved", "SIGTERM", "SIGINT")


class Team:
    """The ranks of a run, seen from one of them; made on every rank.

    rank, size: the rank of this process, and the number of ranks.
    settings:   settings of the whole run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # decisions of the host travel apart from gradients on a GPU
        self._hosts = dist.new_group(backend="gloo")

    def share(self) -> Settings:
        """The settings of one rank. Raises UserError where environments or batches cannot be divided."""
        whole, size = self.settings, self.size
        for flag, value in (("--num-envs", whole.num_envs), ("--batch-size", whole.batch_size)):
            if value % size:
                raise UserError(f"{flag} {value} cannot be divided among {size} ranks; give a multiple.")
        return dataclasses.replace(
            whole,
            num_envs=whole.num_envs // size,
            batch_size=whole.batch_size // size,
            capacity=whole.capacity // size,
            warmup=-(-whole.warmup // size),
            # no GPU has captured an all-reduce with this yet
            graph=False,
        )

    def seed(self, seed: int) -> int:
        """The seed of this rank's environments, exploration and replay."""
        return seed_of(seed, self.rank)

    def average(self, weights: Sequence[Tensor]) -> None:
        """Make the gradients of these weights their mean over all ranks, by one all-reduce."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0 on every rank; all ranks give the same shape."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    def agree(self, reason: str) -> str:
        """The most urgent reason of any rank to end the run, or ""; called after every step of the environments."""
        found = torch.tensor([_REASONS.index(reason)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._hosts)
        return _REASONS[int(found)]


def launched_together() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return dist.is_available() and dist.is_torchelastic_launched()


def join(device: torch.device) -> torch.device:
    """Connect to the other ranks; returns the device of this one."""
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device
