"""A file mapped into memory that holds the fields of one buffer, and is removed with it.

The file is scratch: `save` writes the data that must last.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import numpy as np

# the one file of a buffer in its folder; nothing else there is touched
FILE_NAME = "gpu_replay.ring"
# written at once where the system cannot reserve the blocks of a file
_PIECE = 2**24
# folders tried for a copy of a buffer
_COPIES = 1000
# folders made or found gone on the way to one
_TRIES = 1000
_files: weakref.WeakSet[MappedFile] = weakref.WeakSet()


class MappedFile:
    """`nbytes` of a new file in a folder, mapped into memory.

    mapping: all of it. block: (nbytes,) uint8 of the same memory, zeros.

    The folder is made if it is missing. It is locked while the file is in use, so that no two buffers share it; the
    system drops the lock with the process, however that ends, and the next buffer there replaces the file that a dead
    process left. All blocks of the disk are reserved at once: a full disk is an error here, and no SIGBUS later.

    Raises MemoryError where the disk is full, RuntimeError where another buffer uses the folder, OSError where the
    folder cannot be made or written to.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        with _explained(folder), ExitStack() as undo:
            # the lock is released last, so that no other buffer takes a folder that is about to be removed
            locks: list[int] = []
            undo.callback(_unlock, locks)
            _make(folder, undo)
            lock = _locked(folder)
            if lock is not None:
                locks.append(lock)
            self.lock = lock
            _replaceable(folder)
            descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
            try:
                undo.callback(_remove_file, folder / FILE_NAME, os.fstat(descriptor))
                _reserve(descriptor, nbytes)
                self.mapping = mmap.mmap(descriptor, nbytes)
                self.block = np.frombuffer(self.mapping, dtype=np.uint8)
            finally:
                os.close(descriptor)
            # also when the process ends
            weakref.finalize(self, _undo, os.getpid(), undo.pop_all())
        _files.add(self)


_BINARY = getattr(os, "O_BINARY", 0)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise errors of the file system with a message that names a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise MemoryError(
                f"the disk has no room for the fields at storage_path {folder} ({error.strerror}). Lower the capacity, "
                "or name a folder on another disk."
            ) from error
        advice = "Name a folder that can be written to, or one that can be made"
        if (folder / FILE_NAME).is_dir():
            advice = f"It holds a folder named {FILE_NAME}, as the file of the fields is: rename that, or name another"
        raise type(error)(
            error.errno, f"the fields cannot be kept at storage_path: {error.strerror}. {advice}", str(folder)
        ) from error


def _make(folder: Path, undo: ExitStack) -> None:
    """Make the folder and its parents; `undo` removes those that were missing."""
    for _ in range(_TRIES):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        if not missing:
            break
        # other processes make the same ones, or remove one that they need no more
        with suppress(FileExistsError, FileNotFoundError):
            missing[-1].mkdir()
            undo.callback(_remove_folder, missing[-1])
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _locked(folder: Path) -> int | None:
    """An open descriptor of the folder that holds its lock; None without support for locks. RuntimeError if it is held.

    File systems and systems without locks, as Windows is, go without.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # whoever held it may have removed the folder meanwhile
        busy = not os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except BlockingIOError:
        busy = True
    except OSError:
        os.close(descriptor)
        return None
    if busy:
        os.close(descriptor)
        _refuse(folder)
    return descriptor


def _unlock(locks: list[int]) -> None:
    """Drop locks, also where a child that is being forked has a copy of the descriptor."""
    for lock in locks:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _refuse(folder: Path) -> NoReturn:
    raise RuntimeError(
        f"storage_path {folder} holds the fields of another buffer that is in use. Give each buffer a folder of its "
        "own, or drop the other one first."
    )


def _replaceable(folder: Path) -> None:
    """Remove the file that a dead process left; the caller holds the lock."""
    file = folder / FILE_NAME
    try:
        file.unlink()
    except FileNotFoundError:
        return
    except PermissionError:
        # Windows keeps files that are mapped
        if sys.platform == "win32":
            _refuse(folder)
        raise


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a new file its length and all its blocks."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    zeros = bytes(min(nbytes, _PIECE))
    left = nbytes
    while left:
        left -= os.write(descriptor, zeros[:left])


def _undo(owner: int, undo: ExitStack) -> None:
    """Remove the file, the folders that were made for it and the lock; memory that is still mapped stays.

    owner: the process; a child that it forked removes nothing.
    """
    if os.getpid() == owner:
        undo.close()


def _remove_file(file: Path, made: os.stat_result) -> None:
    with suppress(OSError):
        # not that of another, if folders were moved meanwhile
        if os.path.samestat(os.lstat(file), made):
            os.unlink(file)


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _leave_locks() -> None:
    """A child that was forked holds no lock of its parent's: it would outlive the parent."""
    for file in list(_files):
        if file.lock is not None:
            os.close(file.lock)
            file.lock = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def folder_for_copy(folder: Path) -> Path:
    """The folder itself if no buffer uses it, else the first free one of `NAME-2`, `NAME-3`, ... beside it."""
    for number in range(1, _COPIES):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not candidate.is_dir():
            return candidate
        try:
            lock = _locked(candidate)
        except RuntimeError:
            continue
        if lock is not None:
            _unlock([lock])
            return candidate
        if not (candidate / FILE_NAME).exists():
            return candidate
    return folder


def free_on_disk(folder: Path) -> int | None:
    """Bytes that a new file there can have, or None where the system does not tell."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    if there is None:
        return None
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    # some network file systems report no sizes at all
    if not usage.total:
        return None
    left = 0
    with suppress(OSError):
        status = os.lstat(folder / FILE_NAME)
        # it will be replaced, or refused
        left = getattr(status, "st_blocks", 0) * 512 if stat.S_ISREG(status.st_mode) else 0
    return usage.free + left
