"""The command `gpu-replay study cliffwalk`: the paper's own experiment, from arguments to runs, picture and report."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_replay.console.arguments import positive
from gpu_replay.console.atomic_files import replace, write_text
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.markdown import table
from gpu_replay.console.versions import cpu_cores, cpu_model, versions
from gpu_replay.study.blind_cliffwalk import LEARNERS, PRIORITIZED, Outcome, solve
from gpu_replay.study.workers import WorkerFailed, run_all

DESCRIPTION = (
    "The Blind Cliffwalk of Schaul et al. 2016 (Figure 1 and section 3): updates that tabular Q-learning needs until "
    "its values are right, over the number of states, for uniform, oracle, greedy, proportional and rank-based "
    "replay. Writes cliffwalk.csv, cliffwalk.png and cliffwalk.md."
)
FEWEST_STATES, MOST_STATES = 2, 20
# expected seconds of a run for each transition in the memory
_COST = {"oracle": 1e-6, "greedy": 5e-6, "proportional": 3.5e-4, "rank": 7e-4, "uniform": 2e-5}
COLOURS = {"oracle": "#000000", "greedy": "#56B4E9"}
PICTURE = "cliffwalk.png"
INTRODUCTION = (
    "A chain of n states with two actions each; the wrong one ends the episode with 0, the last right one with 1. The "
    "memory holds every sequence of n actions, each until its end, in random order. Tabular Q-learning with discount "
    "1 - 1/n and step size 1/4 takes one transition at a time until the mean squared error of its values is below "
    "0.001. Schaul et al. 2016, *Prioritized Experience Replay* (section 3, appendix B.1), claim: the oracle needs the "
    "fewest updates, prioritized replay more, uniform replay the most, and exponentially more than the oracle."
)
GROWTH = (
    "Factor by which the median updates, and their ratio to the oracle's, grow with each state, fitted to all numbers "
    "of states; exponential where that fits better than a power of n. The last columns are of the largest number of "
    "states: updates as a share of those of uniform replay, and for each transition in the memory."
)
CONDITIONS = (
    "The oracle knows the true values and takes the transition whose update lowers the error most.",
    "Greedy takes the transition with the largest last TD error, those never taken first.",
    f"Proportional and rank-based sample single transitions from ReplayBuffer: {PRIORITIZED['proportional']}; "
    f"{PRIORITIZED['rank']}. New ones have the largest priority so far; importance weights are 1.",
    "Initial values are normal with standard deviation 0.1. Agents of one seed share memory and initial values.",
)
# agent to number of states to the quartiles of the updates, (3,); runs that did not converge count as infinite
Cells = dict[str, dict[int, NDArray[np.float64]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    states = f"largest number of states, {FEWEST_STATES} to {MOST_STATES}; each one doubles the time (default: 13)"
    limit = "a run that has not converged by then is stopped and marked as such (default: 10,000,000)"
    number: Any = {"type": positive, "metavar": "N"}
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for what is written")
    parser.add_argument("--states-max", default=13, help=states, **number)
    parser.add_argument("--seeds", default=10, help="runs of each (default: 10)", **number)
    parser.add_argument("--max-updates", default=10_000_000, help=limit, **number)
    parser.add_argument("--jobs", help="processes (default: all cores)", **number)


def run(options: argparse.Namespace) -> int:
    """Run everything and write the files. Raises UserError for options that make no sense."""
    require("matplotlib", "scipy", "tqdm", purpose="the study")
    if not FEWEST_STATES <= options.states_max <= MOST_STATES:
        raise UserError(f"--states-max must be {FEWEST_STATES} to {MOST_STATES}; found {options.states_max}.")
    folder: Path = options.output
    jobs = options.jobs or cpu_cores()
    start = time.perf_counter()
    runs = itertools.product(LEARNERS, range(FEWEST_STATES, options.states_max + 1), range(options.seeds))
    tasks = {f"{agent}-{n}-seed{seed}": (agent, n, seed, options.max_updates) for agent, n, seed in runs}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # before the runs, which take long
        (folder / "cliffwalk.csv").touch()
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror or error}.") from None
    try:
        outcomes = [found for _, found in run_all(solve, tasks, jobs, lambda task: _COST[task[0]] * 2.0 ** task[1])]
    except WorkerFailed as error:
        print(f"gpu-replay study cliffwalk: {error}", file=sys.stderr)
        return 1
    facts = {
        "seeds": f"{options.seeds}, at most {options.max_updates:,} updates each",
        "time": f"{time.perf_counter() - start:,.0f} s, {jobs} at a time, on {cpu_model()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    print(*write_cliffwalk(folder, outcomes, facts), sep="\n")
    return 0


def write_cliffwalk(folder: Path, outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> list[Path]:
    """Write cliffwalk.csv, cliffwalk.png and cliffwalk.md, and return their paths.

    facts: what the report should say about the run, name to text.
    """
    cells = summarize(outcomes)
    ordered = sorted(outcomes, key=lambda each: (list(LEARNERS).index(each.agent), each.states, each.seed))
    return [
        replace(folder / "cliffwalk.csv", lambda path: _write_runs(path, ordered)),
        _draw(folder / PICTURE, cells),
        write_text(folder / "cliffwalk.md", _report(cells, facts)),
    ]


def summarize(outcomes: Sequence[Outcome]) -> Cells:
    """The quartiles, agents in the order of the tables and numbers of states ascending."""
    cells: Cells = {agent: {} for agent in LEARNERS}
    for agent in LEARNERS:
        for states in sorted({each.states for each in outcomes}):
            group = [each for each in outcomes if (each.agent, each.states) == (agent, states)]
            updates = sorted(each.updates if each.converged else np.inf for each in group)
            # unlike np.quantile, np.interp leaves no NaN between infinite values
            positions = np.array((0.25, 0.5, 0.75)) * (len(group) - 1)
            cells[agent][states] = np.interp(positions, range(len(group)), updates)
    return cells


def growth(values: Mapping[int, float]) -> tuple[float, bool] | None:
    """The factor per state of an exponential fitted to n -> value, and whether that describes the values.

    It does when it fits better than a power of n and the factor is at least 1.2. None for fewer than four values.
    """
    from scipy import stats

    if len(values) < 4:
        return None
    sizes, logs = np.array(list(values)), np.log(list(values.values()))
    exponential, power = stats.linregress(sizes, logs), stats.linregress(np.log(sizes), logs)
    factor = float(np.exp(exponential.slope))
    return factor, factor >= 1.2 and exponential.rvalue**2 > power.rvalue**2


def _write_runs(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        for each in outcomes:
            writer.writerow({**asdict(each), "converged": int(each.converged), "seconds": f"{each.seconds:.3f}"})


def _draw(path: Path, cells: Cells) -> Path:
    from matplotlib import rc_context

    from gpu_replay.study import plots

    with rc_context(plots.STYLE):
        figure, grid = plots.panels(1, 1, 7.6, 5.0)
    axes = grid[0, 0]
    sizes = {n: _transitions(n) for n in cells["oracle"]}
    # from top to bottom as the lines end
    for agent, row in reversed(cells.items()):
        finite = [n for n in row if np.isfinite(row[n][1])]
        lower, median, upper = np.array([row[n] for n in finite]).reshape(-1, 3).T
        memory, colour = [sizes[n] for n in finite], {**plots.COLOURS, **COLOURS}[agent]
        axes.plot(memory, median, marker="o", markersize=3.5, linewidth=1.8, color=colour, label=_name(agent))
        # an infinite quartile reaches beyond the picture
        high = np.minimum(upper, 10 * median)
        axes.fill_between(memory, lower, high, color=colour, alpha=plots.BAND, linewidth=0)
    ends = [min(sizes.values()), max(sizes.values())]
    axes.plot(ends, ends, color=plots.GREY, linestyle=":", linewidth=1.2, label="one pass through the memory")
    axes.set(xscale="log", yscale="log", xlabel="transitions in the memory, $2^{n+1} - 2$")
    axes.set_ylabel("updates until the values are right")
    axes.set_title("Blind Cliffwalk: median over seeds, band between the quartiles", fontsize="medium", pad=12)
    above = axes.secondary_xaxis("top")
    shown = list(sizes)[:: 1 if len(sizes) <= 10 else 2]
    above.set_xticks([sizes[n] for n in shown], [str(n) for n in shown])
    above.minorticks_off()
    above.set_xlabel("states n")
    figure.legend(loc="outside right center", frameon=False)
    return plots.save(figure, path)


def _report(cells: Cells, facts: Mapping[str, str]) -> str:
    rows = [[str(n), f"{_transitions(n):,}", *[_quartiles(row[n]) for row in cells.values()]] for n in cells["oracle"]]
    header = ["agent", "updates", "updates over the oracle's", "of uniform", "per transition"]
    parts = [
        "# Blind Cliffwalk",
        INTRODUCTION,
        f"![updates until convergence]({PICTURE})",
        "## Updates until convergence",
        "Median over seeds, quartiles in brackets; a run that did not converge counts as ∞.",
        table(["n", "transitions", *map(_name, cells)], rows),
        "## Growth",
        GROWTH,
        table(header, [_growth(cells, agent) for agent in cells]),
        "## Conditions",
        "\n".join(f"- {line}" for line in [*CONDITIONS, *[f"{name}: {text}" for name, text in facts.items()]]),
    ]
    return "\n\n".join(parts) + "\n"


def _growth(cells: Cells, agent: str) -> list[str]:
    """A row of the table of growth, over the numbers of states at which every agent has a finite median."""
    known = [n for n in cells[agent] if all(np.isfinite(row[n][1]) for row in cells.values())]
    medians = {n: cells[agent][n][1] for n in known}
    laws = map(growth, (medians, {n: median / cells["oracle"][n][1] for n, median in medians.items()}))
    told = [f"× {law[0]:.2f}, {'' if law[1] else 'not '}exponential" if law else "–" for law in laws]
    shares = [f"{medians[n] / cells['uniform'][n][1]:.1%}" for n in known]
    passes = [f"{medians[n] / _transitions(n):.2f}" for n in known]
    return [_name(agent), *told, *[column[-1] if known else "–" for column in (shares, passes)]]


def _quartiles(cell: NDArray[np.float64]) -> str:
    lower, median, upper = ("∞" if np.isinf(value) else f"{value:,.0f}" for value in cell)
    return f"{median} [{lower}, {upper}]"


def _transitions(states: int) -> int:
    return 2 ** (states + 1) - 2


def _name(agent: str) -> str:
    return "rank-based" if agent == "rank" else agent
