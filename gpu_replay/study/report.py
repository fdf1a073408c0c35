"""The report of a study: pictures, tables and fixed sentences, all from `episodes.csv` and `settings.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.markdown import table
from gpu_replay.study import analysis
from gpu_replay.study.analysis import PAIRS, PREDICTORS, Correlation, Estimate, Point
from gpu_replay.study.plots import CURVES, draw_all
from gpu_replay.study.results import Study, read_study
from gpu_replay.study.settings import METHODS

REPORT = "report.md"
NOTHING = "–"
TD_COLUMNS = {"td_mean": "mean", "td_median": "median", "td_max": "max", "td_std": "std", "q_mean": "mean Q"}
SMOKE_RUN = "**A smoke run** (`--quick`): it shows that everything works, and nothing about the methods."
QUESTION = (
    "Does the i.i.d. property of the batch (few correlated pairs of states) or the size of the TD errors explain the "
    "differences between the replay methods? The first predicts a negative ρ between correlated pairs and final "
    "returns, the second a positive ρ between TD errors and final returns."
)
READING = (
    "Spearman's ρ over the runs of all environments in which it is defined, ranked within each, with 95% bootstrap "
    "intervals. *Fits* and *contradicts* need an interval that excludes 0, with and without the runs of hindsight, "
    "whose TD errors belong to another task. *Closer*: |ρ| of correlated pairs minus |ρ| of this quantity, same runs."
)
METHODS_DIFFER = (
    "Whether the methods differ at all: mean returns of the best and the worst method, the share of the variance of "
    "the ranks of the final returns that lies between the methods, and its p-value by permutation."
)
BATCHES = "Correlated pairs of states (|r| > 0.8) per batch: mean over all updates of a run, then over seeds."
CORRELATIONS = (
    "Spearman's ρ between the final return and the mean of each quantity over all batches of the run, with 95% "
    f"percentile bootstrap intervals ({analysis.RESAMPLES:,} resamples, seed {analysis.SEED}). *Over runs* resamples "
    "the runs of an environment; *over method means* has one point per method and resamples the seeds of each; *p* is "
    "exact, over all orders of the methods. The pool leaves out environments where ρ is undefined."
)
LIMITS = (
    "A state of MountainCar-v0 has two components. The Pearson correlation of two such vectors is 1, -1 or undefined, "
    "so counting correlated pairs says nothing about batches and stays out of the pool.",
    "With hindsight the network also sees a goal, and four of five transitions of a batch are relabeled. TD errors and "
    "Q values are those of another task, so correlations are given without it as well.",
    "A method that learns sees other states and larger or smaller errors: a correlation can come from performance to "
    "the batch as well as the other way, or from a third cause.",
    "About 1 in 20 intervals misses 0 by chance alone, and bootstrap intervals from a few seeds are too narrow.",
)


def write_report(folder: Path) -> list[Path]:
    """Read a finished study's folder, write its pictures and `report.md` there, and return what was written.

    Raises UserError for files that are missing or damaged.
    """
    study = read_study(folder)
    points = [analysis.summarize(run, columns) for run, columns in study.runs.items()]
    found = analysis.correlations(points)
    pictures = draw_all(folder, study, points, found)
    parts = [
        "# Replay methods compared",
        SMOKE_RUN if study.settings["quick"] else "",
        _header(study),
        "## The answer",
        QUESTION,
        READING,
        _answer(points, found),
        METHODS_DIFFER,
        _differences(study, points),
        "## Final performance",
        f"Mean return of the last {analysis.LAST} episodes of a run, mean over seeds with its 95% interval.",
        _by_method(study, points, lambda point: point.final),
        "## The batches",
        BATCHES,
        _by_method(study, points, lambda point: point.means[PAIRS]),
        "|TD error| within a batch and the mean Q value: means over all updates of a run, then over seeds.",
        _td_errors(study, points),
        "## What goes with performance",
        CORRELATIONS,
        _correlations(found),
        _bullets(f"{each.place}, {PREDICTORS[each.predictor]}: {each.why_not}." for each in found if each.why_not),
        "## Limits",
        _bullets(LIMITS),
        "## Settings",
        *_settings(study.settings),
        "## Pictures",
        f"Curves: {CURVES}.",
        *[f"![{path.stem}]({path.name})" for path in pictures],
    ]
    return [*pictures, write_text(folder / REPORT, "\n\n".join(filter(None, parts)) + "\n")]


def number(value: float) -> str:
    """Three significant digits, a dash for NaN."""
    if np.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def interval(found: Estimate | None, digits: int | None = None) -> str:
    """A value with its interval, "n/a" where it has none."""
    if found is None or np.isnan(found.value):
        return NOTHING
    value, low, high = (
        number(v) if digits is None else f"{v:+.{digits}f}" for v in (found.value, found.low, found.high)
    )
    return f"{value} [{low}, {high}]" if found.bounded else f"{value} [n/a]"


def p_value(p: float) -> str:
    """A p-value with two digits."""
    return NOTHING if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def verdict(found: Correlation) -> str:
    """Whether a correlation has the sign that its explanation predicts, by its intervals with and without hindsight."""
    if not found.overall.bounded:
        return "undefined"
    sign, plain = found.overall.sign, found.without_hindsight
    if plain is not None and plain.bounded and plain.sign != sign:
        return "depends on hindsight"
    if sign == 0:
        return "no evidence"
    return "fits" if sign == (-1 if found.predictor == PAIRS else 1) else "contradicts"


def _header(study: Study) -> str:
    found = study.settings
    kind = "tuned for each environment (`--tuned`)" if found["tuned"] else "those of the tutorial, the default"
    return (
        f"{len(study.methods)} methods, {len(study.environments)} environments, {len(found['seeds'])} seeds, "
        f"{len(study.runs)} runs. Settings: {kind}. It took {found['wall_seconds'] / 60:.0f} minutes on {found['cpu']} "
        f"(`--jobs {found['jobs']}`)."
    )


def _answer(points: Sequence[Point], found: Sequence[Correlation]) -> str:
    rows = []
    # with one environment there is no pool
    for each in [each for each in found if each.place is None] or found:
        predicted, closer = "negative", NOTHING
        if each.predictor != PAIRS:
            predicted, closer = "positive", interval(analysis.difference(points, PAIRS, each.predictor), 2)
        rho, plain = interval(each.overall, 2), interval(each.without_hindsight, 2)
        rows.append([PREDICTORS[each.predictor], predicted, rho, str(each.runs), plain, verdict(each), closer])
    header = ["final return with", "predicted ρ", "ρ", "runs", "without hindsight", "verdict", "closer"]
    return table(header, rows)


def _differences(study: Study, points: Sequence[Point]) -> str:
    rows = []
    for environment in study.environments:
        share, p = analysis.method_share([point for point in points if point.environment == environment])
        finals = {METHODS[name].name: _group(points, environment, name) for name in study.methods}
        means = {name: float(np.mean([point.final for point in group])) for name, group in finals.items()}
        order = sorted(means, key=lambda name: -means[name])
        best, worst = (f"{number(means[name])} ({name})" for name in (order[0], order[-1]))
        rows.append([environment, best, worst, NOTHING if np.isnan(share) else f"{share:.0%}", p_value(p)])
    return table(["environment", "best", "worst", "share", "p"], rows)


def _by_method(study: Study, points: Sequence[Point], value: Callable[[Point], float]) -> str:
    """Mean over seeds with its interval: a row for each method, a column for each environment."""

    def cell(environment: str, method: str) -> str:
        return interval(analysis.mean_over_seeds([value(point) for point in _group(points, environment, method)]))

    rows = [[METHODS[name].name, *[cell(place, name) for place in study.environments]] for name in study.methods]
    return table(["method", *study.environments], rows)


def _group(points: Sequence[Point], environment: str, method: str) -> list[Point]:
    return [point for point in points if (point.environment, point.method) == (environment, method)]


def _td_errors(study: Study, points: Sequence[Point]) -> str:
    rows = []
    for environment, method in ((place, name) for place in study.environments for name in study.methods):
        group = _group(points, environment, method)
        means = [number(float(np.mean([point.means[name] for point in group]))) for name in TD_COLUMNS]
        rows.append([environment, METHODS[method].name, *means])
    return table(["environment", "method", *TD_COLUMNS.values()], rows)


def _correlations(found: Sequence[Correlation]) -> str:
    rows = []
    for each in found:
        estimates = [interval(value, 2) for value in (each.overall, each.without_hindsight, each.between)]
        place = each.place or "all, by ranks within each"
        rows.append([place, PREDICTORS[each.predictor], *estimates, p_value(each.between_p)])
    return table(["environment", "final return with", "over runs", "without hindsight", "over method means", "p"], rows)


def _settings(found: dict[str, Any]) -> list[str]:
    environments, versions = found["environments"], found["versions"].items()
    names = list(next(iter(environments.values())))
    rows = [[name, *[_value(agent[name]) for agent in environments.values()]] for name in names]
    methods = [
        "; ".join(f"{key} {_value(value)}" for key, value in method.items()) for method in found["methods"].values()
    ]
    return [
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions)}.",
        table(["setting", *environments], rows),
        _bullets([*methods, *found["notes"]]),
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else NOTHING if value is None else json.dumps(value)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
