"""Evaluations against a scripted environment: what counts, which network is kept, when a run may end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings

CPU = torch.device("cpu")


class Scripted(Environment):
    """Environment `e` pays `payments[visit][e]` in each of its `e + 1` steps, then pays 100 a step."""

    def __init__(
        self, payments: list[list[float]], threshold: float | None = None, most_points: float | None = None
    ) -> None:
        super().__init__()
        self.num_envs = len(payments[0])
        self.spec = EnvironmentSpec("scripted", Field((1,), torch.float32), 2, threshold, None, 1, most_points)
        self.seeds: list[int] = []
        self.steps, self._payments, self._lengths = 0, payments, torch.arange(1, self.num_envs + 1)

    def reset(self, seed: int) -> Tensor:
        self.seeds.append(seed)
        self._pay = torch.tensor(self._payments[len(self.seeds) - 1])
        self._t = 0
        return torch.zeros(self.num_envs, 1)

    def recv(self) -> Step:
        self._t += 1
        self.steps += 1
        reward = torch.where(self._t <= self._lengths, self._pay, 100.0)
        obs, ended = torch.zeros(self.num_envs, 1), self._t == self._lengths
        # the first environment is truncated, the others terminate
        first = self._lengths == 1
        return Step(obs, reward, terminated=ended & ~first, truncated=ended & first, final_frame=obs)


def evaluator(environment: Scripted, **changes: float) -> Evaluator:
    settings = Settings.for_family("vector", eval_episodes=environment.num_envs, **changes)
    return Evaluator(environment, settings, device=CPU, seed=0, stop=StopRequest())


def network(bias: float = 0.0) -> QNetwork:
    made = QNetwork(Field((1,), torch.float32), 2, Settings(hidden=(2,)))
    with torch.no_grad():
        made.last.bias.fill_(bias)
    return made


def test_each_environment_counts_with_its_first_episode_alone() -> None:
    environment = Scripted([[1.0, 2.0, 3.0]], threshold=5.0)
    result, solved = evaluator(environment).evaluate(network(), 10)
    # returns 1, 4 and 9
    assert result.return_mean == pytest.approx(14 / 3)
    assert result.return_std == pytest.approx(((11**2 + 2**2 + 13**2) / 27) ** 0.5)
    assert result.length_mean == 2
    # below the threshold nothing needs to be confirmed
    assert not solved
    assert (environment.steps, len(environment.seeds)) == (3, 1)
    # episodes are cut off with what they have
    result, _ = evaluator(Scripted([[1.0, 2.0, 3.0]]), eval_max_steps=2).evaluate(network(), 10)
    assert result.return_mean == pytest.approx((1 + 4 + 6) / 3)
    assert result.length_mean == pytest.approx(5 / 3)


def test_the_best_network_is_kept_as_it_was() -> None:
    judge = evaluator(Scripted([[1.0], [5.0], [3.0], [2.0]]))
    net = network()
    for step, bias in ((10, 0.1), (20, 0.2), (30, 0.3)):
        with torch.no_grad():
            net.last.bias.fill_(bias)
        judge.evaluate(net, step)
    assert (judge.best.step, judge.best.evaluation.return_mean) == (20, 5.0)
    assert judge.best.network.last.bias.tolist() == pytest.approx([0.2] * 3)
    assert judge.final().return_mean == 2.0


@pytest.mark.parametrize(
    ("payments", "steps"),
    [
        # episodes of one to four steps, with at most 6 points each: 1 + 6 + 5 + 6 after a step, 1 + 3 + 4 + 6 after two
        ([1.0, 1.5, -1.0, 1.5], 2),
        # the first alone costs too much
        ([-9.0, 1.5, 1.5, 1.5], 1),
        # at the threshold nothing is out of reach: it is confirmed
        ([6.0, 3.0, 0.0, 1.0], 8),
    ],
)
def test_an_evaluation_that_cannot_reach_the_threshold_stops(payments: list[float], steps: int) -> None:
    environment = Scripted([payments] * 4, threshold=4.0, most_points=6.0)
    judge = evaluator(environment)
    result, solved = judge.evaluate(network(), 10, whole=False)
    assert environment.steps == steps
    assert solved is (steps == 8)
    if not solved:
        assert (result.episodes, judge.best, judge.final()) == (0, None, None)
        assert result.return_mean != result.return_mean
    else:
        assert (result.episodes, result.return_mean) == (4, 4.0)
    # a closing evaluation is whole
    total = sum(pay * length for pay, length in zip(payments, range(1, 5), strict=True))
    assert judge.evaluate(network(), 20)[0].return_mean == pytest.approx(total / 4)
    assert judge.best is not None
    # each evaluation has seeds of its own
    assert len(set(environment.seeds)) == len(environment.seeds)


@pytest.mark.parametrize(
    ("payments", "solved", "final"),
    [
        # both evaluations reach it: the second, on fresh seeds, is what is reported
        ([[19.0, 19.0], [17.0, 20.0], [1.0, 1.0]], True, 18.5),
        # the first was luck; the best network is played once more at the end
        ([[19.0, 19.0], [17.0, 18.0], [5.0, 5.0]], False, 5.0),
    ],
)
@pytest.mark.parametrize("stop_at", [None, 18.0])
def test_solved_is_what_two_evaluations_reach(payments: Any, solved: bool, final: float, stop_at: float | None) -> None:
    lengths = torch.arange(1.0, 3.0)
    threshold = 18.0 if stop_at is None else 1.0
    environment = Scripted([(torch.tensor(each) / lengths).tolist() for each in payments], threshold)
    judge, net = evaluator(environment, stop_at=stop_at), network()
    assert judge.evaluate(net, 10)[1] is solved
    copied = evaluator(environment, stop_at=stop_at)
    copied.load_state_dict(judge.state_dict(), net)
    assert copied.best.solved is solved
    assert copied.final().return_mean == pytest.approx(final)
    assert len(set(environment.seeds)) == len(payments) - solved


def test_a_solved_network_is_better_than_a_lucky_one() -> None:
    environment = Scripted([[9.0], [1.0], [5.0], [5.0]], threshold=4.0)
    judge = evaluator(environment)
    assert judge.evaluate(network(), 10)[1] is False
    assert judge.evaluate(network(), 20)[1] is True
    assert judge.best.step == 20
