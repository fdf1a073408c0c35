"""The command `gpu-replay study cliffwalk`: the paper's own experiment, from arguments to runs, plot and report."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_replay.checkpoint.files import replace_text
from gpu_replay.console.arguments import pathname, positive
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.markdown import bullets, table
from gpu_replay.console.versions import cpu_cores, cpu_model, versions
from gpu_replay.study.blind_cliffwalk import LEARNERS, PRIORITIZED, Outcome, solve
from gpu_replay.study.workers import run_all

if TYPE_CHECKING:
    from pandas import DataFrame, Series

DESCRIPTION = (
    "The Blind Cliffwalk of Schaul et al. 2016 (Figure 1 and section 3): updates that tabular Q-learning needs until "
    "its values are right, over the number of states, for uniform, oracle, greedy, proportional and rank-based "
    "replay. Writes cliffwalk.csv, cliffwalk.png and cliffwalk.md."
)
FEWEST_STATES, MOST_STATES = 2, 20
PICTURE = "cliffwalk.png"
TEMPLATE = Path(__file__).with_name("cliffwalk.md")
NAMES = {agent: "rank-based" if agent == "rank" else agent for agent in LEARNERS}
QUARTILES = (0.25, 0.5, 0.75)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    states = f"largest number of states, {FEWEST_STATES} to {MOST_STATES}; each one doubles the time (default: 13)"
    limit = "a run that has not converged by then is stopped and marked as such (default: 10,000,000)"
    number: Any = {"type": positive, "metavar": "N"}
    parser.add_argument("--output", type=pathname, required=True, metavar="DIR", help="folder for what is written")
    parser.add_argument("--states-max", default=13, help=states, **number)
    parser.add_argument("--seeds", default=10, help="runs of each (default: 10)", **number)
    parser.add_argument("--max-updates", default=10_000_000, help=limit, **number)
    parser.add_argument("--jobs", help="processes (default: all cores)", **number)


def run(options: argparse.Namespace) -> int:
    """Run everything and write the files. Raises UserError for options that make no sense."""
    require("matplotlib", "pandas", "scipy", "tqdm", purpose="the study")
    if not FEWEST_STATES <= options.states_max <= MOST_STATES:
        raise UserError(f"--states-max must be {FEWEST_STATES} to {MOST_STATES}; found {options.states_max}.")
    folder: Path = options.output
    jobs = options.jobs or cpu_cores()
    start = time.perf_counter()
    # the longest first
    runs = itertools.product(range(options.states_max, FEWEST_STATES - 1, -1), LEARNERS, range(options.seeds))
    tasks = {f"{agent}-{n}-seed{seed}": (agent, n, seed, options.max_updates) for n, agent, seed in runs}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # before the runs, which take long
        (folder / "cliffwalk.csv").touch()
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror or error}.") from None
    outcomes = [found for _, found in run_all(solve, tasks, jobs)]
    facts = {
        "seeds": f"{options.seeds}, at most {options.max_updates:,} updates each",
        "time": f"{time.perf_counter() - start:,.0f} s, {jobs} at a time, on {cpu_model()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    print(*write_cliffwalk(folder, outcomes, facts), sep="\n")
    return 0


def write_cliffwalk(folder: Path, outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> list[Path]:
    """Write cliffwalk.csv, cliffwalk.png and cliffwalk.md, and return their paths.

    facts: name to text, what the report says about the run.
    """
    import pandas as pd

    runs = pd.DataFrame(outcomes)
    runs["agent"] = pd.Categorical(runs["agent"], LEARNERS)
    runs = runs.sort_values(["agent", "states", "seed"])
    rows = runs.assign(converged=runs["converged"].astype(int))
    cells = summarize(runs)
    return [
        replace_text(folder / "cliffwalk.csv", rows.to_csv(index=False, float_format="%.3f", lineterminator="\n")),
        _draw(folder / PICTURE, cells),
        replace_text(folder / "cliffwalk.md", _report(cells, facts)),
    ]


def summarize(runs: DataFrame) -> DataFrame:
    """The quartiles of the updates: one row per number of states, columns (quartile, agent).

    Runs that did not converge count as infinite.
    """
    import pandas as pd

    # integers would be cast back from infinite quartiles
    updates = runs["updates"].astype(float).where(runs["converged"], np.inf)

    def quartile(group: Series, share: float) -> float:
        # unlike np.quantile, np.interp leaves no NaN between infinite values
        return float(np.interp(share * (len(group) - 1), range(len(group)), group.sort_values()))

    groups = updates.groupby([runs["states"], runs["agent"]], observed=True)
    return pd.concat({share: groups.agg(quartile, share).unstack() for share in QUARTILES}, axis=1)


def growth(values: Series) -> tuple[float, bool] | None:
    """The factor per state of an exponential fitted to n -> value, and whether growth is exponential.

    It is if the exponential fits better than a power of n and the factor is at least 1.2. None for fewer than four
    values.
    """
    from scipy import stats

    if len(values) < 4:
        return None
    sizes, logs = values.index, np.log(values)
    exponential, power = stats.linregress(sizes, logs), stats.linregress(np.log(sizes), logs)
    factor = float(np.exp(exponential.slope))
    return factor, factor >= 1.2 and exponential.rvalue**2 > power.rvalue**2


def _draw(path: Path, cells: DataFrame) -> Path:
    from matplotlib import rc_context

    from gpu_replay.console.figures import GREY, PALETTE, panels, save
    from gpu_replay.study.plots import COLOURS, SHADE, STYLE

    colours = {**COLOURS, "oracle": PALETTE[0], "greedy": PALETTE[-1]}
    with rc_context(STYLE):
        figure, grid = panels(1, 1, 7.6, 5.0)
    axes = grid[0, 0]
    memory = _transitions(cells.index)
    # from top to bottom as the lines end
    for agent in reversed(cells[0.5].columns):
        lower, median, upper = (cells[share][agent] for share in QUARTILES)
        # an infinite median ends the line, an infinite quartile reaches beyond the plot
        shown = np.isfinite(median)
        high = np.minimum(upper, 10 * median)[shown]
        look: Any = {"color": colours[agent], "marker": "o", "markersize": 3.5, "linewidth": 1.8}
        axes.plot(memory[shown], median[shown], label=NAMES[agent], **look)
        axes.fill_between(memory[shown], lower[shown], high, color=colours[agent], **SHADE)
    ends = [memory.min(), memory.max()]
    axes.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.2, label="one pass through the memory")
    axes.set(xscale="log", yscale="log", xlabel="transitions in the memory, $2^{n+1} - 2$")
    axes.set_ylabel("updates until the values are right")
    axes.set_title("Blind Cliffwalk: median over seeds, band between the quartiles", fontsize="medium", pad=12)
    above = axes.secondary_xaxis("top")
    shown = cells.index[:: 1 if len(cells) <= 10 else 2]
    above.set_xticks(_transitions(shown), map(str, shown))
    above.minorticks_off()
    above.set_xlabel("states n")
    figure.legend(loc="outside right center", frameon=False)
    return save(figure, path)


def _report(cells: DataFrame, facts: Mapping[str, str]) -> str:
    medians, agents = cells[0.5], list(cells[0.5])
    rows = [
        [str(n), f"{_transitions(n):,}", *[_quartiles(cells.loc[n].xs(agent, level=1)) for agent in agents]]
        for n in cells.index
    ]
    header = ["agent", "updates", "updates over the oracle's", "of uniform", "per transition"]
    # the numbers of states at which every agent has a finite median
    known = medians[np.isfinite(medians).all(axis=1)]
    return TEMPLATE.read_text(encoding="utf-8").format(
        **PRIORITIZED,
        picture=PICTURE,
        updates=table(["n", "transitions", *[NAMES[agent] for agent in agents]], rows),
        growth=table(header, [[NAMES[agent], *_growth(known, agent)] for agent in agents]),
        facts=bullets(f"{name}: {text}" for name, text in facts.items()),
    )


def _growth(medians: DataFrame, agent: str) -> list[str]:
    """An agent's cells in the table of growth."""
    own = medians[agent]
    laws = map(growth, (own, own / medians["oracle"]))
    told = [f"× {law[0]:.2f}, {'' if law[1] else 'not '}exponential" if law else "–" for law in laws]
    if medians.empty:
        return [*told, "–", "–"]
    last = own.iloc[-1]
    return [*told, f"{last / medians['uniform'].iloc[-1]:.1%}", f"{last / _transitions(medians.index[-1]):.2f}"]


def _quartiles(cell: Series) -> str:
    lower, median, upper = ("∞" if np.isinf(value) else f"{value:,.0f}" for value in cell)
    return f"{median} [{lower}, {upper}]"


def _transitions(states: Any) -> Any:
    return 2 ** (states + 1) - 2
