"""`random_shift`: pictures moved by up to k pixels with repeated edges, the augmentation of DrQ.

Kostrikov et al. 2020, "Image Augmentation Is All You Need": pad by k pixels that repeat the edge, crop at random.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale, statistical
from distribution import check_counts

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

MOST = 2
Move = tuple[int, int]
MOVES: list[Move] = list(itertools.product(range(-MOST, MOST + 1), repeat=2))
SHAPE = (6, 9)
FIELDS = {
    "obs.picture": Field(SHAPE, torch.uint8),
    "obs.layers": Field((3, 7, 5), torch.uint8, torch.float32, 1 / 255),
    "obs.vector": Field((4,), torch.float32),
    "action": Field((), torch.int64),
    "map": Field((4, 4), torch.uint8),
}


def moved(pictures: np.ndarray, move: Move) -> np.ndarray:
    """Pictures (..., height, width) padded by repeated edges and cropped at an offset from the middle."""
    sides = [(0, 0)] * (pictures.ndim - 2) + [(MOST, MOST)] * 2
    padded = np.pad(pictures, sides, mode="edge")
    height, width = pictures.shape[-2:]
    top, left = MOST + move[0], MOST + move[1]
    return padded[..., top : top + height, left : left + width]


def find(seen: np.ndarray, stored: np.ndarray) -> Move:
    """The one move that makes of the stored pictures those that were seen."""
    assert seen.shape == stored.shape
    found = [move for move in MOVES if np.array_equal(moved(stored, move), seen)]
    assert len(found) == 1, f"{len(found)} moves explain the pictures"
    return found[0]


def filled(device: str, *, seed: int = 0, **changed: Any) -> tuple[TrajectoryReplayBuffer, TrajectoryReplayBuffer]:
    """A buffer that moves pictures and one that does not, with the same contents: noise, so that moves can be told."""
    settings: dict[str, Any] = {"stack": 3, "autoreset": "same_step", "sampler": Uniform(replacement=True)} | changed
    pair = [
        TrajectoryReplayBuffer(30, 2, FIELDS, **settings, random_shift=most, device=device, seed=seed)
        for most in (MOST, 0)
    ]
    generator = torch.Generator().manual_seed(3)
    for number in range(12):
        given = {
            name: torch.randint(0, 256, (2, *kind.shape), generator=generator).to(kind.dtype)
            for name, kind in FIELDS.items()
        }
        final = {f"final_{name}": value.flip(0) for name, value in given.items() if name.startswith("obs.")}
        flags = {"terminated": torch.tensor([number == 3, False]), "truncated": torch.tensor([False, number == 6])}
        for buffer in pair:
            buffer.add(**given, **flags, **final, reward=torch.zeros(2))
    return pair[0], pair[1]


def test_all_frames_of_a_stack_move_together_and_by_at_most_k(device: str) -> None:
    buffer, still = filled(device)
    for _ in range(scale(4, 1)):
        batch = buffer.sample(24)
        stored = still[batch.key]
        for seen, whole in zip(batch["obs.picture"].cpu().numpy(), stored["obs.picture"].cpu().numpy(), strict=True):
            find(seen, whole)
        for row in batch.discount.nonzero().flatten().tolist():
            find(batch["next_obs.picture"][row].cpu().numpy(), stored["next_obs.picture"][row].cpu().numpy())


def test_channels_move_together_and_are_converted_as_ever(device: str) -> None:
    buffer, still = filled(device)
    batch = buffer.sample(24)
    stored = still[batch.key]
    assert batch["obs.layers"].dtype == torch.float32
    for row in range(24):
        find(batch["obs.layers"][row].cpu().numpy(), stored["obs.layers"][row].cpu().numpy())
        if not stored.terminated[row]:
            find(batch["next_obs.layers"][row].cpu().numpy(), stored["next_obs.layers"][row].cpu().numpy())


def test_only_pictures_of_observations_move(device: str) -> None:
    buffer, still = filled(device)
    batch = buffer.sample(24)
    stored = still[batch.key]
    for name in ("obs.vector", "map", "action", "reward", "discount", "terminated", "truncated"):
        assert torch.equal(batch[name], stored[name]), name


def test_looking_at_keys_shows_what_is_stored(device: str) -> None:
    buffer, still = filled(device)
    keys = [0, 2, 5, 9]
    one, other = buffer[keys], still[keys]
    assert all(torch.equal(one[name], other[name]) for name in other)


@statistical
def test_every_move_is_equally_likely_and_those_of_obs_and_next_obs_are_independent(device: str) -> None:
    height, width = SHAPE
    fields = {"obs": Field(SHAPE, torch.uint8), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(
        8, 1, fields, random_shift=MOST, sampler=Uniform(replacement=True), device=device, seed=1
    )
    # every pixel says where it is, so the one in the middle says how far the picture moved
    coordinates = torch.arange(height * width, dtype=torch.uint8).reshape(1, *SHAPE)
    no = torch.zeros(1, dtype=torch.bool)
    for _ in range(8):
        buffer.add(obs=coordinates, action=torch.zeros(1).long(), reward=torch.zeros(1), terminated=no, truncated=no)

    def moves(pictures: torch.Tensor) -> list[Move]:
        middles = pictures[:, height // 2, width // 2].tolist()
        return [(middle // width - height // 2, middle % width - width // 2) for middle in middles]

    pairs: Counter[tuple[Move, Move]] = Counter()
    neighbours: Counter[tuple[Move, Move]] = Counter()
    for _ in range(20):
        batch = buffer.sample(512)
        of_obs, of_next = moves(batch.obs), moves(batch.next_obs)
        pairs.update(zip(of_obs, of_next, strict=True))
        neighbours.update(zip(of_obs[::2], of_obs[1::2], strict=True))
    expected = {(one, other): 1.0 for one in MOVES for other in MOVES}
    check_counts(pairs, expected)
    check_counts(neighbours, expected)


def test_a_window_moves_as_one(device: str) -> None:
    buffer, still = filled(device)
    known = still.sample_sequences(400, 3)
    windows = dict(zip(known.key.tolist(), known["obs.picture"].cpu().numpy(), strict=True))
    batch = buffer.sample_sequences(12, 3)
    moves = set()
    for row, key in enumerate(batch.key.tolist()):
        covered = batch.mask[row].cpu().numpy()
        moves.add(find(batch["obs.picture"][row].cpu().numpy()[covered], windows[key][covered]))
    assert len(moves) > 1


def test_equal_seeds_move_the_same_and_each_sample_anew(device: str) -> None:
    one, other = filled(device, seed=4)[0], filled(device, seed=4)[0]
    first, second = one.sample(16), other.sample(16)
    assert all(torch.equal(first[name], second[name]) for name in first)
    third = one.sample(16)
    assert not torch.equal(first["obs.picture"], third["obs.picture"])


def test_moves_are_part_of_the_state(device: str) -> None:
    buffer, _ = filled(device, seed=5)
    buffer.sample(3)
    loaded = filled(device, seed=6)[0]
    loaded.load_state_dict(buffer.state_dict())
    for _ in range(2):
        one, other = buffer.sample(8), loaded.sample(8)
        assert all(torch.equal(one[name], other[name]) for name in one)
