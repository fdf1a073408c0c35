"""Both buffers as plain Python lists: slow, obvious, and written from the contract alone.

Everything public that follows from a sequence of calls is computed here anew whenever it is asked for, in Python's own
integers where the buffer has integers, so that `==` compares them. Only priorities, which depend on the order of calls,
and the random words, which every draw takes from one stream, are carried along.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Philox

from gpu_replay import Combined, Latest, LinearSchedule, Proportional, RankBased, Uniform

UNIT = 2**20  # the mass of priority 1 with alpha 1


def mass_of(priority: float, settings: Proportional, capacity: int) -> int:
    """The integer mass of one priority, at least 1 and at most what keeps every sum below 2^62."""
    value = abs(priority) + settings.eps
    scaled = min(value, settings.clip if settings.clip is not None else math.inf) ** settings.alpha * UNIT + 0.5
    limit = 2**62 // capacity
    return limit if scaled >= limit else max(1, math.floor(scaled))


def rank_masses(ranks: int, alpha: float) -> list[int]:
    """The mass of each rank, the first rank first: 1 / rank^alpha, as many bits of it as 61 bits for all allow."""
    shares = [2.0 ** (-alpha * math.log2(rank)) for rank in range(1, ranks + 1)]
    bits = min(52, math.floor(61 - math.log2(math.fsum(shares))))
    return [max(1, math.floor(share * 2.0**bits + 0.5)) for share in shares]


def by_rank(priorities: Iterable[tuple[int, float]]) -> list[int]:
    """The keys of (key, priority) pairs: the largest priority first, the smaller key first among equal ones."""
    return [key for key, _ in sorted(priorities, key=lambda pair: (-pair[1], pair[0]))]


def stratum(part: int, parts: int, total: int) -> tuple[int, int]:
    """The half-open range of targets of one of `parts` equal parts of the total mass."""
    low, high = (i * (total // parts) + i * (total % parts) // parts for i in (part, part + 1))
    return low, high


def place(word: int, width: int) -> int:
    """A point in `[0, width)` from 64 random bits; 0 for an empty range."""
    return min(math.floor((word >> 11) * 2.0**-53 * width), max(width - 1, 0))


def located(masses: Iterable[int], targets: Sequence[int]) -> list[int]:
    """The first place whose inclusive prefix sum exceeds each target, by a linear scan."""
    prefixes = list(accumulate(masses))
    return [next(at for at, prefix in enumerate(prefixes) if prefix > target) for target in targets]


def permuted(count: int, total: int, words: Sequence[int]) -> list[int]:
    """The first `count` images of a random permutation of [0, total): a Feistel network over a rectangle that just
    covers it, walked until the image falls inside. Each round moves one coordinate by a hash of the other.
    """
    wide = math.isqrt(total - 1) + 1
    high = -(-total // wide)
    rounds = words[: 16 if total >= 64 else 64]

    def moved(one: int, other: int, side: int, at: int) -> int:
        hashed = (other * rounds[at] + rounds[at + 1]) % 2**64 >> 32
        return (one + (hashed * side >> 32)) % side

    def image(number: int) -> int:
        row, column = divmod(number, wide)
        for at in range(0, len(rounds), 4):
            column = moved(column, row, wide, at)
            row = moved(row, column, high, at + 2)
        inside = row * wide + column
        return inside if inside < total else image(inside)

    return [image(number) for number in range(count)]


# one step of one environment as it was given: obs fields, action and further fields, reward, terminated, truncated, and
# perhaps final (a dict like obs) and priority
Step = dict[str, Any]


def is_observation(name: str) -> bool:
    """Whether a field is stacked: `obs`, or `obs.NAME` of a dictionary of observations."""
    return name == "obs" or name.startswith("obs.")


def zeros_like(frame: Any) -> Any:
    """A frame of nested lists with every number zero."""
    return [zeros_like(part) for part in frame] if isinstance(frame, list) else type(frame)(0)


def float32(value: float) -> float:
    """The value rounded once to single precision."""
    return float(np.float32(value))


class Drawn(NamedTuple):
    """What one draw should return, apart from the fields."""

    keys: list[int]
    probability: list[float]
    weight: list[float]


class Model:
    """What both buffers have in common: a sampler, and priorities of what it can draw."""

    # whether draws go by slots among the eligible ones, or by keys where all that is stored can be drawn
    starts = False

    def __init__(self, capacity: int, sampler: Any = Uniform(), seed: int = 0) -> None:  # noqa: B008
        self.capacity, self.sampler = capacity, sampler
        self.base, self.newest = (sampler.base, sampler.newest) if isinstance(sampler, Combined) else (sampler, 0)
        self.by_mass, self.by_rank = isinstance(self.base, Proportional), isinstance(self.base, RankBased)
        # the priority of each key that can be drawn
        self.held: dict[int, float] = {}
        # keys that are never drawn again
        self.excluded: set[int] = set()
        self.running: float | None = None
        self.stale = self.samples = 0
        self.times = Counter[int]()
        self.random = Philox(key=np.array([seed & (2**64 - 1), 0], dtype=np.uint64))
        self.rank_masses = rank_masses(capacity, self.base.alpha) if self.by_rank else []

    # what a kind of buffer says

    added: int

    def live(self) -> range:
        """Keys of all that is stored."""

    def eligible(self) -> list[int]:
        """Keys of what can be drawn, ascending."""

    # priorities

    def initial(self) -> float:
        """The priority of what can be drawn from now on without one of its own, as it stands before a call."""
        initial = getattr(self.base, "initial", 1.0)
        if initial == "running":
            return 1.0 if self.running is None else self.running
        return max(self.held.values(), default=1.0) if initial == "stored" else float(initial)

    def update(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        live = self.live()
        self.stale += sum(key not in live for key in keys if key != -1)
        given = {key: abs(value) for key, value in zip(keys, priorities, strict=True)}
        winners = {key: value for key, value in given.items() if key in self.held}
        waiting = {key: value for key, value in given.items() if key not in winners and self.waits(key)}
        self.held |= winners
        for key, value in waiting.items():
            self.put(key, "priority", {"priority": value})
        self.note([*winners.values(), *waiting.values()])

    def waits(self, key: int) -> bool:
        """Whether a key is that of something that may be drawn later."""
        return False

    def keeps_tree(self) -> bool:
        """Whether rows can be taken out."""
        return self.starts or self.by_mass or self.by_rank

    def exclude(self, keys: Sequence[int]) -> None:
        live = self.live()
        self.stale += sum(key not in live for key in keys if key != -1)
        self.excluded |= {key for key in keys if key in live}
        self.held = {key: value for key, value in self.held.items() if key not in self.excluded}

    def write(self, keys: Sequence[int], names: Sequence[str], values: Sequence[Any]) -> None:
        """Put these values, one for each key, in the place of what is stored."""
        live = self.live()
        self.stale += sum(key not in live for key in keys if key != -1)
        for key, value in zip(keys, values, strict=True):
            for name in names if key in live else ():
                self.put(key, name, value)

    def put(self, key: int, name: str, value: Any) -> None:
        """Replace what is stored of one key."""

    def note(self, given: Iterable[float]) -> None:
        """Keep the largest priority ever given."""
        known = [] if self.running is None else [self.running]
        self.running = max([*map(abs, given), *known], default=None)

    def mass(self, key: int) -> int:
        return mass_of(self.held[key], self.base, self.capacity)

    def given(self, key: int) -> float | None:
        """The priority of a live key, or None."""
        return self.held.get(key)

    def told(self, key: int) -> float:
        """The priority of a live key as the buffer tells it: of a mass what its power was."""
        given = self.given(key)
        if given is None or self.by_rank:
            return given or 0.0
        return max((mass_of(given, self.base, self.capacity) / UNIT) ** (1 / self.base.alpha) - self.base.eps, 0.0)

    def masses(self) -> list[int]:
        """In slot order."""
        masses = [0] * self.capacity
        for key in self.held:
            masses[key % self.capacity] = self.mass(key)
        return masses

    def shares(self) -> dict[int, float]:
        """The probability of each key that can be drawn, of one row."""
        if self.by_rank:
            order = by_rank(self.held.items())
            masses = dict(zip(order, self.rank_masses, strict=False))
        else:
            masses = {key: self.mass(key) if self.by_mass else 1 for key in self.eligible()}
        return {key: mass / sum(masses.values()) for key, mass in masses.items()}

    # draws

    def refusal(self, count: int, found: int) -> type[Exception] | None:
        """What a sample of so many rows from what was found raises."""
        if self.newest > count:
            return ValueError
        chance = self.by_mass or self.by_rank or (isinstance(self.base, Uniform) and self.base.replacement)
        distinct = self.newest if chance else max(self.newest, count - self.newest)
        return RuntimeError if not found else ValueError if found < distinct else None

    def draw(self, count: int, beta: float | None = None) -> Drawn:
        """The rows of a sample."""
        keys = self.eligible()
        newest = count if isinstance(self.base, Latest) else self.newest
        last, drawn = keys[len(keys) - newest :], Drawn([], [], [])
        if count > newest:
            drawn = self._by_chance(keys, count - newest, beta)
        self.samples += 1
        self.times.update([*drawn.keys, *last])
        return Drawn(
            *(
                part + [sure] * len(last) if sure else part + last
                for part, sure in zip(drawn, (0, 1.0, 1.0), strict=True)
            )
        )

    def words(self, count: int) -> list[int]:
        """The next random words; the rest of the last four are lost."""
        return [int(word) for word in self.random.random_raw(-(-count // 4) * 4)[:count]]

    def _by_chance(self, keys: list[int], count: int, beta: float | None) -> Drawn:
        base = self.base
        order = sorted(keys, key=lambda key: key % self.capacity)
        if isinstance(base, Uniform):
            order = order if self.starts else keys
            size = len(order)
            at = [place(word, size) for word in self.words(count)] if base.replacement else []
            at = at or permuted(count, size, self.words(64))
            return Drawn([order[each] for each in at], [1 / size] * count, [1.0] * count)
        if self.by_rank:
            order = by_rank((key, self.held[key]) for key in keys)
            masses = self.rank_masses[: len(order)]
        else:
            masses = [self.mass(key) for key in order]
        total, words = sum(masses), self.words(count)
        parts = [stratum(row, count, total) if base.stratified else (0, total) for row in range(count)]
        targets = [low + place(word, high - low) for (low, high), word in zip(parts, words, strict=True)]
        at = located(masses, targets)
        mine = [masses[each] for each in at]
        lowest = min(masses) if base.normalize == "buffer" else min(mine)
        if beta is None:
            beta = base.beta(self.samples) if isinstance(base.beta, LinearSchedule) else base.beta
        weight = [(lowest / mass) ** beta for mass in mine]
        return Drawn([order[each] for each in at], [mass / total for mass in mine], weight)

    # what it says of itself

    def stats(self) -> dict[str, float]:
        live, shares = self.live(), self.shares()
        times = [self.times[key] for key in live]
        known = bool(self.held) and (self.by_rank or (self.by_mass and self.base.alpha > 0))
        priorities = [self.told(key) for key in self.held] if known else []
        return {
            "size": len(live),
            "added": self.added,
            "eligible": len(self.eligible()),
            "min_priority": min(priorities) if known else math.nan,
            "mean_priority": sum(priorities) / len(priorities) if known else math.nan,
            "max_priority": max(priorities) if known else math.nan,
            "entropy": -sum(share * math.log(share) for share in shares.values()),
            "effective_sample_size": 1 / sum(share**2 for share in shares.values()) if shares else 0.0,
            "mean_age": (len(live) - 1) / 2 if live else 0.0,
            "max_age": max(len(live) - 1, 0),
            "mean_times_sampled": sum(times) / len(times) if times else 0.0,
            "max_times_sampled": max(times, default=0),
            "stale_updates": self.stale,
            "rejected_priorities": 0,
            "saturated_priorities": 0,
            "lost_truncations": 0,
            "unexpected_resets": 0,
            "nonfinite_rewards": 0,
            "lost_terminal_obs": 0,
        }


class RowModel(Model):
    """`ReplayBuffer`: transitions are their keys."""

    def __init__(self, capacity: int, sampler: Any = Uniform(), seed: int = 0) -> None:  # noqa: B008
        super().__init__(capacity, sampler, seed)
        self.added = self.forgotten = 0
        # numbers of the transitions whose values were written later, by key and field
        self.written: dict[tuple[int, str], int] = {}

    def put(self, key: int, name: str, value: int) -> None:
        self.written[key, name] = value

    def live(self) -> range:
        return range(max(self.forgotten, self.added - self.capacity), self.added)

    def eligible(self) -> list[int]:
        return [key for key in self.live() if key not in self.excluded]

    def add(self, count: int, priority: Sequence[float] | None = None) -> list[int]:
        new = range(self.added, self.added + count)
        given = [self.initial()] * count if priority is None else [abs(each) for each in priority]
        self.added += count
        self.held |= dict(zip(new, given, strict=True))
        self.held = {key: self.held[key] for key in self.eligible()}
        self.note(priority or [])
        return list(new)

    def clear(self) -> None:
        self.forgotten, self.held = self.added, {}
        self.times.clear()


class StepModel(Model):
    """`TrajectoryReplayBuffer`: it keeps every step ever added and derives all the rest from the whole history.

    Nothing of it is kept up to date, episodes, dead steps, what is stored and what is eligible, so that a wrong answer
    of the buffer cannot have a wrong twin here.
    """

    starts = True

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        sampler: Any = Uniform(),  # noqa: B008
        seed: int = 0,
        *,
        stack: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        autoreset: str = "next_step",
        padding: str = "reset",
        final_capacity: int | None = None,
        terminal_obs: bool = False,
        relabel: Any = None,
        sequences: Any = None,
    ) -> None:
        self.sequences = sequences
        self.num_envs, self.turn = num_envs, capacity // num_envs
        super().__init__(self.turn * num_envs, sampler, seed)
        self.stack, self.n_step, self.gamma, self.autoreset = stack, n_step, gamma, autoreset
        self.padding, self.final_capacity, self.relabel = padding, final_capacity, relabel
        self.terminal_obs = terminal_obs or relabel is not None
        # one list of steps for each environment
        self.steps: list[list[Step]] = [[] for _ in range(num_envs)]
        # environment and step before which `begin_episodes` was called
        self.broken: set[tuple[int, int]] = set()
        # how many steps of each environment there were at each `clear`
        self.cleared: list[int] = []
        self._view: View | None = None

    @property
    def count(self) -> int:
        """Steps that were added to each environment."""
        return len(self.steps[0])

    @property
    def added(self) -> int:  # type: ignore[override]
        return self.count * self.num_envs

    def live(self) -> range:
        return self.view().live()

    def eligible(self) -> list[int]:
        return self.view().eligible()

    def add(self, steps: Sequence[Step]) -> list[int]:
        """Add a step of every environment, and give what it completes its priority."""
        assert len(steps) == self.num_envs
        initial, first = self.initial(), self.added
        for one, step in zip(self.steps, steps, strict=True):
            one.append(step)
        self._view = None
        own = {key: self._own(key) for key in self.eligible() if key not in self.held}
        given = [priority for priority in own.values() if priority is not None]
        fresh = {key: initial if priority is None else priority for key, priority in own.items()}
        self.held = {key: self.held.get(key, fresh.get(key, 0.0)) for key in self.eligible()}
        self.note(given)
        return list(range(first, self.added))

    def exclude(self, keys: Sequence[int]) -> None:
        super().exclude(keys)
        self._view = None

    def _own(self, key: int) -> float | None:
        env, number = self.view().place(key)
        priority = self.steps[env][number].get("priority")
        return None if priority is None else abs(priority)

    def put(self, key: int, name: str, value: Step) -> None:
        env, number = self.view().place(key)
        self.steps[env][number][name] = value[name]

    def waits(self, key: int) -> bool:
        return key in self.live() and key not in self.held and key in self.later()

    def later(self) -> set[int]:
        """What could be drawn after steps in which nothing ends, in a ring that holds all of them besides."""
        view = self.view()
        if view.later is None:
            after, more = copy.copy(self), self.n_step + 1 + (self.sequences.length if self.sequences else 1)
            plain = {"reward": 0.0, "terminated": False, "truncated": False}
            after.steps, after.turn = [[*steps, *[plain] * more] for steps in self.steps], self.turn + more
            later = View(after)
            # final observations have found their rows in the ring as it is
            later.kept = view.kept
            view.later = set(later.eligible())
        return view.later

    def given(self, key: int) -> float | None:
        return self._own(key) if self.waits(key) else super().given(key)

    def clear(self) -> None:
        self.cleared.append(self.count)
        self.held, self._view = {}, None
        self.times.clear()

    def begin_episodes(self, mask: Sequence[bool] | None = None) -> None:
        self._view = None
        for env in range(self.num_envs):
            if mask is None or mask[env]:
                self.broken.add((env, self.count))

    def view(self) -> View:
        if self._view is None:
            self._view = View(self)
        return self._view

    def draw(self, count: int, beta: float | None = None) -> Drawn:
        """The rows of a sample; with hindsight it takes random words after those of its draw: of a permutation that
        chooses rows, and of a number for each of them.
        """
        drawn = super().draw(count, beta)
        if chosen := round(self.relabel.ratio * count) if self.relabel is not None else 0:
            self.words(64)
            self.words(0 if self.relabel.strategy == "final" else chosen)
        return drawn

    def flaws(self) -> tuple[str, int]:
        """The statistic that counts endings which are not as the autoreset mode says, and how many there are."""
        view, next_step = self.view(), self.autoreset == "next_step"
        found = 0
        for env, steps in enumerate(self.steps):
            for number, step in enumerate(steps):
                cut = step["truncated"] and not step["terminated"]
                acted = step["reward"] != 0 or step["terminated"] or step["truncated"]
                found += view.marks[env][number][1] and acted if next_step else cut and (env, number) not in view.kept
        return "unexpected_resets" if next_step else "lost_truncations", found

    def stats(self) -> dict[str, float]:
        view = self.view()
        rewards = [
            step["reward"]
            for steps, marks in zip(self.steps, view.marks, strict=True)
            for step, (_, dead) in zip(steps, marks, strict=True)
            if not dead
        ]
        counted = {"nonfinite_rewards": len(rewards) - sum(map(math.isfinite, rewards)), "lost_terminal_obs": view.lost}
        return super().stats() | counted | dict([self.flaws()])


class View:
    """What a buffer with this history holds now."""

    def __init__(self, history: StepModel) -> None:
        self.model = history
        self.count = history.count
        # of each environment and step: the first step of its episode, and whether it is dead
        self.marks = [self._marks(env) for env in range(history.num_envs)]
        self.oldest = max([0, self.count - history.turn, *history.cleared])
        # final observations of terminated episodes that found no row, or lost it
        self.lost = 0
        self.kept = self._kept()
        self._eligible: list[int] | None = None
        self.later: set[int] | None = None

    def _marks(self, env: int) -> list[tuple[int, bool]]:
        marks: list[tuple[int, bool]] = []
        for number in range(self.count):
            first, dead = marks[-1] if marks else (0, False)
            last = self.model.steps[env][number - 1] if number else {}
            ended = not dead and bool(last.get("terminated") or last.get("truncated"))
            if number == 0 or (env, number) in self.model.broken or dead:
                marks.append((number, False))
            elif ended:
                # with next-step autoreset this step only brings the final observation of the old episode
                marks.append((first, True) if self.model.autoreset == "next_step" else (number, False))
            else:
                marks.append((first, False))
        return marks

    def _kept(self) -> set[tuple[int, int]]:
        """Environment and step of every final observation that found a row, and that none has taken from it.

        Truncated episodes take the rows in turn, if need be from terminated ones. Those each try one row, in turn from
        the other end. With hindsight both take free rows in one turn, the truncated ones of a step first.
        """
        history = self.model
        rows = min(history.capacity if history.final_capacity is None else history.final_capacity, history.capacity)
        if history.autoreset == "next_step" or rows == 0:
            return set()
        kept: set[tuple[int, int]] = set()
        # environment and step in each row, and whether it was truncated
        held: dict[int, tuple[int, int, bool]] = {}
        shared, taken, tried = history.relabel is not None, 0, 0
        for number in range(self.count):
            oldest = max([0, number + 1 - history.turn, *(each for each in history.cleared if each <= number)])
            now = [(env, steps[number]) for env, steps in enumerate(history.steps)]
            ends = [(env, True) for env, step in now if step["truncated"] and not step["terminated"]]
            if history.terminal_obs:
                ends += [(env, False) for env, step in now if step["terminated"]]
            for env, cut in ends:
                if history.steps[env][number].get("final") is None:
                    continue
                row = taken % rows if cut or shared else rows - 1 - tried % rows
                tried += not cut and not shared
                owner = held.get(row)
                lives = owner is not None and owner[1] >= oldest
                if owner is not None and lives and (shared or not cut or owner[2]):
                    self.lost += not cut
                    continue
                if owner is not None and lives:
                    kept.remove(owner[:2])
                    self.lost += 1
                held[row] = env, number, cut
                kept.add((env, number))
                taken += cut or shared
        return kept

    # what is stored, and what can be drawn

    def live(self) -> range:
        """Keys of all stored steps."""
        return range(self.oldest * self.model.num_envs, self.model.added)

    def place(self, key: int) -> tuple[int, int]:
        """Environment and step number of a key."""
        number, env = divmod(key, self.model.num_envs)
        return env, number

    def next_is_dead(self, env: int) -> bool:
        """Whether the step that this environment gives next will only carry a final observation."""
        if not self.count or self.model.autoreset != "next_step" or (env, self.count) in self.model.broken:
            return False
        last = self.model.steps[env][-1]
        return not self.marks[env][-1][1] and bool(last["terminated"] or last["truncated"])

    def eligible(self) -> list[int]:
        """Keys of the starts that can be drawn, ascending."""
        if self._eligible is None:
            begins = self._complete if self.model.sequences is None else self._begins
            excluded = self.model.excluded
            self._eligible = [key for key in self.live() if key not in excluded and begins(*self.place(key))]
        return list(self._eligible)

    def _begins(self, env: int, start: int) -> bool:
        """Whether a sequence of this buffer may begin with this step."""
        rows = self.model.sequences
        steps = range(start, start + rows.length)
        if start % rows.stride or steps[-1] >= self.count or not self._complete(env, start):
            return False
        if rows.strict and not all(self._same_episode(env, start, each) and not self.dead(env, each) for each in steps):
            return False
        return all(self.known(env, each) or self._never_known(env, each) for each in steps)

    def dead(self, env: int, number: int) -> bool:
        """Whether a step only brings a final observation."""
        return self.marks[env][number][1]

    def _never_known(self, env: int, start: int) -> bool:
        """Whether the window of this step, or the observation after it, will never be stored."""
        if self.dead(env, start):
            return True
        for number in range(start, start + self.model.n_step):
            step = self.model.steps[env][number]
            if step["terminated"]:
                return False
            if step["truncated"] and self.model.autoreset != "next_step":
                return (env, number) not in self.kept
            if number + 1 == self.count:
                return False
            if not self._same_episode(env, start, number + 1):
                return True
        return False

    def _complete(self, env: int, start: int) -> bool:
        return self._stack_numbers(env, start)[0] >= self.oldest and self.known(env, start)

    def known(self, env: int, start: int) -> bool:
        """Whether all of the window of this step is stored, and the observation after it unless it needs none."""
        if self.marks[env][start][1]:
            return False
        length = self._window(env, start)
        if length is None:
            return False
        last = self.model.steps[env][start + length - 1]
        if last["terminated"]:
            return True
        if last["truncated"] and self.model.autoreset != "next_step":
            return (env, start + length - 1) in self.kept
        return self._same_episode(env, start, start + length)

    def _same_episode(self, env: int, one: int, other: int) -> bool:
        return other < self.count and self.marks[env][one][0] == self.marks[env][other][0]

    def _stack_numbers(self, env: int, number: int) -> list[int]:
        """Steps whose frames are in the stack of a step, without the filling before the episode."""
        first = max(self.marks[env][number][0], number - self.model.stack + 1)
        return list(range(first, number + 1))

    def _window(self, env: int, start: int) -> int | None:
        """Steps until the window is full or the episode ends; None when they are not all there."""
        for length in range(1, self.model.n_step + 1):
            number = start + length - 1
            if not self._same_episode(env, start, number):
                return None
            step = self.model.steps[env][number]
            if step["terminated"] or step["truncated"]:
                return length
        return self.model.n_step

    # what a batch holds

    def frames(self, name: str, env: int, number: int, final: Any = None) -> Any:
        """The stack of one observation field at a step, or of the observation that came after it as `final`."""
        stack = self.model.stack
        steps = self.model.steps[env]
        found = [steps[each][name] for each in self._stack_numbers(env, number)]
        if final is not None:
            found = [*found, final][-stack:]
        filler = found[0] if self.model.padding == "reset" else zeros_like(found[0])
        found = [filler] * (stack - len(found)) + found
        return found if stack > 1 else found[0]

    def row(self, key: int) -> dict[str, Any]:
        """The batch row of an eligible start."""
        env, start = self.place(key)
        row, last = self._shown(env, start)
        return row | {"key": key, "terminated": bool(last["terminated"]), "truncated": bool(last["truncated"])}

    def sequence(self, key: int, length: int) -> list[dict[str, Any]]:
        """The steps of a sequence: fields as they were given, stacks, windows, and whether `mask` covers each."""
        env, start = self.place(key)
        sequence = []
        for number in range(start, start + length):
            step, _ = self._shown(env, number)
            same = self._same_episode(env, start, number)
            step["mask"] = same and self.known(env, number)
            step["discount"] *= step["mask"]
            step["mine"] = same and not self.dead(env, number)
            step["dead"] = self.dead(env, number)
            sequence.append(step)
        return sequence

    def _shown(self, env: int, start: int) -> tuple[dict[str, Any], Step]:
        """A step as batches show it, and the last one of its window as far as that is stored: further fields as they
        were given, stacks, reward, discount, and what comes after.
        """
        steps, gamma, numbers = self.model.steps[env], self.model.gamma, [start]
        for number in range(start + 1, min(start + self.model.n_step, self.count)):
            over = steps[number - 1]["terminated"] or steps[number - 1]["truncated"]
            if over or not self._same_episode(env, start, number):
                break
            numbers.append(number)
        last = numbers[-1]
        shown = {name: value for name, value in steps[start].items() if name not in ("final", "priority")}
        shown["reward"] = float32(sum(gamma**m * float32(steps[each]["reward"]) for m, each in enumerate(numbers)))
        shown["discount"] = 0.0 if steps[last]["terminated"] else float32(gamma ** len(numbers))
        for name in filter(is_observation, steps[start]):
            if (env, last) in self.kept:
                after = self.frames(name, env, last, steps[last]["final"][name])
            else:
                # what was not seen is replaced by the last that was
                after = self.frames(name, env, last + 1 if self._same_episode(env, start, last + 1) else last)
            shown |= {name: self.frames(name, env, start), f"next_{name}": after}
        return shown, steps[last]
