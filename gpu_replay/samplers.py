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
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
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
from gpu_replay.ops.masses import MassRule, MassTree, OrderRule
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
    base: _RandomSampler

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


class _RandomSampler(Sampler):
    """A sampler that draws at random: what it says of itself, and how it draws on the host."""

    # what of priorities is kept: nothing, leaves with sums above them, or leaves alone
    prioritized: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    # its branch of the draw kernel; without one it chooses places
    kernel: ClassVar[Literal["uniform", "mass", "rank"] | None] = None

    # for those that have no such settings
    alpha: float = 0.0
    beta: float | LinearSchedule = 0.0
    initial: Literal["running", "stored"] | float = 0.0
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = False
    replacement: bool = True

    @property
    def base(self) -> _RandomSampler:  # type: ignore[override]
        """Itself."""
        return self

    def exponent(self, host: HostState) -> float:
        """The exponent of importance weights of the next sample."""
        return self.beta(host.counters.item(Counter.STEP)) if isinstance(self.beta, LinearSchedule) else self.beta

    def rule(self, slots: int) -> MassRule:
        """The rule that turns priorities into the values of the tree."""
        return MassRule.for_slots(slots, 0.0, 0.0, None)

    def distinct_rows(self, rows: int) -> int:
        """Transitions that `rows` rows need, if more than one."""
        return 0

    @abstractmethod
    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        """Draw `rows` slots on the host."""

    def _weighed(
        self, host: HostState, beta: float | None, slots: np.ndarray, parts: np.ndarray, total: float, least: float = 0
    ) -> HostDraw:
        """What was drawn in (B,) int64 slots.

        parts: (B,), to which their chances are proportional; `total` is the sum of these over all that can be drawn,
               and `least` the part of the largest weight, 0 for the least of the batch.
        """
        weight = weights_of((least or parts.min()) / parts, self.exponent(host) if beta is None else beta)
        return slots, (parts / total).astype(np.float32), weight

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

    @abstractmethod
    def distribution(self, leaves: Tensor, rule: MassRule, eligible: int) -> Distribution:
        """Of one row, given what is kept."""


class Random(Protocol):
    """The buffer's random stream, as `BaseSampler.places` takes it."""

    def doubles(self, count: int, /) -> Tensor:
        """The next (count,) float64 in [0, 1), on the buffer's device."""


@dataclass(frozen=True)
class _RandomFrom:
    """What a function gives, as a stream."""

    doubles: Callable[[int], Tensor]


class BaseSampler(_RandomSampler):
    """The base of samplers of your own: derive a frozen dataclass, written in torch:

        @dataclass(frozen=True)
        class Recent(BaseSampler):
            window: int = 1_000

            def places(self, total, rows, random):
                newest = total.clamp(max=self.window)
                return total - 1 - (random.doubles(rows) * newest).long()

            def chances(self, places, total):
                newest = total.clamp(max=self.window)
                return (places >= total - newest).double() / newest

    It samples all eligible rows, and works in both buffers on every device, in `capture`, `Combined`, sequences,
    shards, `stats()` and checkpoints; a program that loads one must have defined the class. Within a CUDA graph its
    methods must not read from the device, as `total.item()` does. Its fields are numbers, strings, bools, None,
    LinearSchedule, and tuples, lists and string-keyed dicts of these, and come back as they were; another kind is a
    TypeError when a buffer is made, as are methods that do not return tensors: both are called once then, for a full
    buffer. A `field(init=False)` may be anything: it is not saved. Weights are
    `(chance / smallest chance in the batch) ** -beta`, with `beta` 0 unless the class defines it.
    """

    @abstractmethod
    def places(self, total: Tensor, rows: int, random: Random) -> Tensor:
        """Choose a place for each row.

        total:   int64 without dimensions on the buffer's device, at least 1: rows that can be sampled.
        random:  its `doubles(n)`, (n,) float64 in [0, 1) on that device, is the only source of randomness.
        returns: (rows,) int64 in [0, total), counted from the oldest. Others are a ValueError on the CPU, and on CUDA,
                 where looking would wait for the device, the nearest that exist.
        """

    def chances(self, places: Tensor, total: Tensor) -> Tensor:
        """Return the probability, (n,) float64, that one row is at each of these places, (n,) int64.

        Over all places they sum to 1 (to 1e-6): ValueError at the first sample of a buffer on the CPU from which at
        most a million rows can be sampled, and in `stats()`.
        """
        return torch.ones(places.shape, dtype=torch.float64, device=places.device) / total

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        found, slots_at = self._drawable(host)
        random = _RandomFrom(lambda count: torch.from_numpy(host.random.doubles(count)))
        places, chances = choose(self, torch.tensor(found, device="cpu"), rows, random)
        host.chances_checked = host.chances_checked or check_chances(self, found)
        return self._weighed(host, beta, slots_at(places.numpy()), chances.numpy(), 1.0)

    def distribution(self, leaves: Tensor, rule: MassRule, eligible: int) -> Distribution:
        return chance_distribution(all_chances(self, eligible, leaves.device) if eligible else np.zeros(0))


def _is_column(value: object, like: Tensor, rows: int) -> bool:
    """Whether a value is a tensor of so many rows on the device of another."""
    return isinstance(value, Tensor) and value.shape == (rows,) and value.device == like.device


def _described(value: object) -> str:
    """A value for messages, without waiting for a device."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)} on {value.device}"
    return f"{shape}: {value.tolist()}" if value.device.type == "cpu" and value.numel() <= 32 else shape


def choose(sampler: BaseSampler, total: Tensor, rows: int, random: Random) -> tuple[Tensor, Tensor]:
    """(rows,) int64 places and float64 chances by a sampler of somebody's own; ValueError for what cannot be these.

    total: int64 without dimensions.
    """
    places, on_host = sampler.places(total.clone(), rows, random), total.device.type == "cpu"
    wanted = f"{sampler}: places({int(total) if on_host else 'total'}, {rows}) must return {rows} integers"
    if not _is_column(places, total, rows) or places.dtype.is_floating_point or places.dtype == torch.bool:
        raise ValueError(f"{wanted} on {total.device}; found {_described(places)}.")
    # a copy, since it is overwritten
    places = places.to(torch.int64, copy=True)
    if not on_host:
        places = places.clamp(min=0).minimum(total - 1)
    elif bool((places < 0).any()) or bool((places >= total).any()):
        raise ValueError(f"{wanted} from 0 to {int(total) - 1}; found {_described(places)}.")
    chances = sampler.chances(places.clone(), total.clone())
    wanted = f"{sampler}: chances of {rows} sampled places must be {rows} numbers above 0"
    if not _is_column(chances, total, rows) or (on_host and not bool((chances > 0).all())):
        raise ValueError(f"{wanted} on {total.device}; found {_described(chances)}.")
    return places, chances.to(torch.float64)


def all_chances(sampler: BaseSampler, total: int, device: torch.device) -> np.ndarray:
    """The probability, (total,) float64, of each place; ValueError where they are no probabilities."""
    number = torch.tensor(total, device=device)
    chances = sampler.chances(torch.arange(total, device=device), number)
    found = chances.to("cpu", torch.float64).numpy() if _is_column(chances, number, total) else np.zeros(0)
    if found.shape != (total,) or not (found >= 0).all() or not abs(found.sum() - 1) <= SUM_TOLERANCE:
        raise ValueError(
            f"{sampler}: chances of all {total} places must be {total} numbers, at least 0, that sum to 1; found "
            f"{_described(chances)}, the sum {found.sum():.7g} and the smallest {found.min(initial=math.inf):g}. "
            "Divide them by their sum over all places."
        )
    return found


def check_chances(sampler: BaseSampler, total: int) -> bool:
    """Look at the chances of all places on the CPU, unless there are too many; ValueError where they do not sum to 1.

    Returns whether it did.
    """
    if total <= MOST_CHECKED:
        all_chances(sampler, total, torch.device("cpu"))
    return total <= MOST_CHECKED


def check_own(sampler: Sampler, capacity: int, device: torch.device) -> None:
    """Raise TypeError for a sampler of somebody's own whose methods take and return no tensors on this device, as those
    of version 0.3.
    """
    base = sampler.base
    if not isinstance(base, BaseSampler):
        return
    total = torch.tensor(capacity, device=device)
    # of no buffer's stream
    random = _RandomFrom(partial(torch.linspace, 0.0, 0.5, dtype=torch.float64, device=device))
    try:
        places = base.places(total, 2, random)
        found = [places, base.chances(torch.arange(1, device=device), total)]
        problem = "" if all(isinstance(each, Tensor) for each in found) else f"return {found!r}"
        cause = None
    except (TypeError, AttributeError) as error:
        problem, cause = f"raise {error!r}", error
    if problem:
        raise TypeError(
            f"the methods of {type(base).__name__} must take and return tensors on {device}, where these {problem}. "
            "Since 0.4 a sampler of your own is written in torch: def places(self, total, rows, random): return "
            "(random.doubles(rows) * total).long() and def chances(self, places, total): return "
            "torch.ones(len(places), dtype=torch.float64, device=places.device) / total."
        ) from cause


@dataclass(frozen=True)
class Uniform(_RandomSampler):
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

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        count, slots_at = self._drawable(host, self.distinct_rows(rows), by_key=False)
        if self.replacement:
            slots = slots_at(targets_in(count, host.random.doubles(rows), stratified=False))
        else:
            slots = slots_at(permuted_ranks(count, rows, host.random.words(PERMUTATION_WORDS)))
        # half the time of np.full and np.ones
        probability, weight = np.empty(rows, np.float32), np.empty(rows, np.float32)
        probability.fill(1 / count)
        weight.fill(1)
        return slots, probability, weight

    def distribution(self, leaves: Tensor, rule: MassRule, eligible: int) -> Distribution:
        return uniform_distribution(eligible)


class _Prioritized(_RandomSampler):
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

    def rule(self, slots: int) -> MassRule:
        return MassRule.for_slots(slots, self.alpha, self.eps, self.clip)

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        # one loop places, finds and weighs
        slots, probability, ratio = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows)
        doubles, over_buffer = host.random.doubles(rows), self.normalize == "buffer"
        if not host.draw_by_mass(doubles, self.stratified, over_buffer, slots, probability, ratio):
            _some(0)
        return slots, probability, weights_of(ratio, self.exponent(host) if beta is None else beta)

    def distribution(self, leaves: Tensor, rule: MassRule, eligible: int) -> Distribution:
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

    def rule(self, slots: int) -> MassRule:
        return OrderRule()

    def draw(self, host: HostState, rows: int, beta: float | None) -> HostDraw:
        slots, masses, total, last = host.draw_by_rank(host.random.doubles(rows), stratified=self.stratified)
        return self._weighed(host, beta, slots, masses, total, last if self.normalize == "buffer" else 0)

    def distribution(self, leaves: Tensor, rule: MassRule, eligible: int) -> Distribution:
        return rank_distribution(leaves, rule, self.alpha)


UNIFORM = Uniform()


@dataclass(frozen=True)
class Latest(Sampler):
    """The newest `B` transitions, newest last, for on-policy learning."""

    # not used: all rows are the newest
    base = UNIFORM

    def newest_of(self, batch: int) -> int:
        return batch


@dataclass(frozen=True)
class Combined(Sampler):
    """`base` for the first `B - newest` rows, then the `newest` newest transitions: combined experience replay.

    The newest rows have probability 1 and weight 1: they are always in the batch.

    Zhang and Sutton 2017, "A Deeper Look at Experience Replay".
    """

    base: _RandomSampler
    newest: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.base, _RandomSampler):
            names = [f"{name}(...)" for name, kind in Sampler.kinds.items() if issubclass(kind, _RandomSampler)]
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
