"""What holds for every test: one thread, sizes that fit a small machine, and a count of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

NO_GPU = "needs a CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run tests marked slow with their full sizes")


def pytest_configure(config: pytest.Config) -> None:
    # two busy workers on two cores; a result must not depend on it, but the run time does
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the slow tests run with their full sizes."""
    return bool(request.config.getoption("--full"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    without = sum(1 for report in skipped if isinstance(report.longrepr, tuple) and NO_GPU in report.longrepr[2])
    if without:
        terminalreporter.write_line(f"{without} tests marked gpu were skipped: there is no CUDA device here.")
