"""Each example runs for a moment as its head says, and says what it reached."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RUNS = {
    "async_actors": (["--updates", "1000"], r"1,000 updates, .* mean return"),
    "dqn_atari": (
        ["--total-timesteps", "1600", "--capacity", "2000", "--learning-starts", "1200", "--log-every", "800"],
        r"1,600 steps, 100 updates, .* loss 0\.\d+",
    ),
    "sac_continuous": (["--total-timesteps", "700", "--batch-size", "16"], r"mean return of 20 fresh episodes: -\d"),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("ale_py")
    arguments, said = RUNS[name]
    command = [sys.executable, "-m", f"gpu_replay.examples.{name}", *arguments, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout), done.stdout
