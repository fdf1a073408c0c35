"""`sample_sequences`: windows of consecutive steps for recurrent agents, masked to the first episode.

What the masks mean is worked out by hand in test_trajectory_oracle.py; contents over thousands of random streams are
compared in test_programs.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from distribution import check_counts
from tolerances import close
from trajectory_pair import Pair, live_through, numbered, play
from transitions import EXACT

from gpu_replay import Combined, Field, Latest, Proportional, Uniform

pytestmark = pytest.mark.contract

FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
REPLACEMENT = Uniform(replacement=True)
INDEPENDENT = Proportional(alpha=1.0, beta=1.0, eps=0.0, stratified=False)
EVERY = [Uniform(), REPLACEMENT, EXACT, INDEPENDENT, Latest(), Combined(Uniform()), Combined(EXACT, newest=2)]


def lived(sampler: Any, device: str, *, seed: int = 0, **settings: Any) -> Pair:
    """A ring of 20 steps of 3 environments, overwritten once and a half; smaller where kernels are interpreted."""
    known: dict[str, Any] = {"fields": FEW} | settings
    pair = Pair(scale(61, 31), 3, sampler=sampler, device=device, seed=seed, **known)
    return live_through(pair, scale(33, 14), seed, end=0.08)


@pytest.mark.parametrize("stack, frame", [(1, []), (4, [4])])
def test_shapes_types_and_names(stack: int, frame: list[int], device: str) -> None:
    pair = live_through(Pair(61, 3, device=device, stack=stack), scale(33, 16), end=0.02)
    batch = pair.buffer.sample_sequences(5, 7, burn_in=2)
    expected = {
        "obs": ([5, 9, *frame, 2], torch.int16),
        "next_obs": ([5, 9, *frame, 2], torch.int16),
        "note": ([5, 9, 2], torch.float32),
        "action": ([5, 9], torch.int64),
        "reward": ([5, 9], torch.float32),
        "discount": ([5, 9], torch.float32),
        "key": ([5], torch.int64),
        **dict.fromkeys(("terminated", "truncated", "mask"), ([5, 9], torch.bool)),
        **dict.fromkeys(("probability", "weight"), ([5], torch.float32)),
    }
    assert {name: (list(batch[name].shape), batch[name].dtype) for name in batch} == expected
    assert {value.device.type for value in batch.values()} == {device}
    assert len(batch) == 5


def test_burn_in_comes_before_the_steps_that_are_learned_from(device: str) -> None:
    pair, twin = (lived(Uniform(), device, seed=1) for _ in range(2))
    one, other = pair.buffer.sample_sequences(6, 3, burn_in=4), twin.buffer.sample_sequences(6, 7)
    assert one.mask.shape == (6, 7)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stack", [1, 3])
def test_windows_reach_the_newest_step_and_begin_at_the_oldest(stack: int, device: str) -> None:
    pair = Pair(10, 1, sampler=Uniform(), device=device, fields=FEW, stack=stack)
    play(pair, "." * 17, fields=FEW)
    # steps 7 to 16 are stored, and the stack of a first step needs its frames too; 16 waits, but ends a window
    for length in range(1, 12 - stack, scale(1, 4)):
        starts = list(range(6 + stack, min(16, 18 - length)))
        batch = pair.buffer.sample_sequences(len(starts), length)
        assert sorted(batch.key.tolist()) == starts
        for key, obs in zip(batch.key.tolist(), batch.obs.reshape(-1, length, stack).tolist(), strict=True):
            assert obs == [list(range(step + 2 - stack, step + 2)) for step in range(key, key + length)]
        assert bool(batch.mask.all())
    with pytest.raises(RuntimeError, match=r"11"):
        pair.buffer.sample_sequences(1, 11)


def test_a_window_over_an_ending_keeps_its_length(device: str) -> None:
    pair = Pair(40, 1, sampler=Latest(), device=device, fields=FEW, stack=2, padding="zero")
    play(pair, "...T......", fields=FEW)
    batch = pair.buffer.sample_sequences(7, 3)
    assert batch.key.tolist() == [0, 1, 2, 3, 5, 6, 7]
    window = 2
    assert batch.mask[window].tolist() == [True, True, False]
    assert batch.terminated[window].tolist()[:2] == [False, True]
    # of the dead step only its frame is promised
    assert batch.obs[window].tolist()[:2] == [[2, 3], [3, 4]]
    assert batch.obs[window, 2, 1].item() == 5


def test_sequences_of_dictionary_observations_are_converted_like_samples(device: str) -> None:
    fields = {
        "obs.image": Field((2, 3), torch.uint8, torch.float32, 0.5),
        "obs.vector": Field((2,), torch.float64),
        "action": Field((), torch.int32, torch.int64),
    }
    pair = live_through(Pair(40, 2, sampler=Uniform(), device=device, fields=fields, stack=2), 12, end=0.0, final=0.0)
    batch = pair.buffer.sample_sequences(4, 3)
    assert torch.equal(batch.obs.vector, batch["obs.vector"])
    view = pair.model.view()
    for name, lead in (("obs.image", (4, 3, 2)), ("obs.vector", (4, 3, 2)), ("action", (4, 3))):
        field = fields[name]
        steps = [[step[name] for step in view.sequence(key, 3)] for key in batch.key.tolist()]
        expected = torch.tensor(steps).to(field.sample_dtype or field.dtype) * (field.scale or 1)
        assert (batch[name].shape, batch[name].dtype) == ((*lead, *field.shape), expected.dtype)
        assert torch.equal(batch[name].cpu(), expected)


@statistical
@pytest.mark.parametrize("sampler", [Uniform(), REPLACEMENT], ids=["without", "with"])
def test_uniform_sequences_start_anywhere_equally_often(sampler: Uniform, device: str) -> None:
    pair = lived(sampler, device, seed=2)
    starts = pair.model.view().sequence_starts(4)
    assert len(starts) < len(pair.model.view().eligible())
    batches = [pair.buffer.sample_sequences(4, 4) for _ in range(500)]
    assert sampler.replacement or all(len(set(batch.key.tolist())) == 4 for batch in batches)
    assert close(batches[0].probability, [1 / len(starts)] * 4, "probability")
    assert batches[0].weight.tolist() == [1.0] * 4
    check_counts(Counter(key for batch in batches for key in batch.key.tolist()), dict.fromkeys(starts, 1.0))


def heavy(settings: Any, device: str, length: int, seed: int) -> tuple[Pair, dict[int, float]]:
    """The priorities of what can begin a window; the heaviest of all are those that cannot."""
    pair = lived(settings, device, seed=seed)
    view = pair.model.view()
    eligible, starts = view.eligible(), view.sequence_starts(length)
    assert 5 < len(starts) < len(eligible)
    pair.update(eligible, [1.0 + key % 7 if key in starts else 1000.0 for key in eligible])
    return pair, {key: 1.0 + key % 7 for key in starts}


@statistical
@pytest.mark.parametrize("settings", [EXACT, INDEPENDENT], ids=["stratified", "independent"])
def test_proportional_sequences_start_in_proportion_to_the_masses(settings: Proportional, device: str) -> None:
    pair, masses = heavy(settings, device, 4, seed=3)
    keys = torch.cat([pair.buffer.sample_sequences(1, 4).key for _ in range(1200)])
    check_counts(Counter(keys.tolist()), masses)


def test_flags_are_those_of_single_steps_and_rewards_those_of_windows(device: str) -> None:
    pair = Pair(40, 1, sampler=Latest(), device=device, fields=FEW, n_step=3, gamma=0.5, autoreset="same_step")
    for number in range(8):
        pair.add([numbered(number, 0, FEW, reward=float(number), terminated=number == 4)])
    batch = pair.buffer.sample_sequences(2, 3)
    # the newest starts whose own three steps are over
    assert batch.key.tolist() == [3, 4]
    assert batch.reward.tolist() == [[5.0, 4.0, 9.75], [4.0, 9.75, 9.5]]
    assert batch.discount.tolist() == [[0.0, 0.0, 0.125], [0.0, 0.125, 0.25]]
    assert batch.terminated.tolist() == [[False, True, False], [True, False, False]]
    assert batch.mask.tolist() == [[True, True, False], [True, False, False]]


def test_the_last_observation_stands_for_one_that_is_not_stored(device: str) -> None:
    pair = Pair(12, 1, sampler=Latest(), device=device, fields=FEW, gamma=0.5, stack=2, n_step=2)
    play(pair, "...U.....", fields=FEW)
    (window,) = pair.buffer.sample_sequences(1, 3)[:1].next_obs.tolist()
    # of steps 6 to 8, where 9 is to come; the frame of step t is t + 1
    assert window == [[8, 9], [8, 9], [8, 9]]
    cut = Pair(12, 1, sampler=Latest(), device=device, fields=FEW, gamma=0.5, autoreset="same_step")
    play(cut, "..U...", fields=FEW)
    batch = cut.buffer[[0, 1]]
    assert batch.next_obs.tolist() == [2, 3]
    batch = cut.buffer.sample_sequences(3, 3)
    row = batch.key.tolist().index(1)
    assert batch.next_obs[row].tolist()[:2] == [3, 3]
    assert batch.discount[row].tolist()[:2] == [0.5, 0.5]
    assert batch.truncated[row].tolist() == [False, True, False]


def test_strict_windows_may_end_with_their_last_step(device: str) -> None:
    pair = Pair(40, 1, sampler=Uniform(replacement=True), device=device, fields=FEW, autoreset="same_step")
    play(pair, "...T...T...T", fields=FEW)
    assert set(pair.buffer.sample_sequences(50, 4, strict=True).key.tolist()) == {0, 4, 8}
    assert set(pair.buffer.sample_sequences(50, 3, strict=True, stride=4).key.tolist()) == {0, 4, 8}
    with pytest.raises(RuntimeError, match="strict=True"):
        pair.buffer.sample_sequences(1, 5, strict=True)
