"""Large files written and read around the page cache, where the system can do that.

What a checkpoint takes on a machine of few cores is not the disk but the processor: hashing, and the page cache, which
costs more than that again. Around it a byte is copied once, to memory of one page's alignment, at a fifth of the cost.
What is written is not kept in memory that others could use, and what is read comes from the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import TypeVar

import numpy as np

LEAST_BYTES = 16 << 20
"""Smaller files go through the page cache, which answers sooner."""
BUFFER_BYTES = 2 << 20
"""What moves at once; each thread has one buffer."""
# of memory, places in files and lengths; no disk asks for more
_ALIGNED = 4096

_own = threading.local()


def _buffer() -> tuple[mmap.mmap, np.ndarray]:
    """The buffer of this thread, which begins with a page, and the same as an array."""
    if not hasattr(_own, "buffer"):
        memory = mmap.mmap(-1, BUFFER_BYTES)
        _own.buffer = memory, np.frombuffer(memory, dtype=np.uint8)
    found: tuple[mmap.mmap, np.ndarray] = _own.buffer
    return found


Own = TypeVar("Own", bound="_File")


class _File:
    """An open file; `direct` while what is moved goes around the page cache."""

    def __init__(self, path: Path, flags: int, nbytes: int) -> None:
        # never inherited by children, and bytes as they are where systems know of others
        self.fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
        self.direct = nbytes >= LEAST_BYTES and self._set_direct(True)

    def _set_direct(self, wanted: bool) -> bool:
        """Go around the page cache from here on, or through it; whether it goes around it now."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag or sys.platform == "win32":
            return False
        import fcntl

        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:
            # this file system has no other way
            return False
        return wanted

    def _through_cache(self, error: OSError) -> None:
        """Go on through the page cache where the system refused to go around it; raises any other error."""
        if not self.direct or error.errno != errno.EINVAL:
            raise error
        self.direct = self._set_direct(False)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class Writer(_File):
    """A new file of `nbytes`, written from its beginning; `finish` waits until it is on the disk.

    Raises FileExistsError for a path that exists, links that lead nowhere included.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, nbytes)
        self._filled = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append the data."""
        if not self.direct and not self._filled:
            self._write(memoryview(data))
            return
        memory, array = _buffer()
        given = np.frombuffer(data, dtype=np.uint8)
        while given.size:
            taken = min(given.size, BUFFER_BYTES - self._filled)
            # not a copy of memoryviews, during which other threads wait
            np.copyto(array[self._filled : self._filled + taken], given[:taken])
            self._filled += taken
            given = given[taken:]
            if self._filled == BUFFER_BYTES:
                self._write(memoryview(memory))
                self._filled = 0

    def finish(self) -> int:
        """Wait until all of it is on the disk; returns the time of its last change in nanoseconds."""
        if self._filled:
            rest = memoryview(_buffer()[0])[: self._filled]
            whole = self._filled // _ALIGNED * _ALIGNED
            self._write(rest[:whole])
            if self.direct:
                # the end of the file need not be aligned
                self.direct = self._set_direct(False)
            self._write(rest[whole:])
            self._filled = 0
        os.fsync(self.fd)
        return os.fstat(self.fd).st_mtime_ns

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except OSError as error:
                self._through_cache(error)


class Reader(_File):
    """A file of `nbytes`, read from its beginning."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, os.O_RDONLY, nbytes)
        self._begin = self._end = 0
        if not self.direct and hasattr(os, "posix_fadvise"):
            # the disk reads all of it ahead, while what has come is hashed
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def readinto(self, wanted: memoryview) -> int:
        """Fill memory with the next bytes; returns how many there were."""
        _, array = _buffer()
        target = np.frombuffer(wanted, dtype=np.uint8)
        done = 0
        while done < target.size:
            if self._begin == self._end:
                if not self.direct:
                    found = self._read(memoryview(wanted)[done:])
                    if not found:
                        break
                    done += found
                    continue
                self._begin, self._end = 0, self._read(memoryview(_buffer()[0]))
                if not self._end:
                    break
            taken = min(target.size - done, self._end - self._begin)
            np.copyto(target[done : done + taken], array[self._begin : self._begin + taken])
            self._begin += taken
            done += taken
        return done

    def _read(self, memory: memoryview) -> int:
        while True:
            try:
                return os.readv(self.fd, [memory]) if hasattr(os, "readv") else self._read_copy(memory)
            except OSError as error:
                self._through_cache(error)

    def _read_copy(self, memory: memoryview) -> int:
        """As `os.readv`, for systems without it."""
        data = os.read(self.fd, len(memory))
        memory[: len(data)] = data
        return len(data)
