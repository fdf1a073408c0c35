"""The report of a study: plots, tables and fixed sentences, all made from `episodes.csv` and `settings.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_replay.checkpoint.files import replace_text
from gpu_replay.console.markdown import NOTHING, bullets, number, table
from gpu_replay.study import analysis
from gpu_replay.study.analysis import PAIRS, PREDICTORS, Correlation, Estimate
from gpu_replay.study.plots import CURVES, draw_all
from gpu_replay.study.results import read_study
from gpu_replay.study.settings import METHODS

if TYPE_CHECKING:
    from pandas import DataFrame

TD_COLUMNS = {"td_mean": "mean", "td_median": "median", "td_max": "max", "td_std": "std", "q_mean": "mean Q"}
SMOKE_RUN = "**A smoke run** (`--quick`): it shows that everything works, and nothing about the methods."
TEMPLATE = Path(__file__).with_name("report.md")


def write_report(folder: Path) -> list[Path]:
    """Read a finished study's folder, write its plots and `report.md` there, and return their paths.

    Raises UserError if a file is missing or damaged.
    """
    settings, episodes = read_study(folder)
    points = analysis.summarize(episodes)
    found = analysis.correlations(points)
    pictures = draw_all(folder, episodes, points, found)
    undefined = [f"{each.place}, {PREDICTORS[each.predictor]}: {each.why_not}." for each in found if each.why_not]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        **_settings(settings),
        last=analysis.LAST,
        resamples=analysis.RESAMPLES,
        seed=analysis.SEED,
        answer=_answer(points, found),
        differences=_differences(points),
        finals=_by_method(points, "final"),
        pairs=_by_method(points, PAIRS),
        td_errors=_td_errors(points),
        correlations=_correlations(found),
        undefined=bullets(undefined),
        curves=CURVES,
        pictures="\n\n".join(f"![{path.stem}]({path.name})" for path in pictures),
    )
    # an empty section leaves no gap
    return [*pictures, replace_text(folder / TEMPLATE.name, re.sub(r"\n{3,}", "\n\n", text))]


def interval(found: Estimate | None, digits: int | None = None) -> str:
    """A value with its interval, "n/a" if it has none."""
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


def _answer(points: DataFrame, found: Sequence[Correlation]) -> str:
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


def _differences(points: DataFrame) -> str:
    rows = []
    for environment, group in points.groupby("environment", observed=True):
        share, p = analysis.method_share(group)
        finals = group.groupby("method", observed=True)["final"].mean().sort_values(ascending=False, kind="stable")
        best, worst = (f"{number(finals.iloc[at])} ({METHODS[finals.index[at]].name})" for at in (0, -1))
        rows.append([environment, best, worst, NOTHING if np.isnan(share) else f"{share:.0%}", p_value(p)])
    return table(["environment", "best", "worst", "share", "p"], rows)


def _by_method(points: DataFrame, column: str) -> str:
    """Mean over seeds with its interval: a row for each method, a column for each environment."""
    means = points.groupby(["method", "environment"], observed=True)[column].agg(analysis.mean_over_seeds).unstack()
    rows = [[METHODS[method].name, *map(interval, row)] for method, row in zip(means.index, means.values, strict=True)]
    return table(["method", *means.columns], rows)


def _td_errors(points: DataFrame) -> str:
    means = points.groupby(["environment", "method"], observed=True)[list(TD_COLUMNS)].mean()
    rows = [[place, METHODS[method].name, *map(number, row)] for (place, method), *row in means.itertuples()]
    return table(["environment", "method", *TD_COLUMNS.values()], rows)


def _correlations(found: Sequence[Correlation]) -> str:
    rows = []
    for each in found:
        estimates = [interval(value, 2) for value in (each.overall, each.without_hindsight, each.between)]
        place = each.place or "all, by ranks within each"
        rows.append([place, PREDICTORS[each.predictor], *estimates, p_value(each.between_p)])
    return table(["environment", "final return with", "over runs", "without hindsight", "over method means", "p"], rows)


def _settings(found: dict[str, Any]) -> dict[str, str]:
    """The template's texts about the settings."""
    environments, methods, seeds = found["environments"], found["methods"], found["seeds"]
    kind = "tuned for each environment (`--tuned`)" if found["tuned"] else "those of the tutorial, the default"
    header = (
        f"{len(methods)} methods, {len(environments)} environments, {len(seeds)} seeds, "
        f"{len(methods) * len(environments) * len(seeds)} runs. Settings: {kind}. It took "
        f"{found['wall_seconds'] / 60:.0f} minutes on {found['cpu']} (`--jobs {found['jobs']}`)."
    )
    names = next(iter(environments.values()))
    rows = [[name, *[_value(agent[name]) for agent in environments.values()]] for name in names]
    told = ["; ".join(f"{key} {_value(value)}" for key, value in method.items()) for method in methods.values()]
    return {
        "smoke_run": SMOKE_RUN if found["quick"] else "",
        "header": header,
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "settings": table(["setting", *environments], rows),
        "notes": bullets([*told, *found["notes"]]),
    }


def _value(value: Any) -> str:
    return value if isinstance(value, str) else NOTHING if value is None else json.dumps(value)
