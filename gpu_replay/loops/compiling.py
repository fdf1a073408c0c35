"""Compiles loops with Numba where it is installed; elsewhere, and under NUMBA_DISABLE_JIT=1, they run as Python.

A loop is a function over arrays and numbers. Those that buffers call are decorated with `loop(signature)`; functions
that only loops call, with `inner`. Machine code is kept on disk under a name that contains a digest of all loops as
they were loaded, so that machine code of other sources is never loaded, whatever the times of the files say.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Numba's own, which tells it not to compile
VARIABLE = "NUMBA_DISABLE_JIT"
# all files with loops: the digest covers all of them, even those that a process does not use
_FILES = ("constants", "goals", "masses", "random", "ranks", "ring", "steps", "windows")
_NOTE = "gpu_replay compiles its loops for this machine, once, in about half a minute; later runs find them compiled."

_inner: set[Callable[..., Any]] = set()
# that callers have waited for compiled code so far
waited_seconds = 0.0
_notified = False
# how a program tells its users that loops are compiled; without it only a terminal is told
tell: Callable[[str], object] | None = None


@cache
def compiler() -> Any:
    """Numba; None where it is not installed, not made for the installed NumPy, or told not to compile."""
    try:
        numba: Any = import_module("numba")
    except ImportError:
        return None
    return None if numba.config.DISABLE_JIT else numba


def lacks_compiler() -> bool:
    """Whether loops run as Python because Numba is missing, and not because it is told not to compile."""
    told = os.environ.get(VARIABLE, "") not in ("", "0")
    return compiler() is None and sys.modules.get("numba") is None and not told


def inner(function: Function) -> Function:
    """A function that only loops call: it becomes a part of theirs.

    Numba counts the references to each array that is passed, which takes a nanosecond or two: functions called for
    every row of a batch take only numbers.
    """
    _inner.add(function)
    return function


def loop(*signatures: str, **options: bool) -> Callable[[Callable[..., Any]], Loop]:
    """A loop that buffers call, through `compiled()`.

    signatures: types of the arguments, as Numba writes them. options: `nogil=True` for loops of milliseconds, during
    which other threads run.
    """
    return lambda function: Loop(function, signatures, options)


class Loop:
    """A function over arrays that is compiled when it is first asked for."""

    def __init__(self, function: Callable[..., Any], signatures: tuple[str, ...], options: dict[str, bool]) -> None:
        self.function = function
        self._signatures, self._options = signatures, options
        self._code: Callable[..., Any] | None = None

    def compiled(self) -> Callable[..., Any]:
        """Return the machine code, or the function itself when nothing is compiled.

        This thread compiles; Numba lets others wait, which then find the code on the disk. A signal handler that
        raises, such as that of Ctrl-C, ends it at once: nothing of the loop is kept, and the next call compiles it
        again. An interrupt that falls into the import of Numba, or into a step in which Numba holds a lock of its own,
        can leave Numba itself unusable for the rest of the process: then start the program again.
        """
        global waited_seconds
        if self._code is None:
            begin = time.perf_counter()
            self._compile()
            waited_seconds += time.perf_counter() - begin
        return self._code or self.function

    def _compile(self) -> None:
        if compiler() is None:
            self._code = self.function
            return
        made = None
        try:
            made = self._dispatcher(cache=True)
            if not any(_kept(made, f"*{made.py_func.__qualname__}-*.nbi")):
                _notify()
            self._code = self._machine_code(made)
        except Exception:
            # any error of a damaged file, a full disk or a read-only folder: an error of the loop
            # itself is raised again without a cache
            if made is not None:
                _remove(made, f"*{made.py_func.__qualname__}-*")
            self._code = self._machine_code(self._dispatcher(cache=False))
        else:
            if made.stats.cache_misses:
                _remove(made, f"*.{self.function.__name__}_*-*", made.py_func.__qualname__)

    def _dispatcher(self, *, cache: bool) -> Any:
        function = _linked(self.function)
        function.__qualname__ = f"{self.function.__name__}_{_digest()}"
        return compiler().njit(error_model="numpy", cache=cache, **self._options)(function)

    def _machine_code(self, made: Any) -> Callable[..., Any]:
        for signature in self._signatures:
            made.compile(signature)
        made.disable_compile()
        return made


def _remove(made: Any, pattern: str, name: str = " ") -> None:
    """Remove the cached files of a loop that match this pattern, except those that contain `NAME-`."""
    with suppress(OSError):
        for file in _kept(made, pattern):
            if f"{name}-" not in file.name:
                file.unlink()


def _kept(made: Any, pattern: str) -> Iterator[Path]:
    """The cached files of loops that match this pattern."""
    return Path(made.stats.cache_path).glob(pattern)


def _notify() -> None:
    """Tell users, once, why nothing happens for a while."""
    global _notified
    show = tell or (partial(print, file=sys.stderr) if sys.stderr.isatty() else None)
    if show is not None and not _notified:
        _notified = True
        show(_NOTE)


def _linked(function: Any) -> FunctionType:
    """A copy of a function that calls compiled copies of inner functions."""
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(names.get(name), FunctionType) and names[name] in _inner:
            names[name] = _part(names[name])
    made = FunctionType(function.__code__, names, function.__name__)
    made.__module__ = function.__module__
    return made


@cache
def _part(function: FunctionType) -> Any:
    return compiler().njit(error_model="numpy", inline="always")(_linked(function))


def modules() -> list[ModuleType]:
    """All files with loops."""
    return [import_module(f"gpu_replay.loops.{name}") for name in _FILES]


@cache
def _digest() -> str:
    """A digest of the code of all loops as it was loaded, and of the constants that they take from their modules."""
    parts: list[str] = []
    for module in modules():
        for name, value in sorted(vars(module).items()):
            value = value.function if isinstance(value, Loop) else value
            if isinstance(value, FunctionType):
                parts.append(f"{name} {_described(value.__code__)}")
            elif isinstance(value, (bool, int, float, str, tuple)) and not name.startswith("__"):
                parts.append(f"{name} {value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _described(code: CodeType) -> str:
    constants = [_described(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
