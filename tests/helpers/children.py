"""Children of this process, which has all libraries loaded: what they do, what they return, and how they end."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def forked(work: Callable[[], object]) -> int:
    """Start a child that does this and ends, with 1 if it raised; returns its process id."""
    with warnings.catch_warnings():
        # of forks beside threads, which no child here needs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a child; its exit code, or the negative number of the signal that it died of."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_child(work: Callable[[], Any]) -> Any:
    """What this returns, in JSON, where it is called in a child."""
    reading, writing = os.pipe()
    child = forked(lambda: os.write(writing, json.dumps(work()).encode()))
    os.close(writing)
    with os.fdopen(reading) as said:
        found = said.read()
    assert ended(child) == 0
    return json.loads(found)


def memory_of(entry: str) -> int:
    """Bytes of this process, as Linux counts them: `VmRSS`, `VmHWM`, `VmPeak` or `VmData`."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(entry))
