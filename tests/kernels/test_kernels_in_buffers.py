"""Buffers of the kernels against buffers of the host code, call by call: the same integers, nothing written outside.

Random programs of all public calls (`programs.py`) are played to both and to their model. On CPU tensors the kernels
are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from guards import Guards
from interpreted import kernel_device as kernel_device
from kernel_cases import Anywhere
from launches import use_sizes_of_a_gpu
from programs import SAMPLERS, Player, Program, any_program, letters
from trees import check_sums
from twins import FIELDS, Twins, check_same, values_of

from gpu_replay import (
    Combined,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
)

# nothing is written outside
pytestmark = pytest.mark.usefixtures("guards")
SIZES = (1, 2, 127, 128, 129, 4095)
NUMBER = {"n": Field((), torch.int64)}
ANNEALED = ("annealed", "rank-annealed")


# random programs


def play(program: Program, device: str, folder: Path) -> tuple[Any, Any]:
    """Make each call of a program on the host and through kernels; both are like their model, and hold the same.

    returns: the two buffers, the host's first.
    """
    program.settings["place"] = "memory"
    players = []
    for backend, place in (("host", "cpu"), ("triton", device)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPU_REPLAY_BACKEND", backend)
            players.append((backend, Player(program, place, 1, folder)))
    for name, *arguments in program.calls:
        # what is refused, and what is copied, is the same on both
        if name in ("refused", "renew") and arguments[0] != "state":
            continue
        for backend, player in players:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GPU_REPLAY_BACKEND", backend)
                getattr(player, name)(*arguments)
        host, tested = (player.pair.buffer for _, player in players)
        try:
            check_same(tested, host)
        except AssertionError as error:
            raise AssertionError(f"{program}, after {name}{arguments}: {error}") from error
    players[1][1].pair.check_counts()
    return host, tested


@thinned("name, kind, seed", SAMPLERS, ["rows", "steps"], range(3))
def test_programs_leave_the_same_integers(
    name: str, kind: str, seed: int, device: str, tmp_path: Path, guards: Guards
) -> None:
    draw = random.Random(f"{name} {kind} {seed}")
    play(any_program(draw, kind, name, calls=16), device, tmp_path)
    assert len(guards) >= 6


@thinned(
    "strategy, autoreset, name",
    ["future", "final", "episode"],
    ["next_step", "same_step", "disabled"],
    SAMPLERS,
    # goals do not ask how their rows were drawn
    every=4,
)
def test_programs_with_goals_leave_the_same_integers(
    strategy: str, autoreset: str, name: str, device: str, tmp_path: Path
) -> None:
    draw = random.Random(f"{name} {autoreset} {strategy}")
    known = {"n_step": 1, "fields": "goals", "relabel": strategy, "autoreset": autoreset, "final_capacity": None}
    play(any_program(draw, "steps", name, calls=12, **known), device, tmp_path)


def of_steps(calls: list[Any], **settings: Any) -> Program:
    known = {"fields": 0, "seed": 7, "autoreset": "same_step", "sampler": "proportional"}
    return Program("steps", known | settings, calls)


def longer_than_a_program_sees(draw: random.Random, stack: int, n_step: int, envs: int, **settings: Any) -> Program:
    turn = stack + n_step + 3
    calls: list[Any] = [("extend", ["." * envs] * turn, True, None)]
    for time in range(8):
        ends = [letters(draw, envs, (0.02, 0.1)[envs > 2])]
        calls.append(("steps", ends, time % 5 > 0, [[draw.choice((0.5, 2.0)) for _ in range(envs)]]))
        calls += [("sample", 9, None), ("begin_episodes", [draw.random() < 0.1 for _ in range(envs)])][: time % 3]
    settings |= {"sampler": "combined-proportional", "stack": stack, "n_step": n_step}
    return of_steps(calls, capacity=turn * envs, num_envs=envs, **settings)


def few_places(draw: random.Random) -> Program:
    """Many endings of both kinds, and few places for their final observations."""
    calls: list[Any] = [("steps", ["".join(draw.choices("TTU..", k=9))], True, None) for _ in range(12)]
    for place in (12, 9, 6):
        calls.insert(place, ("sample", 9, None))
    places = {"final_capacity": 7, "terminal_obs": True}
    return of_steps(calls, capacity=45, num_envs=9, stack=2, n_step=2, **places)


def short_ring(draw: random.Random, turn: int) -> Program:
    calls = [("steps", [letters(draw, 2, 0.2)], False, None) for _ in range(16)]
    return of_steps(calls, capacity=2 * turn, num_envs=2, stack=3, n_step=1)


def no_room(draw: random.Random) -> Program:
    """Rows go by the order of the environments, however many programs there are."""
    steps = [[letters(draw, 130, (0.0, 0.3, 1.0)[time % 3])] for time in range(9)]
    calls = [("steps", ends, time % 5 != 3, None) for time, ends in enumerate(steps)]
    return of_steps(calls, capacity=390, num_envs=130, final_capacity=3, sampler="latest")


def ends_of_blocks(draw: random.Random, sampler: str) -> Program:
    """One block more than the rows fill, at both ends of a segment, and in two segments."""
    adds = [(rows, [draw.choice((0.25, 1.0, 4.0)) for _ in range(rows)]) for rows in (120, 128, 1, 301)]
    calls: list[Any] = [("add", *each) for each in adds]
    calls += [("sample", 9, None), ("sample", 130, None), ("learn", [draw.choice((0.5, 2.0)) for _ in range(130)])]
    return Program("rows", {"capacity": 300, "sampler": sampler, "seed": 5}, calls)


def several_blocks(draw: random.Random, sampler: str) -> Program:
    return any_program(draw, "rows", sampler, calls=12, capacity=129)


def excluded_rows(draw: random.Random) -> Program:
    """The newest among them, so many that one look does not pass them."""
    calls: list[Any] = [("add", 40, None), ("exclude", [*range(-12, 0), -20, -20])]
    calls += [("sample", 9, None), ("learn", [2.0] * 9), ("update", [-1, -5, -15], [9.0] * 3), ("sample", 3, None)]
    return Program("rows", {"capacity": 30, "sampler": "combined-proportional", "seed": 5}, calls)


def excluded_steps(draw: random.Random) -> Program:
    """The newest among them, which are not eligible yet, and which a priority is given meanwhile."""
    calls: list[Any] = [("extend", ["..."] * 7, False, None), ("exclude", [-1, -3, -4, -8, -9])]
    calls += [("update", [-1, -2, -4, -8], [9.0] * 4), ("sample", 5, None)]
    calls += [("steps", [ends], False, None) for ends in (".T.", "...", "U..", "...")]
    return of_steps([*calls, ("sample", 9, None)], capacity=30, num_envs=3, n_step=2, stack=2)


LONG, KEPT = longer_than_a_program_sees, {"autoreset": "same_step", "final_capacity": 40}
# what is played, whether with the sizes of a GPU, and a statistic with what it must exceed then
PROGRAMS: dict[str, tuple[Callable[[random.Random], Program], bool, str, int]] = {
    **{f"several blocks, {name}": (partial(several_blocks, sampler=name), False, "added", 128) for name in ANNEALED},
    "long windows": (partial(LONG, stack=1, n_step=40, envs=2, autoreset="next_step"), True, "eligible", 0),
    "long stacks": (partial(LONG, stack=40, n_step=1, envs=2, **KEPT), True, "eligible", 0),
    "many environments": (partial(LONG, stack=2, n_step=2, envs=70, **KEPT), True, "eligible", 0),
    # more than one step has: some were taken away
    "few places": (few_places, False, "lost_terminal_obs", 14),
    **{f"a ring of {turn}": (partial(short_ring, turn=turn), False, "size", 5) for turn in (3, 4)},
    "no room": (no_room, True, "lost_truncations", 9),
    "excluded rows": (excluded_rows, False, "eligible", 10),
    "excluded steps": (excluded_steps, False, "eligible", 10),
    **{f"blocks, {name}": (partial(ends_of_blocks, sampler=name), True, "size", 0) for name in ("uniform", *ANNEALED)},
}
SLOW = ("long stacks", "many environments", "blocks, rank-annealed")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS])
def test_programs_at_ends_of_rings_and_blocks(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, on_gpu, statistic, least = PROGRAMS[name]
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    host, _ = play(make(random.Random(name)), device, tmp_path)
    assert getattr(host.stats(), statistic) > least


# samplers of one's own


@pytest.mark.parametrize("combined", [False, True])
def test_samplers_of_ones_own_take_the_same_rows(combined: bool, device: str) -> None:
    sampler: Any = Combined(Anywhere(), newest=2) if combined else Anywhere()
    steps = {"action": Field((), torch.int64), "obs": Field((), torch.int64)}

    def of_streams(place: str) -> TrajectoryReplayBuffer:
        known = {"autoreset": "next_step", "n_step": 2}
        return TrajectoryReplayBuffer(40, 2, steps, sampler=sampler, device=place, seed=3, **known)

    rows = Twins(lambda place: ReplayBuffer(20, NUMBER, sampler=sampler, device=place, seed=3), device)
    streams, flags = Twins(of_streams, device), torch.tensor([False, True])
    rows.insert(n=torch.arange(31))
    for number in range(24):
        ends = {"terminated": flags & (number % 5 == 4), "truncated": ~flags & (number % 7 == 6)}
        streams.insert(obs=flags * number, action=flags * 1, reward=flags * 0.0, **ends)
    drawn = set()
    for both in (rows, streams) * 2:
        found = both.draw(7)
        drawn.add(tuple(found.key.tolist()))
        both.check()
    assert len(drawn) == 4


# rows

MORE_FIELDS = {
    "stacks": Field((2, 84, 50), torch.uint8, torch.float32, 1 / 255),
    "words": Field((16,), torch.int8),
    "long scaled": Field((3,), torch.int64, None, 0.1),
}
ROWS = {**FIELDS, **MORE_FIELDS}


@thinned("name, capacity", ROWS, [1, 37, 129])
def test_written_rows(name: str, capacity: int, device: str) -> None:
    generator = np.random.default_rng(capacity)
    both = twins(device, capacity, {"x": ROWS[name], **NUMBER})
    for rows in (2, 36, 2 * capacity + 3, 1):
        both.insert(x=values_of(ROWS[name], rows, generator), n=torch.arange(rows))
        both.check()
        both.draw(min(rows, capacity))


@pytest.mark.parametrize("field", [ROWS["to half"], ROWS["stacks"], Field((3001,), torch.int8)])
def test_rows_longer_than_a_program_of_a_gpu_moves(field: Field, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    both = twins(device, 5, {"x": field})
    for rows in (3, 4, 7):
        both.insert(x=values_of(field, rows, np.random.default_rng(rows)))
        both.draw(3)
    both.check()


# priorities

EVERYTHING = Proportional(0.5, LinearSchedule(0.4, 1.0, 9), clip=1000.0, initial="stored", normalize="buffer")


def twins(device: str, capacity: int, fields: dict[str, Field], sampler: Any = None) -> Twins:
    return Twins(
        lambda place: ReplayBuffer(capacity, fields, sampler=sampler or Latest(), device=place, seed=capacity), device
    )


@pytest.mark.parametrize("batch", [*SIZES, 1024, 1025])
def test_updates_of_awkward_sizes_with_many_repeated_keys(batch: int, device: str) -> None:
    both = twins(device, 20_000, NUMBER, EVERYTHING)
    generator = np.random.default_rng(batch)
    both.insert(n=torch.arange(batch + 5))
    keys = torch.from_numpy(generator.integers(-3, 60 + batch // 4, batch))
    both.update(keys, torch.from_numpy(4.0 ** generator.integers(-8, 8, batch)))
    both.check()
    assert both.host.stats().stale_updates > 0 or batch < 3


@pytest.mark.parametrize("sampler", [EVERYTHING, RankBased()], ids=["mass", "rank"])
def test_a_priority_that_is_not_finite_changes_nothing_and_is_counted(sampler: Any, device: str) -> None:
    """Kernels cannot raise: such an entry keeps its mass or its rank, also if an earlier one of its key was finite."""
    tested = twins(device, 129, NUMBER, sampler).tested
    engine = tested._engine
    given = torch.tensor([4.0, float("nan"), 16.0, float("inf")], dtype=torch.float64, device=device)
    engine.append({"n": torch.arange(4, device=device)}, 4, given, False)
    before = tested._state.tree.masses[:4].tolist()
    # the initial priority where the given one was not finite
    assert before == [tested._state.rule.mass(priority) for priority in (4.0, 1.0, 16.0, 1.0)]
    keys = torch.tensor([0, 2, 2, 0], device=device)
    given = torch.tensor([1.0, 1.0, float("-inf"), float("nan")], dtype=torch.float64, device=device)
    engine.sampling.update(keys, given, False)
    assert tested._state.tree.masses[:4].tolist() == before
    assert tested.stats().rejected_priorities == 4
    check_sums(tested._state.tree)
    assert (engine.sampling.masses.stamps == -1).all()
    if isinstance(sampler, RankBased):
        tested.sample(4)
        ages = engine.sampling._ranks.ages[:4]
        assert [(4 + age) % 129 for age in ages.tolist()] == [2, 0, 1, 3]


def test_a_priority_of_too_much_mass_is_cut_and_counted_by_itself(device: str) -> None:
    tested = twins(device, 129, NUMBER, Proportional()).tested
    keys = tested.add(n=torch.arange(4, device=device))
    given = torch.tensor([1e300, float("nan"), 1e300, 1.0], dtype=torch.float64, device=device)
    tested._engine.sampling.update(keys, given, False)
    stats = tested.stats()
    assert (stats.saturated_priorities, stats.rejected_priorities, stats.stale_updates) == (2, 1, 0)
    assert tested._state.tree.masses[:4:2].tolist() == [tested._state.rule.limit] * 2


def test_a_priority_that_is_not_finite_counts_as_none(device: str) -> None:
    """On the device nobody can raise; what comes with a dead step is not even looked at."""
    fields = {"obs": Field((3,), torch.float32), "action": Field((), torch.int64)}
    sampler = Proportional(alpha=0.5, eps=0.0)
    tested = Twins(lambda place: TrajectoryReplayBuffer(20, 4, fields, sampler=sampler, device=place), device).tested
    engine, mass = tested._engine, tested._state.rule.mass
    numbers = [4.0, float("nan"), float("inf"), 16.0]
    ends = [[False, False, False, True], [False] * 4]
    for terminated, given in zip(ends, (numbers, [1.0, 1.0, 1.0, float("nan")]), strict=True):
        values = {"obs": torch.zeros(4, 3), "action": torch.zeros(4, dtype=torch.int64), "reward": torch.zeros(4)}
        values |= {"terminated": torch.tensor(terminated), "truncated": torch.zeros(4, dtype=torch.bool)}
        engine.add_step(
            {name: value.to(device) for name, value in values.items()},
            torch.tensor(given, dtype=torch.float64, device=device),
            None,
            False,
        )
    # the fourth ended at once, so its priority was the largest given before the others came to count
    assert tested.masses()[:8].tolist() == [mass(p) for p in (4.0, 16.0, 16.0, 16.0)] + [0] * 4
    assert tested.stats().rejected_priorities == 2
    check_sums(tested._state.tree)
