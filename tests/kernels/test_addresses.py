"""Addresses have 64 bits: kernels on rings of 2^31 - 1 slots, whose bytes pass 2^31 and 2^32, interpreted on memory
that exists only where it is touched.

The same calls are made of a small buffer of the host and of the largest one there can be. What comes back, relative to
the first key, is the same. Kernels whose offsets have 32 bits are among the planted faults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from devices import thinned
from interpreted import INTERPRETED
from launches import every_kernel
from programs import SAMPLERS
from shifted_buffers import ACTION, GOALS, RELABEL, SMALL_STEPS, Shifted, play_rows, play_steps
from sparse_memory import SparseMemory, sparse
from torch import Tensor

from gpu_replay import Field, Sequences, TrajectoryReplayBuffer
from gpu_replay.ops import masses
from gpu_replay.ops.counters import Counter, HostWords, new_counters
from gpu_replay.ops.draw import PERMUTATION_WORDS, digits_for, make_draw, permuted_ranks, targets_in

CPU = torch.device("cpu")
SLOTS = 2**31 - 1
# Atari frames: fewer slots, whose rows are long
FRAME = {"x": Field((84, 84), torch.uint8)}
FRAMES = 1_300_000
NUMBERS = {"x": Field((3,), torch.uint8), "n": Field((), torch.int64)}


def counters_at(added: int) -> Tensor:
    counters = new_counters(CPU, 5)
    counters[Counter.ADDED] = added
    return counters


def check_drawn(by: Any, slots: list[int], added: int, drawn: int, ranks: Any = (), **named: Any) -> None:
    """Fail unless these slots of a full ring are drawn, each with its key; by rank with masses of 1."""
    batch = len(slots)
    found, keys, masses = torch.empty((3, batch), dtype=torch.int64)
    draw, _, minima = make_draw(by, counters_at(added), drawn, batch, SLOTS, **named)
    draw(ranks, (found, keys, torch.empty(batch), masses, torch.empty(minima, dtype=torch.int64)))
    assert found.tolist() == slots
    assert keys.tolist() == [added - SLOTS + (slot - added) % SLOTS for slot in slots]
    assert masses.tolist() == [int(by == "rank")] * batch


def drawn_uniformly(memory: SparseMemory) -> None:
    added = 6 * SLOTS + 2**29
    ranks = permuted_ranks(SLOTS, 40, HostWords(5).words(PERMUTATION_WORDS)).tolist()
    check_drawn("uniform", [(added + rank) % SLOTS for rank in [*ranks, -2, -1]], added, 40)


PLACES = [0, 2**28 - 1, 2**28, 2**29 - 1, 2**29, 2**29 + 1, 2**30 - 1, 2**30, 2**30 + 1, SLOTS - 2, SLOTS - 1]


def drawn_by_rank(memory: SparseMemory) -> None:
    """Ranks of mass 1 each, so that a target is a rank; only what the search of these draws looks at is there."""
    sums, ages = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(2))
    targets = targets_in(SLOTS, HostWords(5).doubles(12), stratified=True).tolist()
    sums[[SLOTS - 1, SLOTS - 2]] = torch.tensor([SLOTS, SLOTS - 1])
    for target in targets:
        for digit in range(digits_for(SLOTS)):
            span = 32**digit
            looked_at = target // (32 * span) * 32 * span + np.arange(1, 33) * span - 1
            looked_at = looked_at[looked_at < SLOTS]
            sums[looked_at] = torch.from_numpy(looked_at + 1)
        sums[[target, max(0, target - 1)]] = torch.tensor([target + 1, max(1, target)])
    slots = [PLACES[row % len(PLACES)] for row in range(12)]
    added = 8 * SLOTS + 2**29
    ages[targets] = torch.tensor([(slot - added) % SLOTS for slot in slots])
    check_drawn("rank", slots, added, 12, (sums, ages, torch.tensor([SLOTS])), normalize_over_buffer=True)


def scanned(memory: SparseMemory) -> None:
    """What the first launch made of all parts but the last is given."""
    from gpu_replay.kernels.prefix_sum import scan_parts_kernel, sum_parts_kernel

    values, out = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(2))
    parts, block = 2**20, 2**11
    sums = torch.zeros(parts, dtype=torch.int64)
    values[-3:], sums[-2] = torch.tensor([1, 2, 3]), 100
    memory.programs = lambda count: [count - 1]
    sum_parts_kernel[(parts,)](values, sums, SLOTS, 1, BLOCK=block)
    scan_parts_kernel[(parts,)](values, sums, out, SLOTS, 1, PARTS=parts, BLOCK=block)
    assert out[-4:].tolist() == [100, 101, 103, 106]


def numbered(memory: SparseMemory) -> None:
    from gpu_replay.kernels.draw import doubles_kernel

    numbers, draws = torch.zeros(SLOTS, dtype=torch.float64), 2**10
    memory.programs = lambda count: [count - 1]
    doubles_kernel[(-(-SLOTS // draws),)](new_counters(numbers.device, 5), numbers, SLOTS, 0, DRAWS=draws)
    assert numbers[-3:].tolist() == HostWords(5, SLOTS // 4).doubles(3).tolist()


class Case(NamedTuple):
    """What to do, and of how many tensors of `least` bytes or more each kernel must have reached the end."""

    play: Callable[..., None]
    reached: dict[str, int]
    buffers: Shifted | None = None
    least: int = SLOTS - 1


def of_rows(sampler: str, **more: int) -> Case:
    """Of two fields, leaves, counts of samples and stamps each kernel reaches the ends."""
    kernels = {"add_kernel": 4, "draw_kernel": 1, "gather_kernel": 3, "update_kernel": 2}
    return Case(play_rows, kernels | more, Shifted(NUMBERS, SAMPLERS[sampler], SLOTS, 5))


def of_steps(sampler: str, fields: Any, reached: Any, envs: int = 2, settings: Any = None) -> Case:
    known = {"stack": 4, "n_step": 3} if settings is None else settings
    # as many steps as fit, of which there are three more than a multiple of four, as in the small ring
    slots = ((SLOTS // envs + 1) // 4 * 4 - 1) * envs
    return Case(
        play_steps,
        reached,
        Shifted(fields, SAMPLERS[sampler], slots, 10 * envs, SMALL_STEPS * envs, envs, known),
        slots,
    )


OBS = {"obs": Field((8,), torch.uint8), **ACTION}
ROWS = {"stack": 3, "n_step": 2, "autoreset": "same_step", "sequences": Sequences(2)}
# fields and rewards, metadata, final observations, and trees
STARTS = {"add_step_kernel": 10, "gather_windows_kernel": 8}
WITH_GOALS = {"add_step_kernel": 13, "gather_windows_kernel": 9}
WITH_GOALS |= {"choose_goals_kernel": 4, "gather_kernel": 2, "draw_kernel": 1}
BY_MASS = {"add_step_kernel": 11, "draw_kernel": 2, "update_kernel": 2}
CASES = {
    "rows by mass": of_rows("proportional"),
    "many keys at once": of_rows("independent", last_wins_kernel=1),
    "frames at the end": Case(
        play_rows, {"add_kernel": 1, "gather_kernel": 1}, Shifted(FRAME, SAMPLERS["latest"], FRAMES, 5)
    ),
    "starts by mass": of_steps("combined-proportional", OBS, STARTS | BY_MASS),
    "sequences by mass": of_steps("combined-proportional", OBS, STARTS | BY_MASS, settings=ROWS),
    "starts": of_steps("uniform", OBS, STARTS | {"draw_kernel": 1}),
    "goals": of_steps("combined", GOALS | ACTION, WITH_GOALS, settings=RELABEL),
    "goals of one": of_steps("proportional", GOALS | ACTION, WITH_GOALS | {"update_kernel": 2}, 1, settings=RELABEL),
    "rows": Case(drawn_uniformly, {}),
    "rows by rank": Case(drawn_by_rank, {"draw_kernel": 1}),
    "numbers": Case(numbered, {"doubles_kernel": 1}),
    "sums": Case(scanned, {"sum_parts_kernel": 1, "scan_parts_kernel": 2}),
}


# in the interpreter seconds each, of kernels and memory that others reach as well
SLOW = ("starts", "goals")


@pytest.mark.skipif(not INTERPRETED or sys.platform != "linux", reason="interpreted, on Linux's memory maps")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_kernels_reach_all_of_the_largest_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if name == "many keys at once":
        # as for more keys than one program takes
        monkeypatch.setattr(masses, "keys_together", lambda batch, interpreted: 0)
    with sparse() as memory:
        # the rows
        memory.programs = lambda count: sorted({*range(count)[:4], *range(count)[-4:]})
        if case.buffers:
            memory.places = (0, 1 - case.buffers.head / case.buffers.large, 1)
        case.play(case.buffers or memory)
        assert memory.reached_ends(case.least) == case.reached


def test_every_kernel_reaches_the_end_of_something() -> None:
    assert {kernel for case in CASES.values() for kernel in case.reached} == every_kernel()


# counters near 2^31, 2^32 or 2^40: a buffer draws as one at the beginning does, in loops and kernels

POWERS = [31, 32, 40]
CODE = pytest.mark.parametrize("backend", ["host", pytest.param("triton", marks=pytest.mark.slow)])
VECTORS = {"obs": Field((2,), torch.float32), **ACTION}
WINDOWS = {"stack": 3, "n_step": 3}
MODES = {
    "next_step": (VECTORS, {"autoreset": "next_step", **WINDOWS}),
    "same_step": (VECTORS, {"autoreset": "same_step", "padding": "zero", **WINDOWS}),
    "goals": (GOALS | ACTION, RELABEL),
}


@thinned("name, power", SAMPLERS, POWERS, times=2)
@CODE
def test_transitions_near_the_ends_of_numbers(backend: str, name: str, power: int) -> None:
    fields = {"x": Field((), torch.int64), "y": Field((3,), torch.float32)}
    twins = play_rows(Shifted(fields, SAMPLERS[name], 7, 0, 7, late=2**power - 4, backend=backend))
    assert twins.tested.added > 2**power
    assert twins.host.stats().stale_updates == twins.tested.stats().stale_updates > 0


@thinned("name, power, mode", SAMPLERS, POWERS, MODES, times=2)
@CODE
def test_steps_near_the_ends_of_numbers(backend: str, name: str, power: int, mode: str) -> None:
    fields, settings = MODES[mode]
    slots, late = 2 * SMALL_STEPS, 2 * 2**power - 2 * 4
    twins = play_steps(Shifted(fields, SAMPLERS[name], slots, 0, slots, 2, settings, late, backend))
    assert twins.tested.added > 2**power * 2
    assert twins.host.stats().eligible == twins.tested.stats().eligible > 0


@CODE
def test_an_episode_longer_than_a_number_stays_eligible(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REPLAY_BACKEND", backend)
    buffer = TrajectoryReplayBuffer(14, 2, {"obs": Field((), torch.float32), **ACTION}, stack=2, n_step=2, device="cpu")
    buffer._counters[Counter.ADDED] = buffer._counters[Counter.FIRST] = 2 * (2**31 - 4)
    # since key 0
    buffer._streams.streams.depth.fill_(2**31 - 5)
    buffer._rebuild(0)
    flags = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    for turn in range(14):
        row = np.full(2, turn, np.float32)
        buffer.add(obs=row, action=np.full(2, turn), reward=row, **flags)
        # an ending of the other environment is no matter of this one
        flags["terminated"][1] = turn == 7
    # but for the steps without the observation after them, those without the frame before, and the ending's own
    assert buffer.stats().eligible >= 7
    assert int(buffer._streams.streams.depth.max()) == 2**31 - 1 - 2
    batch = buffer.sample(4)
    old = batch.key % 2 == 0
    assert torch.equal(batch.obs[old, 1], batch.obs[old, 0] + 1)
