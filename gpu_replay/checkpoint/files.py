"""Files replaced atomically, synced and locked against a second saver, and a bar of progress while they are written.

The bar goes to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gpu_replay.errors import CheckpointError


def replace_file(path: Path, write: Callable[[Path], object], *, partial: Path | None = None) -> Path:
    """Let `write` make a file next to `path`, move it there, and return `path`; a reader never sees half of it.

    partial: where it is made; by default a hidden file with the suffix of `path`. What is there is removed first, so
             that a link is not followed.
    """
    partial = partial or path.with_name(f".{path.stem}.partial{path.suffix}")
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def replace_json(path: Path, value: Any, *, partial: Path) -> None:
    """Replace a file by a JSON value; when this returns, that is on the disk."""

    def write(made: Path) -> None:
        # never through a link: "x" is O_EXCL
        with open(made, "x", encoding="utf-8") as out:
            json.dump(value, out, indent=1)
            sync_file(out)

    replace_file(path, write, partial=partial)
    sync_folder(path.parent)


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Windows needs no call for that and cannot open a folder."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def require_free(folder: Path, needed: int) -> None:
    """Raise OSError (no space left) if `needed` bytes do not fit on the disk of `folder`, before any are written."""
    usage = shutil.disk_usage(folder)
    # some network file systems report no sizes at all
    if usage.total and needed > usage.free:
        raise OSError(errno.ENOSPC, f"no space left on the disk: {needed} bytes are needed and {usage.free} are free")


@contextmanager
def save_lock(folder: Path, target: Path) -> Iterator[None]:
    """Hold the lock of `folder` while saving to `target`; the system drops it with the process, however that ends.

    Raises CheckpointError if another save holds it, or the folder is a link. File systems without locks, and Windows,
    go without: there, two savers of one path are the user's to avoid.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, which no save leaves there. Nothing was written; remove it.")
    if sys.platform == "win32" or not folder.is_dir():
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the saver that held it may have renamed the folder between the two lines above
            busy = not folder.is_dir() or not os.path.samestat(os.stat(folder), os.fstat(descriptor))
        except BlockingIOError:
            busy = True
        except OSError:
            busy = False
        if busy:
            raise CheckpointError(
                f"{target} is in use: another save to it is under way. Wait for it, or save to another path."
            )
        yield
    finally:
        # not `suppress`: a signal handler that raises in its Python code would leave the folder locked
        try:
            # a process that was forked meanwhile has the descriptor as well
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        finally:
            os.close(descriptor)


SHOWN_FROM = 10**9
"""Bytes from which saving and loading show a bar."""


def progress_bar(total: float, **options: Any) -> Any:
    """tqdm with `options`, refreshed rarely where standard error is a log file. Raises ImportError without tqdm."""
    from tqdm import tqdm

    class Bar(tqdm):
        # without the thread that draws bars which nobody advances
        monitor_interval = 0

    # of its own: a signal handler that raises can leave the lock that all bars share held for ever
    Bar.set_lock(threading.RLock())
    # in a log file every refresh is a line of its own
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return Bar(total=total, file=sys.stderr, dynamic_ncols=True, mininterval=interval, miniters=1, **options)


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A callback for the bytes moved since its last call; large totals show a bar if tqdm is installed."""
    try:
        bar = progress_bar(total, desc=title, unit="B", unit_scale=True, leave=False) if total > SHOWN_FROM else None
    except ImportError:
        bar = None
    if bar is None:
        yield lambda nbytes: None
        return
    with bar:
        yield bar.update
