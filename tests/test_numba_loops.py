"""The compiled loops and the NumPy code are one: the same calls leave the same bytes, in every batch and tree."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only, thinned
from trees import check_sums

from gpu_replay import Field, Hindsight, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops import _backend, numpy_loops
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.mass import MassRule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.samplers import Combined, LinearSchedule, Proportional, RankBased, Uniform

pytestmark = [host_only, pytest.mark.skipif(_backend.inner_loops() is numpy_loops, reason="Numba is not installed")]
FIELDS = {"obs": Field((3,), torch.float32), "half": Field((2,), torch.float16, torch.float32, 0.5)}
FIELDS |= {"brain": Field((), torch.bfloat16), "action": Field((), torch.int64)}
FIELDS |= {"large": Field((70,), torch.float32), "flag": Field((), torch.bool)}
SAMPLERS: dict[str, Any] = {
    "strata": Proportional(alpha=0.6, beta=LinearSchedule(0.4, 1.0, 20)),
    "independent": Proportional(alpha=0.9, beta=0.7, stratified=False, clip=3.0),
    "extremes": Proportional(alpha=1.0, normalize="buffer", initial="stored", eps=0.0),
    "steep": Proportional(alpha=4.0, initial=2.0),
    "combined": Combined(Proportional(beta=1.0), newest=3),
    "uniform": Uniform(),
    "rank": RankBased(alpha=1.0),
}


@pytest.fixture(name="both")
def both_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Makes one buffer that uses the loops and one that does not."""

    def make(buffer: Callable[[], Any]) -> tuple[Any, Any]:
        with_loops = buffer()
        with monkeypatch.context() as without:
            without.setattr(_backend, "inner_loops", lambda: numpy_loops)
            return with_loops, buffer()

    return make


def check_equal(first: Any, second: Any) -> None:
    """Fail unless two buffers hold the same bytes."""
    assert bytes(first._counters.numpy().data) == bytes(second._counters.numpy().data)
    for mine, other in zip(trees(first), trees(second), strict=True):
        assert torch.equal(mine.masses, other.masses)
        # one may have a larger root and a level less
        check_sums(mine)
        check_sums(other)
        # a block may be marked as one to look up again though nothing in it changed
        assert mine.low is None or mine.lowest() == other.lowest()
        assert mine.high is None or mine.highest() == other.highest()
    added = first.added
    state = first._state_tensors(added), second._state_tensors(added)
    assert state[0].keys() == state[1].keys()
    for name, tensor in state[0].items():
        assert same(tensor, state[1][name]), name


def trees(buffer: Any) -> list[Any]:
    """The trees of a buffer that are there."""
    return [tree for tree in (buffer._state.tree, buffer._state.eligible_tree) if tree is not None]


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    # a single element counts as contiguous whatever its stride is
    dense = (tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in (one, two))
    views = (tensor.view(torch.uint8) for tensor in dense)
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*views)


def check_batches(first: Any, second: Any, *, spare: frozenset[str] = frozenset()) -> None:
    """Fail unless two batches are the same to the bit; what `spare` names counts where `discount` is not 0."""
    assert list(first) == list(second)
    for name in first:
        one, two = first[name], second[name]
        if name in spare:
            counts = first.discount > 0
            one, two = one[counts], two[counts]
        assert same(one, two), name
        assert one.is_contiguous()


@pytest.mark.parametrize("slots", [1, 4096, 4097, 65_535, 65_536])
def test_sums_of_many_new_masses_are_those_of_the_leaves(slots: int) -> None:
    from gpu_replay.ops import numba_loops

    rule, random = MassRule.for_slots(slots, 0.6, 1e-6, None), np.random.default_rng(slots)
    keys, priorities = random.integers(-2, slots + 2, 2 * slots), random.random(2 * slots)
    found = []
    for loops in (numba_loops, numpy_loops):
        tree = MassTree(slots, torch.device("cpu"), "host")
        tree.set_masses(0, slots, rule.mass(1.0))
        counters = np.zeros(Counter.COUNT, dtype=np.int64)
        # nothing is the largest ever: all sums are made anew
        counters[Counter.MAX_MASS] = 2**40
        # the last slot changes too, in the last block of each level
        loops.update(tree, np.append(keys, slots - 1), np.append(priorities, 0.7), rule, 0, slots, counters, False)
        found.append((counters.tolist(), [level.tolist() for level in tree.arrays]))
        for below, above in itertools.pairwise(tree.arrays):
            assert np.array_equal(above[: below.size // 16], below.reshape(-1, 16).sum(1))
    assert found[0] == found[1]


def test_sums_of_slots_on_both_sides_of_the_seam_are_those_of_the_leaves(both: Any) -> None:
    sampler = Proportional(alpha=1.0)
    for buffer in both(lambda: ReplayBuffer(16_400, {"a": Field((), torch.uint8)}, sampler=sampler, device="cpu")):
        buffer.update_priorities(buffer.add(a=np.zeros(5, np.uint8)), np.arange(5.0))
        # all slots, from the middle of the first block round to there
        buffer.add(a=np.zeros(16_400, np.uint8))
        check_sums(buffer._state.tree)
        assert len(buffer._state.tree.levels) == 2


@pytest.mark.parametrize("stratified", [True, False])
def test_a_tree_larger_than_caches_is_the_same(stratified: bool) -> None:
    from gpu_replay.ops import numba_loops, numba_tree

    slots, random = 2**21 + 17, np.random.default_rng(4)
    rule = MassRule.for_slots(slots, 0.6, 1e-6, None)
    # most of it empty, so that targets fall on both ends of blocks
    some = np.append(random.integers(0, slots, 5_000), [0, slots - 1])
    masses = random.integers(1, 2**40, some.size)
    doubles = random.random(1_037)
    doubles[:2] = 0, 1 - 2**-53
    # repeated keys, keys that are gone, keys to come; a second lap of the ring
    keys = random.integers(slots - 9, 2 * slots + 9, 3_000)
    keys[::7] = keys[0]
    found = []
    for loops in (numba_loops, numpy_loops):
        tree = MassTree(slots, torch.device("cpu"), "host")
        tree.arrays[0][some] = masses
        tree.build()
        counters = np.zeros(Counter.COUNT, dtype=np.int64)
        # nothing is the largest ever, so rows are changed one after the other
        counters[Counter.MAX_MASS] = 2**50
        for _ in range(2):
            drawn = loops.draw(tree, doubles, stratified, 0)
            found += [*drawn, counters.copy(), *(level.copy() for level in tree.arrays)]
            loops.update(tree, keys, np.arange(3_000.0), rule, slots, 2 * slots, counters, False)
        assert tree.compiled[0].size > max(numba_tree._FAR, numba_tree._NEAR)
    half = len(found) // 2
    for one, two in zip(found[:half], found[half:], strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("capacity", [1, 15, 16, 17, 4095, 70_001])
def test_transitions_are_the_same(both: Any, sampler: Any, capacity: int) -> None:
    buffers = both(lambda: ReplayBuffer(capacity, FIELDS, sampler=sampler, device="cpu", seed=5))
    random, spread = np.random.default_rng(capacity), 70_001 // 4
    for turn in range(12):
        rows = int(random.integers(1, max(2, min(2 * capacity, spread))))
        values = {
            "obs": random.standard_normal((rows, 3), dtype=np.float32),
            "half": random.standard_normal((rows, 2)).astype(np.float16),
            "brain": torch.from_numpy(random.standard_normal(rows, dtype=np.float32)).bfloat16(),
            "action": random.integers(-9, 9, rows),
            "large": random.standard_normal((rows, 70), dtype=np.float32),
            "flag": random.random(rows) < 0.5,
        }
        own = None if turn % 3 else np.exp(random.normal(0, 8, rows))
        keys = [buffer.add(priority=own, **values) for buffer in buffers]
        assert torch.equal(*keys)
        most = min(len(buffers[0]), 5_000)
        batch = int(random.integers(1, most + 1))
        if isinstance(sampler, Combined):
            batch += sampler.newest
            if len(buffers[0]) < sampler.newest:
                continue
        drawn = [buffer.sample(batch) for buffer in buffers]
        check_batches(*drawn)
        # repeated keys, keys that are gone, keys to come, in any order
        chosen = torch.cat((drawn[0].key, drawn[0].key[:3], drawn[0].key[:2] - capacity, drawn[0].key[:2] + capacity))
        chosen = chosen[torch.from_numpy(random.permutation(chosen.numel()))] if turn % 2 else chosen
        priorities = torch.from_numpy(np.exp(random.normal(0, 9, chosen.numel()))) * (-1.0 if turn % 5 else 1.0)
        for buffer in buffers:
            buffer.update_priorities(chosen, priorities)
        check_equal(*buffers)
        check_batches(*(buffer[[buffer.added - 1]] for buffer in buffers))


STREAMS = {name: SAMPLERS[name] for name in ("strata", "extremes", "combined", "uniform", "rank")}


GOALS = ("observation", "achieved_goal", "desired_goal")
GOAL = Field((2,), torch.int64)
SPARE = frozenset({"next_obs", *(f"next_obs.{name}" for name in GOALS)})


def reached(achieved: torch.Tensor, desired: torch.Tensor, **_: Any) -> torch.Tensor:
    """A reward for the goal."""
    return -(achieved - desired).abs().float().reshape(len(achieved), -1).sum(dim=1)


@thinned("name, mode, padding", STREAMS, ("next_step", "same_step"), ("reset", "zero"))
def test_streams_are_the_same(both: Any, name: str, mode: Any, padding: Any) -> None:
    sampler, random = STREAMS[name], np.random.default_rng([mode == "next_step", padding == "zero"])
    followed = 0
    for case in range(10):
        envs, stack, n_step = int(random.integers(1, 6)), int(random.integers(1, 5)), int(random.integers(1, 5))
        steps = int(random.integers(2, 60))
        hindsight = case % 3 == 2 and isinstance(sampler, (Proportional, Uniform))
        fields = {"obs": Field((2, 4), torch.uint8), "action": Field((), torch.int64)}
        relabel = None
        if hindsight:
            n_step = 1
            obs, *goals = (f"obs.{name}" for name in GOALS)
            fields = {obs: fields["obs"], **dict.fromkeys(goals, GOAL), "action": fields["action"]}
            relabel = Hindsight("achieved_goal", "desired_goal", reward_fn=reached)
        make = {"stack": stack, "n_step": n_step, "gamma": 0.9, "autoreset": mode, "padding": padding}
        make |= {"sampler": sampler, "relabel": relabel, "random_shift": 0, "device": "cpu", "seed": case}
        buffers = both(functools.partial(TrajectoryReplayBuffer, steps * envs, envs, fields, **make))
        end = (0.0, 0.01, 0.05, 0.3)[case % 4]
        for turn in range(3 * steps):
            values = {
                "obs": random.integers(0, 256, (envs, 2, 4)).astype(np.uint8),
                "action": random.integers(0, 5, envs),
                "reward": random.standard_normal(envs).astype(np.float32),
                "terminated": random.random(envs) < end,
                "truncated": random.random(envs) < end,
            }
            if hindsight:
                values["obs.observation"] = values.pop("obs")
                values |= {f"obs.{name}": random.integers(0, 3, (envs, 2)) for name in GOALS[1:]}
            if case % 2 and mode == "same_step" and not hindsight:
                values["final_obs"] = random.integers(0, 256, (envs, 2, 4)).astype(np.uint8)
            own = None if random.random() < 0.7 else np.exp(random.normal(0, 3, envs))
            followed += not (values["terminated"].any() or values["truncated"].any())
            for buffer in buffers:
                buffer.add(priority=own, **values)
            check_equal(*buffers)
            eligible = int(buffers[0]._counters[Counter.ELIGIBLE])
            if turn % 3 or eligible < 4:
                continue
            drawn = [buffer.sample(int(random.integers(4, eligible + 1))) for buffer in (buffers[0],)]
            drawn.append(buffers[1].sample(len(drawn[0])))
            check_batches(*drawn, spare=SPARE)
            priorities = torch.from_numpy(np.exp(random.normal(0, 3, len(drawn[0]))))
            for buffer in buffers:
                # some of them hold no start, and some are gone
                buffer.update_priorities(drawn[0].key - 2, priorities)
        if case == 7:
            for buffer in buffers:
                buffer.clear()
            check_equal(*buffers)
    assert followed > 100


def test_without_numba_the_same_buffer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "numba" or (name == "gpu_replay.ops" and rest[2] == ("numba_loops",)):
            raise ImportError("no numba here")
        return real(name, *rest, **named)

    _backend.inner_loops.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        assert _backend.inner_loops() is numpy_loops
    finally:
        monkeypatch.undo()
        _backend.inner_loops.cache_clear()
    assert _backend.inner_loops() is not numpy_loops


def test_long_windows_of_one_environment_are_summed_in_the_order_of_their_steps(both: Any) -> None:
    make: dict[str, Any] = {"n_step": 16, "gamma": 1.0, "device": "cpu"}
    fields = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}
    for buffer in both(functools.partial(TrajectoryReplayBuffer, 40, 1, fields, **make)):
        # what is added to the first reward before the ninth takes it away is too little to count
        for step in range(18):
            reward = {0: 1e30, 8: -1e30}.get(step, 1.0)
            buffer.add(obs=[0.0], action=[0], reward=[reward], terminated=[step == 17], truncated=[False])
        assert buffer[0].reward.tolist() == [7.0]
