"""Examples: each runs for a moment as its head says; a door and its key; killed actors; what R2D2 adds and reaches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from devices import host_only

from gpu_replay.examples import fast_td3
from gpu_replay.examples import r2d2_memory as example

RUNS = {
    "async_actors": ("--updates 1000", r"1,000 updates, .* mean return"),
    "dqn_atari": (
        "--total-timesteps 1600 --capacity 2000 --learning-starts 1200 --log-every 800",
        r"1,600 steps, 100 updates, .* loss 0\.\d",
    ),
    "fast_td3": ("--num-envs 64 --batch-size 16 --steps 50", r"the buffer takes .*\nmean return of 256 episodes: -\d"),
    "sac_continuous": ("--total-timesteps 700 --batch-size 16", r"mean return of 20 fresh episodes: -\d"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("ale_py")
    arguments, said = RUNS[name]
    command = [sys.executable, "-m", f"gpu_replay.examples.{name}", *arguments.split(), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout), done.stdout


def test_a_door_opens_for_who_has_the_key_and_the_goal_alone_is_rewarded() -> None:
    pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    from gpu_replay.examples.key_door import KeyDoor

    environment = KeyDoor()
    check_env(environment, skip_render_check=True)
    down, up, right, left = range(4)

    def walk(*moves: int) -> tuple[int, float, bool]:
        obs, _ = environment.reset()
        reward, terminated = 0.0, False
        for move in moves:
            assert (reward, terminated) == (0, False)
            obs, reward, terminated, _, _ = environment.step(np.int64(move))
        return int(obs.argmax()), reward, terminated

    # to the place before the door without the key, and against it
    assert walk(right, *[down] * 7, right, right, right, right) == (7 * 8 + 3, 0, False)
    assert walk(*[down] * 7, *[right] * 7, *[up] * 6) == (64 + 8 + 7, 0, False)
    assert walk(*[down] * 8, left, *[right] * 7, *[up] * 7) == (64 + 7, 1, True)


@pytest.mark.slow
def test_an_actor_that_is_killed_is_replaced_and_one_that_cannot_start_is_an_error() -> None:
    pytest.importorskip("gymnasium")
    from gpu_replay.examples.async_actors import CHUNK, ENVS, Actors, made_network

    network = made_network("CartPole-v1").share_memory()
    with Actors("CartPole-v1", network, 2) as actors:
        heard, killed, deadline = [], None, time.monotonic() + 120
        while time.monotonic() < deadline and not (killed and actors.restarts and heard[-1:] == [0]):
            for number, chunk, _ in actors.receive(timeout=1.0):
                assert {name: len(value) for name, value in chunk.items()} == dict.fromkeys(chunk, CHUNK * ENVS)
                heard.append(number)
            if killed is None and set(heard) == {0, 1}:
                # its pipe is full by then, so that it dies while it writes
                time.sleep(1.0)
                killed = actors.processes[0]
                os.kill(killed.pid or 0, signal.SIGKILL)
        assert killed is not None
        assert (actors.restarts, killed.exitcode, len(actors.processes)) == (1, -signal.SIGKILL, 2)
        processes = actors.processes
    assert not any(process.is_alive() for process in processes)
    actors = Actors("CartPole-v1", network, 1)
    actors.env_id = "NoSuchEnvironment-v0"
    with actors, pytest.raises(RuntimeError, match="actor 0 ended with exit code 1 at once"):
        actors.receive(timeout=120.0)


@pytest.mark.slow
def test_fast_td3_balances_pendulums() -> None:
    """With its own settings, as the page says; random actions get -1,240."""
    torch.manual_seed(0)
    loop = fast_td3.Loop(torch.device("cpu"), 1024, 512, 8)
    for step in range(600):
        loop.step(learn=step >= 10)
    assert fast_td3.mean_return(loop.learner, loop.device) > -200


def test_pendulums_are_cut_at_different_times_and_give_their_final_observations() -> None:
    torch.manual_seed(0)
    env, ended = fast_td3.Pendulums(64, torch.device("cpu")), torch.zeros(64, dtype=torch.int64)
    for _ in range(fast_td3.EPISODE):
        before = env.observe()["policy"]
        obs, reward, terminated, truncated, extras = env.step(torch.zeros(64, 1))
        # each final observation follows the one before, and the next one begins anew
        moved = (extras["final_obs"]["policy"][:, :2] - before[:, :2]).norm(dim=1)
        assert moved.max() < 0.45
        assert torch.equal(extras["final_obs"]["policy"][~truncated], obs["policy"][~truncated])
        assert not torch.isclose(extras["final_obs"]["policy"][truncated], obs["policy"][truncated]).all(1).any()
        assert not terminated.any()
        assert reward.max() <= 0
        ended += truncated
    assert ended.tolist() == [1] * 64


@host_only
def test_r2d2_runs() -> None:
    assert -1 <= example.train(80) <= 1


@host_only
@pytest.mark.slow
def test_r2d2_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--device", "cpu"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.rpartition(" ")[2]) >= 0.95
