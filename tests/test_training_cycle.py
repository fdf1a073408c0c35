"""A step of games on the device in one call: it is the step of the plain loop, and works in memory that stays."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from host_games import sums_trainer
from torch import Tensor
from training_runs import CPU, ROOT, make_trainer

from gpu_replay.graphs.cuda_graph import CaptureError
from gpu_replay.graphs.learning_step import LearningStep
from gpu_replay.training.checkpoints import flatten
from gpu_replay.training.cycle import divided
from gpu_replay.training.trainer import Trainer

# every second step of Catch renews the target network between its two draws, and does that in the plain loop
SMALL = {"capacity": 400, "batch_size": 8, "eval_episodes": 2, "learning_rate_end": 1e-5, "epsilon_steps": 90}
GAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("catch", {**SMALL, "num_envs": 6, "warmup": 20, "target_every": 3, "persistence": 0.5, "clip_reward": True}),
    (
        "device-pong",
        {**SMALL, "num_envs": 5, "warmup": 16, "updates": 2, "shared_draw": True, "frame_size": 36, "hidden": (8,)}
        | {"target_every": 5, "ema_updates": 5, "whiten": True},
    ),
)


def advance(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer._advance()


def played(name: str, steps: int, **options: Any) -> Trainer:
    """A trainer after so many steps; games of Pong are about to end."""
    trainer = make_trainer(name, **options)
    if name == "device-pong":
        games = trainer.environment.state()
        assert games is not None
        # rows of the scores
        games["games"][8:10] = 20
    advance(trainer, steps)
    return trainer


def all_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that the rest of a run depends on."""
    state = trainer.state()
    cycle = {"frame": trainer._cycle.frame, "obs": trainer._cycle.obs}
    parts = {name: state[name] for name in ("agent", "statistics", "actors")}
    buffer = {"buffer": trainer.buffer.state_dict()}
    found = flatten({**parts, **cycle, **buffer})[1]
    return {path: tensor for path, tensor in found.items() if isinstance(tensor, Tensor)}


@pytest.mark.parametrize(("name", "changes"), GAMES, ids=[name for name, _ in GAMES])
def test_a_whole_step_is_the_step_of_the_plain_loop(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = played(name, 60, graph=False, **changes)
    assert plain._cycle.whole_step is None
    made = []
    call = LearningStep.__call__
    monkeypatch.setattr(LearningStep, "__call__", lambda step: (made.append(step), call(step))[1])
    whole = played(name, 60, **changes)
    mine, theirs = all_tensors(whole), all_tensors(plain)
    assert mine.keys() == theirs.keys()
    assert [path for path in theirs if not torch.equal(mine[path], theirs[path])] == []
    assert whole.buffer.state_dict()["counters"] == plain.buffer.state_dict()["counters"]
    assert (whole.agent.updates, whole.step) == (plain.agent.updates, plain.step)
    # episodes ended
    assert int(theirs["statistics/count"]) > 0
    whole_steps = made.count(whole._cycle.whole_step)
    learning = made.count(whole._cycle.learning_step)
    draws = whole.agent.updates // whole.settings.updates_a_sample
    assert whole_steps > 20
    assert whole_steps * draws_of_a_step(whole) + learning == draws
    # the first step, and those that renew the target in between
    assert learning == (1 if name == "device-pong" else pytest.approx(draws / 3, abs=3))


def draws_of_a_step(trainer: Trainer) -> int:
    return trainer.settings.updates // trainer.settings.updates_a_sample


@pytest.mark.parametrize(("name", "changes"), GAMES, ids=[name for name, _ in GAMES])
def test_all_that_a_step_changes_stays_where_it_is(name: str, changes: dict[str, Any]) -> None:
    trainer = played(name, 12, **changes)
    assert trainer.agent.updates

    def places() -> dict[str, int]:
        # copies in host memory are made for each call
        found = {path: tensor for path, tensor in all_tensors(trainer).items() if "generator" not in path}
        return {path: tensor.data_ptr() for path, tensor in found.items() if not path.startswith("buffer")}

    before, games = places(), all_tensors(trainer)
    games = {path: games[path].clone() for path in before}
    advance(trainer, 9)
    assert places() == before
    after = all_tensors(trainer)
    changed = {path.split("/")[0] for path in before if not torch.equal(games[path], after[path])}
    assert {"agent", "statistics", "actors", "frame", "obs"} <= changed


def refuse_capture(refused: LearningStep | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of this step raise as where CUDA cannot capture it."""
    call = LearningStep.__call__

    def refuse(step: LearningStep) -> Any:
        if step is refused:
            raise CaptureError("learn cannot be captured") from RuntimeError("no graph holds this\nand more")
        return call(step)

    monkeypatch.setattr(LearningStep, "__call__", refuse)


def test_a_step_that_cannot_be_captured_goes_on_with_captured_updates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, changes = GAMES[0]
    plain, trainer = played(name, 30, **changes), played(name, 12, **changes)
    refuse_capture(trainer._cycle.whole_step, monkeypatch)
    advance(trainer, 18)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "a step with its updates cannot be captured as a CUDA graph and runs without: no graph holds this"
    assert trainer._cycle.whole_step is None
    assert trainer._cycle.learning_step is not None
    mine, theirs = all_tensors(trainer), all_tensors(plain)
    assert all(torch.equal(mine[path], theirs[path]) for path in theirs)


AHEAD = [(1, 1, 0.0), (2, 3, 0.0), (3, 3, 0.5)]


@pytest.mark.parametrize(("groups", "stack", "persistence"), AHEAD)
def test_games_on_the_host_run_ahead_and_are_those_of_the_plain_loop(
    groups: int, stack: int, persistence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"frame_stack": stack, "persistence": persistence}
    plain = sums_trainer(**changes)
    monkeypatch.setattr("gpu_replay.training.cycle.runs_ahead", lambda actors, device: True)
    ahead = sums_trainer(groups=groups, **changes)
    assert len(ahead._cycle.answers) == groups
    for steps in (3, 26, 5):
        advance(plain, steps)
        advance(ahead, steps)
        # nothing is left out, wherever one looks
        mine, theirs = all_tensors(ahead), all_tensors(plain)
        assert mine.keys() == theirs.keys()
        assert [path for path in theirs if not torch.equal(mine[path], theirs[path])] == []
    assert ahead.buffer.state_dict()["counters"] == plain.buffer.state_dict()["counters"]
    assert (ahead.agent.updates, ahead.buffer.added) == (plain.agent.updates, 34 * 6)
    assert int(theirs["statistics/count"]) > 25


def test_while_the_device_acts_for_one_group_the_others_play() -> None:
    trainer = sums_trainer(groups=2)
    events = trainer.environment.events  # type: ignore[attr-defined]
    advance(trainer, 3)
    again = [("recv", 0), ("send", 0), ("recv", 3), ("send", 3)]
    assert events == [("send", 0), ("send", 3), *again, *again]
    # the last step is under way, and received by whoever looks
    assert trainer.buffer.added == 2 * 6
    trainer.state()
    assert (trainer.buffer.added, events[-2:]) == (3 * 6, [("recv", 0), ("recv", 3)])
    advance(trainer, 1)
    assert events[-2:] == [("send", 0), ("send", 3)]


def test_an_answer_that_cannot_be_captured_is_made_of_calls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, trainer = sums_trainer(groups=2), sums_trainer(groups=2)
    advance(plain, 20)
    advance(trainer, 12)
    refuse_capture(trainer._cycle.answers[1], monkeypatch)
    advance(trainer, 8)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "acting and adding cannot be captured as a CUDA graph and runs without: no graph holds this"
    assert trainer._cycle.answers == []
    mine, theirs = all_tensors(trainer), all_tensors(plain)
    assert all(torch.equal(mine[path], theirs[path]) for path in theirs)


def test_the_share_of_a_captured_call_goes_to_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"whole": 0.008, "act": 0.001, "env": 0.002, "replay": 0.0005, "long": 0.02}
    monkeypatch.setattr("gpu_replay.training.cycle.mean_seconds", lambda call, device: times[call()])
    shares = {"env": 0.1, "act": 0.0, "replay": 0.1, "learn": 0.8}
    parts: Any = {part: lambda part=part: part for part in ("act", "env", "replay")}
    found = divided(shares, lambda: "whole", parts, CPU)  # type: ignore[arg-type]
    assert found == pytest.approx({"env": 0.3, "act": 0.1, "replay": 0.15, "learn": 0.45})
    nothing: Any = dict.fromkeys(shares, 0.0)
    assert divided(nothing, None, parts, CPU) == nothing  # type: ignore[arg-type]
    # parts alone may take longer than together
    found = divided(shares, lambda: "whole", {"act": lambda: "long", "env": lambda: "env"}, CPU)  # type: ignore[arg-type]
    assert found == pytest.approx({"env": 0.1, "act": 0.8, "replay": 0.1, "learn": 0.0})


def test_the_parts_alone_do_what_a_step_does_with_them() -> None:
    trainer = played("catch", 12, **GAMES[0][1])
    parts = trainer._cycle._parts()
    added, updates = trainer.buffer.added, trainer.agent.updates
    weights = {path: tensor.clone() for path, tensor in flatten(trainer.agent.state())[1].items()}
    drawn = trainer.buffer.stats()
    parts["replay"]()
    after = trainer.buffer.stats()
    assert (trainer.buffer.added, trainer.agent.updates) == (added + 6, updates)
    # two draws of 8
    assert after.mean_times_sampled * after.size == pytest.approx(drawn.mean_times_sampled * drawn.size + 16)
    row = trainer.environment.state()
    assert row is not None
    before = row["row"].clone()
    parts["env"]()
    assert torch.equal(trainer.environment.state()["row"], (before + 1) % 11)  # type: ignore[index]
    assert parts["act"]().shape == (6,)  # type: ignore[attr-defined]
    now = flatten(trainer.agent.state())[1]
    assert all(torch.equal(weights[path], now[path]) for path in weights if path.startswith("online"))


@pytest.mark.slow
def test_in_a_rehearsal_replayed_steps_are_those_of_the_plain_loop() -> None:
    places = [str(ROOT), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "gpu_replay.bench.rehearsal", "rehearsed_cycle"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = [f"games on the host in {groups} groups" for groups, _, _ in AHEAD]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [*(name for name, _ in GAMES), *hosts]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "changes"), GAMES, ids=[name for name, _ in GAMES])
def test_on_a_gpu_replayed_steps_play_the_games_of_the_plain_loop(name: str, changes: dict[str, Any]) -> None:
    cuda = torch.device("cuda")
    plain, whole = (played(name, 60, device=cuda, graph=graph, **changes) for graph in (False, True))
    assert whole._cycle.whole_step is not None
    assert whole._cycle.whole_step.captured
    mine, theirs = all_tensors(whole), all_tensors(plain)
    for path, tensor in theirs.items():
        if path.startswith("agent"):
            torch.testing.assert_close(mine[path], tensor, rtol=1e-3, atol=1e-4)
        elif path.startswith(("actors", "statistics", "frame", "obs")):
            assert torch.equal(mine[path], tensor), path


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "stack", "persistence"), AHEAD)
def test_on_a_gpu_games_on_the_host_are_those_of_the_plain_loop(groups: int, stack: int, persistence: float) -> None:
    changes = {"frame_stack": stack, "persistence": persistence}
    cuda = torch.device("cuda")
    plain, ahead = sums_trainer(cuda, graph=False, **changes), sums_trainer(cuda, groups, **changes)
    for _ in range(50):
        advance(plain, 1)
        plain._cycle.settle()
    advance(ahead, 50)
    assert all(answer.captured for answer in ahead._cycle.answers)
    assert len(ahead._cycle.answers) == groups
    mine, theirs = all_tensors(ahead), all_tensors(plain)
    for path, tensor in theirs.items():
        if path.startswith("agent"):
            torch.testing.assert_close(mine[path], tensor, rtol=1e-3, atol=1e-4)
        elif path.startswith(("actors", "statistics", "frame", "obs")):
            assert torch.equal(mine[path], tensor), path
