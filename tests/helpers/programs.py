"""Random programs of public calls, and what plays them to a buffer and its model: from a seed, or drawn by Hypothesis.

A program is data: where it is played, and a list of calls with their arguments, in which keys are counted from the
newest (-1 is the last one added, 0 the next). So a program that failed can be written down as it is.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from devices import INTERPRETED
from hindsight_oracle import GOALS, check_batch, goal_step, hindsight
from model import UNIT, Step
from pairs import RENEWED, RowPair, StepPair, lettered, letters
from refusals import REFUSALS, whole_state

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, RankBased, Sequences, Uniform

# powers of two and alpha 1 give masses that no library rounds differently
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "proportional": Proportional(alpha=1.0, beta=0.5, eps=0.0),
    "independent": Proportional(alpha=1.0, beta=1.0, eps=0.0, stratified=False, initial=0.25),
    "annealed": Proportional(
        alpha=1.0, beta=LinearSchedule(0.0, 1.0, 4), eps=0.25, clip=512.0, normalize="buffer", initial="stored"
    ),
    "rank": RankBased(),
    "rank-independent": RankBased(alpha=1.0, beta=1.0, stratified=False, normalize="buffer", initial="stored"),
    "rank-annealed": RankBased(alpha=2.0, beta=LinearSchedule(0.0, 1.0, 6), initial=0.5),
    "combined": Combined(Uniform(), newest=2),
    "combined-proportional": Combined(Proportional(alpha=1.0, beta=LinearSchedule(0.0, 1.0, 4), eps=0.0), newest=3),
    "combined-rank": Combined(RankBased(normalize="buffer"), newest=2),
}
KINDS = ("rows", "steps")
FIELDS = [
    {"obs": Field((), torch.int64), "action": Field((), torch.int64)},
    {"obs": Field((2,), torch.float32), "action": Field((), torch.int64), "note": Field((2,), torch.float32)},
    {
        "obs.image": Field((2, 3), torch.int16, torch.float32, 0.5),
        "obs.vector": Field((2,), torch.float64, torch.float32),
        "action": Field((2,), torch.float32, torch.float16),
    },
]
Call = tuple[Any, ...]


class Program(NamedTuple):
    """What is played.

    settings: of the pair; `sampler` is a name in SAMPLERS, `fields` a place in FIELDS.
    """

    kind: str
    settings: dict[str, Any]
    calls: list[Call]


# making programs


def numbers(draw: random.Random, count: int, style: str) -> list[float]:
    """Priorities that are whole numbers of mass units, some negative.

    style: "equal" for many equal ones; "tiny" for a few units each, so that targets fall on borders between slots;
           "wide" for ten orders of magnitude.
    """
    if style == "tiny":
        return [draw.randint(1, 3) / UNIT for _ in range(count)]
    if style == "equal":
        return draw.choices((0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, -2.0, 7.25, 300.0), k=count)
    sizes = (round(10 ** draw.uniform(-5, 5) * UNIT) for _ in range(count))
    return [draw.choice((1, 1, -1)) * max(1, size) / UNIT for size in sizes]


def any_keys(draw: random.Random, capacity: int) -> list[int | None]:
    """Stored keys, some twice, and a few that are gone, never were, or are not yet, from the newest on; None is -1."""
    keys: list[int | None] = [draw.randint(-capacity, -1) for _ in range(draw.randint(0, 8))]
    keys += draw.choices(keys, k=2) if keys else []
    gone = (None, -capacity - 1, -capacity - 2, 0, 1, -(10**6), 10**9, 2**31, 2**40, 2**62, -(2**63))
    keys += draw.choices(gone, k=draw.randint(0, 3))
    draw.shuffle(keys)
    return keys


def any_call(draw: random.Random, kind: str, capacity: int, envs: int, end: float, style: str, largest: int) -> Call:
    """One call with its arguments."""
    chance = draw.random()
    if chance < 0.45:
        own = draw.random() < 0.3
        if kind == "rows":
            count = draw.randint(0, draw.choice((1, 3, capacity // 2 + 1, capacity, 2 * capacity + 3)))
            return "add", count, numbers(draw, count, style) if own else None
        many = draw.choice((1, 1, 1, 1, 2, 2 * capacity // envs + 1))
        steps = [letters(draw, envs, end) for _ in range(draw.randint(1, many))]
        own_numbers = [numbers(draw, envs, style) for _ in steps] if own else None
        return "steps" if len(steps) == 1 else "extend", steps, draw.random() < 0.6, own_numbers
    beta = draw.choice((None, None, 0.0, 1.0, 0.3))
    if chance < 0.6:
        return "sample", draw.randint(1, largest), beta
    if chance < 0.76:
        return "learn", numbers(draw, largest, style)
    if chance < 0.88:
        keys = any_keys(draw, capacity)
        return "update", keys, numbers(draw, len(keys), style)
    if chance < 0.895:
        return "exclude", any_keys(draw, capacity)
    if chance < 0.91:
        return "write", any_keys(draw, capacity), draw.randrange(1, 8), draw.randint(0, 200)
    if chance < 0.94:
        return "refused", draw.randrange(1000)
    if chance < 0.96:
        return "renew", draw.choice(("state", *RENEWED))
    if chance < 0.98 or kind == "rows":
        return ("clear",)
    return "begin_episodes", draw.choice((None, [draw.random() < 0.5 for _ in range(envs)]))


def any_program(
    draw: random.Random, kind: str, sampler: str, *, calls: int, capacity: int | None = None, **known: Any
) -> Program:
    """So many calls of a buffer with random settings, but for those that are known.

    capacity: transitions, or steps of one environment.
    """
    envs, end = 1, draw.choice((0.02, 0.1, 0.3, 0.6, 1.0))
    style = "equal" if "rank" in sampler else draw.choice(("tiny", "wide", "wide"))
    size = capacity or draw.choice((1, 2, 3, 5, 7, 8, 13, 21, 40))
    settings: dict[str, Any] = {"sampler": sampler, "seed": draw.choice((draw.getrandbits(16), 0, -7, 2**64 - 1))}
    settings["place"] = draw.choice(("memory", "memory", "memory", "file"))
    if kind == "steps":
        envs = draw.randint(1, 4)
        settings |= {
            "capacity": envs * size + draw.randrange(envs),
            "num_envs": envs,
            "fields": draw.randrange(len(FIELDS)),
            "stack": min(size, draw.choice((1, 1, 2, 3, 5, 8))),
            "n_step": min(size, draw.choice((1, 1, 2, 3, 5, 8))),
            "gamma": draw.choice((0.99, 0.5, 1.0, 0.9)),
            "autoreset": draw.choice(("next_step", "same_step", "disabled")),
            "padding": draw.choice(("reset", "zero")),
            "final_capacity": None,
        }
        if settings["autoreset"] != "next_step":
            settings["final_capacity"] = draw.choice((None, None, 0, 1, 3))
            settings["terminal_obs"] = settings["final_capacity"] != 0 and draw.random() < 0.5
        if draw.random() < 0.15:
            settings |= {"n_step": 1, "fields": "goals", "relabel": draw.choice(("future", "final", "episode"))}
        settings |= known
        longest = settings["capacity"] // envs - settings["n_step"] - settings["stack"] + 1
        if "relabel" not in settings and longest > 0 and draw.random() < 0.5:
            length = min(longest, draw.choice((1, 2, 3, 4, 6, 11)))
            settings["sequences"] = Sequences(length, draw.random() < 0.5, draw.choice((1, 1, 2, 3)))
    else:
        settings |= {"capacity": size} | known
    turn, largest = settings["capacity"] // envs * envs, draw.choice((5, 12, 40))
    # first something that can be drawn
    made = [any_call(draw, kind, turn, envs, end, style, largest) for _ in range(calls)]
    return Program(kind, settings, made)


# playing them


def reward(number: int, env: int) -> float:
    """One that no sum of a few others makes, and that single precision rounds."""
    return (number * 37 + env * 101) % 23 / 3 - 4


class Player:
    """A pair that plays a program.

    often: after how many calls contents are compared too.
    """

    def __init__(self, program: Program, device: str, often: int, folder: Path) -> None:
        settings = dict(program.settings)
        settings["folder"] = folder if settings.pop("place") == "file" else None
        settings["sampler"] = SAMPLERS[settings["sampler"]]
        self.strategy = settings.get("relabel")
        self.goals = settings.get("fields") == "goals"
        if program.kind == "steps":
            settings["fields"] = GOALS if self.goals else FIELDS[settings["fields"]]
            if self.strategy:
                settings["relabel"] = hindsight(self.strategy, 0.5)
        self.pair: Any = (StepPair if program.kind == "steps" else RowPair)(**settings, device=device)
        if self.strategy:
            self.pair.contents = lambda batch: check_batch(batch, self.pair.model.view(), self.strategy)
        self.kind, self.often = program.kind, often
        # the keys that were drawn last
        self.drawn: list[int] = []

    def play(self, calls: list[Call]) -> None:
        for number, (name, *arguments) in enumerate(calls, 1):
            getattr(self, name)(*arguments)
            self.pair.check_counts()
            if number % self.often == 0 or number == len(calls):
                self.pair.check_all()
                self.pair.check_contents()

    def __getattr__(self, name: str) -> Any:
        """Calls that a pair takes as they are."""
        return getattr(self.pair, name)

    def made(self, step: str, number: int, final: bool, own: list[float] | None) -> list[Step]:
        model = self.pair.model
        if self.goals:
            ends = [letter.replace("B", "TU").replace(".", "") for letter in step]
            made = [goal_step(number, env, end=end, final=final) for env, end in enumerate(ends)]
        else:
            made = lettered(number, step, self.pair.fields, final=final, terminal=model.terminal_obs)
        for env, each in enumerate(made):
            # of a reset step the reward may be anything, but should be 0
            dead = number == model.count and model.view().next_is_dead(env)
            value = (0.0, float("nan"), reward(number, env))[(number + env) % 3] if dead else reward(number, env)
            each |= {"reward": value} | ({"priority": own[env]} if own else {})
        return made

    def steps(self, steps: list[str], final: bool, own: list[list[float]] | None) -> None:
        self.pair.add(self.made(steps[0], self.pair.model.count, final, own and own[0]))

    def extend(self, steps: list[str], final: bool, own: list[list[float]] | None) -> None:
        first = self.pair.model.count
        self.pair.extend([self.made(each, first + at, final, own and own[at]) for at, each in enumerate(steps)])

    def sample(self, count: int, beta: float | None) -> None:
        if isinstance(self.pair.model.base, Uniform | Latest) and self.kind == "rows":
            # as many as there are is the more interesting
            count = min(count, max(1, len(self.pair.model.live()) + 1))
        self.drawn = self.pair.sample(count, beta)

    def learn(self, numbers: list[float]) -> None:
        """Update what was drawn last."""
        keys = self.drawn[: len(numbers)]
        self.pair.update(keys, numbers[: len(keys)])

    def keys(self, keys: list[int | None]) -> list[int]:
        return [-1 if key is None else self.pair.model.added + key for key in keys]

    def update(self, keys: list[int | None], numbers: list[float]) -> None:
        self.pair.update(self.keys(keys), numbers)

    def exclude(self, keys: list[int | None]) -> None:
        self.pair.exclude(self.keys(keys))

    def write(self, keys: list[int | None], some: int, first: int) -> None:
        """Write to one field or to several, as the bits of `some` say."""
        names = [name for place, name in enumerate(self.pair.buffer.fields) if some >> place & 1]
        if not self.goals and names:
            self.pair.write_numbers(self.keys(keys), names, first)

    def refused(self, number: int) -> None:
        """A call that means nothing changes nothing."""
        known = [each for each in REFUSALS if self.kind in each.kinds]
        call = known[number % len(known)]
        before = whole_state(self.pair.buffer)
        call.check(self.pair.buffer)
        assert whole_state(self.pair.buffer) == before, call.name


def run(program: Program, device: str = "cpu", often: int | None = None) -> Any:
    """Play a program to its end; fails with the program in its message."""
    with tempfile.TemporaryDirectory() as folder:
        player = Player(program, device, often or (8 if INTERPRETED else 4), Path(folder))
        try:
            player.play(program.calls)
        except AssertionError as error:
            raise AssertionError(f"{program}: {error}") from error
    return player.pair
