"""The ranks of one buffer: what they tell each other through `torch.distributed`, and what is raised when one fails.

A buffer over all ranks of the program has a process group of its own: its messages keep its timeout, and never stand
between those of the program. One over some of the ranks uses the group that it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_replay.engines.storage import check_device
from gpu_replay.validation import number

Result = TypeVar("Result")

# while some ranks read or write files the others wait in rounds of this share of the timeout, at most so many seconds
_ROUND_SHARE, _LONGEST_ROUND = 8, 5.0
_OUT_OF_STEP = "an earlier call failed ({}); the ranks are out of step. Load a checkpoint in new processes"


class Agreed(Exception):
    """Carries an error that every rank knows of: all of them raise, and the group goes on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Message:
    """One operation of the group that has begun, and the tensor that it fills."""

    def __init__(self, group: Group, work: Any, tensor: Tensor) -> None:
        self._group, self._work, self._tensor = group, work, tensor

    def wait(self, *, on_host: bool = False) -> Tensor:
        """The tensor; what reads it on its device comes after the operation.

        on_host: the host will read it: on CUDA wait here, so that a failure is raised here too.
        """
        with self._group.messages():
            if on_host or not self._tensor.is_cuda:
                self._work.wait(self._group.limit)
            else:
                self._work.wait()
        return self._tensor


class Group:
    """The ranks that share a buffer, seen from one of them.

    Making one is collective. Raises RuntimeError without `torch.distributed`, or when a rank does not take part within
    the timeout; ValueError for a backend that does not fit the device, or on a rank outside of the group.
    """

    def __init__(self, group: Any, device: torch.device | str | None, timeout: object) -> None:
        self.timeout = number("timeout", timeout, above=True)
        self.limit = timedelta(seconds=self.timeout)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a ShardedReplayBuffer needs torch.distributed: start the program with torchrun and call "
                "torch.distributed.init_process_group() first. On a single device use ReplayBuffer."
            )
        world = dist.group.WORLD if group is None else group
        if dist.get_rank(world) < 0:
            raise ValueError("this process is not a rank of the group; make the buffer on the ranks of it alone.")
        ranks = dist.get_process_group_ranks(world)
        self.rank, self.size = dist.get_rank(world), len(ranks)
        self.lock = threading.RLock()
        self._failed: str | None = None
        self.device, backend = device_and_backend(str(dist.get_backend_config(world)), device)
        # torch gives equal names to two groups that some ranks of the program make one after the other
        self._owned = self.size == dist.get_world_size()
        self._group = world
        with self.call("making a ShardedReplayBuffer"), self.messages():
            # a rank that is gone is noticed at once; new_group would wait for it
            self.all_reduce(torch.zeros(1, device=self.device)).wait(on_host=True)
            if self._owned:
                self._group = dist.new_group(ranks, timeout=self.limit, backend=backend)

    def close(self) -> None:
        """Give up the process group; calls that need it raise RuntimeError from then on."""
        with self.lock:
            if self._failed is None:
                self._failed = "the buffer was closed, and only calls that concern this rank's own shard still work"
                if self._owned:
                    dist.destroy_process_group(self._group)

    # errors

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """One collective call at a time, in the same order on every rank.

        A rank that leaves it by an error of its own is out of step with the others: from then on it raises.
        """
        with self.lock:
            if self._failed is not None:
                raise RuntimeError(f"{name}: {self._failed}.")
            try:
                yield
            except Agreed as agreed:
                raise agreed.error from None
            except MessageFailed as error:
                self._failed = _OUT_OF_STEP.format(name)
                raise RuntimeError(
                    f"{name}: rank {self.rank} of {self.size} lost another rank, or waited {self.timeout:g} s for one "
                    f"that did not make the same call: {error}"
                ) from error.__cause__
            except BaseException as error:
                self._failed = _OUT_OF_STEP.format(f"{name}: {type(error).__name__}")
                raise

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Errors of torch.distributed as MessageFailed."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            raise MessageFailed(lines[0] if lines else type(error).__name__) from error

    def agree(self, errors: Sequence[str | None], own: BaseException | None, name: str) -> None:
        """Raise on every rank if one has an error: its own there, elsewhere RuntimeError that names the first one."""
        if own is not None:
            raise Agreed(own)
        for rank, error in enumerate(errors):
            if error is not None:
                raise Agreed(RuntimeError(f"{name}: rank {rank} of {self.size} failed: {error}"))

    # messages

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Message:
        """Begin to make the tensor the sum, or the largest, of those of all ranks."""
        kind = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with self.messages():
            return Message(self, dist.all_reduce(tensor, kind, group=self._group, async_op=True), tensor)

    def table(self, row: Tensor) -> Message:
        """Begin to make (R, K) of the (K,) row of each rank, by one all-reduce in which the other rows are 0."""
        table = torch.zeros((self.size, *row.shape), dtype=row.dtype, device=row.device)
        table[self.rank] = row
        return self.all_reduce(table)

    def all_to_all(self, given: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows along the first dimension: so many to each rank, in order, and so many from each."""
        out = torch.empty((sum(received), *given.shape[1:]), dtype=given.dtype, device=given.device)
        with self.messages():
            work = dist.all_to_all_single(out, given, list(received), list(sent), group=self._group, async_op=True)
        return Message(self, work, out).wait(on_host=True)

    def tell(self, text: str) -> list[str]:
        """The texts of all ranks, in the order of ranks: two all-reduces."""
        data = text.encode()
        lengths = self.table(torch.tensor([len(data)], device=self.device)).wait(on_host=True).view(-1).tolist()
        row = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
        table = self.table(row.to(self.device)).wait(on_host=True).cpu()
        return [bytes(each[:length].numpy()).decode() for each, length in zip(table, lengths, strict=True)]

    def together(self, work: Callable[[], Result], name: str) -> Result:
        """Work of unknown length on every rank, such as files: it ends when all have done it.

        Meanwhile the ranks answer each other in rounds, so that one that dies is noticed within the timeout, and a slow
        one is waited for. If the work of one raises, all raise.
        """
        own: BaseException | None = None
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            pause = min(_LONGEST_ROUND, self.timeout / _ROUND_SHARE)
            while True:
                finished = bool(wait([future], 0.0 if future.done() else pause).done)
                if finished:
                    own = future.exception()
                counts = self.table(torch.tensor([finished, own is not None], device=self.device)).wait(on_host=True)
                done, failed = counts.cpu().sum(0).tolist()
                if done == self.size:
                    break
        if failed:
            told = self.tell("" if own is None else f"{type(own).__name__}: {own}")
            self.agree([each or None for each in told], own, name)
        return future.result()


class MessageFailed(RuntimeError):
    """What torch.distributed raised while ranks exchanged something."""


def device_and_backend(config: str, device: torch.device | str | None) -> tuple[torch.device, str]:
    """The device of a shard, and the backend that moves its tensors.

    config: of the process group, as `torch.distributed.get_backend_config` says it: "cpu:gloo,cuda:nccl".
    device: None is the GPU of this process's local rank where the group has NCCL, else the CPU.
    Raises ValueError where the group has no backend for the device.
    """
    has_nccl = "nccl" in config and torch.cuda.is_available()
    if device is None:
        if has_nccl:
            local = dist.get_node_local_rank(fallback_rank=dist.get_rank() % torch.cuda.device_count())
            return torch.device("cuda", local), "nccl"
        device = "cpu"
    found = check_device(device)
    wanted = "nccl" if found.type == "cuda" else "gloo"
    if wanted not in config:
        raise ValueError(
            f"shards on {str(found)!r} need a process group with {wanted}; found {config!r}. Call "
            f"init_process_group({wanted!r}), or without a backend for both."
        )
    return found, wanted
