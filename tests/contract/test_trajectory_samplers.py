"""Every sampler on the trajectory buffer: the exact distribution over the eligible starts, and never anything else.

Chi-square tests raise a false alarm once in a million (see distribution.py); their seeds are fixed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import host_only, scale, statistical
from distribution import check_counts
from trajectory_pair import Pair, live_through, numbered, play
from transitions import EXACT

from gpu_replay import Combined, Field, Latest, Proportional, RankBased, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

INDEPENDENT = Proportional(alpha=1.0, beta=1.0, eps=0.0, stratified=False)
REPLACEMENT = Uniform(replacement=True)
FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


def lived(sampler: Any, device: str, *, seed: int = 0, **settings: Any) -> Pair:
    """A ring of 12 steps of 3 environments that was overwritten, about half of it eligible."""
    known: dict[str, Any] = {"stack": 3, "n_step": 2, "fields": FEW} | settings
    pair = Pair(37, 3, sampler=sampler, device=device, seed=seed, **known)
    live_through(pair, scale(30, 14), seed)
    eligible = pair.model.view().eligible()
    assert 5 < len(eligible) < 30
    return pair


def prioritized(settings: Any, device: str, *, seed: int = 0, **more: Any) -> tuple[Pair, dict[int, int]]:
    """The same with priorities over two decades, and the mass of each eligible start in slot order."""
    pair = lived(settings, device, seed=seed, **more)
    eligible = pair.model.view().eligible()
    pair.update(eligible, [(1 + (7 * key) % 100) / 16 for key in eligible])
    masses = pair.buffer.masses().tolist()
    slots = {key: key % pair.model.capacity for key in eligible}
    in_order = {key: masses[slots[key]] for key in sorted(eligible, key=slots.__getitem__)}
    assert [slot for slot, mass in enumerate(masses) if mass] == sorted(slots.values())
    return pair, in_order


def tally(pair: Pair, count: int, times: int) -> torch.Tensor:
    """The keys of so many samples, one a row."""
    return torch.stack([pair.buffer.sample(count).key for _ in range(times)]).cpu()


@statistical
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
def test_uniform_draws_every_eligible_start_equally_often(sampler: Uniform, autoreset: str, device: str) -> None:
    pair = lived(sampler, device, autoreset=autoreset, seed=1)
    for row in tally(pair, 4, 1000).T.tolist():
        check_counts(Counter(row), dict.fromkeys(pair.model.view().eligible(), 1.0))


@statistical
@pytest.mark.parametrize("replacement", [False, True])
def test_every_ordered_pair_is_equally_likely(replacement: bool, device: str) -> None:
    pair = Pair(12, 2, sampler=Uniform(replacement), device=device, seed=2 + replacement, fields=FEW)
    play(pair, ".T....", "...T..", fields=FEW)
    eligible = pair.model.view().eligible()
    pairs = itertools.product(eligible, repeat=2) if replacement else itertools.permutations(eligible, 2)
    keys = tally(pair, 128, 60) if replacement else tally(pair, 2, 1500)
    check_counts(Counter(map(tuple, keys.reshape(-1, 2).tolist())), dict.fromkeys(pairs, 1.0))


@statistical
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
@pytest.mark.parametrize("share", [0.02, 0.98])
def test_uniform_over_a_large_ring_where_few_or_most_can_be_drawn(sampler: Uniform, share: float, device: str) -> None:
    """Few: every step ends, nearly always by a truncation whose final observation is not known."""
    envs, turn = 50, 40
    pair = Pair(envs * turn, envs, sampler=sampler, device=device, seed=4, fields=FEW, autoreset="same_step")
    generator = torch.Generator().manual_seed(5)
    for number in range(turn + 7):
        lucky = (torch.rand(envs, generator=generator) < share).tolist()
        steps = [numbered(number, env, FEW, terminated=lucky[env], truncated=not lucky[env]) for env in range(envs)]
        pair.add(steps)
    eligible = pair.model.view().eligible()
    assert eligible
    if not sampler.replacement:
        assert sorted(pair.buffer.sample(len(eligible)).key.tolist()) == eligible
    rows = min(len(eligible), 256)
    check_counts(Counter(tally(pair, rows, 20_000 // rows).flatten().tolist()), dict.fromkeys(eligible, 1.0))


@statistical
@pytest.mark.parametrize("settings", [EXACT, INDEPENDENT], ids=["stratified", "independent"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_proportional_draws_are_proportional_to_the_masses(autoreset: str, settings: Proportional, device: str) -> None:
    pair, masses = prioritized(settings, device, seed=6, autoreset=autoreset)
    # one row is one draw from the whole mass, also where strata would make rows depend on each other
    for count, times in ((1, 1000), (64, 0 if settings.stratified else 100)):
        if times:
            keys = tally(pair, count, times).flatten().tolist()
            check_counts(Counter(keys), {key: float(mass) for key, mass in masses.items()})


def test_lowest_mass_of_the_buffer_is_that_of_an_eligible_start(device: str) -> None:
    """The weight of a start does not fall when one that was lighter can no longer be drawn."""
    settings = Proportional(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer")
    pair = Pair(4, 1, sampler=settings, fields=FEW, device=device, stack=2)
    play(pair, "....", fields=FEW)
    pair.update([0, 1, 2], [0.25, 2.0, 4.0])
    batch = pair.buffer.sample(64)
    assert set(zip(batch.key.tolist(), batch.weight.tolist(), strict=True)) >= {(1, 0.125), (2, 0.0625)}
    # step 0 goes; step 1 stays stored, but its stack needs step 0, so 4.0 is the lowest beside the new start's 4.0
    play(pair, ".", fields=FEW)
    batch = pair.buffer.sample(16)
    assert (set(batch.key.tolist()), batch.weight.tolist()) == ({2, 3}, [1.0] * 16)


@statistical
@pytest.mark.parametrize("base", [Uniform(), REPLACEMENT, EXACT], ids=["without", "with", "proportional"])
def test_rows_of_the_base_of_combined_have_its_distribution(base: Any, device: str) -> None:
    pair = lived(Combined(base, newest=2), device, seed=10)
    eligible = pair.model.view().eligible()
    pair.update(eligible, [1.0 + key % 5 for key in eligible])
    shares = {key: 1.0 + key % 5 if base is EXACT else 1.0 for key in eligible}
    check_counts(Counter(tally(pair, 3, 1000)[:, 0].tolist()), shares)


EVERY = [Uniform(), REPLACEMENT, EXACT, INDEPENDENT, RankBased(), Latest()]
EVERY += [Combined(Uniform()), Combined(EXACT, newest=2), Combined(RankBased(), newest=2)]


@host_only
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("left", [0, 1])
def test_a_draw_from_fewer_starts_than_were_counted_is_refused(replacement: bool, left: int) -> None:
    """Rather than read what is not there, or look for it for ever."""
    fields = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(8, 1, fields, sampler=Uniform(replacement=replacement), device="cpu")
    for _ in range(6):
        no = np.zeros(1, dtype=bool)
        buffer.add(obs=np.zeros(1, np.float32), action=[0], reward=[0.0], terminated=no, truncated=no)
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
