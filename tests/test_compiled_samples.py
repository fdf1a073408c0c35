"""Samples of trajectory buffers in compiled loops: the bytes, counts and errors of the calls that they replace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only

from gpu_replay import Combined, Field, Hindsight, Proportional, RankBased, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops import _backend
from gpu_replay.ops.threads import LARGE

pytestmark = [host_only, pytest.mark.skipif(_backend.whole_samples() is None, reason="Numba is not installed")]
GOAL = Field((2,), torch.bfloat16)
FIELDS = {
    "obs.picture": Field((2, 3), torch.uint8),
    "obs.reached": GOAL,
    "obs.wanted": GOAL,
    "action": Field((), torch.int64),
    # converted after the loop
    "half": Field((3,), torch.float16, torch.float32, 0.5),
    "wide": Field((40,), torch.float64),
}
ENVS, STEPS = 3, 20


def reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved.float() - 3 * desired.float()).sum(1)


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved == desired).all(1)


def step(random: np.random.Generator, end: float) -> dict[str, Any]:
    """Random numbers for all environments, with final observations."""
    given: dict[str, Any] = {}
    for name, field in FIELDS.items():
        numbers = torch.from_numpy(random.integers(0, 9, (ENVS, *field.shape))).to(field.dtype)
        given[name] = numbers
        if name.startswith("obs"):
            given[f"final_{name}"] = numbers + 100
    ends = {name: random.random(ENVS) < end for name in ("terminated", "truncated")}
    return {**given, **ends, "reward": random.standard_normal(ENVS).astype(np.float32)}


def pair(**settings: Any) -> tuple[TrajectoryReplayBuffer, TrajectoryReplayBuffer]:
    """Two buffers, of which the second samples without the loops."""
    one, two = (TrajectoryReplayBuffer(ENVS * STEPS, ENVS, FIELDS, device="cpu", seed=5, **settings) for _ in range(2))
    assert one._engine._compiled is not None
    two._engine._compiled = None
    return one, two


def bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def check_samples(one: Any, two: Any, batch: int) -> None:
    """Fail unless both draw the same bytes and count the same."""
    drawn = [buffer.sample(batch) for buffer in (one, two)]
    assert list(drawn[0]) == list(drawn[1])
    for name in drawn[0]:
        assert bytes_of(drawn[0][name]) == bytes_of(drawn[1][name]), name
    assert one._counters.tolist() == two._counters.tolist()
    assert one._storage.times_sampled.tolist() == two._storage.times_sampled.tolist()


def goals(strategy: Any = "future", **more: Any) -> Hindsight:
    return Hindsight("reached", "wanted", reward_fn=reward, ratio=0.7, strategy=strategy, **more)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"sampler": Uniform()},
    "final frames": {"sampler": Uniform(replacement=True), "autoreset": "same_step", "n_step": 3, "stack": 3},
    "zeros": {"sampler": Proportional(), "padding": "zero", "stack": 4, "n_step": 2},
    "newest": {"sampler": Combined(Uniform(), newest=2), "autoreset": "disabled", "final_capacity": 4},
    "rank": {"sampler": RankBased(resort_every=3), "relabel": goals("final")},
    "goals": {"sampler": Uniform(), "relabel": goals(), "stack": 2},
    "final goals": {"sampler": Uniform(replacement=True), "relabel": goals("episode"), "autoreset": "same_step"},
    "few finals": {
        "sampler": Proportional(),
        "relabel": goals(terminated_fn=reached),
        "autoreset": "disabled",
        "final_capacity": 5,
        "padding": "zero",
        "stack": 3,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_without_the_loops(name: str) -> None:
    buffers, random = pair(**CASES[name]), np.random.default_rng(len(name))
    for number in range(2 * STEPS + 5):
        given = step(random, 0.0 if number % 9 < 5 else 0.3)
        for buffer in buffers:
            buffer.add(**given)
        eligible = buffers[0].stats().eligible
        if number == STEPS + 3:
            for buffer in buffers:
                buffer.begin_episodes([True, False, False])
        if number % 4 == 3 and eligible > 3:
            check_samples(*buffers, batch=eligible)
            check_samples(*buffers, batch=3)


@pytest.mark.parametrize("rows", [400, 5000])
def test_larger_batches_are_those_without_the_loops(rows: int) -> None:
    """Whose memory is used again, or that take the other way."""
    buffers, random = pair(sampler=Uniform(replacement=True), relabel=goals(), stack=2), np.random.default_rng(1)
    for _ in range(STEPS):
        given = step(random, 0.1)
        for buffer in buffers:
            buffer.add(**given)
    loops = buffers[0]._engine._compiled
    assert (rows * loops._row_bytes < LARGE) == (rows == 400)
    kept = [buffers[0].sample(rows) for _ in range(2)]
    again = [buffers[1].sample(rows) for _ in range(2)]
    for one, two in zip(kept, again, strict=True):
        for name in one:
            assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("added", [0, 2, STEPS + 1])
def test_a_reward_function_that_adds_and_fails_leaves_no_sample(added: int) -> None:
    """What it added has not been sampled, and what was drawn is as it was before."""
    asked: list[int] = []

    def fails(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        if asked:
            for _ in range(asked.pop()):
                buffer.add(**given)
            raise ArithmeticError
        return reward(achieved, desired)

    relabel = Hindsight("reached", "wanted", reward_fn=fails)
    buffer = TrajectoryReplayBuffer(ENVS * STEPS, ENVS, FIELDS, device="cpu", sampler=Uniform(), relabel=relabel)
    given = step(np.random.default_rng(0), 0.0)
    for _ in range(STEPS + 4):
        buffer.add(**given)
    for _ in range(3):
        buffer.sample(30)
    expected, drawn = buffer._storage.times_sampled.clone(), buffer._counters.clone()
    asked.append(added)
    with pytest.raises(ArithmeticError):
        buffer.sample(30)
    for row in range(added):
        begin = (STEPS + 4 + row) % STEPS * ENVS
        expected[begin : begin + ENVS] = 0
    assert buffer._storage.times_sampled.tolist() == expected.tolist()
    assert buffer._counters[2:4].tolist() == drawn[2:4].tolist()


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("left", [0, 1])
def test_a_draw_from_fewer_starts_than_were_counted_is_refused(replacement: bool, left: int) -> None:
    """Rather than read what is not there, or look for it for ever."""
    buffer, _ = pair(sampler=Uniform(replacement=replacement))
    random = np.random.default_rng(1)
    for _ in range(4):
        buffer.add(**step(random, 0.0))
    draws = buffer._engine.draws
    before = draws.counters.tolist()
    # sums of a tree whose leaves are few
    flat = draws.state.eligible.compiled[0]
    flat[:] = 0
    if left:
        draws.state.eligible.arrays[0][0] = 1
        draws.state.eligible.build()
    if replacement and left:
        assert buffer.sample(2).key.tolist() == [0, 0]
        return
    with pytest.raises(RuntimeError, match=rf"sample\(2\): {left} starts can be drawn, where 9 were counted"):
        buffer.sample(2)
    assert draws.counters.tolist() == before
