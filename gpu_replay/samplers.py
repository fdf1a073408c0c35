"""The samplers. Each class is one place: its frozen settings, and all in which it differs from the others.

A sampler says what of priorities a buffer keeps (`rule`, `summed`), which rows of a batch are the newest (`newest_of`), how
it places the others (`places`, `draw` on the host, `kernel` on a device), and its statistics. What it does not say is
refused where it is needed. The buffer owns all state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from gpu_replay.ops.counters import HostWords, blocks_for
from gpu_replay.ops.draw import (
    ALL,
    PERMUTATION_WORDS,
    DrawRange,
    draw_by_mass,
    importance_weights,
    independent_ranks,
    permuted_ranks,
    slots_in,
    slots_of,
    stratified_targets,
    weights_of,
)
from gpu_replay.ops.mass import MassRule, OrderRule, Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ranks import HostRanks
from gpu_replay.stats import Distribution, mass_distribution, rank_distribution, uniform_distribution
from gpu_replay.validation import check_choice, check_float, check_int

_DAMAGED = (
    "fewer transitions can be drawn than were counted. The buffer was changed past its lock, or its memory is "
    "damaged; load it from a checkpoint."
)


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
    the device. Raises TypeError or ValueError for numbers that are not finite or `steps` below 1.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _put(
            self,
            start=check_float("LinearSchedule start", self.start, -math.inf),
            end=check_float("LinearSchedule end", self.end, -math.inf),
            steps=check_int("LinearSchedule steps", self.steps, 1),
        )

    def __call__(self, step: int) -> float:
        """The value after `step` samples."""
        return self.start + (self.end - self.start) * min(step, self.steps) / self.steps


class HostDraw(NamedTuple):
    """(B,) int64 slots, float32 probabilities and importance weights, and the blocks of random words that they took."""

    slots: np.ndarray
    probability: np.ndarray
    weight: np.ndarray
    blocks: int


class HostState(Protocol):
    """What a sampler draws from on the host; see `HostSampler`."""

    random: HostWords
    capacity: int

    @property
    def block(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def masses(self) -> MassTree: ...
    @property
    def starts(self) -> MassTree | None: ...
    @property
    def ranks(self) -> HostRanks: ...
    def span(self) -> tuple[int, int]: ...
    def range(self, tree: MassTree, skipped: int, *, by_key: bool = False) -> DrawRange: ...


class Sampler(ABC):
    """A sampler: settings, and which rows of a batch are the newest. The others are drawn by `base`."""

    # every sampler by name, for checkpoints, commands and messages
    kinds: ClassVar[dict[str, type[Sampler]]] = {}
    base: Base

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith(("_", "Base")):
            Sampler.kinds[cls.__name__] = cls

    def newest_of(self, batch: int) -> int:
        """Rows at the end of a batch that are the newest."""
        return 0

    def distinct(self, batch: int) -> int:
        """The least number of transitions that a batch needs; at least one is always needed."""
        newest = self.newest_of(batch)
        return max(newest, self.base.distinct_rows(batch - newest))

    @property
    def counts_starts(self) -> bool:
        """Whether the eligible starts of a trajectory buffer must be counted in slot order, beside any masses."""
        return self.newest_of(1) > 0 or not self.base.prioritized


class Base(Sampler):
    """A sampler that draws at random."""

    # what of priorities is kept: nothing, leaves with sums above them, or leaves alone
    prioritized: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    # its branch of the draw kernel
    kernel: ClassVar[Literal["uniform", "mass", "rank"]]
    # modes of sharded buffers that can use it
    shards: ClassVar[tuple[str, ...]] = ()

    alpha: float = 0.0
    beta: float | LinearSchedule = 0.0
    initial: Literal["running", "stored"] | float = 0.0
    stratified: bool = False
    replacement: bool = False

    @property
    def base(self) -> Base:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def lowest_of_all(self) -> bool:
        """Whether weights are divided by the largest that any stored transition could get, or in the batch."""
        return getattr(self, "normalize", "batch") == "buffer"

    def beta_at(self, step: int) -> float:
        """The exponent of importance weights after so many samples."""
        return self.beta(step) if isinstance(self.beta, LinearSchedule) else self.beta

    def rule(self, slots: int) -> Rule:
        """The rule that turns priorities into the values of the tree."""
        return MassRule.for_slots(slots, 0.0, 0.0, None)

    def distinct_rows(self, rows: int) -> int:
        """Transitions that `rows` rows need, if more than one."""
        return 0

    @abstractmethod
    def places(self, total: int, rows: int, words: HostWords, block: int) -> tuple[np.ndarray, int]:
        """(rows,) int64 in [0, total) from the words of a block on, and the blocks that they take."""

    @abstractmethod
    def draw(self, host: HostState, rows: int, beta: float | None, skipped: int) -> HostDraw:
        """Draw `rows` slots on the host, none of them among the newest `skipped`."""

    @abstractmethod
    def distribution(self, leaves: Tensor | None, rule: Rule, eligible: int) -> Distribution:
        """Of the draw, given what is kept."""


@dataclass(frozen=True)
class Uniform(Base):
    """Every stored transition is equally likely.

    replacement: False draws `B` distinct transitions in random order (`B > len(buffer)` is a ValueError);
                 True draws each row independently.
    """

    kernel = "uniform"
    shards = ("local", "global")

    replacement: bool = False

    def __post_init__(self) -> None:
        _flag("Uniform", "replacement", self.replacement)

    def distinct_rows(self, rows: int) -> int:
        return 0 if self.replacement else rows

    def places(self, total: int, rows: int, words: HostWords, block: int) -> tuple[np.ndarray, int]:
        if self.replacement:
            return independent_ranks(total, words.doubles(block, rows)), blocks_for(rows)
        return permuted_ranks(total, rows, words.words(block, PERMUTATION_WORDS)), blocks_for(PERMUTATION_WORDS)

    def draw(self, host: HostState, rows: int, beta: float | None, skipped: int) -> HostDraw:
        (first, added), tree = host.span(), host.starts
        drawable = None if tree is None else host.range(tree, skipped)
        count = added - first if drawable is None else drawable.mass
        if count < (self.distinct_rows(rows) or 1):
            raise RuntimeError(_DAMAGED)
        slots, blocks = self.places(count, rows, host.random, host.block)
        if tree is None or drawable is None:
            slots = slots_of(slots, first, host.capacity)
        else:
            slots = slots_in(tree, drawable, slots)
        return HostDraw(slots, np.full(rows, 1 / count, np.float32), np.ones(rows, np.float32), blocks)

    def distribution(self, leaves: Tensor | None, rule: Rule, eligible: int) -> Distribution:
        return uniform_distribution(eligible)


@dataclass(frozen=True)
class Proportional(Base):
    """P(i) is proportional to mass(i) = min(priority + eps, clip) ** alpha.

    alpha:      0 is uniform, 1 fully proportional; at least 0.
    beta:       exponent of the importance weights, a number at least 0 or a LinearSchedule.
    eps:        added to every priority, so that none is zero.
    clip:       largest value of priority + eps, or None.
    initial:    priority of new transitions: "running" the largest ever given (1.0 before any), "stored" the largest
                among those stored now (1.0 when there is none), or a number.
    normalize:  weights are divided by the largest in the batch ("batch"), or by the largest that any stored
                transition could get ("buffer").
    stratified: one draw from each of `B` equal parts of the total mass; False draws independently.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    kernel = "mass"
    prioritized = summed = True
    shards = ("local", "global")

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
        _put(self, eps=check_float("Proportional eps", self.eps), clip=clip)

    def rule(self, slots: int) -> Rule:
        return MassRule.for_slots(slots, self.alpha, self.eps, self.clip)

    def places(self, total: int, rows: int, words: HostWords, block: int) -> tuple[np.ndarray, int]:
        place = stratified_targets if self.stratified else independent_ranks
        return place(total, words.doubles(block, rows)), blocks_for(rows)

    def draw(self, host: HostState, rows: int, beta: float | None, skipped: int) -> HostDraw:
        # one loop places, finds and weighs
        tree, doubles = host.masses, host.random.doubles(host.block, rows)
        within = host.range(tree, skipped) if skipped else ALL
        draws = draw_by_mass(tree, doubles, stratified=self.stratified, of_all=self.lowest_of_all, within=within)
        if not draws.mass:
            raise RuntimeError(_DAMAGED)
        weight = weights_of(draws.ratio, self.beta_at(host.step) if beta is None else beta)
        return HostDraw(draws.slots, draws.probability, weight, blocks_for(rows))

    def distribution(self, leaves: Tensor | None, rule: Rule, eligible: int) -> Distribution:
        return mass_distribution(leaves, rule)


@dataclass(frozen=True)
class RankBased(Base):
    """P(i) is proportional to 1 / rank(i) ** alpha: rank 1 has the largest priority, equal ones go by smaller key.

    alpha:        0 is uniform; at least 0.
    beta:         exponent of the importance weights, a number at least 0 or a LinearSchedule.
    initial, normalize: as in Proportional.
    stratified:   one draw from each of `B` parts of equal probability; False draws independently.

    Ranks are exact at every `sample`. Outliers among the priorities do not matter here, only their order.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    kernel = "rank"
    prioritized = True
    # ranks over all shards would need a sort over all shards for every sample
    shards = ("local",)

    alpha: float = 0.7
    beta: float | LinearSchedule = 0.5
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        _check_prioritized(self)

    def rule(self, slots: int) -> Rule:
        return OrderRule()

    def places(self, total: int, rows: int, words: HostWords, block: int) -> tuple[np.ndarray, int]:
        raise NotImplementedError

    def draw(self, host: HostState, rows: int, beta: float | None, skipped: int) -> HostDraw:
        doubles = host.random.doubles(host.block, rows)
        ranked = host.ranks.draw(doubles, stratified=self.stratified, skipped=skipped)
        lowest = ranked.last if self.lowest_of_all else int(ranked.masses.min())
        weight = importance_weights(ranked.masses, lowest, self.beta_at(host.step) if beta is None else beta)
        return HostDraw(ranked.slots, (ranked.masses / ranked.total).astype(np.float32), weight, blocks_for(rows))

    def distribution(self, leaves: Tensor | None, rule: Rule, eligible: int) -> Distribution:
        return rank_distribution(leaves, rule, self.alpha)


def _check_prioritized(sampler: Proportional | RankBased) -> None:
    """Check the settings that both samplers have, or raise TypeError / ValueError."""
    owner = type(sampler).__name__
    _put(sampler, alpha=check_float(f"{owner} alpha", sampler.alpha))
    if isinstance(sampler.beta, LinearSchedule):
        check_float(f"{owner} beta.start", sampler.beta.start)
        check_float(f"{owner} beta.end", sampler.beta.end)
    else:
        _put(sampler, beta=check_float(f"{owner} beta", sampler.beta))
    if isinstance(sampler.initial, str):
        if sampler.initial not in ("running", "stored"):
            raise ValueError(f"{owner} initial must be 'running', 'stored' or a number; found {sampler.initial!r}.")
    else:
        _put(sampler, initial=check_float(f"{owner} initial", sampler.initial))
    check_choice(f"{owner} normalize", sampler.normalize, ("batch", "buffer"))
    _flag(owner, "stratified", sampler.stratified)


@dataclass(frozen=True)
class Latest(Sampler):
    """The newest `B` transitions, newest last, for on-policy learning."""

    base: ClassVar[Base] = Uniform()

    def newest_of(self, batch: int) -> int:
        return batch


@dataclass(frozen=True)
class Combined(Sampler):
    """`base` for the first `B - newest` rows, then the `newest` newest transitions: combined experience replay.

    The newest rows have probability 1 and weight 1: they are always in the batch.

    Zhang and Sutton 2017, "A Deeper Look at Experience Replay".
    """

    base: Base
    newest: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.base, Base):
            names = [f"{name}(...)" for name, kind in Sampler.kinds.items() if issubclass(kind, Base)]
            raise TypeError(f"Combined base must be {', '.join(names[:-1])} or {names[-1]}; found {self.base!r}.")
        _put(self, newest=check_int("Combined newest", self.newest, 1))

    def newest_of(self, batch: int) -> int:
        return self.newest


def check_sampler(sampler: object) -> Sampler:
    """The sampler, or TypeError for anything else."""
    if not isinstance(sampler, Sampler):
        names = [f"{name}()" for name in Sampler.kinds]
        raise TypeError(f"sampler must be {', '.join(names[:-1])} or {names[-1]}; found {sampler!r}.")
    return sampler
