"""The samplers: frozen settings for how a buffer samples. The buffer owns all state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpu_replay.validation import MOST_EXPONENT, check_choice, check_float, check_int


def _flag(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner} {name} must be True or False; found {value!r}.")


def _put(settings: object, **numbers: float | None) -> None:
    """Let the frozen settings hold plain numbers, of whatever type those were that were given."""
    for name, number in numbers.items():
        object.__setattr__(settings, name, number)


@dataclass(frozen=True)
class LinearSchedule:
    """Goes from `start` to `end` in `steps` equal steps, then stays at `end`.

    steps: number of `sample` calls from `start` to `end`, at least 1.

    The buffer counts the steps (one for each `sample`), so that the count is checkpointed and, on CUDA, lives on
    the device. Raises TypeError or ValueError for numbers beyond 1e100 and for `steps` below 1 or beyond 63 bits.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _put(
            self,
            start=check_float("LinearSchedule start", self.start, -MOST_EXPONENT, MOST_EXPONENT),
            end=check_float("LinearSchedule end", self.end, -MOST_EXPONENT, MOST_EXPONENT),
            steps=check_int("LinearSchedule steps", self.steps, 1, 2**63 - 1),
        )

    def __call__(self, step: int) -> float:
        """The value after `step` samples."""
        return self.start + (self.end - self.start) * min(step, self.steps) / self.steps


@dataclass(frozen=True)
class Uniform:
    """Every stored transition is equally likely.

    replacement: False draws `B` distinct transitions in random order (`B > len(buffer)` is a ValueError);
                 True draws each row independently.
    """

    replacement: bool = False

    def __post_init__(self) -> None:
        _flag("Uniform", "replacement", self.replacement)


@dataclass(frozen=True)
class Proportional:
    """P(i) is proportional to mass(i) = min(priority + eps, clip) ** alpha.

    alpha:      0 is uniform, 1 fully proportional; at least 0.
    beta:       exponent of the importance weights, a number at least 0 or a LinearSchedule.
    eps:        added to every priority. A mass is never below one unit, 2^-20: a priority of 0 with `eps=0` counts as
                that, and so do TD errors below 1e-6 with `alpha=1` (with `alpha=0.6` below 1e-10). Masses are whole
                units, so with alpha near 1 small ones are coarse: with `alpha=1` that of a TD error is off by up to
                0.5% from 1e-4 on, 4% from 1e-5 on, 20% from 1e-6 on and 33% below (with `alpha=0.6` 0.2% at most).
                Weights are those of the rounded masses, so they stay consistent.
    clip:       largest value of priority + eps, or None.
    initial:    priority of new transitions: "running" the largest ever given (1.0 before any), "stored" the largest
                among those stored now (1.0 when there is none), or a number.
    normalize:  weights are divided by the largest in the batch ("batch"), or by the largest that any stored
                transition could get ("buffer").
    stratified: one draw from each of `B` equal parts of the total mass; False draws independently.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    alpha: float = 0.6
    beta: float | LinearSchedule = 0.4
    eps: float = 1e-6
    clip: float | None = None
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        _check_prioritized(self)
        clip = None if self.clip is None else check_float("Proportional clip", self.clip, above=True)
        _put(self, eps=check_float("Proportional eps", self.eps, high=MOST_EXPONENT), clip=clip)


@dataclass(frozen=True)
class RankBased:
    """P(i) is proportional to 1 / rank(i) ** alpha: rank 1 has the largest priority, equal ones go by smaller key.

    alpha:        0 is uniform; at least 0.
    beta:         exponent of the importance weights, a number at least 0 or a LinearSchedule.
    initial, normalize: as in Proportional.
    stratified:   one draw from each of `B` parts of equal probability; False draws independently.

    Ranks are exact at every `sample`. Outliers among the priorities do not matter here, only their order.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    alpha: float = 0.7
    beta: float | LinearSchedule = 0.5
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        _check_prioritized(self)


def _check_prioritized(sampler: Proportional | RankBased) -> None:
    """Check the settings that both samplers have, or raise TypeError / ValueError."""
    owner = type(sampler).__name__
    _put(sampler, alpha=check_float(f"{owner} alpha", sampler.alpha, high=MOST_EXPONENT))
    if isinstance(sampler.beta, LinearSchedule):
        check_float(f"{owner} beta.start", sampler.beta.start)
        check_float(f"{owner} beta.end", sampler.beta.end)
    else:
        _put(sampler, beta=check_float(f"{owner} beta", sampler.beta, high=MOST_EXPONENT))
    if isinstance(sampler.initial, str):
        if sampler.initial not in ("running", "stored"):
            raise ValueError(f"{owner} initial must be 'running', 'stored' or a number; found {sampler.initial!r}.")
    else:
        _put(sampler, initial=check_float(f"{owner} initial", sampler.initial))
    check_choice(f"{owner} normalize", sampler.normalize, ("batch", "buffer"))
    _flag(owner, "stratified", sampler.stratified)


@dataclass(frozen=True)
class Latest:
    """The newest `B` transitions, newest last, for on-policy learning."""


@dataclass(frozen=True)
class Combined:
    """`base` for the first `B - newest` rows, then the `newest` newest transitions: combined experience replay.

    The newest rows have probability 1 and weight 1: they are always in the batch.

    Zhang and Sutton 2017, "A Deeper Look at Experience Replay".
    """

    base: Uniform | Proportional | RankBased
    newest: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.base, (Uniform, Proportional, RankBased)):
            raise TypeError(
                f"Combined base must be Uniform(...), Proportional(...) or RankBased(...); found {self.base!r}."
            )
        _put(self, newest=check_int("Combined newest", self.newest, 1))


Sampler = Uniform | Proportional | RankBased | Latest | Combined
