"""The Blind Cliffwalk: its memory and values by hand, its agents against one another, and what the report claims."""

from __future__ import annotations

import csv
import functools

import numpy as np
import pytest

from gpu_replay.cli import main
from gpu_replay.study.blind_cliffwalk import LEARNERS, Outcome, QTable, fill_memory, solve, true_values
from gpu_replay.study.cliffwalk import growth, summarize, write_cliffwalk

pd = pytest.importorskip("pandas")

MOST = 1_000_000


class Fixed:
    """Stands for a generator whose normal draws are zero."""

    def normal(self, mean: float, spread: float, shape: tuple[int, int]) -> np.ndarray:
        return np.full(shape, mean)


def zero_table(states: int) -> QTable:
    return QTable(states, Fixed())  # type: ignore[arg-type]


def outcome(agent: str, states: int, updates: int, seed: int = 0, converged: bool = True) -> Outcome:
    return Outcome(agent, states, 2 ** (states + 1) - 2, seed, updates, converged, 0.5)


def test_true_values_of_three_states():
    # discount 2/3; right actions are 0, 1, 0
    np.testing.assert_allclose(true_values(3), [[4 / 9, 0], [0, 2 / 3], [1, 0]])


@pytest.mark.parametrize("states", [2, 3, 7, 10])
def test_memory_holds_every_sequence_once(states):
    memory = fill_memory(states, np.random.default_rng(states))
    assert {len(column) for column in memory.values()} == {2 ** (states + 1) - 2}
    assert memory["reward"].sum() == 1
    assert memory["terminated"].sum() == 2**states
    # half of those who reach a state go wrong there
    for state in range(states):
        here = memory["state"] == state
        assert here.sum() == 2 ** (states - state)
        assert (memory["action"][here] == state % 2).sum() == here.sum() / 2
    # an episode begins at state 0 after each end, and goes on one state further otherwise
    assert memory["state"][0] == 0
    expected = np.where(memory["terminated"][:-1], 0, memory["state"][:-1] + 1)
    np.testing.assert_array_equal(memory["state"][1:], expected)


def test_updates_by_hand():
    table = zero_table(2)
    # the last right step first: error 1, a quarter of it is learned
    assert table.update(1, 1, 1.0, True) == 1.0
    assert table.values == [[0.0, 0.0], [0.0, 0.25]]
    # discount 1/2 of the best value ahead
    assert table.update(0, 0, 0.0, False) == 0.125
    assert table.values == [[0.03125, 0.0], [0.0, 0.25]]
    # the wrong step leads nowhere
    assert table.update(0, 1, 0.0, True) == 0.0
    # true values are 1/2 and 1: by how much the next two updates would lower the sum of squares
    assert table.gain(1, 1, 1.0, True) == pytest.approx(0.75**2 - 0.5625**2)
    assert table.gain(0, 0, 0.0, False) == pytest.approx(0.46875**2 - (0.5 - 0.03125 - 0.25 * 0.09375) ** 2)


def test_convergence_is_a_mean_squared_error_below_a_thousandth():
    table = zero_table(2)
    table.values[:] = true_values(2).tolist()
    table.values[0][0] += 0.0633  # 0.0633 ** 2 / 4 = 0.0010017
    table.update(0, 1, 0.0, True)
    assert not table.converged
    near = zero_table(2)
    for _ in range(40):
        near.update(1, 1, 1.0, True)
        near.update(0, 0, 0.0, False)
    assert near.converged


def test_oracle_of_two_states_takes_the_best_step_each_time():
    # by brute force over the four kinds of transitions
    kinds = [(0, 0, 0.0, False), (0, 1, 0.0, True), (1, 0, 0.0, True), (1, 1, 1.0, True)]
    random = np.random.default_rng([2, 5])
    fill_memory(2, random)
    q = random.normal(0.0, 0.1, (2, 2))
    truth = np.array([[0.5, 0.0], [0.0, 1.0]])
    count = 0
    while ((q - truth) ** 2).mean() >= 1e-3:
        tried = np.stack([q] * 4)
        for i, (state, action, reward, ended) in enumerate(kinds):
            tried[i, state, action] += 0.25 * (reward + (0 if ended else 0.5 * q[1].max()) - q[state, action])
        q = tried[((tried - truth) ** 2).sum(axis=(1, 2)).argmin()]
        count += 1
    assert solve("oracle", 2, 5, MOST).updates == count


@pytest.mark.parametrize("agent", LEARNERS)
def test_runs_are_reproducible_and_converge(agent):
    first, again = solve(agent, 4, 3, MOST), solve(agent, 4, 3, MOST)
    assert first.converged
    assert (first.updates, first.transitions) == (again.updates, 30)
    assert {solve(agent, 4, seed, MOST).updates for seed in range(3)} != {first.updates}
    stopped = solve(agent, 6, 0, 7)
    assert (stopped.updates, stopped.converged) == (7, False)


@functools.cache
def median(agent: str, states: int) -> float:
    return float(np.median([solve(agent, states, seed, MOST).updates for seed in range(3)]))


@pytest.mark.parametrize("agent, states", [("greedy", 10), ("proportional", 10), ("rank", 8)])
def test_order_of_the_paper(agent, states):
    # by far: at ten states it is about 1 : 7 : 56
    assert 2 * median("oracle", states) < median(agent, states) < median("uniform", states) / 3


def quartiles(*runs: tuple[int, bool]) -> list[float]:
    group = [outcome("uniform", 4, updates, seed, converged) for seed, (updates, converged) in enumerate(runs)]
    cells = summarize(pd.DataFrame([outcome("oracle", 4, 1), *group]))
    return cells.loc[4].xs("uniform", level=1).tolist()


def test_quartiles_and_censored_runs():
    assert quartiles((10, True), (30, True), (20, True), (40, True)) == [17.5, 25, 32.5]
    assert quartiles((10, True), (30, True), (99, False), (99, False)) == [25, np.inf, np.inf]
    # the lower quartile of five runs is the second one, whatever comes after it
    assert quartiles((10, True), (30, True), (99, False), (99, False), (99, False)) == [30, np.inf, np.inf]


def test_growth_tells_exponentials_from_powers():
    sizes = range(2, 14)
    assert growth(pd.Series({n: 3 * 2.0**n for n in sizes})) == (pytest.approx(2), True)
    for other in ({n: float(n) ** 3 for n in sizes}, {n: 1.01**n for n in sizes}):
        assert not growth(pd.Series(other))[1]
    assert growth(pd.Series({2: 1.0, 3: 2.0, 4: 4.0})) is None


def test_report_holds_growth_and_savings_and_marks_runs_that_did_not_converge(tmp_path):
    pytest.importorskip("matplotlib")
    slopes = {"oracle": 5, "greedy": 10, "proportional": 20, "rank": 21}
    outcomes = [outcome(agent, n, slopes[agent] * n, converged=n < 10) for agent in slopes for n in range(2, 11)]
    outcomes += [outcome("uniform", n, 50 * 2**n, converged=n < 10) for n in range(2, 11)]
    write_cliffwalk(tmp_path, outcomes, {"time": "an hour"})
    report = " ".join((tmp_path / "cliffwalk.md").read_text().split())
    assert "| proportional | × 1.23, not exponential | × 1.00, not exponential |" in report
    assert "| uniform | × 2.00, exponential | × 1.63, exponential |" in report
    assert "| 9 | 1,022 | 45 [45, 45] | 90 [90, 90] | 180 [180, 180] |" in report
    assert "| ∞ [∞, ∞] |" in report
    assert "- time: an hour" in report


@pytest.mark.slow
def test_command_writes_runs_picture_and_report_whatever_the_number_of_processes(tmp_path):
    for name in ("matplotlib", "scipy", "tqdm"):
        pytest.importorskip(name)
    found: list[list[dict[str, str]]] = []
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        arguments = ["study", "cliffwalk", "--states-max", "3", "--seeds", "2", "--jobs", jobs, "--max-updates", "60"]
        assert main([*arguments, "--output", str(folder)]) == 0
        assert sorted(path.name for path in folder.iterdir()) == ["cliffwalk.csv", "cliffwalk.md", "cliffwalk.png"]
        with (folder / "cliffwalk.csv").open() as file:
            found.append([{**row, "seconds": ""} for row in csv.DictReader(file)])
    assert found[0] == found[1]
    assert len(found[0]) == 5 * 2 * 2
    assert {row["converged"] for row in found[0]} == {"0", "1"}
