"""The ranks of one buffer: their messages through `torch.distributed`, and the errors raised when one fails.

Every collective call begins with one all-gather, in which each rank says which call it makes, a digest of the arguments
that must be equal, whether it failed, and the numbers that the call needs of all ranks. These messages are all of one
size, so calls that differ meet in one and are refused on all ranks.

A buffer over all ranks of the program has a process group of its own: its messages keep its timeout, and never stand
between those of the program. One over some of the ranks uses the group that it was given.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_replay.base.refusals import refuse_in_forks
from gpu_replay.checkpoint.config import difference
from gpu_replay.checkpoint.threads import Threads
from gpu_replay.engines.storage import check_device
from gpu_replay.validation import check_float

Result = TypeVar("Result")
# what a rank sends when a call begins: the arguments that must be equal on all ranks, by name, and int64 numbers
Contribution = tuple[Mapping[str, Any], Tensor | None]

MAKING = "making a ShardedReplayBuffer"
# messages name a call by its index here
CALLS = (MAKING, "load", "len", "sample", "update_priorities", "stats", "clear", "save")
# a row of the table: the head, then this many numbers, or one for each rank if there are more ranks
_NUMBERS = 20
# the head: the index of the call, a bit that is set if the rank failed, and a digest of the arguments of this many bits
_DIGEST_BITS = 56
# while some ranks read or write files the others wait in rounds: the timeout divided by 8, at most 5 seconds each
_ROUND_SHARE, _LONGEST_ROUND = 8, 5.0
# seconds between two polls of an NCCL operation
_POLL = 2e-5
_OUT_OF_STEP = "an earlier call failed ({}); the ranks are out of step. Load a checkpoint in new processes"


class CollectiveError(Exception):
    """Carries an error that all ranks raise in the same call; the group can be used further.

    Whoever raises it takes it out of `errors`: an error that the frames of its own traceback hold would be a cycle,
    which keeps a dropped buffer until Python looks for it.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.errors = [error]


class MessageFailed(RuntimeError):
    """An error that torch.distributed raised during an exchange between ranks."""


class Message:
    """An asynchronous operation of the group, and the tensor that it writes."""

    def __init__(self, group: Group, work: Any, tensor: Tensor) -> None:
        self._group, self._work, self._tensor = group, work, tensor

    def wait(self, *, on_host: bool = False) -> Tensor:
        """Return the tensor; later work on its device runs after the operation.

        on_host: the host will read it: on CUDA wait for the operation, so that its failure is raised here.
        """
        with self._group.messages():
            if not self._tensor.is_cuda:
                self._work.wait(self._group.limit)
            else:
                # NCCL's wait ignores its timeout argument
                deadline = time.monotonic() + self._group.timeout
                while on_host and not self._work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("no answer came")
                    time.sleep(_POLL)
                self._work.wait()
        return self._tensor


class Group:
    """The ranks that share a buffer, and the messages between them.

    An invalid device or timeout is raised by the first `agree`, on all ranks. Raises RuntimeError without
    `torch.distributed`, ValueError on a rank outside of the group.
    """

    def __init__(self, group: Any, device: torch.device | str | None, timeout: object) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a ShardedReplayBuffer needs torch.distributed: start the program with torchrun and call "
                "torch.distributed.init_process_group() first. On a single device use ReplayBuffer."
            )
        world = dist.group.WORLD if group is None else group
        if dist.get_rank(world) < 0:
            raise ValueError("this process is not a rank of the group; make the buffer on the ranks of it alone.")
        self._ranks = dist.get_process_group_ranks(world)
        self.rank, self.size = dist.get_rank(world), len(self._ranks)
        self._lock = threading.RLock()
        refuse_in_forks(self)
        self._failed: str | None = None
        config = str(dist.get_backend_config(world))
        # raised by the next `agree`
        self._wrong: list[Exception] = []
        try:
            self.timeout = check_float("timeout", timeout, 1e-3, 1e9)
            self.device, self._backend = device_and_backend(config, device)
        except Exception as error:
            self._wrong.append(error)
            self.timeout = 60.0
            self.device, self._backend = device_and_backend(config, None)
        self.limit = timedelta(seconds=self.timeout)
        self._group, self._owned = world, False
        # a group with gloo can exchange the error even if the ranks' devices differ
        self._place = torch.device("cpu") if "gloo" in config else self.device
        self._unchecked: Tensor | None = None

    def adopt_group(self) -> None:
        """Make a process group for this buffer alone if it uses all ranks of the program; collective."""
        # torch gives the same name to two groups that only some ranks of the program make one after the other
        if self.size == dist.get_world_size():
            # the NCCL watchdog ends the process at its timeout, so calls must raise earlier
            limit = self.limit * (2 if self._backend == "nccl" else 1)
            with self.messages():
                self._group = dist.new_group(self._ranks, timeout=limit, backend=self._backend)
            self._owned = True
        self._place = self.device

    @property
    def works(self) -> bool:
        """Whether it was neither closed nor fell out of step."""
        return self._failed is None

    @property
    def lock(self) -> threading.RLock:
        """Held by one call at a time."""
        return self._lock

    def close(self) -> None:
        """Release the process group; calls that need it raise RuntimeError from then on."""
        with self.lock:
            if self._failed is None:
                self._failed = "the buffer was closed, and only calls that concern this rank's own shard still work"
                if self._owned:
                    dist.destroy_process_group(self._group)

    # calls

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Allow one collective call at a time, in the same order on every rank.

        After an error that only this rank raised, it is out of step with the others and refuses every further call.
        """
        with self.lock:
            if self._failed is not None:
                raise RuntimeError(f"{name}: {self._failed}.")
            try:
                yield
            except CollectiveError as error:
                raise error.errors.pop() from None
            except MessageFailed as error:
                self._failed = _OUT_OF_STEP.format(name)
                raise RuntimeError(
                    f"{name}: rank {self.rank} of {self.size} lost another rank, or waited {self.timeout:g} s for one "
                    f"that did not make the same call: {error}"
                ) from error.__cause__
            except BaseException as error:
                # keep the reason if a call within this one has set it
                self._failed = self._failed or _OUT_OF_STEP.format(f"{name}: {type(error).__name__}")
                raise

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Raise errors of torch.distributed as MessageFailed."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            raise MessageFailed(lines[0] if lines else type(error).__name__) from error

    def agree(
        self, name: str, prepare: Callable[[], Contribution], *, late: bool = False, unread: bool = False
    ) -> Tensor:
        """Send the first message of a call; return the numbers of all ranks, (R, max(20, R)) int64.

        prepare: checks this rank's arguments; what it changes must be undone if CollectiveError is raised.
        late:    some ranks may go on without reading the table, so the text of an error is not exchanged.
        unread:  the host does not read the table in this call; the next call that reads one raises the error.

        Raises CollectiveError on all ranks: RuntimeError if they make different calls; the error of `prepare` on its
        rank, and RuntimeError that names the rank on the others; ValueError if arguments differ.
        """
        text, numbers, errors = "{}", None, list[Exception]()
        try:
            if self._wrong:
                raise self._wrong.pop()
            if self._unchecked is not None and not unread:
                doubt, self._unchecked = bool(self._unchecked), None
                if doubt:
                    raise RuntimeError("a rank failed in an earlier sample, or made another call instead.")
            alike, numbers = prepare()
            text = json.dumps(alike)
        except Exception as error:
            errors.append(error)
        unread = unread and not errors
        digest = int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BITS // 8).digest(), "little")
        head = (2 * CALLS.index(name) + bool(errors) << _DIGEST_BITS) + digest
        row = torch.zeros(row_length(self.size), dtype=torch.int64, device=self._place)
        row[0] = head
        if numbers is not None:
            row[1 : 1 + numbers.numel()] = numbers
        table = self.all_gather(row).wait(on_host=not unread)
        heads = table[:, 0]
        if unread:
            other = (heads != head).any()
            self._unchecked = other if self._unchecked is None else self._unchecked | other
        elif errors or heads.tolist() != [head] * self.size:
            raise CollectiveError(self._refusal(name, heads.tolist(), text, errors.pop() if errors else None, late))
        return table[:, 1:]

    def _refusal(self, name: str, heads: list[int], text: str, error: Exception | None, late: bool) -> Exception:
        """What all ranks raise: one of the heads differs from the others or has the bit of a failure."""
        for rank, head in enumerate(heads):
            called = CALLS[head >> _DIGEST_BITS + 1]
            if called != name:
                return RuntimeError(
                    f"{name}: rank {rank} of {self.size} called {called} instead, and neither was done. Every rank "
                    "must make the same collective calls in the same order."
                )
        said = "it says why" if error is None else f"{type(error).__name__}: {error}"
        own = json.dumps([said, text])
        answers = [json.loads(each) for each in ([own] * self.size if late else self.all_gather_text(own))]
        if error is not None:
            return error
        failed = [bool(head >> _DIGEST_BITS & 1) for head in heads]
        wrong = next(rank for rank, head in enumerate(heads) if failed[rank] or head != heads[0])
        if failed[wrong]:
            return RuntimeError(f"{name}: rank {wrong} of {self.size} failed: {answers[wrong][0]}")
        unlike = (
            difference(json.loads(answers[0][1]), json.loads(answers[wrong][1])) or "those here are others than there"
        )
        unlike = unlike.replace(" here", " on rank 0").replace(" there", f" on rank {wrong}")
        return ValueError(f"{name} needs the same arguments on every rank; {unlike}.")

    # messages

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Message:
        """Start to replace the tensor by the sum, or the maximum, over all ranks."""
        kind = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with self.messages():
            return Message(self, dist.all_reduce(tensor, kind, group=self._group, async_op=True), tensor)

    def all_gather(self, row: Tensor) -> Message:
        """Start to gather the (K,) rows of all ranks into an (R, K) table."""
        table = torch.empty((self.size, *row.shape), dtype=row.dtype, device=row.device)
        with self.messages():
            return Message(self, dist.all_gather(list(table), row, group=self._group, async_op=True), table)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: `sent[r]` of the given rows go to rank r, in order; returns `received[r]` rows from each."""
        out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        with self.messages():
            work = dist.all_to_all_single(out, rows, list(received), list(sent), group=self._group, async_op=True)
        return Message(self, work, out).wait(on_host=True)

    def all_gather_text(self, text: str) -> list[str]:
        """Exchange a text; returns the texts of all ranks, in the order of ranks."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(data)], device=self._place)).wait(on_host=True).view(-1).tolist()
        row = torch.nn.functional.pad(data, (0, max(lengths) - len(data))).to(self._place)
        table = self.all_gather(row).wait(on_host=True).cpu()
        return [bytes(row[:length].numpy()).decode().strip() for row, length in zip(table, lengths, strict=True)]

    def run_on_all(self, work: Callable[[], Result], name: str) -> Result:
        """Run work of unknown duration, such as writing files, on every rank; returns when all ranks have finished.

        Meanwhile the ranks exchange a message in each round, so that a rank that dies is noticed within the timeout,
        while a slow one is waited for. If the work raises on one rank, all ranks raise.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    # holds for one thread
                    torch.cuda.set_device(self.device)
                results.append(work())
            except BaseException as error:
                errors.append(error)

        pause, done, threads = min(_LONGEST_ROUND, self.timeout / _ROUND_SHARE), 0, Threads()
        try:
            threads.start(run)
            while done < self.size:
                finished = torch.tensor(int(threads.wait(pause)), device=self.device)
                done = int(self.all_reduce(finished).wait(on_host=True))
        finally:
            threads.wait()

        def ended() -> Contribution:
            if errors:
                raise errors.pop()
            return {}, None

        self.agree(name, ended)
        return results[0]


def row_length(ranks: int) -> int:
    """The number of int64 values that a rank sends when a call begins."""
    return 1 + max(_NUMBERS, ranks)


def device_and_backend(config: str, device: torch.device | str | None) -> tuple[torch.device, str]:
    """The device of a shard, and the backend that sends its tensors.

    config: of the process group, as `torch.distributed.get_backend_config` returns it: "cpu:gloo,cuda:nccl".
    device: None is the GPU of this process's local rank if the group has NCCL, else the CPU.
    Raises ValueError if the group has no backend for the device.
    """
    has_nccl = "nccl" in config and torch.cuda.is_available()
    if device is None:
        if has_nccl:
            local = dist.get_node_local_rank(fallback_rank=dist.get_rank() % torch.cuda.device_count())
            return torch.device("cuda", local), "nccl"
        device = "cpu"
    resolved = check_device(device)
    backend = "nccl" if resolved.type == "cuda" else "gloo"
    if backend not in config:
        raise ValueError(
            f"shards on {str(resolved)!r} need a process group with {backend}; found {config!r}. Call "
            f"init_process_group({backend!r}), or without a backend for both."
        )
    return resolved, backend
