"""A finished run that several files look at, made once; and runs without pictures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def catch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of Catch, which tests leave as it is."""
    from training_runs import CATCH

    from gpu_replay.cli import main

    folder = tmp_path_factory.mktemp("runs") / "catch"
    assert main([*CATCH, "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test draw nothing: half a second each. Those that are shared are made before, with their pictures."""
    for name in ("plot", "plot_buffer"):
        monkeypatch.setattr(f"gpu_replay.training.records.Recorder.{name}", lambda *_: None)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the study are made by threads of this process, where no other one need load torch."""
    monkeypatch.setattr("gpu_replay.study.workers.ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
