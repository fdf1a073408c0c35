"""Memory in a file that has no name: the system frees its blocks with the last mapping, however the process ends.

The file is scratch: `save` writes the data that must last.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

# written at once where the system cannot reserve the blocks of a file
_PIECE = 2**24


def mapped(folder: Path, nbytes: int) -> mmap.mmap:
    """`nbytes` of a new file in a folder, which is made if it is missing, mapped into memory; zeros.

    All blocks of the disk are reserved at once: a full disk is an error here, and no SIGBUS later. Raises MemoryError
    then, OSError where the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise MemoryError(
                f"the disk has no room for the fields at storage_path {folder} ({error.strerror}). Lower the capacity, "
                "or name a folder on another disk."
            ) from error
        advice = "Name a folder that can be written to, or one that can be made"
        raise type(error)(
            error.errno, f"the fields cannot be kept at storage_path: {error.strerror}. {advice}", str(folder)
        ) from error


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Give a new file its length and all its blocks."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    for begin in range(0, nbytes, _PIECE):
        file.write(bytes(min(_PIECE, nbytes - begin)))
    file.flush()


def free_on_disk(folder: Path) -> int | None:
    """Bytes that a new file there can have, or None where the system does not tell."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    try:
        usage = None if there is None else shutil.disk_usage(there)
    except OSError:
        return None
    # some network file systems report no sizes at all
    return usage.free if usage is not None and usage.total else None
