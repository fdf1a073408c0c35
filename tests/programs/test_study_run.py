"""Runs of the study: recorded episodes come again, and measures by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay.study.methods import Memory
from gpu_replay.study.results import read_study
from gpu_replay.study.run import COLUMNS, KEYS, RunId, make_run
from gpu_replay.study.settings import ENVIRONMENTS, METHODS, AgentSettings, agents, described
from gpu_replay.study.statistics import correlated_pairs, td_statistics

pytest.importorskip("gymnasium")
pd = pytest.importorskip("pandas")

RECORDED = Path(__file__).resolve().parents[2] / "bench" / "results"


# what is measured


def test_td_statistics_by_hand() -> None:
    # absolute values 1, 2, 3, 6: deviation sqrt((4 + 1 + 0 + 9) / 4)
    found = td_statistics(np.array([[-2.0, 1.0, 6.0, -3.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    expected = {"td_mean": 3.0, "td_median": 2.5, "td_max": 6.0, "td_std": pytest.approx(3.5**0.5, rel=1e-15)}
    assert {name: values.tolist() for name, values in found.items()} == {n: [x, 0.0] for n, x in expected.items()}


# with a: (1, 2, 3): b rises with it (r = 1), c falls (r = -1), d is flat and has no correlation,
# f: (2, 1, 5) has r = 3 / sqrt(2 * 26 / 3) = 0.7206
A, B, C, D, F = (1, 2, 3), (10, 20, 30), (3, 2, 1), (7, 7, 7), (2, 1, 5)
# three times 0.1 divided by three is not 0.1 in floating point
TENTHS = (0.1, 0.1, 0.1)
# two components are always correlated unless they are equal: 10 states, one of them flat
TWO = [(float(at), float(at * at - 3)) for at in range(1, 10)] + [(0.5, 0.5)]


BY_HAND: list[tuple[list[tuple[float, ...]], float, int]] = [
    *(([A, B, C, D, D], 0.8, 3), ([A, F], 0.72, 1), ([A, F], 0.73, 0), ([C, F], 0.72, 1)),
    *(([A, TENTHS, TENTHS], 0.8, 0), (TWO, 0.8, 36)),
]


def test_correlated_pairs_by_hand() -> None:
    for batch, above, pairs in BY_HAND:
        assert correlated_pairs(np.array([batch], dtype=np.float32), above).tolist() == [pairs], batch


def test_correlated_pairs_are_those_of_corrcoef_at_any_size() -> None:
    # more updates than are computed at a time
    states = np.random.default_rng(4).standard_normal((70, 33, 4)).astype(np.float32)
    matrices = np.abs([np.corrcoef(batch) for batch in states.astype(np.float64)])
    expected = (np.triu(matrices, 1) > 0.8).sum(axis=(1, 2)).tolist()
    for size in (1e-30, 1.0, 1e30):
        assert correlated_pairs((states * np.float32(size)).astype(np.float32), 0.8).tolist() == expected


# runs


@pytest.fixture(scope="module")
def recorded() -> Any:
    return read_study(RECORDED / "study")[1]


RUNS = [("CartPole-v1", "none", 0), ("CartPole-v1", "uniform", 1), ("CartPole-v1", "rank", 2)]
RUNS += [("CartPole-v1", "combined", 3), ("CartPole-v1", "hindsight", 4), ("Acrobot-v1", "hindsight", 0)]
# episodes that are cut off
RUNS += [("MountainCar-v0", "hindsight", 0), ("MountainCar-v0", "uniform", 0)]


@pytest.mark.parametrize("run", RUNS)
def test_recorded_episodes_come_again(run: tuple[str, str, int], recorded: Any) -> None:
    """The first ones of each method but proportional replay, whose beta follows from the number of episodes."""
    count = {"CartPole-v1": 8, "Acrobot-v1": 1, "MountainCar-v0": 2}[run[0]]
    settings = agents([run[0]], tuned=False, episodes=count)[run[0]]
    found = pd.DataFrame(make_run(RunId(*run), settings))
    which = np.all([recorded[name] == each for name, each in zip(KEYS, run, strict=True)], axis=0)
    # steps, durations and returns; epsilon; means over the updates, of which the first episodes have none
    for name in (name for name in COLUMNS if name not in (*KEYS, "seconds")):
        wanted = recorded[which][name].head(count)
        np.testing.assert_allclose(found[name].astype(float), wanted, rtol=1e-4, err_msg=name)


def test_importance_weights_grow_stronger_over_the_run() -> None:
    def weights(method: str, progress: float) -> np.ndarray:
        memory, obs = Memory(method, AgentSettings(memory=60), "CartPole-v1", 4, 0), np.zeros(4, dtype=np.float32)
        for _ in range(60):
            memory.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        memory.update_priorities(torch.arange(60), np.linspace(0.01, 3, 60, dtype=np.float32))
        return memory.sample(32, progress).weight

    assert weights("combined", 0.5).tolist() == [1.0] * 32
    early, late = weights("proportional", 0.0), weights("proportional", 1.0)
    assert early.min() < 0.7
    # the same draws, weighted by P ** -0.4 and by P ** -1
    np.testing.assert_allclose(late, early ** (1 / 0.4), rtol=1e-4)
    assert weights("rank", 0.0).tolist() == weights("rank", 1.0).tolist()


@pytest.mark.parametrize("name, tuned", [("study", False), ("study-tuned", True)])
def test_settings_are_those_of_the_recorded_studies_and_may_be_shortened(name: str, tuned: bool) -> None:
    recorded = json.loads((RECORDED / name / "settings.json").read_text())
    found = described(agents(ENVIRONMENTS, tuned=tuned), list(METHODS), 5, tuned=tuned, quick=False)
    for each in ("environments", "seeds", "tuned", "quick"):
        assert json.loads(json.dumps(found[each])) == recorded[each]
    assert [each.episodes for each in agents(ENVIRONMENTS, tuned=tuned, episodes=7).values()] == [7, 7, 7]
