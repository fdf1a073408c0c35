"""Data-parallel training: what each rank gets of the settings, averaged gradients, and runs under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import Gone, command, forkserver, ranks_of  # noqa: E402
from training_runs import CPU, ROOT, Events, read_rows, summary  # noqa: E402

from gpu_replay import Field, TrajectoryReplayBuffer  # noqa: E402
from gpu_replay.cli import main  # noqa: E402
from gpu_replay.console.errors import UserError  # noqa: E402
from gpu_replay.console.interrupt import StopRequest  # noqa: E402
from gpu_replay.training.checkpoints import latest, newest, save_run  # noqa: E402
from gpu_replay.training.environments import EnvironmentSpec  # noqa: E402
from gpu_replay.training.evaluation import Evaluator  # noqa: E402
from gpu_replay.training.registry import identify  # noqa: E402
from gpu_replay.training.run import make_buffer, refill  # noqa: E402
from gpu_replay.training.settings import Settings  # noqa: E402
from gpu_replay.training.team import Team  # noqa: E402
from gpu_replay.training.train import Trainer, beta_schedule  # noqa: E402


class Alone(Team):
    """One of several ranks, in a process of its own; `others_failed` is what they say of their work."""

    others_failed = False

    def largest(self, number: int) -> int:
        return max(number, self.others_failed)


def rank_of(rank: int, size: int) -> Alone:
    team = Alone(Settings.for_family("vector"))
    team.rank, team.size = rank, size
    return team


def test_settings_are_those_of_all_ranks_together() -> None:
    team = rank_of(1, 4)
    share = team.share()
    assert (share.num_envs, share.batch_size, share.capacity, share.warmup) == (4, 32, 25_000, 250)
    assert (share.steps, share.epsilon_steps) == (team.settings.steps, team.settings.epsilon_steps)
    assert len({rank_of(rank, 4).seed(7) for rank in range(4)}) == 4
    with pytest.raises(UserError, match="--num-envs 16 cannot be divided among 3 ranks"):
        rank_of(0, 3).share()


def together(group: Any) -> tuple[list[list[float]], list[str], list[float]]:
    team = Team(Settings.for_family("vector"))
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 3))]
    for place, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, float(team.rank + 10 * place))
    team.average(weights)
    reasons = [team.agree(each if team.rank else "") for each in ("", "SIGTERM")]
    gradients = [weight.grad.flatten().tolist() for weight in weights if weight.grad is not None]
    return gradients, reasons, team.of_first(torch.full((2,), float(team.rank))).tolist()


@pytest.mark.slow
def test_gradients_are_averaged_and_ends_agreed_on() -> None:
    with ranks_of(2) as ranks:
        for found in ranks.run(2, together):
            assert found == ([[0.5] * 2, [10.5] * 3], ["", "SIGTERM"], [0.0, 0.0])


# checkpoints of several ranks


def test_a_checkpoint_counts_when_all_ranks_have_written_their_parts(tmp_path: Path) -> None:
    def save(step: int, rank: int, others_failed: bool = False) -> None:
        state, team = {"ranks": 2, "trainer": {"place": torch.tensor([step, rank])}}, rank_of(rank, 2)
        team.others_failed = others_failed
        save_run(tmp_path, step, state, None, team)

    def check(step: int) -> None:
        saved = latest(tmp_path)
        assert saved is not None
        assert [saved.trainer(rank)["place"].tolist() for rank in range(2)] == [[step, 0], [step, 1]]

    save(5, 1)
    assert latest(tmp_path) is None
    save(5, 0)
    check(5)
    # the disk of rank 1 is full, or rank 0 died before it could say that all is there
    with pytest.raises(OSError, match="another rank"):
        save(6, 0, others_failed=True)
    save(7, 1)
    check(5)
    save(7, 0)
    check(7)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007"]


def left(group: Any, folder: str) -> None:
    """Save a checkpoint, where rank 1 dies when rank 0 has completed it, before it could say so."""
    team = Team(Settings.for_family("vector"))
    answers, agreed = [], team.largest

    def largest(number: int) -> int:
        answers.append(number)
        if team.rank and len(answers) == 2:
            while newest(Path(folder)) is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return agreed(number)

    team.largest = largest  # type: ignore[method-assign]
    save_run(Path(folder), 5, {"ranks": 2, "trainer": {"place": torch.tensor(team.rank)}}, None, team)


def test_a_rank_that_dies_while_all_leave_a_save_does_not_cost_the_first_checkpoint(tmp_path: Path) -> None:
    with ranks_of(2) as ranks:
        first, second = ranks.tried(2, left, str(tmp_path))
    assert (first.kind, second) == ("RuntimeError", Gone(-signal.SIGKILL))
    saved = latest(tmp_path)
    assert saved is not None
    assert [int(saved.trainer(rank)["place"]) for rank in range(2)] == [0, 1]


def weights_learned_from(group: Any) -> list[tuple[list[float], list[float], float, int, int]]:
    """Of each batch that this rank learns from: weights, probabilities, beta, rows that can be drawn and their mass."""
    catch = identify("catch")
    team = Team(catch.settings(CPU, bfloat16=False, num_envs=16, hidden=(8,), warmup=64, steps=320, eval_episodes=2))
    share, beta = team.share(), beta_schedule(team.settings)
    games, judged = (catch.make(count, share, CPU) for count in (share.num_envs, 2))
    buffer = make_buffer(games.spec, share, beta, CPU, team.seed(0), share.num_envs)
    evaluator = Evaluator(judged, share, device=CPU, seed=0, stop=StopRequest())
    trainer = Trainer(games, evaluator, buffer, team, seed=0)
    found, learn = [], trainer._learn_from

    def noted(batch: Any) -> None:
        rows, total = int((buffer.masses() > 0).sum()), buffer.total_mass()
        found.append((batch.weight.tolist(), batch.probability.tolist(), beta(len(found)), rows, total))
        learn(batch)

    trainer._learn_from = noted  # type: ignore[method-assign]
    trainer.run(None if team.rank else Events(), StopRequest())
    return found


def test_the_ranks_learn_with_weights_over_the_steps_of_all() -> None:
    with ranks_of(2) as ranks:
        both = list(zip(*ranks.run(2, weights_learned_from), strict=True))
    assert len(both) > 5
    for drawn in both:
        rows, total = sum(each[3] for each in drawn), sum(each[4] for each in drawn)
        expected = [
            2 * own / total * (rows * 2 * chance * own / total) ** -beta
            for _, chances, beta, _, own in drawn
            for chance in chances
        ]
        told = [weight for weights, *_ in drawn for weight in weights]
        assert told == pytest.approx([each / max(expected) for each in expected], rel=1e-4)


SMALL = {"hidden": (8,), "capacity": 240, "num_envs": 8, "warmup": 64, "n_step": 2, "frame_stack": 2}


def test_replay_buffers_are_divided_among_another_number_of_ranks(tmp_path: Path) -> None:
    settings = Settings.for_family("catch", **SMALL)
    spec = EnvironmentSpec("numbers", Field((2,), torch.float32), 2, None, None, 2)
    beta, made = beta_schedule(settings), []
    for rank in range(2):
        buffer = make_buffer(spec, replace(settings, capacity=120), beta, torch.device("cpu"), rank, 4)
        for step in range(70):
            envs = torch.arange(4) + 4 * rank
            obs = torch.stack((envs, torch.full_like(envs, step)), 1).float()
            ended = (envs + step) % 7 == 0
            buffer.add(obs=obs, action=envs % 2, reward=obs.sum(1), terminated=ended, truncated=torch.zeros(4).bool())
        buffer.update_priorities(buffer.keys(), buffer.keys() % 11 + 1.0)
        buffer.save(tmp_path / str(rank))
        made.append(buffer)
    parts = [tmp_path / str(rank) for rank in range(2)]
    for size in (1, 4):
        count = 8 // size
        for rank in range(size):
            buffer = make_buffer(spec, settings, beta, torch.device("cpu"), 0, count)
            refill(buffer, parts, rank)
            # the rings of both ranks hold 30 steps of their four environments
            assert len(buffer) == 30 * count
            rows = torch.cat([batch.obs for batch in buffer.batches(64)]).view(30, count, 2)
            assert rows[..., 0].unique(dim=0).tolist() == [list(range(rank * count, (rank + 1) * count))]
            assert torch.equal(rows[:, 0, 1], torch.arange(40.0, 70.0))
            masses = {(float(env), float(step)): mass for old in made for env, step, mass in marked(old)}
            found = [(masses[env, step], mass) for env, step, mass in marked(buffer)]
            # the oldest steps had no complete stack and begin an episode now; windows past the newest are not complete
            assert [mass for was, mass in found[count:]] == [was for was, mass in found[count:]]
            assert all(mass > 0 and was in (0, mass) for was, mass in found[:count])


def marked(buffer: TrajectoryReplayBuffer) -> list[tuple[float, float, int]]:
    """Environment, step and mass of all that is stored."""
    masses = buffer.masses()
    (batch,) = buffer.batches(1_000)
    slots = batch.key % buffer.capacity
    return [(float(obs[0]), float(obs[1]), int(masses[slot])) for obs, slot in zip(batch.obs, slots, strict=True)]


# runs


def torchrun(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A run on two ranks, in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["-m", "gpu_replay", "train", *more]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, **output)


@pytest.mark.slow
def test_torchrun_trains_one_run_on_two_ranks_and_any_number_goes_on(tmp_path: Path) -> None:
    folder, quick = tmp_path / "run", ["--output", "run", "--eval-episodes", "4"]
    process = torchrun(tmp_path, "CartPole-v1", "--device", "cpu", *quick, "--steps", "2000")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    before = summary(folder)
    # as many as of one process: two for each 16 steps after the warm-up, whose windows take some more
    assert 80 <= before["updates"] <= 126
    assert said.count("written to") == 1
    # alone: learning goes on at once with the steps of both ranks
    assert main(["train", "--resume", "--output", str(folder), "--steps", "4000"]) == 0
    after = summary(folder)
    assert (after["steps"], after["resumed"]) == (4000, 1)
    assert after["updates"] - before["updates"] == pytest.approx(2 * 2000 / 16, abs=2 * 12)
    assert read_rows(folder)[-1]["stored"] == 4000
    # and together again
    process = torchrun(tmp_path, "--resume", "--output", "run", "--steps", "6000")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert (summary(folder)["resumed"], read_rows(folder)[-1]["stored"]) == (2, 3000)


def test_a_run_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path: Path) -> None:
    """In a folder of its own choice; the rank is killed at the first checkpoint. The agent is that of torchrun."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    catch = ["train", "catch", "--device", "cpu", "--steps", "8000", "--eval-episodes", "4", "--log-every", "500"]
    config = LaunchConfig(1, 1, 2, run_id="one", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=3)
    config.start_method, config.monitor_interval = forkserver().get_start_method(), 0.1
    with ThreadPoolExecutor(1) as agent:
        run = agent.submit(elastic_launch(config, command), str(tmp_path), *catch, "--checkpoint-every", "0.2")
        seen: set[Path | None] = {None}
        while len(seen) < 2:
            assert not run.done(), run.result()
            seen |= {newest(folder) for folder in tmp_path.glob("runs/*/checkpoint")}
            time.sleep(0.02)
        killed = (tmp_path / "rank 1").read_text()
        os.kill(int(killed), signal.SIGKILL)
        assert run.result() == {0: None, 1: None}
    assert (tmp_path / "rank 1").read_text() != killed
    (folder,) = tmp_path.glob("runs/*")
    told, steps = summary(folder), [row["step"] for row in read_rows(folder)]
    assert steps == sorted(set(steps))
    assert (told["steps"], told["stopped_by"], told["resumed"] >= 1) == (8_000, "steps", True)
    # none of the updates is lost or made twice: the first 35 of 250 steps of all games fill the warm-up
    assert told["updates"] == 2 * (250 - 35)
