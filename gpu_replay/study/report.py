"""The report of a study: pictures, tables, and the answer in words, all from `episodes.csv` and `settings.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.console.atomic_files import replace, write_text
from gpu_replay.console.errors import require
from gpu_replay.console.markdown import table
from gpu_replay.study.analysis import (
    LAST,
    LEVEL,
    PREDICTORS,
    RESAMPLES,
    SEED,
    TWO_COMPONENTS,
    Connection,
    Point,
    connections,
    mean_over_seeds,
    points,
)
from gpu_replay.study.findings import NOTHING, answer, chance, interval, number, place_sentence
from gpu_replay.study.plots import (
    band_words,
    draw_durations,
    draw_durations_by_method,
    draw_pairs,
    draw_q_values,
    draw_td_errors,
)
from gpu_replay.study.results import Run, Study, label, read_study
from gpu_replay.study.scatter import draw_explained, draw_final_returns

REPORT = "report.md"
TD_COLUMNS = {"td_mean": "mean", "td_median": "median", "td_max": "max", "td_std": "std", "q_mean": "mean Q"}


def write_report(folder: Path) -> list[Path]:
    """Read a study's folder, write its pictures and `report.md` there, and return what was written.

    Only whole runs count; a folder without any gets a report that says so. Raises UserError for files that are missing
    or damaged, and without matplotlib.
    """
    require("matplotlib", purpose="the pictures of the study")
    study = read_study(folder)
    if not study.runs:
        return [write_text(folder / REPORT, "\n\n".join([TITLE, *_warnings(study), "No run is whole yet.", ""]))]
    found = points(study)
    related = connections(found)
    pictures = _draw(folder, study, found, related)
    text = "\n\n".join(
        [
            TITLE,
            *_warnings(study),
            "## The answer",
            QUESTION,
            _bullets(answer(found, related)),
            *_performance(study, found),
            *_batches(study, found),
            *_connections(found, related),
            "## Limits",
            _bullets(_limits(study, found)),
            *_settings(study),
            "## Pictures",
            f"Curves: {band_words(study)}.",
            *[f"![{path.stem}]({path.name})" for path in pictures],
            "",
        ]
    )
    return [*pictures, write_text(folder / REPORT, text)]


TITLE = "# Replay methods compared"
QUESTION = (
    "Does the i.i.d. property of the batch (few correlated pairs of states) or the size of the TD errors explain the "
    "differences between the replay methods?"
)


def _draw(folder: Path, study: Study, found: Sequence[Point], related: Sequence[Connection]) -> list[Path]:
    over_episodes: dict[str, Callable[[Study, Path], Path]] = {
        "durations": draw_durations,
        "durations-by-method": draw_durations_by_method,
        "td-errors": draw_td_errors,
        "correlated-pairs": draw_pairs,
        "q-values": draw_q_values,
    }
    drawn = [
        replace(folder / "final-returns.png", lambda path: draw_final_returns(found, path)),
        replace(folder / "explained.png", lambda path: draw_explained(found, related, path)),
    ]
    for name, draw in over_episodes.items():
        drawn.append(replace(folder / f"{name}.png", lambda path, draw=draw: draw(study, path)))  # type: ignore[misc]
    return drawn


def _warnings(study: Study) -> list[str]:
    found = []
    if study.settings.get("quick"):
        found.append(
            "**A smoke run** (`--quick`): so few seeds and episodes show that everything works, and nothing about the "
            "methods."
        )
    if study.unfinished:
        names = ", ".join(f"{_name(run)} ({run.episodes} episodes)" for run in study.unfinished)
        found.append(f"**Unfinished runs are left out everywhere below**: {names}.")
    return found


def _name(run: Run) -> str:
    return f"{run.environment} {run.method} seed {run.seed}"


def _performance(study: Study, found: Sequence[Point]) -> list[str]:
    def cell(group: Sequence[Point]) -> str:
        return interval(mean_over_seeds([point.final for point in group]))

    shortest = min(run.episodes for run in study.runs)
    last = f"last {LAST}" if shortest >= LAST else f"last {LAST} (all {shortest}, where there are fewer)"
    words = (
        f"Mean return of the {last} episodes of a run, mean over seeds with its {LEVEL:.0%} bootstrap interval. With "
        "few seeds such intervals are too narrow."
    )
    return ["## Final performance", words, _by_method(study, found, cell)]


def _batches(study: Study, found: Sequence[Point]) -> list[str]:
    def pairs(group: Sequence[Point]) -> str:
        return interval(mean_over_seeds([point.means["correlated_pairs"] for point in group]))

    rows = []
    for environment in study.environments:
        for method in study.methods:
            group = [p for p in found if (p.environment, p.method) == (environment, method)]
            if group:
                means = [number(float(np.mean([p.means[name] for p in group]))) for name in TD_COLUMNS]
                rows.append([environment, label(method), *means])
    return [
        "## The batches",
        "Correlated pairs of states (|Pearson correlation| > 0.8) per batch: mean over all updates of a run, then over "
        "seeds, with its bootstrap interval.",
        _by_method(study, found, pairs),
        "Statistics of |TD error| within a batch and the mean Q value, averaged over all updates of a run, then over "
        "seeds.",
        table(["environment", "method", *TD_COLUMNS.values()], rows),
    ]


def _by_method(study: Study, found: Sequence[Point], cell: Callable[[Sequence[Point]], str]) -> str:
    rows = []
    for method in study.methods:
        row = [label(method)]
        for environment in study.environments:
            group = [p for p in found if (p.environment, p.method) == (environment, method)]
            row.append(cell(group) if group else NOTHING)
        rows.append(row)
    return str(table(["method", *study.environments], rows))


def _connections(found: Sequence[Point], related: Sequence[Connection]) -> list[str]:
    rows = []
    for each in related:
        place = each.place or "all, by ranks within each"
        if each.why_not:
            rows.append([place, PREDICTORS[each.predictor], "undefined", NOTHING, NOTHING, NOTHING])
            continue
        plain = interval(each.plain_goal, 2) if each.plain_goal is not None else NOTHING
        exact = NOTHING if np.isnan(each.between_p) else chance(each.between_p)
        cells = [interval(each.overall, 2), plain, interval(each.between, 2), exact]
        rows.append([place, PREDICTORS[each.predictor], *cells])
    header = ["environment", "final return with", "over runs", "without hindsight", "over method means", "exact"]
    words = (
        "Spearman's ρ between the final return and the mean of each quantity over all batches of the run, with "
        f"{LEVEL:.0%} percentile bootstrap intervals ({RESAMPLES:,} resamples, seed {SEED}). *Over runs* resamples the "
        "runs of an environment; *over method means* has one point per method, few indeed, and resamples the seeds of "
        "each; *exact* is the share of all orders of the methods with as large a |ρ|. The pool ranks runs within each "
        "environment and leaves out those where nothing can be correlated."
    )
    return [
        "## What goes with performance",
        words,
        table(header, rows),
        "In words:",
        _bullets([place_sentence(place, related) for place in dict.fromkeys(point.environment for point in found)]),
    ]


def _limits(study: Study, found: Sequence[Point]) -> list[str]:
    lines = []
    for environment in study.environments:
        finals = [point.final for point in found if point.environment == environment]
        if np.ptp(finals) == 0:
            lines.append(
                f"On {environment} every run ends with a return of {number(finals[0])}. Equal values have no ranks, so "
                "correlations with them are undefined."
            )
        if environment in TWO_COMPONENTS:
            lines.append(
                f"A state of {environment} has two components. The Pearson correlation of two such vectors is 1 or -1 "
                "(or undefined), so counting correlated pairs says nothing about batches and stays out of the pool."
            )
    if "hindsight" in study.methods:
        lines.append(
            "TD errors, Q values and states of hindsight belong to another task, reaching goals that were reached "
            "anyway; they are not comparable in size with the others. So correlations stand without it as well."
        )
    lines += [
        "TD errors and Q values grow with the returns that are possible and with what has been learned: a method that "
        "learns sees other states and other errors. A correlation here can come from performance to the batch as well "
        "as the other way, or from a third thing. It is no cause.",
        f"{len(PREDICTORS)} quantities in {len(study.environments)} environments are looked at: about 1 in 20 of such "
        "intervals misses 0 by chance alone.",
        _seeds(study),
    ]
    return lines


def _seeds(study: Study) -> str:
    counts = {len(study.of(e, m)) for e in study.environments for m in study.methods if study.of(e, m)}
    told = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    if max(counts) == 1:
        return "One seed for each method: no bands, no intervals over seeds, and nothing about chance."
    return f"{told} seeds for each method and environment: bootstrap intervals from so few points are too narrow."


def _settings(study: Study) -> list[str]:
    found = study.settings
    kind = "tuned for each environment (`--tuned`)" if found.get("tuned") else "those of the tutorial, the default"
    facts = [f"Settings: {kind}."]
    seeds = found.get("seeds")
    if seeds:
        facts.append(f"Seeds: {', '.join(map(str, seeds)) if isinstance(seeds, list) else seeds}.")
    if isinstance(found.get("versions"), dict):
        facts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".")
    if found.get("cpu"):
        facts.append(f"Processor: {found['cpu']}, {found.get('jobs', 'unknown')} processes.")
    if isinstance(found.get("wall_seconds"), (int, float)):
        facts.append(f"It took {found['wall_seconds'] / 60:.1f} minutes.")
    parts = ["## Settings", _bullets(facts)]
    environments = found.get("environments")
    if isinstance(environments, dict) and environments and all(isinstance(v, dict) for v in environments.values()):
        names = list(dict.fromkeys(name for values in environments.values() for name in values if name != "notes"))
        rows = [[name, *[_value(values.get(name)) for values in environments.values()]] for name in names]
        parts.append(table(["setting", *environments], rows))
    if isinstance(found.get("methods"), dict):
        lines = [f"{label(name)}: {_described(described)}" for name, described in found["methods"].items()]
        parts += ["The methods:", _bullets(lines)]
    notes = _notes(found)
    if notes:
        parts += ["Where these settings are known to be poor, and what else to know:", _bullets(notes)]
    return parts


def _described(value: Any) -> str:
    """A method's settings in one line."""
    if not isinstance(value, dict):
        return _value(value)
    return "; ".join(f"{name} {_value(each)}" for name, each in value.items() if name != "label")


def _notes(settings: dict[str, Any]) -> list[str]:
    notes = settings.get("notes")
    found = [str(note) for note in notes] if isinstance(notes, list) else []
    environments = settings.get("environments")
    for name, values in environments.items() if isinstance(environments, dict) else ():
        own = values.get("notes") if isinstance(values, dict) else None
        if isinstance(own, list):
            found += [f"{name}: {note}" for note in own]
    return found


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else NOTHING if value is None else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
