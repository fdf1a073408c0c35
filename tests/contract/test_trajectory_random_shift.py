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
from transitions import same

from gpu_replay import Field, Sequences, TrajectoryReplayBuffer, Uniform

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


def find(seen_here: torch.Tensor, stored_here: torch.Tensor) -> Move:
    """The one move that makes of the stored pictures those that were seen."""
    seen, stored = seen_here.cpu().numpy(), stored_here.cpu().numpy()
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


def test_all_frames_and_channels_move_together_by_at_most_k_and_nothing_else_moves(device: str) -> None:
    buffer, still = filled(device)
    # looking at keys shows what is stored
    same(buffer[[0, 2, 5, 9]], still[[0, 2, 5, 9]])
    for _ in range(scale(2, 1)):
        batch = buffer.sample(24)
        stored = still[batch.key]
        assert batch["obs.layers"].dtype == torch.float32
        for name in ("picture", "layers"):
            for row in range(24):
                find(batch[f"obs.{name}"][row], stored[f"obs.{name}"][row])
                if batch.discount[row]:
                    find(batch[f"next_obs.{name}"][row], stored[f"next_obs.{name}"][row])
        for name in ("obs.vector", "map", "action", "reward", "discount", "terminated", "truncated"):
            assert torch.equal(batch[name], stored[name]), name


@statistical
def test_every_move_is_equally_likely_and_independent_of_all_else(device: str) -> None:
    height, width = SHAPE
    fields = {"obs": Field(SHAPE, torch.uint8), "action": Field((), torch.int64)}
    sampler = Uniform(replacement=True)
    buffer = TrajectoryReplayBuffer(8, 1, fields, random_shift=MOST, sampler=sampler, device=device, seed=1)
    # every pixel says where it is, so the one in the middle says how far the picture moved
    coordinates = torch.arange(height * width, dtype=torch.uint8).reshape(1, *SHAPE)
    no = torch.zeros(1, dtype=torch.bool)
    for _ in range(8):
        buffer.add(obs=coordinates, action=torch.zeros(1).long(), reward=torch.zeros(1), terminated=no, truncated=no)

    def moves(pictures: list[torch.Tensor]) -> list[Move]:
        middles = torch.cat(pictures)[:, height // 2, width // 2].tolist()
        return [(middle // width - height // 2, middle % width - width // 2) for middle in middles]

    batches = [buffer.sample(512) for _ in range(20)]
    of_obs, of_next = moves([batch.obs for batch in batches]), moves([batch.next_obs for batch in batches])
    expected = dict.fromkeys(itertools.product(MOVES, MOVES), 1.0)
    check_counts(Counter(zip(of_obs, of_next, strict=True)), expected)
    check_counts(Counter(zip(of_obs[::2], of_obs[1::2], strict=True)), expected)
    # the next sample draws its rows by other random words
    columns, keys = (column for _, column in of_next), torch.cat([batch.key for batch in batches[1:]]).tolist()
    columns_and_keys = itertools.product(range(-MOST, MOST + 1), range(7))
    check_counts(Counter(zip(columns, keys, strict=False)), dict.fromkeys(columns_and_keys, 1.0))


def test_a_window_moves_as_one(device: str) -> None:
    buffer, still = filled(device, sequences=Sequences(3))
    known = still.sample(400)
    windows = dict(zip(known.key.tolist(), known["obs.picture"], strict=True))
    batch = buffer.sample(12)
    rows = zip(batch.key.tolist(), batch["obs.picture"], batch.mask, strict=True)
    assert len({find(seen[covered], windows[key][covered]) for key, seen, covered in rows}) > 1


def test_equal_seeds_and_states_move_the_same_and_each_sample_anew(device: str) -> None:
    one, other, loaded = (filled(device, seed=seed)[0] for seed in (4, 4, 6))
    loaded.load_state_dict(one.state_dict())
    first = one.sample(16)
    for again in (other, loaded):
        same(first, again.sample(16))
    assert not torch.equal(first["obs.picture"], one.sample(16)["obs.picture"])
