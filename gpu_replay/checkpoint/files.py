"""Files replaced atomically, synced and locked against a second saver; and how a program shows that they are moved."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from gpu_replay.checkpoint import CheckpointError


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


def replace_text(path: Path, text: str) -> Path:
    """Replace a text file, and return `path`."""
    return replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


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


def _silent(title: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """Show nothing."""
    return nullcontext(lambda nbytes: None)


# how a program shows its users what is saved or loaded, given a title and the bytes of all; within it each call counts
# the bytes moved since the last one
show = _silent
