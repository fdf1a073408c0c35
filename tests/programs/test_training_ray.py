"""Actors on Ray: real processes that are killed and stopped, on a local Ray and through a cluster's address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray, in the extra `ray`")
pytest.importorskip("zstandard")

from training_runs import CPU, read_rows, start, summary, wait_for  # noqa: E402

from gpu_replay.cli import main  # noqa: E402
from gpu_replay.console.errors import UserError  # noqa: E402
from gpu_replay.training.actors import Chunk, Fleet  # noqa: E402
from gpu_replay.training.agent import Agent  # noqa: E402
from gpu_replay.training.device_games import Catch  # noqa: E402
from gpu_replay.training.networks import QNetwork  # noqa: E402
from gpu_replay.training.registry import EnvironmentId, identify  # noqa: E402
from gpu_replay.training.settings import Settings  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # sockets that Ray leaves to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS = Settings.for_family("catch", num_envs=8)
AGENT = Agent(QNetwork(Catch.spec.stacked, 3, SETTINGS), SETTINGS, CPU, 1, seed=0)
# where other programs use all cores, Ray takes half a minute to start an actor
PATIENCE = 300.0
CARTPOLE = ["CartPole-v1", "--device", "cpu", "--num-envs", "16"]


@pytest.fixture
def fleets() -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as made:
        yield lambda count, game: made.enter_context(closing(Fleet(str(count), game, SETTINGS, 0)))


def collectors() -> list[int]:
    """Processes of actors on this machine, all of them started by these tests."""
    found = subprocess.run(["pgrep", "-f", "^ray::Collector"], capture_output=True, text=True).stdout
    return sorted(map(int, found.split()))


def receive(fleet: Fleet, count: int, seconds: float = PATIENCE) -> list[Chunk]:
    """At least so many chunks."""
    found: list[Chunk] = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        found += fleet.receive(AGENT, 0.5)
        assert time.monotonic() < deadline
    return found


def test_a_killed_actor_is_replaced_and_what_it_sent_is_kept(fleets: Any, capfd: pytest.CaptureFixture[str]) -> None:
    fleet = fleets(1, identify("catch"))
    receive(fleet, 1)
    (process,) = collectors()
    # both of its calls are done, and nobody has fetched what they gave
    ray.wait(list(fleet._pending), num_returns=2, timeout=30)
    os.kill(process, signal.SIGKILL)
    time.sleep(1)
    assert len(fleet.receive(AGENT, 0.5, wait=0.0)) == 2
    receive(fleet, 3)
    assert fleet.restarts == 1
    assert collectors() != [process]
    assert "actor 0 is gone" in capfd.readouterr().err


def test_a_stopped_actor_holds_up_nobody(fleets: Any) -> None:
    fleet = fleets(2, identify("catch"))
    while len(collectors()) < 2:
        receive(fleet, 1)
    first = collectors()[0]
    os.kill(first, signal.SIGSTOP)
    try:
        receive(fleet, 4)
        began = time.monotonic()
        receive(fleet, 20)
        assert time.monotonic() - began < 20
        assert fleet.restarts == 0
    finally:
        os.kill(first, signal.SIGCONT)


def test_an_actor_that_cannot_begin_ends_the_run_with_its_reason(fleets: Any) -> None:
    fleet = fleets(1, EnvironmentId("NoSuchGame-v0", "gymnasium"))
    with pytest.raises(UserError, match="actor 0 ended 3 times before its first chunk"):
        receive(fleet, 1)


def test_cartpole_is_learned_through_actors_that_are_killed_and_resumed(tmp_path: Path) -> None:
    process = start(tmp_path, *CARTPOLE, "--actors", "2", "--no-early-stop", "--steps", "60000", "--log-every", "1000")
    wait_for(process, lambda: len(read_rows(tmp_path)) >= 3, PATIENCE)
    os.kill(collectors()[0], signal.SIGKILL)
    wait_for(process, lambda: len(read_rows(tmp_path)) >= 20, PATIENCE)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "2 actors, 1 replaced" in out
    assert collectors() == []
    last = read_rows(tmp_path)[-1]
    assert last["actor_restarts"] == 1
    # the same number of updates for a step as with environments in the process
    assert last["updates"] == pytest.approx(2 * (last["step"] - 1_000) / 16, rel=0.15)
    process = start(tmp_path, "--resume")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    told = summary(tmp_path)
    assert told["eval_return_mean"] >= 475
    assert (told["actors"], told["resumed"], told["steps"] >= 60_000) == (2, 1, True)


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "catch", "--device", "cpu", "--actors", "ray://127.0.0.1:9", "--output", str(tmp_path)]
    assert main(arguments) == 2
    assert "--actors ray://127.0.0.1:9: Ray cannot be reached" in capsys.readouterr().err


def test_a_run_goes_on_with_the_nodes_of_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "ray_client_server_port": port})
    try:
        first, second = (cluster.add_node(num_cpus=1) for _ in range(2))
        flags = [*CARTPOLE, "--steps", "1e8", "--no-early-stop", "--log-every", "500", "--eval-every", "100000000"]
        process = start(tmp_path, *flags, "--actors", f"ray://127.0.0.1:{port}")
        try:
            wait_for(process, lambda: len(read_rows(tmp_path)) >= 3 and len(collectors()) == 2, PATIENCE)
            cluster.remove_node(second, allow_graceful=False)
            wait_for(process, lambda: read_rows(tmp_path)[-1]["actor_restarts"] >= 1, PATIENCE)
            (left,) = collectors()
            cluster.add_node(num_cpus=1)
            wait_for(process, lambda: len(collectors()) == 2, PATIENCE)
            # the new node works alone when the first one goes as well
            cluster.remove_node(first, allow_graceful=False)
            wait_for(process, lambda: left not in collectors(), PATIENCE)
            seen = len(read_rows(tmp_path))
            wait_for(process, lambda: len(read_rows(tmp_path)) >= seen + 5, PATIENCE)
            # one for each node that went, and more if Ray placed one there before it knew; it may take seconds to know
            wait_for(process, lambda: read_rows(tmp_path)[-1]["actor_restarts"] >= 2, PATIENCE)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 143, err
        finally:
            process.kill()
    finally:
        cluster.shutdown()
