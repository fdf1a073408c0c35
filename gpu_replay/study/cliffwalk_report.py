"""What a Blind Cliffwalk leaves behind: a table of runs, a log-log picture like the paper's, and a page of Markdown."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.console.atomic_files import replace, write_text
from gpu_replay.console.markdown import table
from gpu_replay.study.cliffwalk_agents import AGENTS, PRIORITIZED, Outcome
from gpu_replay.study.cliffwalk_summary import (
    NAMES,
    Cell,
    gap_words,
    growth_of,
    of_agent,
    order_words,
    prioritized_words,
    summarise,
)
from gpu_replay.study.style import BAND, QUIET, colours, panels, save

RUNS, PICTURE, REPORT = "cliffwalk.csv", "cliffwalk.png", "cliffwalk.md"
LOOK = {**colours(()), "oracle": "#000000", "greedy": "#56B4E9"}
NOTHING = "–"


def write_cliffwalk(folder: Path, outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> list[Path]:
    """Write cliffwalk.csv, cliffwalk.png and cliffwalk.md, and return their paths.

    facts: what the report should say about the run, name to text.
    """
    cells = summarise(outcomes)
    ordered = sorted(outcomes, key=lambda each: (AGENTS.index(each.agent), each.states, each.seed))
    return [
        replace(folder / RUNS, lambda path: _write_runs(path, ordered)),
        replace(folder / PICTURE, lambda path: _draw(path, cells)),
        write_text(folder / REPORT, _report(cells, facts)),
    ]


def _write_runs(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        for each in outcomes:
            writer.writerow({**asdict(each), "converged": int(each.converged), "seconds": f"{each.seconds:.3f}"})


def _draw(path: Path, cells: Sequence[Cell]) -> Path:
    figure, grid = panels(1, 1, 7.6, 5.0)
    axes = grid[0][0]
    for agent in AGENTS:
        found = [cell for cell in of_agent(cells, agent).values() if np.isfinite(cell.median)]
        if not found:
            continue
        memory = [cell.transitions for cell in found]
        look: dict[str, Any] = {"color": LOOK[agent], "label": NAMES[agent]}
        axes.plot(memory, [cell.median for cell in found], marker="o", markersize=3.5, linewidth=1.8, **look)
        # an endless quartile goes as far as the picture does
        high = [cell.upper if np.isfinite(cell.upper) else 10 * cell.median for cell in found]
        axes.fill_between(memory, [cell.lower for cell in found], high, color=LOOK[agent], alpha=BAND, linewidth=0)
    sizes = {cell.states: cell.transitions for cell in cells}
    ends = [min(sizes.values()), max(sizes.values())]
    axes.plot(ends, ends, color=QUIET, linestyle=":", linewidth=1.2, label="one pass through the memory")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("transitions in the memory, $2^{n+1} - 2$")
    axes.set_ylabel("updates until the values are right")
    axes.set_title("Blind Cliffwalk: median over seeds, band between the quartiles", fontsize="medium", pad=12)
    above = axes.secondary_xaxis("top")
    shown = [n for i, n in enumerate(sorted(sizes)) if len(sizes) <= 10 or i % 2 == 0]
    above.set_xticks([sizes[n] for n in shown], [str(n) for n in shown])
    above.minorticks_off()
    above.set_xlabel("states n")
    handles, labels = axes.get_legend_handles_labels()
    # from top to bottom as the lines end
    order = [*reversed(range(len(handles) - 1)), len(handles) - 1]
    figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside right center", frameon=False)
    return save(figure, path)


def _report(cells: Sequence[Cell], facts: Mapping[str, str]) -> str:
    agents = [agent for agent in AGENTS if of_agent(cells, agent)]
    by_agent = {agent: of_agent(cells, agent) for agent in agents}
    rows = []
    for states in sorted({cell.states for cell in cells}):
        known = {agent: found[states] for agent, found in by_agent.items() if states in found}
        transitions = next(iter(known.values())).transitions
        rows.append([str(states), f"{transitions:,}", *[_cell(known[a]) if a in known else NOTHING for a in agents]])
    censored = [cell for cell in cells if cell.censored]
    parts = [
        "# Blind Cliffwalk",
        "A chain of n states with two actions each; the wrong one ends the episode with 0, the last right one with 1. "
        "The memory holds every sequence of n actions, each until its end, in random order. Tabular Q-learning with "
        "discount 1 - 1/n and step size 1/4 takes one transition at a time until the mean squared error of its values "
        "is below 0.001. After Schaul et al. 2016, *Prioritized Experience Replay*, section 3 and appendix B.1.",
        "## What it shows",
        _bullets([order_words(cells), gap_words(cells), *prioritized_words(cells)]),
        f"![updates until convergence]({PICTURE})",
        "## Updates until convergence",
        "Median over seeds, quartiles in brackets.",
        table(["n", "transitions", *[NAMES[agent] for agent in agents]], rows),
        "## Growth",
        "By what the median updates are multiplied for each state, fitted to all numbers of states, and whether an "
        "exponential fits them better than a power of n.",
        table(["agent", "per state", "exponential"], [[NAMES[a], *_growth(cells, a)] for a in agents]),
        "## Conditions",
        _bullets([*_conditions(), *[f"{name}: {text}" for name, text in facts.items()]]),
    ]
    if censored:
        names = ", ".join(f"{c.agent} at {c.states} states ({c.censored} of {c.runs})" for c in censored)
        parts.insert(4, f"**Runs that had not converged when they were stopped** count as endless: {names}.")
    return "\n\n".join([*parts, ""])


def _conditions() -> list[str]:
    samplers = "; ".join(str(sampler) for sampler in PRIORITIZED.values())
    return [
        "The oracle knows the true values and takes the transition whose update lowers the error most.",
        "Greedy takes the transition with the largest last TD error, those never taken first.",
        f"Proportional and rank-based draw from this package's ReplayBuffer, one transition at a time: {samplers}. New "
        "transitions have the largest priority so far; updates carry no importance weights, since nothing here is "
        "random but the draws.",
        "Initial values are normal with standard deviation 0.1. Agents of one seed share memory and initial values.",
    ]


def _cell(cell: Cell) -> str:
    def written(value: float) -> str:
        return f"{value:,.0f}" if np.isfinite(value) else "∞"

    return f"{written(cell.median)} [{written(cell.lower)}, {written(cell.upper)}]"


def _growth(cells: Sequence[Cell], agent: str) -> tuple[str, str]:
    law = growth_of(cells, agent)
    if law is None:
        return NOTHING, NOTHING
    return f"× {law.factor:.2f}", "yes" if law.exponential else "no"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
