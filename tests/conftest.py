"""What holds for every test: one thread, what is left out by default, and one line that says how much that was."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from guards import guards_fixture as guards_fixture

from gpu_replay.loops.compiling import Loop, modules
from gpu_replay.ops.launch import EMPTY_STRIDED

# workers, and processes that tests start: a pool of threads for each of them is slower than none
os.environ.setdefault("OMP_NUM_THREADS", "1")
# before Triton is imported: without a GPU it interprets the kernels that tests launch
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    # which reads the variable
    from interpreted import interpret_quickly

    interpret_quickly()

LEFT_OUT = {
    "gpu": "{} tests need a GPU and were deselected: no kernel runs on one here.",
    "slow": "{} slow tests were deselected: --full runs them.",
}
deselected = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked slow as well, and all sizes")


def pytest_configure(config: pytest.Config) -> None:
    # two busy workers on two cores; a result must not depend on it, but the run time does
    torch.set_num_threads(1)
    config.stash[deselected] = dict.fromkeys(LEFT_OUT, 0)


def pytest_sessionstart() -> None:
    # in a fresh clone each worker of xdist compiles its share of the loops, and finds those of others on the disk
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        loops = [loop for module in modules() for loop in vars(module).values() if isinstance(loop, Loop)]
        for loop in loops[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            loop.compiled()


def left_out(item: pytest.Item, full: bool) -> str | None:
    """The marker for which a test does not run, or None; a GPU takes no time for what is slow in the interpreter."""
    if item.get_closest_marker("gpu") is not None:
        # nor do kernels run on a GPU where Triton interprets them
        return None if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "gpu"
    return "slow" if not full and item.get_closest_marker("slow") is not None else None


# last, so that what -k and -m left out is not counted
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = [left_out(item, config.option.full) for item in items]
    for name in LEFT_OUT:
        config.stash[deselected][name] = reasons.count(name)
    if gone := [item for item, reason in zip(items, reasons, strict=True) if reason]:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]


def pytest_collection_finish() -> None:
    # what was imported and collected stays; no collection looks at it again
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # a worker of xdist tells the process that prints
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash[deselected]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    # every worker collects all tests, so their counts are the same
    node.config.stash[deselected] = getattr(node, "workeroutput", {}).get("deselected", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, count in config.stash[deselected].items():
        if count:
            terminalreporter.write_line(LEFT_OUT[name].format(count))


@pytest.fixture(autouse=True)
def default_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only its own code is tested, and beside it the host code, whatever the variable says."""
    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.delenv("GPU_REPLAY_BACKEND", raising=False)


@pytest.fixture(autouse=True)
def allocations_that_tests_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU batches are allocated by `torch.empty`, which sentinels, modes and planted errors reach."""
    monkeypatch.delitem(EMPTY_STRIDED, "cpu", raising=False)


@pytest.fixture(params=["small", pytest.param("full", marks=pytest.mark.slow)])
def full(request: pytest.FixtureRequest) -> bool:
    """Whether sizes are those of --full."""
    return bool(request.param == "full")


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT has its usual effect here and in processes that start here, also where a shell lets tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
