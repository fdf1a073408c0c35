"""What the runs of the Blind Cliffwalk say: medians, growth per state, and the paper's two claims put to the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.cliffwalk_agents import AGENTS, PRIORITIZED, Outcome

NAMES = {
    "oracle": "oracle",
    "greedy": "greedy",
    "proportional": "proportional",
    "rank": "rank-based",
    "uniform": "uniform",
}
# fewer numbers of states than this show no law of growth
FEWEST_SIZES = 4
# a gap that grows less than this for each state is no exponential one in any useful sense
LEAST_GROWTH = 1.2


@dataclass(frozen=True)
class Cell:
    """Runs of one agent on one chain: quartiles of the updates, runs that never converged counted as endless.

    A quartile is infinite when it falls on such runs. `censored` says how many of `runs` did not converge.
    """

    agent: str
    states: int
    transitions: int
    lower: float
    median: float
    upper: float
    runs: int
    censored: int


@dataclass(frozen=True)
class Growth:
    """y = c * factor ** n, fitted to the logarithms; `exponential` when that fits better than a power of n."""

    factor: float
    exponential: bool


def summarise(outcomes: Sequence[Outcome]) -> list[Cell]:
    """One cell for each agent, in the order of AGENTS, and each number of states, ascending."""
    cells = []
    for agent in AGENTS:
        for states in sorted({each.states for each in outcomes if each.agent == agent}):
            group = [each for each in outcomes if (each.agent, each.states) == (agent, states)]
            updates = sorted(each.updates if each.converged else np.inf for each in group)
            lower, median, upper = (_quantile(updates, share) for share in (0.25, 0.5, 0.75))
            censored = sum(not each.converged for each in group)
            cells.append(Cell(agent, states, group[0].transitions, lower, median, upper, len(group), censored))
    return cells


def of_agent(cells: Sequence[Cell], agent: str) -> dict[int, Cell]:
    """The cells of one agent by number of states."""
    return {cell.states: cell for cell in cells if cell.agent == agent}


def growth(sizes: Sequence[int], values: Sequence[float]) -> Growth | None:
    """The law by which positive finite values grow with the size; None for fewer than four of them."""
    kept = [(size, value) for size, value in zip(sizes, values, strict=True) if np.isfinite(value)]
    if len(kept) < FEWEST_SIZES:
        return None
    n = np.array([size for size, _ in kept], dtype=np.float64)
    logs = np.log([value for _, value in kept])
    slope, off_exponential = _line(n, logs)
    _, off_power = _line(np.log(n), logs)
    factor = float(np.exp(slope))
    return Growth(factor, factor >= LEAST_GROWTH and off_exponential < off_power)


def growth_of(cells: Sequence[Cell], agent: str) -> Growth | None:
    """How the median updates of an agent grow with the states."""
    found = of_agent(cells, agent)
    return growth(list(found), [cell.median for cell in found.values()])


def ratios(cells: Sequence[Cell], slow: str, fast: str) -> dict[int, float]:
    """Median updates of `slow` over those of `fast`, where both have one."""
    slower, faster = of_agent(cells, slow), of_agent(cells, fast)
    both = [states for states in slower if states in faster]
    return {
        states: slower[states].median / faster[states].median
        for states in both
        if np.isfinite(slower[states].median) and np.isfinite(faster[states].median)
    }


def order_words(cells: Sequence[Cell]) -> str:
    """Whether the paper's order, oracle < prioritized < uniform, is there, and from how many states on."""
    oracle, uniform = of_agent(cells, "oracle"), of_agent(cells, "uniform")
    between = [of_agent(cells, name) for name in PRIORITIZED]
    sizes = [n for n in oracle if n in uniform and all(n in each for each in between)]
    if not sizes:
        return "The order of the agents cannot be told: not all of them have run."
    # of two endless medians neither is smaller
    holds = [n for n in sizes if all(oracle[n].median < each[n].median < uniform[n].median for each in between)]
    if holds == sizes:
        return (
            "The order of the paper is there at every number of states: the oracle needs the fewest updates, "
            "proportional and rank-based replay more, uniform replay the most."
        )
    tail = [n for n in sizes if all(m in holds for m in sizes if m >= n)]
    if tail:
        return (
            f"The order of the paper (oracle, then proportional and rank-based, then uniform) is there from {tail[0]} "
            f"states on; below that it is not at {_list([n for n in sizes if n not in holds])}."
        )
    missing = _list([n for n in sizes if n not in holds])
    return f"The order of the paper is NOT there: it fails at {missing} of {sizes[0]} to {sizes[-1]} states."


def gap_words(cells: Sequence[Cell]) -> str:
    """Whether uniform replay falls behind the oracle exponentially, as the paper says."""
    gap = ratios(cells, "uniform", "oracle")
    law = growth(list(gap), list(gap.values()))
    if law is None:
        return "Too few numbers of states to tell how the gap between uniform replay and the oracle grows."
    first, last = min(gap), max(gap)
    told = (
        f"uniform replay needs {gap[first]:.1f} times the updates of the oracle at {first} states and {gap[last]:,.0f} "
        f"times at {last}, a factor of {law.factor:.2f} for each state"
    )
    if law.exponential:
        return f"The exponential gap of the paper is there: {told}, which an exponential fits better than any power."
    return f"The exponential gap of the paper is NOT there: {told}."


def prioritized_words(cells: Sequence[Cell]) -> list[str]:
    """What prioritized replay saves at the largest number of states, one sentence each."""
    found = []
    for agent in ("greedy", *PRIORITIZED):
        gain = ratios(cells, "uniform", agent)
        if gain:
            last = max(gain)
            memory = of_agent(cells, agent)[last]
            found.append(
                f"At {last} states {NAMES[agent]} replay needs {1 / gain[last]:.1%} of the updates of uniform replay, "
                f"{memory.median / memory.transitions:.2f} for each transition in the memory."
            )
    return found


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Linear between neighbours, infinite as soon as one of them is."""
    place = share * (len(ascending) - 1)
    low = int(place)
    if place == low or ascending[low] == np.inf:
        return float(ascending[low])
    return float(ascending[low] + (place - low) * (ascending[low + 1] - ascending[low]))


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and sum of squared residuals of the least-squares line."""
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / (x * x).sum())
    return slope, float(((y - slope * x) ** 2).sum())


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
