"""One class per sampler: its settings, and how it draws.

A sampler says what a buffer keeps of priorities, how many rows of a batch are the newest ones, how the others are drawn
on the host, and which branch of the kernel draws them on a device. A call that needs what a sampler does not say is
refused. The buffer owns all state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch import Tensor

from gpu_replay.ops.counters import Counter, HostWords
from gpu_replay.ops.draw import (
    PERMUTATION_WORDS,
    DrawRange,
    permuted_ranks,
    slots_in,
    slots_of,
    targets_in,
    weights_of,
)
from gpu_replay.ops.masses import MassRule, MassTree, OrderRule, Rule
from gpu_replay.ops.ranks import RankedRows
from gpu_replay.stats import (
    Distribution,
    chance_distribution,
    mass_distribution,
    rank_distribution,
    uniform_distribution,
)
from gpu_replay.validation import MOST_EXPONENT, check_bool, check_choice, check_float, check_int

# the first sample asks for the chances of all places of up to so many, and how far from 1 their sum may be
MOST_CHECKED = 1_000_000
SUM_TOLERANCE = 1e-6


def _put(settings: object, **numbers: float | None) -> None:
    """Let the frozen settings hold plain numbers, of whatever type those were that were given."""
    for name, number in numbers.items():
        object.__setattr__(settings, name, number)


@dataclass(frozen=True)
class LinearSchedule:
    """Go from `start` to `end` in `steps` equal steps, then stay at `end`.

    steps: number of `sample` calls from `start` to `end`, at least 1.

    The buffer counts the steps (one per `sample`): checkpoints contain the count, and on CUDA it is on the
    device. Raises TypeError or ValueError for numbers beyond 1e100 and for `steps` below 1 or beyond 63 bits.
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
class Sequences:
    """Let each row of a batch be `length` consecutive steps of one environment, for recurrent agents and world models.

    length: steps `L` of a row, at least 1; a burn-in is a part of them.
    strict: whether all lie in one episode; the last one may end it.
    stride: what the number of the first step, `key // num_envs`, is a multiple of.

    Give it to a TrajectoryReplayBuffer as `sequences`. Raises TypeError or ValueError for numbers below 1.

    Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2).
    """

    length: int
    strict: bool = False
    stride: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_int("Sequences length", self.length, 1, 2**24))
        object.__setattr__(self, "strict", check_bool("Sequences strict", self.strict))
        object.__setattr__(self, "stride", check_int("Sequences stride", self.stride, 1, 2**31 - 1))


# (B,) int64 slots, float32 probabilities and float32 importance weights
HostDraw = tuple[np.ndarray, np.ndarray, np.ndarray]


class HostState(Protocol):
    """What a sampler draws from on the host; `HostSampler` implements it."""

    random: HostWords
    capacity: int
    counters: np.ndarray
    # the eligible starts; None where all stored slots can be drawn
    starts: MassTree | None
    # by priority, where there are any: `loops.masses.draw` of the tree of masses, or `HostRanks.draw_ranks`
    draw_by_mass: Callable[..., int]
    draw_by_rank: Callable[..., RankedRows]
    # whether a sampler of one's own was asked for the chances of all places
    chances_checked: bool

    def span(self) -> tuple[int, int]: ...
    def range(self, tree: MassTree) -> DrawRange: ...


class Sampler(ABC):
    """The type of all samplers: the newest rows of a batch go by `newest_of`, the others are drawn by `base`."""

    kinds: ClassVar[dict[str, type[Sampler]]] = {}
    """Every sampler by its name, for checkpoints, commands and messages; a class is entered when it is defined."""
    base: BaseSampler

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        outside, known = cls.__module__ != __name__, Sampler.kinds.get(cls.__name__)
        if (known is not None and known.__module__ == __name__) or cls.__name__ == LinearSchedule.__name__:
            what = "schedule" if known is None else "sampler"
            raise TypeError(f"{cls.__name__} is a {what} of gpu_replay; name yours differently.")
        kin = [each.__name__ for each in cls.__mro__ if each.__module__ == __name__ and getattr(each, "kernel", None)]
        if outside and kin:
            raise TypeError(
                f"{cls.__name__} derives from {kin[0]}, and a GPU would sample it as that. Derive it from BaseSampler."
            )
        if outside or not cls.__name__.startswith(("_", "Base")):
            Sampler.kinds[cls.__name__] = cls

    def newest_of(self, batch: int) -> int:
        """Rows at the end of a batch of `batch` rows that are the newest."""
        return 0

    def needs(self, batch: int) -> tuple[int, int]:
        """Rows of a batch that are the newest, and how many transitions it needs at least, if more than one."""
        newest = self.newest_of(batch)
        return newest, max(newest, self.base.distinct_rows(batch - newest))

    @property
    def needs_start_tree(self) -> bool:
        """Whether a trajectory buffer must count the eligible starts in slot order, next to any masses."""
        return self.newest_of(1) > 0 or not self.base.prioritized


class BaseSampler(Sampler):
    """A sampler that draws at random. To write your own, derive a frozen dataclass:

        @dataclass(frozen=True)
        class Recent(BaseSampler):
            window: int = 1_000

            def places(self, total, rows, random):
                drawn = (random.doubles(rows) * min(self.window, total)).astype(np.int64)
                return total - 1 - drawn

            def chances(self, places, total):
                window = min(self.window, total)
                return np.where(places >= total - window, 1 / window, 0.0)

    It draws from all eligible rows, and works in both buffers on the CPU, in `Combined`, in `stats()` and in
    checkpoints; a program that loads one must have defined the class. Its fields are numbers, strings, bools, None,
    LinearSchedule, and tuples, lists and string-keyed dicts of these, and come back as they were; another kind is a
    TypeError when a buffer is made. A `field(init=False)` may be anything: it is not saved. Weights are
    `(chance / smallest chance in the batch) ** -beta`, with `beta` 0 unless the class defines it.
    """

    # what of priorities is kept: nothing, leaves with sums above them, or leaves alone
    prioritized: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    # its branch of the draw kernel; without one a device refuses it
    kernel: ClassVar[Literal["uniform", "mass", "rank"] | None] = None

    # for those that have no such settings
    alpha: float = 0.0
    beta: float | LinearSchedule = 0.0
    initial: Literal["running", "stored"] | float = 0.0
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = False
    replacement: bool = True

    @property
    def base(self) -> BaseSampler:  # type: ignore[override]
        """Itself."""
        return self

    @abstractmethod
    def places(self, total: int, rows: int, random: HostWords) -> np.ndarray:
        """Choose a place for each row.

        total:   number of places, at least 1: eligible rows, counted from the oldest, or units of mass.
        random:  its `doubles(n)`, float64 in [0, 1), and `words(n)`, uint64, are the only source of randomness.
        returns: (rows,) int64 in [0, total).
        """

    def chances(self, places: np.ndarray, total: int) -> np.ndarray:
        """Return the probability, (n,) float64, that one row is at each of these places; without priorities.

        Over all places they sum to 1 (to 1e-6): ValueError at the first sample of a buffer from which at most a million
        rows can be drawn, and in `stats()`.
        """
        return np.full(places.size, 1 / total)

    def exponent(self, host: HostState) -> float:
        """The exponent of importance weights of the next sample."""
        return self.beta(host.counters.item(Counter.STEP)) if isinstance(self.beta, LinearSchedule) else self.beta

    def rule(self, slots: int) -> Rule:
        """The rule that turns priorities into the values of the tree."""
        return MassRule.for_slots(slots, 0.0, 0.0, None)

    def distinct_rows(self, rows: int) -> int:
        """Transitions that `rows` rows need, if more than one."""
        return 0

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        """Draw `rows` slots on the host."""
        slots, parts, total, least = self._rows(host, rows)
        weight = weights_of((least or parts.min()) / parts, self.exponent(host) if beta is None else beta)
        return slots, (parts / total).astype(np.float32), weight

    def _rows(self, host: HostState, count: int) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Draw so many rows by chance: (B,) int64 slots; (B,) parts, to which their chances are proportional; the sum
        of these over all that can be drawn; and the part of the largest weight, 0 for the least of the batch.
        """
        total, slots_at = self._drawable(host)
        places = np.ascontiguousarray(self.places(total, count, host.random), dtype=np.int64)
        if places.shape != (count,) or places.min() < 0 or places.max() >= total:
            raise ValueError(f"{self}: places({total}, {count}) must return {count} integers from 0 to {total - 1}.")
        chances = np.asarray(self.chances(places, total), dtype=np.float64)
        if chances.shape != (count,) or not (chances > 0).all():
            raise ValueError(
                f"{self}: chances of {count} drawn places must be {count} numbers above 0; found {chances}."
            )
        if not host.chances_checked and total <= MOST_CHECKED:
            self._all_chances(total)
            host.chances_checked = True
        return slots_at(places), chances, 1.0, 0

    def _all_chances(self, total: int) -> np.ndarray:
        """The probability, (total,) float64, of each place; ValueError where they are no probabilities."""
        chances = np.asarray(self.chances(np.arange(total), total), dtype=np.float64)
        if chances.shape != (total,) or not (chances >= 0).all() or not abs(chances.sum() - 1) <= SUM_TOLERANCE:
            raise ValueError(
                f"{self}: chances of all {total} places must be {total} numbers, at least 0, that sum to 1; found "
                f"shape {list(chances.shape)}, the sum {chances.sum():.7g} and the smallest "
                f"{chances.min(initial=math.inf):g}. Divide them by their sum over all places."
            )
        return chances

    def _drawable(
        self, host: HostState, needed: int = 1, *, by_key: bool = True
    ) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
        """How many slots can be drawn, and what finds them by their places, counted from the oldest, or in the order of
        slots, which takes no search for the oldest.
        """
        (first, added), tree = host.span(), host.starts
        if tree is None:
            return _some(added - first, needed), lambda places: slots_of(places, first, host.capacity)
        within = host.range(tree) if by_key else DrawRange(tree.total())
        return _some(within.total, needed), lambda places: slots_in(tree, within, places)

    def distribution(self, leaves: Tensor, rule: Rule, eligible: int) -> Distribution:
        """Of one row, given what is kept."""
        return chance_distribution(self._all_chances(eligible) if eligible else np.zeros(0))


@dataclass(frozen=True)
class Uniform(BaseSampler):
    """Every stored transition is equally likely.

    replacement: False samples `B` distinct transitions in random order (`B > len(buffer)` is a ValueError);
                 True samples each row independently.
    """

    kernel = "uniform"

    replacement: bool = False

    def __post_init__(self) -> None:
        _put(self, replacement=check_bool("Uniform replacement", self.replacement))

    def distinct_rows(self, rows: int) -> int:
        return 0 if self.replacement else rows

    def places(self, total: int, rows: int, random: HostWords) -> np.ndarray:
        if self.replacement:
            return targets_in(total, random.doubles(rows), stratified=False)
        return permuted_ranks(total, rows, random.words(PERMUTATION_WORDS))

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        count, slots_at = self._drawable(host, self.distinct_rows(rows), by_key=False)
        slots = slots_at(self.places(count, rows, host.random))
        # half the time of np.full and np.ones
        probability, weight = np.empty(rows, np.float32), np.empty(rows, np.float32)
        probability.fill(1 / count)
        weight.fill(1)
        return slots, probability, weight

    def distribution(self, leaves: Tensor, rule: Rule, eligible: int) -> Distribution:
        return uniform_distribution(eligible)


class _Prioritized(BaseSampler):
    """What both samplers with priorities share."""

    prioritized = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _put(self, alpha=check_float(f"{owner} alpha", self.alpha, high=MOST_EXPONENT))
        if type(self.beta) is LinearSchedule:
            check_float(f"{owner} beta.start", self.beta.start)
            check_float(f"{owner} beta.end", self.beta.end)
        elif isinstance(self.beta, (tuple, LinearSchedule)):
            # a device draws by the numbers of a schedule alone, and a checkpoint keeps these
            raise TypeError(f"{owner} beta must be a number or LinearSchedule(start, end, steps); found {self.beta!r}.")
        else:
            _put(self, beta=check_float(f"{owner} beta", self.beta, high=MOST_EXPONENT))
        if isinstance(self.initial, str):
            if self.initial not in ("running", "stored"):
                raise ValueError(f"{owner} initial must be 'running', 'stored' or a number; found {self.initial!r}.")
        else:
            _put(self, initial=check_float(f"{owner} initial", self.initial))
        check_choice(f"{owner} normalize", self.normalize, ("batch", "buffer"))
        _put(self, stratified=check_bool(f"{owner} stratified", self.stratified))

    def places(self, total: int, rows: int, random: HostWords) -> np.ndarray:
        return targets_in(total, random.doubles(rows), stratified=self.stratified)


@dataclass(frozen=True)
class Proportional(_Prioritized):
    """P(i) is proportional to mass(i) = min(priority + eps, clip) ** alpha.

    alpha:      0 is uniform, 1 fully proportional; at least 0.
    beta:       exponent of the importance weights, a number at least 0 or a LinearSchedule.
    eps:        added to every priority. A mass is at least one unit, 2^-20, also for a priority of 0 with `eps=0` and
                for TD errors below 1e-6 with `alpha=1` (below 1e-10 with `alpha=0.6`). Masses are whole units, so with
                alpha near 1 small ones are coarse: with `alpha=1` the mass of a TD error is off by up to 0.5% from 1e-4
                on, 4% from 1e-5 on, 20% from 1e-6 on and 33% below (with `alpha=0.6` by at most 0.2%). Weights are
                computed from the rounded masses, so they stay consistent.
    clip:       largest value of priority + eps, or None.
    initial:    priority of new transitions: "running" is the largest ever given (1.0 before any), "stored" the largest
                among those stored now (1.0 in an empty buffer), or a number. Of a key that an update names more than
                once only the last priority counts as given.
    normalize:  weights are divided by the largest in the batch ("batch"), or by the largest that any stored
                transition could get ("buffer").
    stratified: one sample from each of `B` equal parts of the total mass; False samples independently.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    kernel = "mass"
    summed = True

    alpha: float = 0.6
    beta: float | LinearSchedule = 0.4
    eps: float = 1e-6
    clip: float | None = None
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        clip = None if self.clip is None else check_float("Proportional clip", self.clip, above=True)
        _put(self, eps=check_float("Proportional eps", self.eps, high=MOST_EXPONENT), clip=clip)

    def rule(self, slots: int) -> Rule:
        return MassRule.for_slots(slots, self.alpha, self.eps, self.clip)

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        # one loop places, finds and weighs
        slots, probability, ratio = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows)
        doubles, over_buffer = host.random.doubles(rows), self.normalize == "buffer"
        if not host.draw_by_mass(doubles, self.stratified, over_buffer, slots, probability, ratio):
            _some(0)
        return slots, probability, weights_of(ratio, self.exponent(host) if beta is None else beta)

    def distribution(self, leaves: Tensor, rule: Rule, eligible: int) -> Distribution:
        return mass_distribution(leaves, rule)


@dataclass(frozen=True)
class RankBased(_Prioritized):
    """P(i) is proportional to 1 / rank(i) ** alpha: rank 1 has the largest priority; ties go to the smaller key.

    alpha:        0 is uniform; at least 0.
    beta:         exponent of the importance weights, a number at least 0 or a LinearSchedule.
    initial, normalize: as in Proportional.
    stratified:   one sample from each of `B` parts of equal probability; False samples independently.

    Ranks are exact at every `sample`. Only the order of priorities matters, so outliers do no harm.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    kernel = "rank"

    alpha: float = 0.7
    beta: float | LinearSchedule = 0.5
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def rule(self, slots: int) -> Rule:
        return OrderRule()

    def _rows(self, host: HostState, count: int) -> tuple[np.ndarray, np.ndarray, float, float]:
        slots, masses, total, last = host.draw_by_rank(host.random.doubles(count), stratified=self.stratified)
        return slots, masses, total, last if self.normalize == "buffer" else 0

    def distribution(self, leaves: Tensor, rule: Rule, eligible: int) -> Distribution:
        return rank_distribution(leaves, rule, self.alpha)


_UNIFORM = Uniform()


@dataclass(frozen=True)
class Latest(Sampler):
    """The newest `B` transitions, newest last, for on-policy learning."""

    @property
    def base(self) -> BaseSampler:  # type: ignore[override]
        """Not used: all rows are the newest."""
        return _UNIFORM

    def newest_of(self, batch: int) -> int:
        return batch


@dataclass(frozen=True)
class Combined(Sampler):
    """`base` for the first `B - newest` rows, then the `newest` newest transitions: combined experience replay.

    The newest rows have probability 1 and weight 1: they are always in the batch.

    Zhang and Sutton 2017, "A Deeper Look at Experience Replay".
    """

    base: BaseSampler
    newest: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.base, BaseSampler):
            names = [f"{name}(...)" for name, kind in Sampler.kinds.items() if issubclass(kind, BaseSampler)]
            raise TypeError(f"Combined base must be {', '.join(names[:-1])} or {names[-1]}; found {self.base!r}.")
        _put(self, newest=check_int("Combined newest", self.newest, 1))

    def newest_of(self, batch: int) -> int:
        return self.newest


def check_sampler(sampler: object) -> Sampler:
    """The sampler, or TypeError for anything else."""
    if not isinstance(sampler, Sampler):
        names = [f"{name}()" for name in Sampler.kinds]
        raise TypeError(f"sampler must be {', '.join(names[:-1])} or {names[-1]}; found {sampler!r}.")
    for each in (sampler, sampler.base):
        if not is_dataclass(each):
            raise TypeError(f"{type(each).__name__} must be a dataclass, whose fields checkpoints and messages show.")
    return sampler


def _some(found: int, needed: int = 1) -> int:
    """What can be drawn, or RuntimeError where it is less than the buffer counted."""
    if found < max(1, needed):
        raise RuntimeError(
            "fewer transitions can be sampled than were counted. The buffer was changed past its lock, or its memory "
            "is damaged; load it from a checkpoint."
        )
    return found
