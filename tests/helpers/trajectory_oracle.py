"""The trajectory buffer as plain Python lists: it keeps every step ever added and derives all the rest when asked.

Nothing here is kept up to date: episodes, dead steps, what is stored and what is eligible follow from the whole history
each time, in the words of the contract, so that a wrong answer of the real buffer cannot have a wrong twin here. Only
priorities, which depend on the order of calls, are carried along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle import mass_of

from gpu_replay import Proportional

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


@dataclass
class History:
    """Everything that was ever given to a buffer, one list of steps for each environment."""

    capacity: int
    num_envs: int
    stack: int = 1
    n_step: int = 1
    gamma: float = 0.99
    autoreset: str = "next_step"
    padding: str = "reset"
    final_capacity: int | None = None
    # with hindsight, final observations of terminated episodes are kept too
    relabel: Any = None
    steps: list[list[Step]] = field(default_factory=list)
    # environment and step before which `begin_episodes` was called
    broken: set[tuple[int, int]] = field(default_factory=set)
    # how many steps of each environment there were at each `clear`
    cleared: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn = self.capacity // self.num_envs
        self.capacity = self.turn * self.num_envs
        self.steps = [[] for _ in range(self.num_envs)]

    @property
    def count(self) -> int:
        """Steps that were added to each environment."""
        return len(self.steps[0])

    @property
    def added(self) -> int:
        return self.count * self.num_envs

    def add(self, steps: Sequence[Step]) -> list[int]:
        assert len(steps) == self.num_envs
        first = self.added
        for one, step in zip(self.steps, steps, strict=True):
            one.append(step)
        return list(range(first, self.added))

    def clear(self) -> None:
        self.cleared.append(self.count)

    def begin_episodes(self, mask: Sequence[bool] | None = None) -> None:
        for env in range(self.num_envs):
            if mask is None or mask[env]:
                self.broken.add((env, self.count))

    def view(self) -> View:
        return View(self)


class View:
    """What a buffer with this history holds now."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.count = history.count
        # of each environment and step: the first step of its episode, and whether it is dead
        self.marks = [self._marks(env) for env in range(history.num_envs)]
        self.oldest = max([0, self.count - history.turn, *history.cleared])
        self.kept = self._kept()

    def _marks(self, env: int) -> list[tuple[int, bool]]:
        marks: list[tuple[int, bool]] = []
        for number in range(self.count):
            first, dead = marks[-1] if marks else (0, False)
            last = self.history.steps[env][number - 1] if number else {}
            ended = not dead and bool(last.get("terminated") or last.get("truncated"))
            if number == 0 or (env, number) in self.history.broken or dead:
                marks.append((number, False))
            elif ended:
                # with next-step autoreset this step only brings the final observation of the old episode
                marks.append((first, True) if self.history.autoreset == "next_step" else (number, False))
            else:
                marks.append((first, False))
        return marks

    def _kept(self) -> set[tuple[int, int]]:
        """Environment and step of every final observation that found a row in the side ring."""
        history = self.history
        rows = history.capacity if history.final_capacity is None else history.final_capacity
        if history.autoreset == "next_step" or rows == 0:
            return set()
        kept: list[tuple[int, int]] = []
        for number in range(self.count):
            oldest = max([0, number + 1 - history.turn, *(each for each in history.cleared if each <= number)])
            for env in range(history.num_envs):
                step = history.steps[env][number]
                wanted = step["truncated"] and not step["terminated"]
                if history.relabel is not None:
                    wanted = step["truncated"] or step["terminated"]
                # the row that comes next must not belong to a step that is still stored
                free = len(kept) < rows or kept[len(kept) - rows][1] < oldest
                if wanted and step.get("final") is not None and free:
                    kept.append((env, number))
        return set(kept)

    # what is stored, and what can be drawn

    def live(self) -> range:
        """Keys of all stored steps."""
        return range(self.oldest * self.history.num_envs, self.history.added)

    def place(self, key: int) -> tuple[int, int]:
        """Environment and step number of a key."""
        number, env = divmod(key, self.history.num_envs)
        return env, number

    def dead(self) -> list[int]:
        """Keys of stored steps that only carry a final observation."""
        places = {key: self.place(key) for key in self.live()}
        return [key for key, (env, number) in places.items() if self.marks[env][number][1]]

    def next_is_dead(self, env: int) -> bool:
        """Whether the step that this environment gives next will only carry a final observation."""
        if not self.count or self.history.autoreset != "next_step" or (env, self.count) in self.history.broken:
            return False
        last = self.history.steps[env][-1]
        return not self.marks[env][-1][1] and bool(last["terminated"] or last["truncated"])

    def eligible(self) -> list[int]:
        """Keys of the starts that can be drawn, ascending."""
        return [key for key in self.live() if self._complete(*self.place(key))]

    def _complete(self, env: int, start: int) -> bool:
        if self.marks[env][start][1] or self._stack_numbers(env, start)[0] < self.oldest:
            return False
        length = self._window(env, start)
        if length is None:
            return False
        last = self.history.steps[env][start + length - 1]
        if last["terminated"]:
            return True
        if last["truncated"] and self.history.autoreset != "next_step":
            return (env, start + length - 1) in self.kept
        return self._same_episode(env, start, start + length)

    def _same_episode(self, env: int, one: int, other: int) -> bool:
        return other < self.count and self.marks[env][one][0] == self.marks[env][other][0]

    def _stack_numbers(self, env: int, number: int) -> list[int]:
        """Steps whose frames are in the stack of a step, without the filling before the episode."""
        first = max(self.marks[env][number][0], number - self.history.stack + 1)
        return list(range(first, number + 1))

    def _window(self, env: int, start: int) -> int | None:
        """Steps until the window is full or the episode ends; None when they are not all there."""
        for length in range(1, self.history.n_step + 1):
            number = start + length - 1
            if not self._same_episode(env, start, number):
                return None
            step = self.history.steps[env][number]
            if step["terminated"] or step["truncated"]:
                return length
        return self.history.n_step

    # what a batch holds

    def frames(self, name: str, env: int, number: int, final: Any = None) -> Any:
        """The stack of one observation field at a step, or of the observation that came after it as `final`."""
        stack = self.history.stack
        steps = self.history.steps[env]
        found = [steps[each][name] for each in self._stack_numbers(env, number)]
        if final is not None:
            found = [*found, final][-stack:]
        filler = found[0] if self.history.padding == "reset" else zeros_like(found[0])
        found = [filler] * (stack - len(found)) + found
        return found if stack > 1 else found[0]

    def row(self, key: int) -> dict[str, Any]:
        """The batch row of an eligible start; `next_obs` is None where its content is unspecified."""
        env, start = self.place(key)
        steps, gamma = self.history.steps[env], self.history.gamma
        length = self._window(env, start)
        assert length is not None
        window = steps[start : start + length]
        last, end = window[-1], start + length
        final = last.get("final") if (env, end - 1) in self.kept else None
        row: dict[str, Any] = {
            "key": key,
            "reward": float32(sum(gamma**power * float32(step["reward"]) for power, step in enumerate(window))),
            "discount": 0.0 if last["terminated"] else float32(gamma**length),
            "terminated": bool(last["terminated"]),
            "truncated": bool(last["truncated"]),
        }
        for name, value in steps[start].items():
            if is_observation(name):
                row[name] = self.frames(name, env, start)
                after = (end, None) if final is None else (end - 1, final[name])
                row[f"next_{name}"] = None if last["terminated"] else self.frames(name, env, *after)
            elif name not in ("reward", "terminated", "truncated", "final", "priority"):
                row[name] = value
        return row

    def sequence_starts(self, length: int) -> list[int]:
        """Keys of the eligible starts whose next `length` steps are all stored."""
        return [key for key in self.eligible() if self.place(key)[1] + length <= self.count]

    def sequence(self, key: int, length: int) -> list[dict[str, Any]]:
        """The steps of a sequence: fields as they were given, stacks, windows, and whether `mask` covers each."""
        env, start = self.place(key)
        sequence = []
        for number in range(start, start + length):
            given = self.history.steps[env][number]
            step = {name: value for name, value in given.items() if name not in ("final", "priority")}
            step |= {name: self.frames(name, env, number) for name in step if is_observation(name)}
            step |= self._open_window(env, number)
            same = self._same_episode(env, start, number)
            step["mask"] = same and not self.marks[env][number][1]
            step["dead"] = self.marks[env][number][1]
            sequence.append(step)
        return sequence

    def _open_window(self, env: int, start: int) -> dict[str, Any]:
        """Reward, discount and what comes after the window of any step, as far as it is stored."""
        steps, gamma, numbers = self.history.steps[env], self.history.gamma, [start]
        for number in range(start + 1, min(start + self.history.n_step, self.count)):
            over = steps[number - 1]["terminated"] or steps[number - 1]["truncated"]
            if over or not self._same_episode(env, start, number):
                break
            numbers.append(number)
        last = numbers[-1]
        found: dict[str, Any] = {
            "reward": float32(sum(gamma**power * float32(steps[each]["reward"]) for power, each in enumerate(numbers))),
            "discount": 0.0 if steps[last]["terminated"] else float32(gamma ** len(numbers)),
        }
        for name in steps[start]:
            if not is_observation(name):
                continue
            if (env, last) in self.kept:
                after = self.frames(name, env, last, steps[last]["final"][name])
            else:
                # what was not seen is replaced by the last that was
                after = self.frames(name, env, last + 1 if self._same_episode(env, start, last + 1) else last)
            found[f"next_{name}"] = None if steps[last]["terminated"] else after
        return found


class Priorities:
    """Masses of the eligible starts of a history, for a `Proportional` sampler."""

    def __init__(self, history: History, settings: Proportional) -> None:
        self.history, self.settings = history, settings
        self.held: dict[int, float] = {}
        self.running: float | None = None
        self.stale = 0

    def add(self, steps: Sequence[Step]) -> list[int]:
        """Add a step of every environment to the history, and give what it completes its priority."""
        initial = self.initial()
        keys = self.history.add(steps)
        view = self.history.view()
        own = {key: self._own(view, key) for key in view.eligible() if key not in self.held}
        given = [priority for priority in own.values() if priority is not None]
        fresh = {key: initial if priority is None else priority for key, priority in own.items()}
        self.held = {key: self.held.get(key, fresh.get(key, 0.0)) for key in view.eligible()}
        self._note(given)
        return keys

    def _own(self, view: View, key: int) -> float | None:
        env, number = view.place(key)
        priority = self.history.steps[env][number].get("priority")
        return None if priority is None else abs(priority)

    def initial(self) -> float:
        """The priority of what becomes eligible without one of its own, as it stands before a call."""
        if self.settings.initial == "running":
            return 1.0 if self.running is None else self.running
        if self.settings.initial == "stored":
            return max(self.held.values(), default=1.0)
        return float(self.settings.initial)

    def clear(self) -> None:
        self.history.clear()
        self.held = {}

    def update(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        live = self.history.view().live()
        self.stale += sum(key not in live for key in keys)
        winners = {key: abs(value) for key, value in zip(keys, priorities, strict=True) if key in self.held}
        self.held |= winners
        self._note(list(winners.values()))

    def _note(self, given: Sequence[float]) -> None:
        known = [] if self.running is None else [self.running]
        self.running = max([*given, *known], default=None)

    def masses(self) -> list[int]:
        """In slot order."""
        masses = [0] * self.history.capacity
        for key, priority in self.held.items():
            masses[key % self.history.capacity] = mass_of(priority, self.settings, self.history.capacity)
        return masses

    def shares(self) -> dict[int, float]:
        """The probability of each eligible start."""
        capacity = self.history.capacity
        masses = {key: mass_of(value, self.settings, capacity) for key, value in self.held.items()}
        return {key: mass / sum(masses.values()) for key, mass in masses.items()}
