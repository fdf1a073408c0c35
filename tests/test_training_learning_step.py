"""The learning step: captured as a graph, run as it is where it cannot be, and where its time goes."""

from __future__ import annotations

import pytest
import torch
from training_runs import CPU, advanced

from gpu_replay.graphs.cuda_graph import CaptureError
from gpu_replay.graphs.learning_step import LearningStep
from gpu_replay.training.stopwatch import SAMPLED, UNTIMED, Stopwatch, mean_seconds

CUDA = torch.device("cuda")


def test_a_step_that_cannot_be_captured_is_named_and_runs_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(step: LearningStep) -> None:
        raise CaptureError("learn cannot be captured") from RuntimeError("operation not permitted\nand more")

    monkeypatch.setattr(LearningStep, "__call__", refuse)
    found, eager = advanced(30), advanced(30, graph=False)
    lines = capsys.readouterr().err.splitlines()
    # Catch steps without a host; where that cannot be captured an update may
    assert [line.split(" cannot be captured")[0] for line in lines] == ["the learning step", "a step with its updates"]
    assert all(line.endswith("runs without: operation not permitted") for line in lines)
    assert found.agent.updates == eager.agent.updates > 0
    mine, theirs = (each.agent.online.state_dict() for each in (found, eager))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_on_a_gpu_one_step_in_so_many_is_timed_and_none_that_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    watch = Stopwatch(CUDA)
    monkeypatch.setattr(watch, "now", lambda: now[0])
    for step in range(3 * SAMPLED):
        watch.begin()
        now[0] += 1
        watch.lap("act")
        if step == 2 * SAMPLED - 1:
            watch.skip()
        now[0] += 2
        watch.lap("learn")
    assert watch.seconds == {"env": 0.0, "act": 3.0, "replay": 0.0, "learn": 4.0}


def test_a_call_is_timed_without_its_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    calls = []

    def call() -> None:
        calls.append(1)
        now[0] += 100.0 if len(calls) <= UNTIMED else 0.25

    assert mean_seconds(call, CPU, times=8) == 0.25


def test_the_buffers_part_of_a_captured_update_is_taken_from_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = advanced(0)
    # as where environments need the host
    found._cycle.whole_step = None
    found.watch.seconds = {"env": 1.0, "act": 1.0, "replay": 0.5, "learn": 7.5}
    assert found.shares() == {"env": 0.1, "act": 0.1, "replay": 0.05, "learn": 0.75}
    times = iter([0.004, 0.0004])
    monkeypatch.setattr("gpu_replay.training.cycle.mean_seconds", lambda call, device: next(times))
    monkeypatch.setattr(LearningStep, "captured", True)
    assert found.shares() == pytest.approx({"env": 0.1, "act": 0.1, "replay": 0.125, "learn": 0.675})


def test_the_buffers_part_alone_is_what_an_update_does_with_it() -> None:
    found = advanced(30)
    before, weights = found.buffer.stats(), found.agent.online.state_dict()
    kept = {name: weight.clone() for name, weight in weights.items()}
    found.buffer.capture(found._cycle.draw_size, found._cycle._update_only)()
    after = found.buffer.stats()
    assert after.mean_times_sampled * after.size == pytest.approx(before.mean_times_sampled * before.size + 64)
    assert after.mean_priority != before.mean_priority
    assert all(torch.equal(kept[name], weights[name]) for name in kept)


# on a GPU


@pytest.mark.gpu
def test_a_captured_run_is_an_eager_run() -> None:
    changes = {"device": CUDA, "learning_rate_end": 1e-4, "target_every": 7}
    graph, eager = (advanced(80, graph=graph, **changes) for graph in (True, False))
    # of two updates a step each second copy to the target falls between them
    assert graph._cycle.learning_step.captured
    assert graph._cycle.whole_step.captured
    assert eager._cycle.learning_step is None
    assert graph.agent.updates == eager.agent.updates == 2 * (80 - 13)
    assert graph.buffer.state_dict()["counters"] == eager.buffer.state_dict()["counters"]
    for mine, theirs in ((graph.agent.online, eager.agent.online), (graph.agent.target, eager.agent.target)):
        for name, weight in mine.state_dict().items():
            torch.testing.assert_close(weight, theirs.state_dict()[name], rtol=1e-4, atol=1e-5)
    # what is read now and then goes on as well
    assert graph.agent.means() == pytest.approx(eager.agent.means(), rel=1e-2)


@pytest.mark.gpu
def test_a_captured_step_follows_the_learning_rate() -> None:
    found = advanced(30, device=CUDA)
    step = found._cycle.whole_step
    assert step.captured
    found.agent.set_learning_rate(0.0)
    before = {name: weight.clone() for name, weight in found.agent.online.state_dict().items()}
    for _ in range(5):
        step()
    assert all(torch.equal(before[name], weight) for name, weight in found.agent.online.state_dict().items())
    found.agent.set_learning_rate(1e-3)
    step()
    assert not all(torch.equal(before[name], weight) for name, weight in found.agent.online.state_dict().items())


@pytest.mark.gpu
def test_the_share_of_a_captured_buffer_is_a_share() -> None:
    found = advanced(3 * SAMPLED, device=CUDA)
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < shares["replay"] < 1
    assert 0 < shares["learn"] < 1
