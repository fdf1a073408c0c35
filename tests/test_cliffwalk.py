"""The Blind Cliffwalk: its memory and values by hand, its agents against one another, and what the report claims."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gpu_replay.console.errors import UserError
from gpu_replay.study import cliffwalk
from gpu_replay.study.blind_cliffwalk import QTable, discount, fill_memory, right_action, true_values
from gpu_replay.study.cliffwalk_agents import AGENTS, BLOCK, Outcome, solve
from gpu_replay.study.cliffwalk_summary import (
    gap_words,
    growth,
    order_words,
    prioritized_words,
    summarise,
)

MOST = 1_000_000


class Fixed:
    """Stands for a generator whose normal draws are zero."""

    def normal(self, mean: float, spread: float, shape: tuple[int, int]) -> np.ndarray:
        return np.full(shape, mean)


def zero_table(states: int) -> QTable:
    return QTable(states, Fixed())  # type: ignore[arg-type]


def outcome(agent: str, states: int, updates: int, seed: int = 0, converged: bool = True) -> Outcome:
    return Outcome(agent, states, 2 ** (states + 1) - 2, seed, updates, converged, 0.5)


def made_up(**curves: object) -> list:
    """Cells of these agents, updates as a function of the states."""
    return summarise([outcome(agent, n, curve(n)) for agent, curve in curves.items() for n in range(2, 10)])


def test_true_values_of_three_states():
    # discount 2/3; right actions are 0, 1, 0
    np.testing.assert_allclose(true_values(3), [[4 / 9, 0], [0, 2 / 3], [1, 0]])
    assert discount(3) == pytest.approx(2 / 3)


def test_true_values_are_those_that_nothing_changes():
    table = zero_table(5)
    table.values[:] = true_values(5).tolist()
    memory = fill_memory(5, np.random.default_rng(0))
    for step in zip(memory.state, memory.action, memory.reward, memory.terminated, strict=True):
        assert table.td_error(*step) == pytest.approx(0, abs=1e-12)
    assert zero_table(5).mean_squared_error == pytest.approx(float((true_values(5) ** 2).mean()))


def test_memory_of_two_states_by_hand():
    memory = fill_memory(2, np.random.default_rng(0))
    found = Counter(zip(*(column.tolist() for column in vars(memory).values()), strict=True))
    # right actions are 0 and then 1: two sequences fall at once, one falls second, one arrives
    assert found == {(0, 1, 0.0, True): 2, (0, 0, 0.0, False): 2, (1, 0, 0.0, True): 1, (1, 1, 1.0, True): 1}


@pytest.mark.parametrize("states", [2, 3, 7, 10])
def test_memory_holds_every_sequence_once(states):
    memory = fill_memory(states, np.random.default_rng(states))
    assert len(memory) == 2 ** (states + 1) - 2
    assert memory.reward.sum() == 1
    assert memory.terminated.sum() == 2**states
    # half of those who reach a state go wrong there
    for state in range(states):
        here = memory.state == state
        assert here.sum() == 2 ** (states - state)
        assert (memory.action[here] == right_action(state)).sum() == here.sum() / 2
    # an episode begins at state 0 after each end, and goes on one state further otherwise
    assert memory.state[0] == 0
    expected = np.where(memory.terminated[:-1], 0, memory.state[:-1] + 1)
    np.testing.assert_array_equal(memory.state[1:], expected)


def test_memory_order_follows_the_generator():
    first, again, other = (fill_memory(6, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.action, again.action)
    assert not np.array_equal(first.terminated, other.terminated)


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
    # true values are 1/2 and 1
    assert table.mean_squared_error == pytest.approx(((0.5 - 0.03125) ** 2 + 0.75**2) / 4)
    # of the next two updates, by which each would lower the sum of squares
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
    assert near.mean_squared_error < 1e-3


def test_oracle_of_two_states_takes_the_best_step_each_time():
    # by brute force over the four kinds of transitions
    kinds = [(0, 0, 0.0, False), (0, 1, 0.0, True), (1, 0, 0.0, True), (1, 1, 1.0, True)]
    random = np.random.default_rng([2, 5])
    fill_memory(2, random)
    q = random.normal(0.0, 0.1, (2, 2))
    truth = np.array([[0.5, 0.0], [0.0, 1.0]])
    count = 0
    while ((q - truth) ** 2).mean() >= 1e-3:
        best = None
        for state, action, reward, ended in kinds:
            tried = q.copy()
            tried[state, action] += 0.25 * (reward + (0 if ended else 0.5 * q[1].max()) - q[state, action])
            error = ((tried - truth) ** 2).sum()
            if best is None or error < best[0]:
                best = (error, tried)
        q = best[1]
        count += 1
    assert solve("oracle", 2, 5, MOST).updates == count


@pytest.mark.parametrize("agent", AGENTS)
def test_runs_are_reproducible_and_converge(agent):
    first, again = solve(agent, 4, 3, MOST), solve(agent, 4, 3, MOST)
    assert first.converged
    assert (first.updates, first.transitions) == (again.updates, 30)
    assert {solve(agent, 4, seed, MOST).updates for seed in range(3)} != {first.updates}


@pytest.mark.parametrize("agent", AGENTS)
def test_runs_that_do_not_converge_are_marked(agent):
    found = solve(agent, 6, 0, 7)
    assert (found.updates, found.converged) == (7, False)


def test_uniform_goes_on_after_a_block():
    assert solve("uniform", 10, 0, MOST).updates > BLOCK


@pytest.mark.parametrize("agent, states", [("greedy", 10), ("proportional", 10), ("rank", 8)])
def test_order_of_the_paper(agent, states):
    def median(name: str) -> float:
        return float(np.median([solve(name, states, seed, MOST).updates for seed in range(3)]))

    # by far: at ten states it is about 1 : 7 : 56
    assert 2 * median("oracle") < median(agent) < median("uniform") / 3


def test_quartiles_and_censored_runs():
    runs = [outcome("uniform", 4, updates, seed) for seed, updates in enumerate((10, 30, 20, 40))]
    cell = summarise(runs)[0]
    assert (cell.lower, cell.median, cell.upper, cell.censored) == (17.5, 25, 32.5, 0)
    cut = [*runs[:2], outcome("uniform", 4, 99, 2, False), outcome("uniform", 4, 99, 3, False)]
    cell = summarise(cut)[0]
    assert (cell.lower, cell.median, cell.upper, cell.censored) == (25, np.inf, np.inf, 2)


def test_growth_tells_exponentials_from_powers():
    sizes = range(2, 14)
    doubling = growth(sizes, [3 * 2.0**n for n in sizes])
    assert doubling is not None
    assert doubling.factor == pytest.approx(2)
    assert doubling.exponential
    cubic = growth(sizes, [float(n) ** 3 for n in sizes])
    assert cubic is not None
    assert not cubic.exponential
    flat = growth(sizes, [1.01**n for n in sizes])
    assert flat is not None
    assert not flat.exponential
    assert growth([2, 3, 4, 5], [1.0, 2.0, 4.0, np.inf]) is None


def test_words_follow_the_curves():
    paper = made_up(
        oracle=lambda n: 5 * n, proportional=lambda n: 20 * n, rank=lambda n: 21 * n, uniform=lambda n: 50 * 2**n
    )
    assert "order of the paper is there at every number of states" in order_words(paper)
    assert "exponential gap of the paper is there" in gap_words(paper)
    assert "from 3 states on; below that it is not at 2" in order_words(
        made_up(
            oracle=lambda n: 5 * n, proportional=lambda n: 90 * n, rank=lambda n: 21 * n, uniform=lambda n: 40 * 2**n
        )
    )
    reverse = made_up(
        oracle=lambda n: 5 * n, proportional=lambda n: 20 * n, rank=lambda n: 4 * n, uniform=lambda n: 50 * n
    )
    assert "NOT there: it fails at 2, 3, 4, 5, 6, 7, 8, 9" in order_words(reverse)
    assert "exponential gap of the paper is NOT there" in gap_words(reverse)
    assert "cannot be told" in order_words(made_up(oracle=lambda n: n))
    assert "Too few" in gap_words(made_up(oracle=lambda n: n))
    assert "At 9 states proportional replay needs 0.7% of the updates of uniform replay, 0.18 for each" in " ".join(
        prioritized_words(paper)
    )


def run(folder: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cliffwalk.add_arguments(parser)
    return cliffwalk.run(parser.parse_args(["--output", str(folder), "--jobs", "1", *arguments]))


def test_command_writes_runs_picture_and_report(tmp_path, capsys):
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    assert run(tmp_path / "new", "--states-max", "5", "--seeds", "2") == 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["cliffwalk.csv", "cliffwalk.md", "cliffwalk.png"]
    with (tmp_path / "new" / "cliffwalk.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 4 * 2
    assert {row["converged"] for row in rows} == {"1"}
    report = (tmp_path / "new" / "cliffwalk.md").read_text()
    found = summarise(
        [outcome("uniform", 5, int(r["updates"])) for r in rows if (r["agent"], r["states"]) == ("uniform", "5")]
    )
    assert f"{found[0].median:,.0f} [" in report
    assert "endless" not in report
    assert "exponential gap" in capsys.readouterr().out


def test_processes_find_what_one_finds(tmp_path):
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)

    def found(folder: Path, jobs: str) -> list[str]:
        run(folder, "--states-max", "3", "--seeds", "1", "--jobs", jobs)
        return [line.rpartition(",")[0] for line in (folder / "cliffwalk.csv").read_text().splitlines()]

    assert found(tmp_path / "two", "2") == found(tmp_path / "one", "1")


def test_command_marks_censored_runs(tmp_path):
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    run(tmp_path, "--states-max", "4", "--seeds", "1", "--max-updates", "60")
    report = (tmp_path / "cliffwalk.md").read_text()
    assert "had not converged when they were stopped" in report
    assert "uniform at 4 states (1 of 1)" in report
    assert "∞" in report


@pytest.mark.parametrize("states", ["1", "21"])
def test_command_refuses_sizes_that_make_no_sense(tmp_path, states):
    with pytest.raises(UserError, match="must be 2 to 20"):
        run(tmp_path, "--states-max", states)


def test_command_refuses_an_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run(tmp_path / "file" / "below")
