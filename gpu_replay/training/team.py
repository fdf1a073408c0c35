"""Data-parallel training: ranks that `torchrun` started share one run, each with its own environments and replay.

Settings describe all ranks together: environments, batches, capacity and warm-up are divided among them. Every rank
samples from the steps of its own environments, with weights over those of all ranks; gradients are averaged, so that
all networks stay equal. Rank 0 alone evaluates and writes the files of the run; each rank writes its part of a
checkpoint. When a rank dies, `torchrun` starts all of them again with the same command line, which then go on from the
last checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_replay.console.errors import UserError
from gpu_replay.training.settings import Settings

# what a rank can ask for after a step: to go on, to save, or to end the run for a reason; the most urgent last
SAVE = "save"
_REQUESTS = ("", SAVE, "steps", "max_seconds", "solved", "SIGTERM", "SIGINT")


class Team:
    """The ranks of a run, seen from one of them; made on every rank. Without `torchrun` there is one rank.

    rank, size: the rank of this process, and the number of ranks.
    settings:   settings of the whole run.
    """

    rank, size = 0, 1

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if dist.is_available() and dist.is_initialized():
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
            graph=whole.graph and size == 1,
        )

    def seed(self, seed: int) -> int:
        """The seed of this rank's environments, exploration and replay."""
        if self.rank == 0:
            return seed
        words = np.random.SeedSequence((seed % 2**64, self.rank)).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def average(self, weights: Sequence[Tensor]) -> None:
        """Make the gradients of these weights their mean over all ranks, by one all-reduce."""
        if self.size == 1:
            return
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0 on every rank; all ranks give the same shape."""
        tensor = tensor.contiguous()
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def largest(self, number: int) -> int:
        """The largest number that any rank gives, each in the same call."""
        found = torch.tensor([number])
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._hosts)
        return int(found)

    def agree(self, request: str) -> str:
        """The most urgent request of any rank, or ""; called after every step of the environments."""
        return _REQUESTS[self.largest(_REQUESTS.index(request))]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of each rank, such as writing files: all leave the block when all have done it.

        Raises OSError where the work of another rank failed, which raises its own error there.
        """
        failed = True
        try:
            yield
            failed = False
        finally:
            other = self.largest(failed) and not failed
        if other:
            raise OSError("another rank could not write its part, and says why")


def launched_together() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return dist.is_available() and dist.is_torchelastic_launched()


def launch() -> str:
    """The name of the launch by `torchrun`, which stays when it starts its ranks again; "" without one.

    It is the `--rdzv-id`, by default unique on one machine.
    """
    name = _told("TORCHELASTIC_RUN_ID") if launched_together() else "none"
    return "" if name == "none" else f"torchrun-{name}"


def is_first() -> bool:
    """Whether this is rank 0, also before `join`."""
    return not launched_together() or _told("RANK") == "0"


def _told(name: str) -> str:
    """What `torchrun` tells each of its ranks."""
    from torch.distributed.elastic.utils.api import get_env_variable_or_raise

    return str(get_env_variable_or_raise(name))


def join(device: torch.device) -> torch.device:
    """Connect to the other ranks; returns the device of this one."""
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    if _told("GROUP_WORLD_SIZE") == "1":
        # on one machine torchrun keeps a store for all its starts, with the addresses of ranks that are gone
        store = PrefixStore(_told("TORCHELASTIC_RESTART_COUNT"), store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    return device
