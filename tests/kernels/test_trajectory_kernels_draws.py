"""Kernels that draw starts of a trajectory buffer, against the host code: the same integers, none written outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from devices import host_only, thinned
from guards import Guards
from interpreted import kernel_device as kernel_device
from tolerances import close
from trees import random_masses

from gpu_replay import Combined, Field, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.engines.draw_state import DrawState
from gpu_replay.engines.host_sampler import HostSampler
from gpu_replay.engines.sampler_plan import plan_of
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops.counters import NO_MASS, Counter, blocks_for
from gpu_replay.ops.draw import DeviceDraws, plan_draw
from gpu_replay.ops.eligibility import StreamShape
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ring import plan_gather
from gpu_replay.ops.weights import pending_weights
from gpu_replay.samplers import Sampler

CPU = torch.device("cpu")
FIELDS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


class Ring(NamedTuple):
    """A ring that need never have been filled by adds: `added` steps of all environments, masses at random."""

    num_envs: int
    steps: int
    added: int

    @property
    def slots(self) -> int:
        return self.num_envs * self.steps


class Drawers:
    """The host engine and the kernels' trees and counters over the same ring."""

    def __init__(self, ring: Ring, sampler: Sampler, device: str, *, largest: int = 2**40, seed: int = -9) -> None:
        shape = StreamShape(ring.num_envs, ring.steps, 1, 1, True, 0)
        plan = plan_of(sampler)
        masses = random_masses(ring.slots, ring.added, largest)
        # nothing stands in slots that were never written
        masses[ring.added * ring.num_envs :] = 0
        self.eligible = int((masses > 0).sum())
        self.slots, self.plan = ring.slots, plan
        state = DrawState(plan, ring.slots, CPU, "host", seed, tracks_eligibility=True)
        for tree, leaves in ((state.tree, masses), (state.eligible_tree, masses > 0)):
            if tree is not None:
                tree.masses.copy_(torch.from_numpy(leaves.astype(np.int64)))
        state.rebuild(ring.slots)
        trees = state.tree, state.eligible_tree
        self.tree, self.eligible_tree = (None if each is None else device_tree(each, device) for each in trees)
        counters = state.counters
        counters[Counter.ADDED], counters[Counter.RANDOM] = ring.added * ring.num_envs, 5
        self.counters = counters.clone().to(device)
        storage = TrajectoryStorage(shape, dict(FIELDS), CPU, gamma=0.9, padding="reset", random_shift=0)
        self.host = HostSampler(state, storage, seed)
        self.host_counters = counters
        self.times_sampled = torch.zeros(ring.slots, dtype=torch.int32, device=device)

    def draw(self, batch: int, **form: Any) -> DeviceDraws:
        plan = self.plan
        return plan_draw(
            "uniform" if self.tree is None else "mass",
            *(self.counters, self.times_sampled, batch - plan.newest_of(batch), batch, self.slots),
            tree=self.tree,
            starts=self.eligible_tree,
            tracks_eligibility=True,
            stratified=plan.stratified,
            lowest_of_all=plan.lowest_of_all,
            replacement=plan.replacement,
            **form,
        ).launch()

    def check(self, batch: int, skipped: int, *, shifted: bool) -> None:
        """Draw once on either side and compare; if `shifted`, `batch` random words are taken after the draw."""
        host = self.host.draw(batch, 0.5, skipped)
        slots, probability, weight, blocks = host
        block = int(self.host_counters[Counter.RANDOM])
        shifts = batch if shifted else 0
        newest = self.plan.newest_of(batch)
        drawn = batch - newest
        before = self.times_sampled.tolist()
        found = self.draw(batch, skipped=skipped, shifted=shifted)
        given = found.value
        if self.tree is not None and drawn > 0:
            leaves = self.host.state.masses.arrays[0]
            assert found.value.tolist() == [*leaves[slots[:drawn]].tolist(), *[0] * newest]
            # the stream moves on with the weights
            assert int(self.counters[Counter.RANDOM]) == block
            weighing = pending_weights(found.value, self.counters, None, 0.5, drawn, shifts)
            plan_gather({}, {}, found.slots.numel(), found.slots.device, weighed=True)(found.slots, weighing)
            given = weighing.weight
        assert (found.words is None) == (not shifted)
        if found.words is not None:
            assert found.words.tolist() == [block + blocks]
        assert found.slots.tolist() == slots.tolist()
        assert found.keys.tolist() == self.host.finish({}, host, blocks_for(shifts))["key"].tolist()
        assert close(found.probability, torch.from_numpy(probability), "probability")
        assert close(given, torch.from_numpy(weight), "weight")
        now = np.array(before) + np.bincount(slots, minlength=self.slots)
        assert self.times_sampled.tolist() == now.tolist()
        assert self.counters.tolist() == self.host_counters.tolist()


def device_tree(source: MassTree, device: str) -> MassTree:
    tree = MassTree(source.slots, torch.device(device), "triton", low=source.low is not None)
    tree.masses.copy_(source.masses)
    tree.build()
    return tree


SAMPLERS: dict[str, Sampler] = {
    "distinct": Uniform(),
    "replacement": Uniform(replacement=True),
    "stratified": Proportional(),
    "independent": Proportional(stratified=False, normalize="buffer"),
    "latest": Latest(),
    "combined distinct": Combined(Uniform(), newest=3),
    "combined stratified": Combined(Proportional(), newest=9),
    "combined independent": Combined(Proportional(stratified=False, normalize="buffer")),
}
# environments, steps of the ring, steps ever added; with the kernels' fan-out trees of one to three levels
RINGS = {
    "partly filled": Ring(3, 40, 25),
    "just full": Ring(2, 64, 64),
    "gone round": Ring(3, 43, 43 * 5 + 17),
    "two levels": Ring(7, 585, 4000),
    "three levels": Ring(16, 1250, 999),
}


@thinned("sampler, ring", SAMPLERS, RINGS, times=2)
def test_draws(sampler: str, ring: str, device: str, guards: Guards) -> None:
    shape = RINGS[ring]
    drawers = Drawers(shape, SAMPLERS[sampler], device)
    some = min(20, drawers.eligible // 4)
    for batch in (some, 10):
        for steps in (0, 1, min(shape.added, shape.steps) // 2):
            drawers.check(batch, steps * shape.num_envs, shifted=steps > 0)
    guards.check()


@thinned(
    "sampler, added",
    ["distinct", "stratified", "latest", "combined distinct", "combined stratified"],
    [0, 1, 63, 64, 127],
)
def test_every_place_of_the_oldest_key_and_of_the_last_one_in_reach(
    sampler: str, added: int, device: str, guards: Guards
) -> None:
    """The seam of the ring lies everywhere in a block of the tree once, and so does the first slot left out."""
    chosen = SAMPLERS[sampler]
    newest = getattr(chosen, "newest", 0)
    drawers = Drawers(Ring(2, 128, 256 + added), chosen, device, seed=added)
    for left in (0, 1, 50, 63, 64, 65, 90):
        drawers.check(newest + 9, 2 * left, shifted=False)


@pytest.mark.parametrize("sampler", ["distinct", "latest"])
def test_all_there_are(sampler: str, device: str, guards: Guards) -> None:
    for steps in (1, 2, 3, 129):
        drawers = Drawers(Ring(1, steps, 2 * steps + 1), SAMPLERS[sampler], device)
        drawers.check(drawers.eligible, 0, shifted=False)


def test_newest_rows_alone_of_a_sampler_by_mass(device: str, guards: Guards) -> None:
    Drawers(RINGS["gone round"], SAMPLERS["combined stratified"], device).check(9, 0, shifted=True)


@pytest.mark.parametrize("skipped", [0, 30])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_where_nothing_is_eligible_stay_inside(sampler: str, skipped: int, device: str, guards: Guards) -> None:
    """Only a replayed graph can ask for them; they mean nothing, and must harm nothing."""
    drawers = Drawers(RINGS["gone round"], SAMPLERS[sampler], device)
    for tree in (drawers.tree, drawers.eligible_tree):
        if tree is not None:
            tree.clear()
    found = drawers.draw(40, skipped=skipped)
    assert int(found.slots.min()) >= 0
    assert int(found.slots.max()) < drawers.slots
    assert int(drawers.times_sampled.sum()) == 40
    assert bool(found.probability.isfinite().all())


def test_without_marks_there_is_no_newest(device: str) -> None:
    drawers = Drawers(RINGS["just full"], SAMPLERS["stratified"], device)
    with pytest.raises(RuntimeError, match="no tree of eligible starts"):
        plan_draw(
            "mass", drawers.counters, drawers.times_sampled, 0, 4, 128, tree=drawers.tree, tracks_eligibility=True
        )


def test_the_smallest_mass_is_forgotten_between_draws(device: str) -> None:
    drawers = Drawers(RINGS["just full"], SAMPLERS["stratified"], device)
    for _ in range(2):
        drawers.check(5, 0, shifted=False)
        assert int(drawers.counters[Counter.LOWEST]) == NO_MASS


@host_only
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("left", [0, 1])
def test_a_draw_from_fewer_starts_than_were_counted_is_refused(replacement: bool, left: int) -> None:
    """Rather than read what is not there, or look for it for ever."""
    buffer = TrajectoryReplayBuffer(8, 1, FIELDS, sampler=Uniform(replacement=replacement), device="cpu")
    for number in range(6):
        buffer.add(obs=[number], action=[0], reward=[0.0], terminated=[False], truncated=[False])
    # a tree whose leaves are few
    tree = buffer._state.eligible
    tree.masses.zero_()
    tree.masses[0] = left
    tree.build()
    before = buffer._counters.tolist()
    if replacement and left:
        assert buffer.sample(2).key.tolist() == [0, 0]
        return
    with pytest.raises(RuntimeError, match="fewer transitions can be drawn than were counted"):
        buffer.sample(2)
    assert buffer._counters.tolist() == before
