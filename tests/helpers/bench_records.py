"""What the tests of the bench folder share: records made by hand, and trials that take no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_replay.bench import main, measure
from gpu_replay.bench.records import Environment, Record

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

ENVIRONMENT = Environment(
    device="cpu",
    cpu="Test CPU",
    cores=2,
    threads=1,
    load=0.5,
    versions={"python": "3.11.7", "torch": "2.13.0", "triton": None},
    commit="0123456789ab",
    date="2026-01-02T03:04:05+00:00",
)
GPU = replace(ENVIRONMENT, device="NVIDIA Test 9000")


def record(
    case: str = "cycle/N=1M/B=256", median: float = 100.0, implementation: str = "gpu_replay", **changes: Any
) -> Record:
    """A record of a case by its name, "draw/N=10k/B=32"; quantiles are half, once and twice the median."""
    operation, *sizes = case.split("/")
    given = dict(size.split("=") for size in sizes)
    capacity = given.get("N", "0").replace("k", "000").replace("M", "000000")
    values: dict[str, Any] = {"suite": "cpu", "case": case, "operation": operation, "implementation": implementation}
    values |= {"capacity": int(capacity), "batch": int(given.get("B", "0")), "added": 8}
    values |= {"fields": {"obs": ["float32", [4]]}, "unit": "us", "repetitions": 100, "warmup": 3}
    values |= {"quantiles": {"p10": median / 2, "p50": median, "p90": median * 2}, "quick": False}
    values |= {"bytes": 37_000, "copy_bandwidth": 10e9, "copy_share": 0.25, "environment": ENVIRONMENT}
    return Record(**{**values, **changes})


def quicker(monkeypatch: Patch) -> None:
    """Trials of five calls each, without a collection of the whole heap before each measurement."""
    monkeypatch.setattr(main, "QUICK", measure.Plan(warmup=0, seconds=0, fewest=5, most=5))
    monkeypatch.setattr(measure.gc, "collect", int)
