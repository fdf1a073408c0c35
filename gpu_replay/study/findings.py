"""Sentences made from numbers: every claim of the report follows signs and intervals, none stands beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpu_replay.study.analysis import (
    PAIRS,
    PREDICTORS,
    Connection,
    Estimate,
    Point,
    method_share,
    stronger,
)
from gpu_replay.study.results import label

NOTHING = "–"
CHANCE = 0.05
TD = ("td_mean", "td_max", "td_std")


def number(value: float) -> str:
    """Three significant digits, a dash for what is not there."""
    if np.isnan(value):
        return NOTHING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def interval(found: Estimate, digits: int | None = None) -> str:
    """A value with its interval, "n/a" where there is none."""

    def written(value: float) -> str:
        return number(value) if digits is None else f"{value:+.{digits}f}"

    if np.isnan(found.value):
        return NOTHING
    bounds = f"[{written(found.low)}, {written(found.high)}]" if found.bounded else "[n/a]"
    return f"{written(found.value)} {bounds}"


def chance(p: float) -> str:
    """A p-value."""
    return f"p < {0.001:g}" if p < 0.001 else f"p = {p:.2g}"


def strength(value: float) -> str:
    """Cohen's words for a correlation."""
    size = abs(value)
    return "weak" if size < 0.3 else "moderate" if size < 0.5 else "strong"


def answer(found: Sequence[Point], connections: Sequence[Connection]) -> list[str]:
    """The question of the study, one sentence for each thing that the numbers allow to say; the verdict first."""
    places = list(dict.fromkeys(point.environment for point in found))
    # with one environment there is no pool
    place = None if len(places) > 1 else places[0]
    pooled = {each.predictor: each for each in connections if each.place == place}
    main, *others = [pooled[name] for name in TD]
    more = ", ".join(f"{PREDICTORS[each.predictor]} {_rho(each)} ({standing(each)})" for each in others)
    return [
        f"**{verdict(pooled)}**",
        *[differences([point for point in found if point.environment == each], each) for each in places],
        "The i.i.d. property expects a negative ρ: the fewer correlated pairs, the better. "
        + connection_sentence(pooled[PAIRS]),
        "The size of the TD errors expects a positive ρ: the more there is to learn, the better. "
        f"{connection_sentence(main)} The others: {more}.",
        *[comparison(found, name, place) for name in ("td_mean", "td_max")],
    ]


def standing(found: Connection) -> str:
    """How a correlation stands to what its explanation expects, by its intervals with and without hindsight."""
    if found.why_not or not found.overall.bounded:
        return "undefined"
    sign = _sign(found.overall)
    if found.plain_goal is not None and found.plain_goal.bounded and _sign(found.plain_goal) != sign:
        return "depends on hindsight"
    if sign == 0:
        return "no evidence"
    return "as expected" if sign == (-1 if found.predictor == PAIRS else 1) else "the opposite"


def verdict(pooled: Mapping[str, Connection]) -> str:
    """Which of the two explanations fits, in one line."""
    pairs = standing(pooled[PAIRS])
    if {pairs, *(standing(pooled[name]) for name in TD)} == {"undefined"}:
        return "Nothing can be told about either explanation: there is no correlation with an interval."
    fitting = [PREDICTORS[name] for name in TD if standing(pooled[name]) == "as expected"]
    names = " and ".join(fitting)
    told = {
        "undefined": "what the i.i.d. property does cannot be told",
        "depends on hindsight": "what correlated pairs say depends on whether hindsight is counted",
        "no evidence": "correlated pairs show no connection with the returns",
        "the opposite": "more correlated pairs went with higher returns, against the i.i.d. explanation",
    }
    if pairs == "as expected":
        if fitting:
            return f"Both fit: fewer correlated pairs and larger TD errors ({names}) went with higher returns."
        return (
            "Only the i.i.d. property fits throughout: fewer correlated pairs went with higher returns; "
            f"{_td_words(pooled)}."
        )
    if fitting:
        return (
            f"Only the size of the TD errors fits throughout: larger ones ({names}) went with higher returns; "
            f"{told[pairs]}."
        )
    return f"Neither explanation fits: {told[pairs]}; {_td_words(pooled)}."


def _td_words(pooled: Mapping[str, Connection]) -> str:
    """What the TD statistics show where none is as expected."""
    told = {
        "undefined": "cannot be told",
        "depends on hindsight": "depend on whether hindsight is counted",
        "no evidence": "show no connection",
        "the opposite": "were larger where returns were lower",
    }
    by_standing: dict[str, list[str]] = {}
    for name in TD:
        by_standing.setdefault(standing(pooled[name]), []).append(PREDICTORS[name])
    if len(by_standing) == 1:
        return f"TD errors {told[next(iter(by_standing))]}"
    return ", ".join(f"{' and '.join(names)} {told[each]}" for each, names in by_standing.items())


def place_sentence(place: str, connections: Sequence[Connection]) -> str:
    """What all correlations of one environment say, in one line."""
    here = [each for each in connections if each.place == place]
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "none": []}
    absent: dict[str, list[str]] = {}
    for each in here:
        name = PREDICTORS[each.predictor]
        if each.why_not:
            absent.setdefault(each.why_not, []).append(name)
            continue
        sign = _sign(each.overall)
        groups["higher" if sign > 0 else "lower" if sign < 0 else "none"].append(f"{name} ({_rho(each)})")
    ways = {"higher": "rise", "lower": "fall"}
    parts = [f"returns {verb} with {_listed(groups[way])}" for way, verb in ways.items() if groups[way]]
    if groups["none"]:
        parts.append(f"no evidence for {_listed(groups['none'])}")
    parts += [f"nothing can be said of {_listed(names)}: {why}" for why, names in absent.items()]
    return f"{place}: {'; '.join(parts)}."


def differences(group: Sequence[Point], place: str) -> str:
    """Whether the methods differ in an environment at all, and which is best."""
    share, p = method_share(group)
    finals = [point.final for point in group]
    if np.ptp(finals) == 0:
        return (
            f"{place}: all {len(group)} runs end with a mean return of {number(finals[0])}: there is no difference to "
            "explain."
        )
    names = list(dict.fromkeys(point.method for point in group))
    means = {name: float(np.mean([p.final for p in group if p.method == name])) for name in names}
    order = sorted(names, key=lambda name: -means[name])
    best, worst = number(means[order[0]]), number(means[order[-1]])
    ends = f"go from {best} ({label(order[0])}) to {worst} ({label(order[-1])})" if best != worst else f"are all {best}"
    if len(names) < 2:
        return f"{place}: one method only, {label(order[0])}, with a mean return of {best}."
    if np.isnan(share):
        return f"{place}: mean returns {ends}; one run for each method says nothing about chance."
    verdict = "the methods differ" if p < CHANCE else "the differences between methods may be chance"
    return (
        f"{place}: mean returns {ends}; the method accounts for {share:.0%} of the variance of their ranks "
        f"({chance(p)} by permutation), so {verdict}."
    )


def connection_sentence(found: Connection) -> str:
    """What one correlation allows to say."""
    name = PREDICTORS[found.predictor]
    where = "Over all environments (ranks within each)" if found.place is None else f"On {found.place}"
    if found.why_not:
        return f"{where} {name} cannot be correlated with returns: {found.why_not}."
    value = found.overall
    told = f"ρ = {interval(value, 2)} over {found.runs} runs"
    if not value.bounded:
        sentence = f"{where} {name}: {told}; without an interval this is no evidence."
    elif value.low <= 0 <= value.high:
        sentence = f"{where} there is no evidence of a connection between {name} and returns ({told}; it contains 0)."
    else:
        direction = "higher" if value.value > 0 else "lower"
        larger = f"more {name} go" if found.predictor == PAIRS else f"a larger {name} goes"
        sentence = f"{where} {larger} with {direction} returns, a {strength(value.value)} connection ({told})."
    return " ".join(part for part in (sentence, _without_hindsight(found), _between(found)) if part)


def comparison(found: Sequence[Point], predictor: str, place: str | None) -> str:
    """Whether correlated pairs or a TD statistic goes more closely with the returns."""
    names = f"{PREDICTORS[PAIRS]} and {PREDICTORS[predictor]}"
    difference = stronger(found, PAIRS, predictor, place)
    if difference is None:
        return f"Nothing tells {names} apart: no environment has a correlation for both."
    told = f"|ρ| of the first minus |ρ| of the second: {interval(difference, 2)}"
    if not difference.bounded or difference.low <= 0 <= difference.high:
        return f"The runs do not tell {names} apart as explanations ({told})."
    closer = PREDICTORS[PAIRS] if difference.value > 0 else PREDICTORS[predictor]
    return f"Of {names}, {closer} goes more closely with returns ({told})."


def _without_hindsight(found: Connection) -> str:
    if found.plain_goal is None or not found.plain_goal.bounded:
        return ""
    changed = _sign(found.plain_goal) != _sign(found.overall)
    told = f"Without the runs of hindsight ρ = {interval(found.plain_goal, 2)}"
    return f"{told}, which changes the verdict." if changed else f"{told}, the same verdict."


def _between(found: Connection) -> str:
    """The means of the methods: so few points that only a large correlation says anything."""
    if np.isnan(found.between.value):
        return ""
    told = f"Between the means of the {found.methods} methods ρ = {interval(found.between, 2)}"
    if np.isnan(found.between_p):
        return f"{told}."
    verdict = "more than chance gives" if found.between_p < CHANCE else "which chance alone gives easily"
    return f"{told}, {verdict} with so few points (exact {chance(found.between_p)})."


def _sign(found: Estimate) -> int:
    """1 or -1 for an interval on one side of 0, 0 for all else."""
    if not found.bounded or found.low <= 0 <= found.high:
        return 0
    return 1 if found.value > 0 else -1


def _rho(found: Connection) -> str:
    return f"ρ = {interval(found.overall, 2)}" if not found.why_not else "ρ undefined"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
