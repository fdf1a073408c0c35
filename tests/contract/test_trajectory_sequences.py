"""`sample_sequences`: the form of windows of consecutive steps, masked to the first episode.

What they hold is compared with the model in test_programs.py; what masks mean is worked out by hand in
test_trajectory_oracle.py, and how often each window is drawn is in test_distributions.py.
"""

from __future__ import annotations

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from trajectory_pair import Pair, live_through, numbered, play

from gpu_replay import Field, Latest, Uniform

pytestmark = pytest.mark.contract

FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


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
