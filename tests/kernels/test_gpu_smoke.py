"""The first minute on a GPU: every operation once, in small, beside the host code. Records name what fails here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_twins import KINDS, SAMPLERS, OnGpu

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer

pytestmark = pytest.mark.gpu

CASES = [(kind, name) for kind in KINDS for name in ("everything", "uniform", "combined-rank")]


def filled(kind: str, name: str) -> OnGpu:
    both = OnGpu(100, 5, SAMPLERS[name], kind)
    both.add(30)
    return both


@pytest.mark.parametrize("kind, name", CASES)
def test_every_call_once(kind: str, name: str) -> None:
    both = filled(kind, name)
    both.update(both.draw(16).key, torch.arange(16.0) ** 2)
    both.draw(16)
    both.check()
    assert both.gpu.stats().size == both.host.stats().size
    for buffer in both.both:
        buffer.clear()
        assert len(buffer) == 0


def test_rows_of_the_host_in_pinned_memory_and_without() -> None:
    both = filled("transitions", "uniform")
    given = both.given(150, "cpu", own=False)
    both.host.add(**given)
    both.gpu.add(**given)
    both.host.add(**given)
    both.gpu.add(**{name: value.pin_memory() for name, value in given.items()})
    both.check()


@pytest.mark.parametrize("kind, kept", [("transitions", ReplayBuffer), ("same_step", TrajectoryReplayBuffer)])
def test_a_checkpoint_goes_from_the_gpu_to_the_host(kind: str, kept: type, tmp_path: Path) -> None:
    both = filled(kind, "everything")
    both.gpu.save(tmp_path / "saved")
    both.host = kept.load(tmp_path / "saved", device="cpu")
    both.check()
