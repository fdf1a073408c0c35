"""Kernels that draw and weigh, and trees, against the host code: integers are equal, nothing is written outside.

Masses are put where no call would put them, in rings that were never filled. On CPU tensors the kernels are
interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from devices import thinned
from guards import Guards
from interpreted import kernel_device as kernel_device
from programs import SAMPLERS
from trees import check_sums, random_masses
from twins import Twins

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer, Uniform
from gpu_replay.kernels.random import divided, floor_of_product
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.launch import reciprocal
from gpu_replay.ops.masses import MassTree
from gpu_replay.ops.ring import make_gather

# nothing is written outside
pytestmark = pytest.mark.usefixtures("guards")
NUMBER = {"n": Field((), torch.int64)}
STEPS = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
# 1, a power of the base of a search for a rank, of a block, and a few slots of a block of many
SIZES = (1, 2, 31, 32, 33, 127, 128, 129, 1024, 1025, 4095, 20_000)
EXACT = Proportional(alpha=1.0, beta=0.5, eps=0.0)
ALL_RANKS = RankBased(alpha=0.0)


class Drawn(Twins):
    """Buffers of rows, or of steps of `envs` environments, with these masses in slot order and `count` live keys."""

    def __init__(
        self, device: str, sampler: Any, masses: Any, added: int, *, envs: int = 0, count: int | None = None
    ) -> None:
        self.slots = len(masses)

        def make(place: str) -> Any:
            settings = {"sampler": sampler, "device": place, "seed": 9}
            if envs:
                return TrajectoryReplayBuffer(self.slots, envs, STEPS, autoreset="next_step", **settings)
            return ReplayBuffer(self.slots, NUMBER, **settings)

        super().__init__(make, device)
        leaves = torch.as_tensor(masses)
        self.eligible = int((leaves > 0).sum())
        for buffer in self.both:
            counters, state = buffer._counters, buffer._state
            counters[Counter.ADDED], counters[Counter.RANDOM] = added, 5
            counters[Counter.FIRST] = max(0, added - (self.slots if count is None else count))
            for tree, values in ((state.tree, leaves), (state.eligible_tree, leaves > 0)):
                if tree is not None:
                    tree.masses.copy_(values)
            for tensor in buffer._storage.tensors.values():
                tensor.copy_(torch.arange(self.slots))
            buffer._rebuild(9)

    def compare(self, batch: int, **named: Any) -> Any:
        """Fail unless both draw the same and count it alike, and every sum is right; returns the host's batch."""
        found = self.draw(batch, **named)
        self.check()
        return found


def drawn_on_device(buffer: Any, batch: int) -> dict[str, torch.Tensor]:
    """A sample of no fields, with its slots."""
    draws = buffer._engine.sampling

    def make(end: Any) -> Any:
        finish = make_gather({}, {}, batch, buffer._counters, end)
        return lambda slots, *others: finish(slots, *others) | {"slots": slots.clone()}

    return draws.make_sample(batch, False, make)(0.5)


def some_codes(slots: int, seed: int, *, empty: float = 0.3) -> np.ndarray:
    """Few different order codes, so that many are equal, at both ends of what one can be; some slots are empty."""
    generator = np.random.default_rng([slots, seed])
    values = np.array([1, 2, 2**52, 2**62 + 1, 0x7FF0000000000000])
    codes = np.where(generator.random(slots) < empty, 0, generator.choice(values, slots))
    codes[seed % slots] = 5
    return codes


def leaves_for(sampler: Any, slots: int, seed: int = 0) -> np.ndarray:
    """Masses over all orders of magnitude, or order codes, for a sampler."""
    if isinstance(getattr(sampler, "base", sampler), RankBased):
        return some_codes(slots, seed)
    return random_masses(slots, slots + seed, 2**62 // slots)


@thinned("name, slots", SAMPLERS, SIZES)
def test_draws_of_rows(name: str, slots: int, device: str, guards: Guards) -> None:
    sampler = SAMPLERS[name]
    newest = getattr(sampler, "newest", 0)
    # one row more than the newest at least
    slots = max(slots, newest + 1)
    both = Drawn(device, sampler, leaves_for(sampler, slots), 3 * slots + slots // 3)
    assert len(guards) > 3
    most = slots - newest if isinstance(getattr(sampler, "base", sampler), Uniform) or name == "latest" else 257
    # more than one schedule has steps, and more than one program draws
    for batch in (1, 9, 33, 1, 257, 9):
        both.compare(newest + min(batch, most))


@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "replacement"])
def test_uniform_draws_of_all_there_are(replacement: bool, device: str) -> None:
    for count in (1, 2, 5, 63, 64, 65, 129):
        both = Drawn(device, Combined(Uniform(replacement=replacement)), [1] * 129, 3 * 129 + count, count=count)
        found = both.compare(count + 1).key.tolist()
        assert replacement or sorted(found[:-1]) == list(range(3 * 129, 3 * 129 + count))


@pytest.mark.parametrize("batch", [1, 7, 360, 450, 1000])
def test_targets_on_the_very_first_and_last_unit_of_a_slot(batch: int, device: str) -> None:
    """With as many draws as there is mass, every unit is a target once; with 360, 90 strata have a unit more."""
    masses = [0, 1, 0, 0, 2] * 150
    both = Drawn(device, EXACT, masses, 750)
    both.compare(batch)
    if batch == sum(masses):
        assert both.tested._storage.times_sampled.tolist() == masses


@thinned("name, added", SAMPLERS, [0, 3, 11, 12, 13, 31])
def test_every_place_of_the_oldest_key_and_of_the_last_one_in_reach(name: str, added: int, device: str) -> None:
    """The seam of the ring lies everywhere in a block of the tree, and so does the first slot left out."""
    sampler, slots = SAMPLERS[name], 2 * 32
    both = Drawn(device, sampler, leaves_for(sampler, slots, added), 2 * (64 + added), envs=2)
    both.compare(min(20, both.eligible // 4))


# by rank: with alpha 0 all ranks are drawn alike, so that as many draws as there are ranks show their order


@pytest.mark.parametrize(
    "slots", [1, 2, 3, 7, 40, 127, 129, *(pytest.param(each, marks=pytest.mark.slow) for each in (128, 1000))]
)
def test_the_largest_code_comes_first_and_equal_ones_by_age(slots: int, device: str) -> None:
    for seed, head in enumerate({0, slots // 2, slots - 1}):
        both = Drawn(device, ALL_RANKS, some_codes(slots, seed), 3 * slots + head % slots)
        both.compare(both.eligible)


def test_a_list_is_sorted_anew_after_each_change_and_in_every_graph(device: str) -> None:
    both = Drawn(device, ALL_RANKS, some_codes(40, 1), 123)
    tree, ranks = both.tested._state.tree, both.tested._engine.sampling._ranks

    def listed(capturing: bool = False) -> list[int]:
        _, ages, count = ranks.current(tree, capturing)
        return [(3 + age) % 40 for age in ages[: int(count)].tolist()]

    def expected() -> list[int]:
        codes = tree.masses.tolist()
        return sorted((slot for slot in range(40) if codes[slot]), key=lambda slot: (-codes[slot], (slot - 3) % 40))

    before = listed()
    assert before == expected()
    tree.masses[7] = 2**60
    # the host has heard of no change
    assert listed() == before
    assert listed(True) == expected()
    tree.masses[9] = 2**61
    ranks.changed(capturing=False)
    assert listed() == expected()
    # what a graph changes is seen by nobody, so that from then on every sample sorts
    ranks.changed(capturing=True)
    for code in (2**61 + 1, 2):
        assert listed() == expected()
        tree.masses[30] = code
    assert listed() == expected()


# draws that mean nothing


@thinned("name, envs, left", SAMPLERS, [0, 3], [0, 1, 3, 70])
def test_draws_of_what_is_not_there_end_and_stay_inside(name: str, envs: int, left: int, device: str) -> None:
    """Only a graph replayed after a `clear` can ask for them; they mean nothing, and must harm nothing."""
    masses = [0] * (129 - left) + [1] * left
    both = Drawn(device, SAMPLERS[name], masses, 3 * 129, envs=envs, count=left)
    times_sampled = both.tested._storage.times_sampled
    times_sampled.zero_()
    found = drawn_on_device(both.tested, 120)
    slots, keys = found["slots"].tolist(), found["key"].tolist()
    assert (min(slots) >= 0, max(slots) < 129) == (True, True)
    assert slots == [key % 129 for key in keys]
    assert int(times_sampled.sum()) == 120
    assert bool(found["probability"].isfinite().all())
    if name == "uniform" and not envs:
        assert set(keys) == set(range(387 - left, 387) if left else [387 - 129])


def test_the_newest_of_a_buffer_younger_than_a_replayed_batch_stay_inside(device: str) -> None:
    both = Drawn(device, SAMPLERS["latest"], [1] * 50, 5)
    assert drawn_on_device(both.tested, 9)["slots"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]


# weights


@thinned("beta, batch", [0.4, 0.0, 1 / 3, 1.0, 1e35], [1, 128, 129, 4095])
def test_weights(beta: float, batch: int, device: str) -> None:
    both = Drawn(device, EXACT, random_masses(batch, batch, 2**40), batch)
    with np.errstate(under="ignore", over="ignore"):
        both.compare(batch, beta=beta)


# arithmetic


@triton.jit
def floor_kernel(words_ptr, widths_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, floor_of_product(tl.load(words_ptr + place), tl.load(widths_ptr + place)))


def test_a_point_in_a_width_stays_below_it_whatever_is_rounded(device: str) -> None:
    words = [0, 2**64 - 1, 2**63, 2**11 - 1, 2**11, 12345678901234567890, 2**64 - 2**11, 2**64 - 1]
    widths = [2**62, 2**62, 2**61 + 1, 2**62, 2**53, 10**18, 2**55 - 1, 0]
    out = torch.empty(8, dtype=torch.int64, device=device)
    given = torch.from_numpy(np.array(words, dtype=np.uint64)).to(device)
    floor_kernel[(1,)](given, torch.tensor(widths, device=device), out, COUNT=8)
    expected = [
        max(0, min(math.floor((word >> 11) * 2.0**-53 * width), width - 1))
        for word, width in zip(words, widths, strict=True)
    ]
    assert out.tolist() == expected


@triton.jit
def division_kernel(numbers_ptr, divisors_ptr, reciprocals_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    number, divisor = tl.load(numbers_ptr + place), tl.load(divisors_ptr + place)
    quotient, rest = divided(number, divisor, tl.load(reciprocals_ptr + place))
    tl.store(out_ptr + place, quotient)
    tl.store(out_ptr + COUNT + place, rest)


def test_division_by_a_reciprocal_is_exact(device: str) -> None:
    """All small numbers, and those around multiples of divisors up to the largest."""
    most = 2**63 - 1
    divisors = [1, 2, 3, 7, 127, 1000, 2**31 - 1, 2**31, 2**32 + 1, 10**12 + 39, 2**62 - 1, 2**62, most - 1, most]
    pairs = [(number, divisor) for divisor in range(1, 33) for number in range(128)]
    for divisor in divisors:
        laps = {0, 1, 2, 3, 2**20, 2**31, most // divisor // 2, most // divisor - 1, most // divisor}
        near = {lap * divisor + by for lap in laps for by in (-2, -1, 0, 1, 2)} | {most, most - 1, 2**62, 2**53 + 1}
        pairs += [(number, divisor) for number in sorted(near) if 0 <= number <= most]
    count = 1 << (len(pairs) - 1).bit_length()
    pairs += [(0, 1)] * (count - len(pairs))
    numbers, by = torch.tensor(pairs, device=device).T.contiguous()
    reciprocals = torch.tensor([reciprocal(divisor) for _, divisor in pairs], device=device)
    out = torch.empty(2 * count, dtype=torch.int64, device=device)
    division_kernel[(1,)](numbers, by, reciprocals, out, COUNT=count)
    assert out[:count].tolist() == [number // divisor for number, divisor in pairs]
    assert out[count:].tolist() == [number % divisor for number, divisor in pairs]


# trees


# of one to four levels, whole blocks, and a few leaves more than those
@pytest.mark.parametrize("slots", [1, 128, 1024, 1025, 2048, 32_768, 32_769, 70_001])
def test_every_node_is_the_sum_of_its_block(slots: int, device: str) -> None:
    """Of a tree whose leaves alone are right, and the padding above them, which nothing changes."""
    tree = MassTree(slots, torch.device(device), "triton")
    tree.masses.copy_(torch.from_numpy(random_masses(slots, slots, 2**62 // slots)))
    for below, above in zip(tree.levels, tree.levels[1:], strict=False):
        above[: below.numel() // tree.fanout] = 7
    tree.build()
    check_sums(tree)
    assert tree.total() == int(tree.masses.sum())
