"""Processes that are the ranks of a process group on gloo, kept for a module."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# a rank that has not answered after so many seconds hangs
MOST_SECONDS = 60.0
# imported once, by the process that all ranks are forked from
PRELOADED = ["torch", "torch.distributed", "gpu_replay", "loaded_loops"]


class Raised(NamedTuple):
    """What a rank raised: the name of the class, and the message."""

    kind: str
    message: str
    trace: str


class Gone(NamedTuple):
    """A rank that has ended, with its exit code."""

    code: int | None


def serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """One rank: answer calls until there are none."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            work, ranks, arguments = connection.recv()
        except EOFError:
            break
        # every process takes part, as torch asks for
        group = None if ranks == size else dist.new_group(list(range(ranks)), timeout=timedelta(seconds=30))
        try:
            connection.send(work(group, *arguments) if rank < ranks else None)
        except BaseException as error:
            connection.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        if group is not None and rank < ranks:
            dist.destroy_process_group(group)
    # without waiting for ranks that are gone
    os._exit(0)


def forkserver() -> Any:
    """Where processes begin with what is imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def command(folder: str, *arguments: str) -> None:
    """`gpu-replay` as one rank of a launch, in a folder that then names its process."""
    from gpu_replay.cli import main

    os.chdir(folder)
    Path(f"rank {os.environ['RANK']}").write_text(str(os.getpid()))
    sys.exit(main([*arguments]))


class Ranks:
    """The processes."""

    def __init__(self, size: int, store: Path) -> None:
        context = forkserver()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def tried(self, ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `work(group, *arguments)` returns on each of the first `ranks`, or Raised, or Gone."""
        for connection in self._connections:
            connection.send((work, ranks, arguments))
        found = []
        for connection, process in zip(self._connections, self._processes, strict=True):
            if not connection.poll(MOST_SECONDS):
                raise TimeoutError(f"a rank did not answer in {MOST_SECONDS} s")
            try:
                found.append(connection.recv())
            except EOFError:
                process.join(MOST_SECONDS)
                found.append(Gone(process.exitcode))
        return found[:ranks]

    def run(self, ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same, where no rank may fail."""
        found = self.tried(ranks, work, *arguments)
        failed = [each for each in found if isinstance(each, (Raised, Gone))]
        if failed:
            raise AssertionError("\n".join(each.trace if isinstance(each, Raised) else str(each) for each in failed))
        return found

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    """So many ranks; the processes end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        found = Ranks(size, Path(folder) / "store")
        try:
            yield found
        finally:
            found.close()
