"""Actors in real processes, one of them killed with -9 while it sends."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("gymnasium")

from gpu_replay.examples.async_actors import CHUNK, ENVS, Actors, made_network

pytestmark = pytest.mark.slow


def test_an_actor_that_is_killed_is_replaced_and_what_it_sent_is_kept() -> None:
    network = made_network("CartPole-v1").share_memory()
    with Actors("CartPole-v1", network, 2) as actors:
        heard: list[int] = []
        killed = None
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (killed and actors.restarts and heard[-1:] == [0]):
            for number, chunk, _ in actors.receive(timeout=1.0):
                assert {name: len(value) for name, value in chunk.items()} == dict.fromkeys(chunk, CHUNK * ENVS)
                heard.append(number)
            if killed is None and set(heard) == {0, 1}:
                # its pipe is full by then, so that it dies while it writes
                time.sleep(1.0)
                killed = actors.processes[0]
                os.kill(killed.pid or 0, signal.SIGKILL)
        assert actors.restarts == 1
        assert killed is not None
        assert killed.exitcode == -signal.SIGKILL
        assert len(actors.processes) == 2
        processes = actors.processes
    assert not any(process.is_alive() for process in processes)


def test_an_actor_that_cannot_start_is_an_error() -> None:
    actors = Actors("CartPole-v1", made_network("CartPole-v1"), 1)
    actors.env_id = "NoSuchEnvironment-v0"
    with actors, pytest.raises(RuntimeError, match="actor 0 ended with exit code 1 at once"):
        actors.receive(timeout=120.0)
