"""Python's collector is off: what is dropped goes at once, or stays because it is part of a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(name="collector_off")
def collector_off_fixture() -> Iterator[None]:
    """No cycles are looked for during the test."""
    gc.disable()
    yield
    gc.enable()
