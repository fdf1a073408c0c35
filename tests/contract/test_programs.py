"""Random programs of every public call, played to a buffer and to plain Python lists: all that comes back is equal.

Whatever runs behind the buffer (compiled loops, loops as Python, interpreted kernels, a GPU) is compared with the same
lists, so all of them draw the same keys, bit for bit. What a program is, and how it is played, says `programs.py`.
"""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from devices import INTERPRETED, host_only, scale, thinned
from model import UNIT, place, stratum
from programs import KINDS, SAMPLERS, Program, any_program, run
from transitions import EXACT, NUMBER

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_programs(kind: str, name: str, device: str, full: bool) -> None:
    # each compiles kernels of its own for a GPU
    few = INTERPRETED or device != "cpu"
    for seed in range((6 if few else 60) if full else scale(4, 1)):
        draw = random.Random(f"{kind} {name} {seed} {full}")
        program = any_program(draw, kind, name, calls=scale(40, 15))
        # whatever happened, it goes on from disk
        run(program._replace(calls=[*program.calls, ("renew", "checkpoint"), ("sample", 3, None)]), device)


@thinned("capacity, name", [97, 129, 1009, scale(4099, 300)], ["uniform", "rank-annealed", "annealed", "independent"])
def test_programs_in_larger_buffers(capacity: int, name: str, device: str) -> None:
    draw = random.Random(f"{capacity} {name}")
    run(any_program(draw, "rows", name, calls=scale(25, 8), capacity=capacity), device, often=25)


# programs that caught what random ones let pass
FOUND = {
    "more updates between two draws than an order of ranks notes": Program(
        "rows",
        {"sampler": "rank", "capacity": 200, "seed": 3, "place": "memory"},
        [
            ("add", 200, None),
            ("sample", 5, None),
            ("update", [*range(-200, 0)], [float(key * 37 % 101) for key in range(200)]),
            ("sample", 40, None),
        ],
    )
}


@pytest.mark.parametrize("name", FOUND)
def test_found_programs(name: str, device: str) -> None:
    run(FOUND[name], device)


@hypothesis.settings(
    max_examples=scale(16, 4),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(list(SAMPLERS)),
    calls=st.integers(1, 30),
    draw=st.randoms(use_true_random=False),
)
def test_any_program(kind: str, name: str, calls: int, draw: random.Random, device: str) -> None:
    run(any_program(draw, kind, name, calls=calls), device)


def test_a_capacity_of_millions(device: str) -> None:
    # loops as Python take their time
    capacity = 40_009 if INTERPRETED or os.environ.get("NUMBA_DISABLE_JIT") == "1" else 3_000_001
    buffer = ReplayBuffer(capacity, NUMBER, sampler=EXACT, device=device, seed=3)
    generator = np.random.default_rng(3)
    given_masses = (10 ** generator.uniform(-5, 5, capacity) * UNIT).round().clip(1)
    buffer.add(number=torch.arange(capacity, device=device), priority=torch.from_numpy(given_masses / UNIT).to(device))
    masses, words = given_masses.astype(np.int64), np.random.Philox(key=[3, 0])

    def check(count: int) -> None:
        assert np.array_equal(buffer.masses().cpu().numpy(), masses)
        prefix = masses.cumsum()
        total = int(prefix[-1])
        assert buffer.total_mass() == total
        parts = [stratum(part, count, total) for part in range(count)]
        raw = words.random_raw(-(-count // 4) * 4)[:count].tolist()
        targets = [low + place(word, high - low) for (low, high), word in zip(parts, raw, strict=True)]
        slots, batch = prefix.searchsorted(targets, side="right"), buffer.sample(count)
        assert batch.key.tolist() == np.where(slots < buffer.added % capacity, slots + capacity, slots).tolist()
        assert torch.equal(batch.number, batch.key)

    check(scale(1000, 100))
    # the last slot, the first one and their neighbours, by far the heaviest
    ends = [0, 1, capacity - 2, capacity - 1]
    buffer.update_priorities(torch.tensor(ends), torch.full((4,), 2.0**18, dtype=torch.float64))
    masses[ends] = 2**38
    check(scale(4097, 300))
    # the ring wraps by two: two heavy slots are overwritten with the running maximum
    buffer.add(number=torch.tensor([capacity, capacity + 1], device=device))
    check(scale(1000, 100))


@pytest.mark.slow
@host_only
@pytest.mark.skipif(find_spec("numba") is None or os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="loops as Python")
def test_a_million_steps_of_one_environment_are_stored_within_a_second() -> None:
    count, seconds = 1_000_000, []
    steps = {"obs": np.zeros((count, 1, 4), np.float32), "action": np.zeros((count, 1), np.int64)}
    steps |= {"reward": np.ones((count, 1), np.float32), "truncated": np.zeros((count, 1), bool)}
    steps["terminated"] = (np.arange(count) % 200 == 199)[:, None]
    fields = {"obs": Field((4,), torch.float32), "action": NUMBER["number"]}
    # a busy machine may be late, and the first call compiles
    for _ in range(4):
        buffer = TrajectoryReplayBuffer(
            count, 1, fields, n_step=3, autoreset="next_step", sampler=Proportional(), device="cpu"
        )
        began = time.perf_counter()
        buffer.extend(**steps)
        seconds.append(time.perf_counter() - began)
    assert buffer.stats().eligible > 0.99 * count
    assert min(seconds) < 1
