"""The ranks that share a memory: their messages through `torch.distributed`, and the errors raised when one fails.

Every collective call begins with one all-gather of four numbers. The first says which call a rank makes and whether it
failed there, with a digest of the arguments that must be equal; three are numbers of the call. Calls that differ meet
in one such message and are refused on all ranks.

A buffer over all ranks of the program has a process group of its own: its messages keep its timeout, and never stand
between those of the program. One over some of the ranks uses the group that it was given.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_replay.base.refusals import refuse_in_forks
from gpu_replay.checkpoint.state import difference
from gpu_replay.engines.memory import check_device
from gpu_replay.validation import check_float

Result = TypeVar("Result")
# what a rank sends when a call begins: the arguments that must be equal on all ranks, by name, and (3,) int64 numbers,
# the first of which must be equal too
Contribution = tuple[Mapping[str, Any], Tensor | None]

MAKING = "making a ShardedReplay"
# messages name a call by its index here
CALLS = (MAKING, "load", "sample", "global_stats", "clear", "save", "close")
# what a rank tells besides the head
NUMBERS = 3
# the head: the index of the call, a bit that is set if the rank failed, and a digest of the arguments of this many bits
_DIGEST_BITS = 56
# while some ranks read or write files the others wait in rounds: the timeout divided by 8, at most 5 seconds each
_ROUND_SHARE, _LONGEST_ROUND = 8, 5.0
# seconds between two polls of an NCCL operation
_POLL = 2e-5
# what a rank says of such work in each round
_BUSY, _DONE, _FAILED = range(3)
_CLOSED = "it was closed, and only calls on this rank's own buffer still work"
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


class Group:
    """The ranks that share a buffer, and the messages between them.

    device: of the buffer, in any form that the buffers take.

    An invalid timeout or device, or a group that cannot send from it, is raised by the first `agree`, on all ranks.
    Raises RuntimeError without `torch.distributed`, ValueError on a rank outside of the group.
    """

    def __init__(self, group: Any, device: torch.device | str | None, timeout: object) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a ShardedReplay needs torch.distributed: start the program with torchrun and call "
                "torch.distributed.init_process_group() first. On a single device the buffer alone is enough."
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
        self.timeout, self.device, self._backend = 60.0, torch.device("cpu"), "gloo"
        try:
            self.timeout = check_float("timeout", timeout, 1e-3, 1e9)
            self.device = check_device(device)
            self._backend = "nccl" if self.device.type == "cuda" else "gloo"
            if self._backend not in config:
                raise ValueError(
                    f"buffers on {str(device)!r} need a process group with {self._backend}; found {config!r}. Call "
                    f"init_process_group({self._backend!r}), or without a backend for both."
                )
        except Exception as error:
            self._wrong.append(error)
        self.limit = timedelta(seconds=self.timeout)
        self._group, self._owned = world, False
        # a group with gloo can exchange the error even if the ranks' devices differ
        self._place = torch.device("cpu") if "gloo" in config else torch.device("cuda", torch.cuda.current_device())
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

    def close(self) -> None:
        """Release the process group on all ranks; calls that need it raise RuntimeError from then on.

        After a failure it sends nothing, and closing again changes nothing.
        """
        with self._lock:
            try:
                if self._failed is None:
                    with self.call("close"):
                        self.agree("close", lambda: ({}, None))
                        self._failed = _CLOSED
            finally:
                # not where the ranks made different calls, after which they go on
                if self._failed is not None and self._owned:
                    self._owned = False
                    dist.destroy_process_group(self._group)

    # calls

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Allow one collective call at a time, in the same order on every rank.

        After an error that only this rank raised, it is out of step with the others and refuses every further call.
        """
        with self._lock:
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
        """Send the first message of a call; return the numbers of all ranks, (R, 3) int64.

        prepare: checks this rank's arguments and prepares the call; it changes nothing, as any rank may refuse.
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
        row = torch.zeros(1 + NUMBERS, dtype=torch.int64, device=self._place)
        row[0] = head
        if numbers is not None:
            row[1:] = numbers
        table = self.all_gather(row, on_host=not unread)
        if unread:
            other = (table[:, :2] != row[:2]).any()
            self._unchecked = other if self._unchecked is None else self._unchecked | other
        elif errors or (table[:, :2] != row[:2]).any():
            raise CollectiveError(
                self._refusal(name, table[:, 0].tolist(), text, errors.pop() if errors else None, late)
            )
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
        if heads == [heads[0]] * self.size:
            return ValueError(f"{name}: ranks have another beta, as their buffers were not sampled equally often.")
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

    def all_gather(self, row: Tensor, *, on_host: bool = True) -> Tensor:
        """Gather the (K,) rows of all ranks into an (R, K) table; later work on its device runs after that.

        on_host: the host will read it: on CUDA wait for the operation, so that its failure is raised here.
        """
        table = torch.empty((self.size, *row.shape), dtype=row.dtype, device=row.device)
        with self.messages():
            work = dist.all_gather(list(table), row, group=self._group, async_op=True)
            if not row.is_cuda:
                work.wait(self.limit)
            else:
                # NCCL's wait ignores its timeout argument
                deadline = time.monotonic() + self.timeout
                while on_host and not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("no answer came")
                    time.sleep(_POLL)
                work.wait()
        return table

    def all_gather_text(self, text: str) -> list[str]:
        """Exchange a text; returns the texts of all ranks, in the order of ranks."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(data)], device=self._place)).view(-1).tolist()
        row = torch.nn.functional.pad(data, (0, max(lengths) - len(data))).to(self._place)
        table = self.all_gather(row).cpu()
        return [bytes(row[:length].numpy()).decode().strip() for row, length in zip(table, lengths, strict=True)]

    def run_on_all(self, work: Callable[[], Result], name: str) -> Result:
        """Run work of unknown duration, such as writing files, on every rank; returns when all ranks have finished.

        Meanwhile the ranks exchange a message in each round, so that a rank that dies is noticed within the timeout,
        while a slow one is waited for. If the work raises on one rank, all ranks raise. Nothing is sent after the round
        in which the last rank said that its work is done.
        """

        def run() -> Result:
            if self.device.type == "cuda":
                # holds for one thread
                torch.cuda.set_device(self.device)
            return work()

        pause, said = min(_LONGEST_ROUND, self.timeout / _ROUND_SHARE), [_BUSY]
        with ThreadPoolExecutor(1) as pool:
            calls = [pool.submit(run)]
            while _BUSY in said:
                wait(calls, pause)
                own = _BUSY if not calls[0].done() else _FAILED if calls[0].exception() else _DONE
                said = self.all_gather(torch.tensor([own], device=self._place)).view(-1).tolist()

        def ended() -> Contribution:
            # taken out, since an error and its frames would keep each other
            calls.pop().result()
            return {}, None

        if _FAILED in said:
            self.agree(name, ended)
        return calls[0].result()
