"""Each example runs for a moment as its head says, and says what it reached."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from gpu_replay import Field, TrajectoryReplayBuffer

RUNS = {
    "async_actors": (["--updates", "1000"], r"1,000 updates, .* mean return"),
    "dqn_atari": (
        ["--total-timesteps", "1600", "--capacity", "2000", "--learning-starts", "1200", "--log-every", "800"],
        r"1,600 steps, 100 updates, .* loss 0\.\d+",
    ),
    "sac_continuous": (["--total-timesteps", "700", "--batch-size", "16"], r"mean return of 20 fresh episodes: -\d"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("ale_py")
    arguments, said = RUNS[name]
    command = [sys.executable, "-m", f"gpu_replay.examples.{name}", *arguments, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout), done.stdout


def test_actors_explore_however_many_there_are() -> None:
    pytest.importorskip("gymnasium")
    from gpu_replay.examples.async_actors import exploration

    assert exploration(0, 1) == 0.05
    for count in (2, 3, 8):
        shares = [exploration(number, count) for number in range(count)]
        assert (shares[0], shares[-1]) == (pytest.approx(0.4**8), pytest.approx(0.4))
        assert shares == sorted(shares)


def test_an_update_of_dqn_leaves_its_loss_on_the_device() -> None:
    pytest.importorskip("ale_py")
    from gpu_replay.examples.dqn_atari import SIDE, STACK, Network, update

    fields = {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(40, 2, fields, stack=STACK, n_step=3, device="cpu")
    flags = torch.zeros(2, dtype=torch.bool)
    for _ in range(10):
        frame, action = torch.randint(256, (2, SIDE, SIDE), dtype=torch.uint8), torch.randint(3, (2,))
        buffer.add(obs=frame, action=action, reward=torch.ones(2), terminated=flags, truncated=flags)
    online, target = Network(3), Network(3)
    loss = update(online, target, torch.optim.Adam(online.parameters()), buffer, 4)
    assert isinstance(loss, torch.Tensor)
    assert (loss.shape, loss.requires_grad, bool(loss > 0)) == ((), False, True)
