"""Graphs of a step: they are the step of the plain loop, and work in memory that stays."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_twins import amount
from interpreted import run_rehearsed
from torch import Tensor
from training_runs import CPU, make_trainer, sums_trainer

from gpu_replay.training.checkpoints import flatten
from gpu_replay.training.train import Trainer

SMALL = {"capacity": 400, "batch_size": 8, "eval_episodes": 3, "learning_rate_end": 1e-5, "epsilon_steps": 90}
SMALL |= {"eval_max_steps": 70, "eval_epsilon": 0.3}
GAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "catch",
        {**SMALL, "num_envs": 6, "warmup": 20, "target_every": 3, "persistence": 0.5, "clip_reward": True}
        | {"end_on_reward": True},
    ),
    (
        "device-pong",
        {**SMALL, "num_envs": 5, "warmup": 16, "updates": 2, "shared_draw": True, "frame_size": 36, "hidden": (8,)}
        | {"target_every": 5, "ema_updates": 5, "whiten": True},
    ),
    ("sums", {"frame_stack": 1, "persistence": 0.0}),
    ("sums", {"frame_stack": 3, "persistence": 0.5}),
)
IDS = ["catch", "device-pong", "host", "host-stacks"]


def played(name: str, steps: int, device: torch.device = CPU, **options: Any) -> Trainer:
    """A trainer after so many steps; games of Pong are about to end."""
    trainer = sums_trainer(device, **options) if name == "sums" else make_trainer(name, device, **options)
    if name == "device-pong":
        # rows of the scores
        trainer.environment.games[8:10] = 20  # type: ignore[operator, index]
    advance(trainer, steps)
    return trainer


def advance(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.advance()


def all_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that the rest of a run depends on."""
    parts = {**trainer.state_dict(), "buffer": trainer.buffer.state_dict()}
    return {path: tensor for path, tensor in flatten(parts)[1].items() if isinstance(tensor, Tensor)}


def check_alike(mine: Trainer, theirs: Trainer) -> None:
    found, expected = all_tensors(mine), all_tensors(theirs)
    assert found.keys() == expected.keys()
    assert [path for path in expected if not torch.equal(found[path], expected[path])] == []
    assert mine.buffer.state_dict()["counters"] == theirs.buffer.state_dict()["counters"]
    assert (mine.agent.updates, mine.step) == (theirs.agent.updates, theirs.step)


@pytest.mark.parametrize(("name", "changes"), GAMES, ids=IDS)
def test_captured_steps_are_those_of_the_plain_loop(name: str, changes: dict[str, Any]) -> None:
    plain, graphed = (played(name, 0, **changes) for _ in range(2))
    graphed.capture()
    for steps in (3, 40, 17):
        advance(plain, steps)
        advance(graphed, steps)
        check_alike(graphed, plain)
    assert plain.agent.updates > 40
    assert int(plain.statistics.count) >= 5


@pytest.mark.parametrize(("name", "place"), [("catch", 0), ("sums", 1)])
def test_what_cannot_be_captured_is_made_of_calls(name: str, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    changes = GAMES[0][1] if name == "catch" else {}
    plain, trainer = played(name, 30, **changes), played(name, 12, **changes)
    # of the graphs that are made, the one in this place
    refuse, capture = mock.Mock(side_effect=RuntimeError("no graph holds this")), trainer.buffer.capture
    turns = itertools.count()
    captured = mock.Mock(side_effect=lambda *of, **more: refuse if next(turns) == place else capture(*of, **more))
    trainer.buffer.capture = captured  # type: ignore[method-assign]
    trainer.capture()
    assert captured.call_count > place
    advance(trainer, 18)
    # in Catch the first graph is that of evaluations
    mine, theirs = (each.evaluator.evaluate(plain.agent.online, 0)[0] for each in (trainer, plain))
    assert mine == theirs
    # said once
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("cannot be captured as a CUDA graph and runs without: no graph holds this")
    check_alike(trainer, plain)


def test_an_error_of_the_step_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = played("catch", 12, **GAMES[0][1])
    trainer.capture()
    monkeypatch.setattr(trainer.agent, "update", lambda batch, target: torch.zeros(3) @ torch.zeros(4))
    with pytest.raises(RuntimeError, match="size"):
        trainer.advance()


@pytest.mark.slow
def test_in_a_rehearsal_replayed_steps_are_those_of_the_plain_loop() -> None:
    """There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted
    or put elsewhere meanwhile would be repeated as it was, and differ."""
    assert run_rehearsed("tests/programs/test_training_cycle.py", "on_a_gpu") == len(GAMES) + 2


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "changes"), GAMES, ids=IDS)
def test_on_a_gpu_replayed_steps_play_the_games_of_the_plain_loop(name: str, changes: dict[str, Any]) -> None:
    cuda = torch.device("cuda")
    # past a step that is timed
    plain, graphed = (played(name, amount(80, 28), device=cuda, graph=graph, **changes) for graph in (False, True))
    assert all(step.captured for step in graphed._graphs.values())  # type: ignore[attr-defined]
    assert int(plain.statistics.count), "no episode ended"
    if amount(0, 1):
        check_alike(graphed, plain)
        return
    mine, theirs = all_tensors(graphed), all_tensors(plain)
    for path, tensor in theirs.items():
        if path.startswith(("agent/online", "agent/target", "agent/averaged")):
            torch.testing.assert_close(mine[path], tensor, rtol=1e-3, atol=1e-4)
        elif path.startswith(("actors", "statistics", "actions")):
            assert torch.equal(mine[path], tensor), path


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "changes"), GAMES[:2], ids=IDS[:2])
def test_on_a_gpu_evaluations_as_a_graph_are_those_of_calls(name: str, changes: dict[str, Any]) -> None:
    """The networks differ from evaluation to evaluation; the games of Catch end long before the graph is asked."""
    both = [played(name, 10, torch.device("cuda"), graph=graph, **changes) for graph in (False, True)]
    for turn in range(4):
        theirs, mine = (each.evaluator.evaluate(both[0].agent.judged, turn)[0] for each in both)
        assert mine == theirs
        for each in both:
            advance(each, 5)
    assert both[1].evaluator._graphs["an evaluation"].captured


@pytest.mark.gpu
def test_the_share_of_a_captured_buffer_is_a_share() -> None:
    trainer = make_trainer(device=torch.device("cuda"), eval_episodes=4, warmup=320)
    advance(trainer, 200)
    shares = trainer.watch.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0
