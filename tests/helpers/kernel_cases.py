"""Buffers whose calls launch every kernel in every form that matters, each launch under a name that people can read.

    PYTHONPATH=. python tests/helpers/kernel_cases.py [KERNEL ...]

writes anew what every kernel, or each of those named, takes on every target, `kernel_resources.json`, after a change
that is meant to change it: the table of the Triton that is installed. There is one more, of the Triton of the GPU
machine:

    pip install --no-deps --target FOLDER triton==3.6.0
    PYTHONPATH=FOLDER:. python tests/helpers/kernel_cases.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from launches import TARGETS, Launch, Resources, compile_for, recorded, resources, rows_of
from torch import Tensor

from gpu_replay import (
    Combined,
    Field,
    Hindsight,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    Sequences,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.ranks import inclusive_prefix_sum
from gpu_replay.samplers import BaseSampler, Random, Sampler

TABLE = Path(__file__).with_name("kernel_resources.json")
SMALL = {"x": Field((4,), torch.float32)}
CLASSIC = {
    "obs": Field((4,), torch.float32),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "next_obs": Field((4,), torch.float32),
    "terminated": Field((), torch.bool),
}
ODD = {
    "seven": Field((7,), torch.float32),
    "flags": Field((3,), torch.bool),
    "bytes": Field((5,), torch.int8, torch.float32),
    "brain": Field((9,), torch.bfloat16, torch.float32),
    "double": Field((3,), torch.float64, torch.float32, 0.5),
    "wide": Field((11,), torch.int64, torch.float64, 2.0),
}
TWENTY = {f"f{i}": Field(((4,), (), (3,))[i % 3], (torch.float32, torch.int64, torch.uint8)[i % 3]) for i in range(20)}
# rows of whole 16-byte words, which must be moved as such
WHOLE_WORDS = {
    "vectors of 4": SMALL,
    "frames": {"x": Field((84, 84), torch.uint8)},
    "frames to half": {"x": Field((84, 84), torch.uint8, torch.float16, 1 / 255)},
    "stacks": {"x": Field((4, 84, 84), torch.uint8)},
    "stacks to bfloat16": {"x": Field((4, 84, 84), torch.uint8, torch.bfloat16, 1 / 255)},
    "doubles": {"x": Field((6,), torch.float64)},
    "brain floats": {"x": Field((24,), torch.bfloat16)},
}
EVERYTHING = Proportional(beta=LinearSchedule(0.4, 1.0, 100), clip=2.0, initial="stored", normalize="buffer")
PLAIN = Proportional()
ALL_RANKS = RankBased(beta=LinearSchedule(0.4, 1.0, 100), initial="stored", normalize="buffer", stratified=False)

ACTION = {"action": Field((), torch.int64)}
VECTORS = {"obs": Field((4,), torch.float32), **ACTION}
# observations whose frames are whole 16-byte words, which must be moved as such
FRAMES = {
    "atari": {"obs": Field((84, 84), torch.uint8), **ACTION},
    "atari to half": {"obs": Field((84, 84), torch.uint8, torch.float16, 1 / 255), **ACTION},
    "atari to bfloat16": {"obs": Field((84, 84), torch.uint8, torch.bfloat16, 1 / 255), **ACTION},
    "atari to float": {"obs": Field((84, 84), torch.uint8, torch.float32, 1 / 255), **ACTION},
}
SAME_STEP = {"autoreset": "same_step", "padding": "zero"}
GOALS = {name: Field((3,), torch.float32) for name in ("obs.achieved_goal", "obs.desired_goal")} | ACTION


def distances(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    """Of goals."""
    return (achieved - desired).abs().flatten(1).sum(1)


GEOMETRIC: dict[str, Any] = {"strategy": "geometric", "gamma": 0.99}


@dataclass(frozen=True)
class Anywhere(BaseSampler):
    """A sampler of one's own."""

    def places(self, total: Tensor, rows: int, random: Random) -> Tensor:
        return (random.doubles(rows) * total).long()


# name: capacity, fields, sampler, and of a trajectory buffer of two environments further settings
CASES: dict[str, tuple[Any, ...]] = {
    "classic, 3 levels, all options": (5_000, CLASSIC, EVERYTHING),
    "2 levels": (100, SMALL, PLAIN),
    "3 levels, independent draws": (20_000, SMALL, Proportional(stratified=False, normalize="buffer")),
    "4 levels": (1_000_000, SMALL, PLAIN),
    "odd widths, uniform": (100, ODD, Uniform()),
    "3 levels, combined": (20_000, SMALL, Combined(PLAIN, 2)),
    "own sampler": (100, SMALL, Anywhere()),
    **{f"{name}, latest": (10, fields, Latest()) for name, fields in WHOLE_WORDS.items()},
    "by rank": (1_000_000, SMALL, RankBased()),
    "atari": (5_000, FRAMES["atari"], PLAIN, {"stack": 4, "n_step": 3}),
    "atari to half": (100, FRAMES["atari to half"], Uniform(), {"stack": 4, **SAME_STEP}),
    "atari to bfloat16": (100, FRAMES["atari to bfloat16"], Latest(), {"stack": 2}),
    "atari to float": (100, FRAMES["atari to float"], Combined(EVERYTHING, 3), {"stack": 4, "n_step": 12, **SAME_STEP}),
    "sequences": (5_000, FRAMES["atari"], PLAIN, {"stack": 4, "n_step": 3, "sequences": Sequences(9)}),
    "strict sequences": (
        *(100, FRAMES["atari to half"], Uniform()),
        {"stack": 4, "sequences": Sequences(8, strict=True, stride=2), **SAME_STEP},
    ),
    "goals": (5_000, GOALS, PLAIN, {"relabel": Hindsight(reward_fn=distances)}),
    "terminal observations": (100, VECTORS, PLAIN, {"stack": 3, "n_step": 2, "terminal_obs": True, **SAME_STEP}),
    "steps of vectors": (20_000, VECTORS, Proportional(stratified=False, initial="stored"), {}),
}
MORE_CASES: dict[str, tuple[Any, ...]] = {
    "twenty fields, replacement": (100, TWENTY, Uniform(replacement=True)),
    "3 levels": (5_000, SMALL, PLAIN),
    "4 levels, all options": (1_000_000, SMALL, EVERYTHING),
    "2 levels, all options": (100, CLASSIC, EVERYTHING),
    "2 levels, independent draws": (100, SMALL, Proportional(stratified=False)),
    "3 levels, lowest only": (20_000, SMALL, Proportional(normalize="buffer")),
    "3 levels, highest only": (20_000, SMALL, Proportional(initial="stored")),
    "by rank, all options": (2_100_000, CLASSIC, ALL_RANKS),
    "few by rank, combined": (30, SMALL, Combined(RankBased(normalize="buffer"))),
    "streams of 4 levels": (1_000_000, VECTORS, Combined(PLAIN), {"n_step": 8}),
    "streams of 4 levels, all options": (1_000_000, VECTORS, Combined(EVERYTHING), {"stack": 8, **SAME_STEP}),
    "streams of 4 levels, replacement": (1_000_000, VECTORS, Uniform(replacement=True), {"autoreset": "disabled"}),
    "goals of episodes": (
        *(100, GOALS, Uniform()),
        {"relabel": Hindsight(reward_fn=distances, strategy="episode"), **SAME_STEP},
    ),
    "geometric goals": (5_000, GOALS, Uniform(), {"relabel": Hindsight(reward_fn=distances, **GEOMETRIC)}),
    "last goals": (100, GOALS, Latest(), {"relabel": Hindsight(reward_fn=distances, strategy="final")}),
    "several observations": (
        *(100, {f"obs.{name}": field for name, field in ODD.items()} | {"action": Field((6,), torch.float32)}),
        *(PLAIN, {"stack": 3, "n_step": 2, **SAME_STEP}),
    ),
    "steps by rank": (20_000, VECTORS, RankBased(), {}),
    "sequences of one step": (20_000, VECTORS, PLAIN, {"n_step": 3, "sequences": Sequences(1, stride=3)}),
    "several observations of sequences": (
        *(100, {f"obs.{name}": field for name, field in ODD.items()} | {"action": Field((6,), torch.float32)}),
        *(PLAIN, {"stack": 3, "n_step": 2, "sequences": Sequences(4), **SAME_STEP}),
    ),
    "sequences by rank, all options": (
        *(2_100_000, VECTORS, Combined(ALL_RANKS)),
        {"n_step": 8, "sequences": Sequences(5, strict=True), **SAME_STEP},
    ),
    "streams by rank, all options": (2_100_000, VECTORS, Combined(ALL_RANKS), {"n_step": 8, **SAME_STEP}),
    "5 levels, all options": (2_100_000, SMALL, EVERYTHING),
}


MAIN_TARGET = "sm_90"
# what the other targets compile, and tests of one target that need no more
PART = ("classic, 3 levels, all options", "4 levels", "odd widths, uniform", "atari", "atari to half", "sequences")
# what the main target compiles by default, by kernel and buffer: every kernel, and those whose code differs most
QUICK = (
    rf"(?!update)\w+: ({PART[0]}: (?!.* with )|sums)",
    rf"update_kernel: {PART[0]}: update( of thousands)?$",
    r"(add_step|gather_windows)_kernel: atari: (?!.*priority)",
    r"(add|gather)_kernel: odd widths",
    r"add_step_kernel: atari to half: step with",
    r"(add_step|gather_windows)_kernel: strict sequences: st(ep|arts)$",
    r"draw_kernel: by rank|choose_goals_kernel: goals|doubles_kernel",
)
KEYS = ("of hundreds", "of a thousand", "of thousands")
# those of which many keys are updated at once, too
UPDATED = ("classic, 3 levels, all options", "by rank", "atari")


def made(capacity: int, fields: Any, sampler: Sampler, settings: Any = None, num_envs: int = 2) -> Any:
    """An empty buffer of rows, or of steps with these settings."""
    if settings is None:
        return ReplayBuffer(capacity, fields, sampler=sampler, device="cpu")
    known = {"autoreset": "next_step", "sampler": sampler, "device": "cpu", **settings}
    buffer = TrajectoryReplayBuffer(capacity, num_envs, fields, **known)
    # launches that are not made count nothing
    buffer._counters[Counter.ELIGIBLE] = 10
    return buffer


def calls_of(buffer: Any, rows: int = 9) -> dict[str, Callable[[], object]]:
    """Every call that launches kernels, by a name of its own."""
    keys, priorities = torch.arange(5), torch.ones(5)
    if isinstance(buffer, ReplayBuffer):
        given = rows_of(buffer, rows)
        return {
            "add": lambda: buffer.add(**given),
            "add with priority": lambda: buffer.add(**given, priority=torch.ones(rows)),
            "sample": lambda: buffer.sample(5),
            "sample with beta": lambda: buffer.sample(5, beta=0.5),
            "update": lambda: buffer.update_priorities(keys, priorities),
        }
    count = buffer.num_envs
    given = rows_of(buffer, count)
    return {
        "step": lambda: buffer.add(**given),
        "step with priority": lambda: buffer.add(**given, priority=torch.ones(count)),
        "step with final observation": lambda: buffer.add(**rows_of(buffer, count, final=True)),
        "starts": lambda: buffer._engine.sample(5, None),
        "update of starts": lambda: buffer.update_priorities(keys, priorities),
    }


def launches_of(case: tuple[Any, ...], *, updates: bool = False) -> dict[str, list[Launch]]:
    """The launches of each kind of call of a buffer; `updates`: also of more keys than a small batch has."""
    found: dict[str, list[Launch]] = {}
    with recorded() as launches:
        buffer = made(*case)
        calls = calls_of(buffer)
        for call, keys in zip(KEYS, (500, 1000, 2000), strict=True) if updates else ():
            given = torch.arange(keys), torch.ones(keys)
            calls[f"update {call}"] = partial(buffer.update_priorities, *given)
        for name, call in calls.items():
            launches.clear()
            call()
            found[name] = list(launches)
    return found


def _sums() -> dict[str, list[Launch]]:
    with recorded() as launches:
        inclusive_prefix_sum(torch.zeros(100_003, dtype=torch.int64))
        return {"prefix sum": list(launches)}


@cache
def cases(more: bool) -> dict[str, Launch]:
    """Launches that need different compiled code, by the kernel, the buffer and the call that makes them."""
    # a launch is named after the first call that makes it, whether or not there are more
    chosen = {**CASES, **(MORE_CASES if more else {})}
    found = {name: launches_of(case, updates=name in UPDATED) for name, case in chosen.items()}
    found["sums"] = _sums()
    named: dict[str, Launch] = {}
    variants = set()
    for name, calls in found.items():
        for call, launches in calls.items():
            for launch in launches:
                if launch.variant not in variants:
                    variants.add(launch.variant)
                    named[f"{launch.name}: {name}: {call}"] = launch
    return named


def chosen(target: str, full: bool) -> list[str]:
    """The cases to compile for a target."""
    if full and target == MAIN_TARGET:
        return list(cases(full))
    if target != MAIN_TARGET:
        return [case for case in cases(full) if case.split(": ")[1] in PART]
    return [case for case in cases(full) if re.match("|".join(QUICK), case)]


@cache
def compiled(case: str, target: str) -> object:
    """The compiled kernel of a case."""
    return compile_for(cases(case not in cases(False))[case], target)


@cache
def measured(case: str, target: str) -> Resources:
    """What the compiled kernel of a case takes."""
    return resources(compiled(case, target), target)


def write_table(targets: Iterable[str], kernels: Collection[str]) -> None:
    """Compile for these targets, and write the registers and the bytes of shared memory that it takes into this
    compiler's table; what spills is printed.

    kernels: those whose rows are written anew; none: all rows.
    """
    tables = json.loads(TABLE.read_text())
    for target in targets:
        before, rows = tables.setdefault(compiler(), {}).get(target, {}), {}
        for case in chosen(target, True):
            if kernels and case.split(":")[0] not in kernels:
                rows[case] = before[case]
                continue
            taken = measured(case, target)
            if taken.spilled:
                print(f"{target}: {case}: {taken}")
            rows[case] = [taken.registers, taken.shared]
        tables[compiler()][target] = rows
    # the two numbers of a case in its line
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(tables, indent=1)) + "\n")


def read_table() -> dict[str, dict[str, Resources]] | None:
    """What the kernels took, by target and case, if this compiler has a table; nothing spilled."""
    table = json.loads(TABLE.read_text()).get(compiler())
    return table and {
        target: {case: Resources(registers, 0, shared) for case, (registers, shared) in entries.items()}
        for target, entries in table.items()
    }


def compiler() -> str:
    """Triton's version, as far as it decides what is made of a kernel."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


if __name__ == "__main__":
    write_table(TARGETS, sys.argv[1:])
