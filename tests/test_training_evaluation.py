"""Evaluations against a scripted environment: what counts, which network is kept, when a run may end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.evaluation import CONFIRMATIONS, Evaluation, Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.recorder import COLUMNS, Recorder
from gpu_replay.training.run_dir import PROGRESS, RunDir
from gpu_replay.training.settings import Settings

CPU = torch.device("cpu")


class Scripted(Environment):
    """Environment `e` pays `payments[visit][e]` in each of its `e + 1` steps, then pays 100 a step."""

    def __init__(self, payments: list[list[float]], threshold: float | None = None) -> None:
        self.num_envs = len(payments[0])
        self.spec = EnvironmentSpec("scripted", Field((1,), torch.float32), 2, threshold, None)
        self.seeds: list[int] = []
        self.steps = 0
        self._payments = payments
        self._lengths = torch.arange(1, self.num_envs + 1)

    def reset(self, seed: int) -> Tensor:
        self.seeds.append(seed)
        self._pay = torch.tensor(self._payments[len(self.seeds) - 1])
        self._t = 0
        return torch.zeros(self.num_envs, 1)

    def send(self, actions: Tensor) -> None:
        self.actions = actions

    def recv(self) -> Step:
        self._t += 1
        self.steps += 1
        reward = torch.where(self._t <= self._lengths, self._pay, 100.0)
        obs = torch.zeros(self.num_envs, 1)
        # the first environment is truncated, the others terminate
        ended = self._t == self._lengths
        first = torch.arange(self.num_envs) == 0
        return Step(obs=obs, reward=reward, terminated=ended & ~first, truncated=ended & first, final_obs=obs)

    def close(self) -> None:
        pass


def evaluator(environment: Scripted, **changes: float) -> Evaluator:
    settings = Settings.for_family("vector", eval_episodes=environment.num_envs, **changes)
    return Evaluator(environment, settings, device=CPU, seed=0, stop=StopRequest())


def network(bias: float = 0.0) -> QNetwork:
    made = QNetwork(Field((1,), torch.float32), 2, Settings(hidden=(2,)))
    with torch.no_grad():
        made.head[-1].bias.fill_(bias)  # type: ignore[operator, union-attr]
    return made


def test_each_environment_counts_with_its_first_episode_alone() -> None:
    environment = Scripted([[1.0, 2.0, 3.0]], threshold=5.0)
    result, solved = evaluator(environment).evaluate(network(), 10)
    # returns 1, 4 and 9
    assert result.return_mean == pytest.approx(14 / 3)
    assert result.return_std == pytest.approx(((11**2 + 2**2 + 13**2) / 27) ** 0.5)
    assert result.length_mean == 2
    assert result.episodes == 3
    # below the threshold nothing needs to be confirmed
    assert not solved
    assert (environment.steps, len(environment.seeds)) == (3, 1)


def test_episodes_are_cut_off_with_what_they_have() -> None:
    result, _ = evaluator(Scripted([[1.0, 2.0, 3.0]]), eval_max_steps=2).evaluate(network(), 10)
    assert result.return_mean == pytest.approx((1 + 4 + 6) / 3)
    assert result.length_mean == pytest.approx(5 / 3)


def test_the_best_network_is_kept_as_it_was() -> None:
    judge = evaluator(Scripted([[1.0], [5.0], [3.0], [2.0]]))
    net = network()
    for step, bias in ((10, 0.1), (20, 0.2), (30, 0.3)):
        with torch.no_grad():
            net.head[-1].bias.fill_(bias)  # type: ignore[operator, union-attr]
        judge.evaluate(net, step)
    assert (judge.best.step, judge.best.evaluation.return_mean) == (20, 5.0)
    assert judge.best.network.head[-1].bias.tolist() == pytest.approx([0.2] * 3)  # type: ignore[union-attr, operator]
    final = judge.final()
    assert final.return_mean == 2.0


@pytest.mark.parametrize(
    "confirmations, solved",
    [
        ([[10.0] * 8] * 3, True),
        ([[10.0] * 8, [10.0] * 8, [9.9] * 8], False),
        # a mean of 10.5 that scatters by 3.5 is 0.7 standard errors above the threshold
        ([[7.0, 14.0] * 4] * 3, False),
        ([[20.0, 27.0] * 4] * 3, True),
    ],
)
def test_solved_needs_a_confirmation_that_is_significant(confirmations: list[list[float]], solved: bool) -> None:
    # what is paid per step is divided by the number of steps, so that these are returns
    lengths = torch.arange(1.0, 9.0)
    payments = [(torch.tensor(each) / lengths).tolist() for each in ([10.0] * 8, *confirmations)]
    environment = Scripted(payments, threshold=9.99)
    judge = evaluator(environment)
    assert judge.evaluate(network(), 10)[1] is solved
    assert len(set(environment.seeds)) == 1 + CONFIRMATIONS
    assert judge.best.solved is solved


@pytest.mark.parametrize(
    ("payments", "solved", "final"),
    [
        # both evaluations reach it: the second, on fresh seeds, is what is reported
        ([[19.0, 19.0], [17.0, 20.0], [1.0, 1.0]], True, 18.5),
        # the first was luck; the best network is played once more at the end
        ([[19.0, 19.0], [17.0, 18.0], [5.0, 5.0]], False, 5.0),
        # below it nothing is confirmed
        ([[17.0, 17.0], [5.0, 5.0]], False, 5.0),
    ],
)
def test_stop_at_is_reached_in_two_evaluations(payments: list[list[float]], solved: bool, final: float) -> None:
    lengths = torch.arange(1.0, 3.0)
    environment = Scripted([(torch.tensor(each) / lengths).tolist() for each in payments], threshold=1.0)
    judge, net = evaluator(environment, stop_at=18.0), network()
    assert judge.evaluate(net, 10)[1] is solved
    copied = evaluator(environment, stop_at=18.0)
    copied.restore(judge.state(), net)
    assert copied.best.solved is solved
    assert copied.final().return_mean == pytest.approx(final)
    assert len(set(environment.seeds)) == len(payments) - solved


def test_a_solved_network_is_better_than_a_lucky_one() -> None:
    environment = Scripted([[9.0], [1.0], [1.0], [1.0], [5.0], [5.0], [5.0], [5.0]], threshold=4.0)
    judge = evaluator(environment)
    assert judge.evaluate(network(), 10)[1] is False
    assert judge.evaluate(network(), 20)[1] is True
    assert judge.best.step == 20


def test_rows_are_on_disk_at_once_and_evaluations_belong_to_the_next_row(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    row = {name: 1.0 for name in COLUMNS if not name.startswith("eval_")}
    with closing(Recorder(RunDir(tmp_path, "refuse"), Scripted([[1.0]]).spec, Settings(), seed=0)) as recorder:
        recorder.row(row | {"step": 500})
        recorder.evaluated(700, Evaluation(2.5, 0.5, 3.0, 4), None)
        recorder.row(row | {"step": 1_000, "loss": 0.25})
        recorder.row(row | {"step": 1_500})
        lines = [line.split(",") for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert lines[0] == list(COLUMNS)
    named = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [line["step"] for line in named] == ["500", "1000", "1500"]
    assert [line["eval_return_mean"] for line in named] == ["nan", "2.5", "nan"]
    assert named[1]["loss"] == "0.25"
