"""What ranks do in the tests of `ShardedReplayBuffer`, and what one buffer of the whole would have drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpu_replay import Combined, Field, Latest, Proportional, ShardedReplayBuffer, Uniform
from gpu_replay.engines.draw_plan import plan_of
from gpu_replay.ops.counters import HostWords, blocks_for
from gpu_replay.ops.draw import PERMUTATION_WORDS, draw_by_mass, independent_ranks, permuted_ranks, weights_of
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.samplers import LinearSchedule

# what a row holds follows from its global key, so that rows can be told from each other wherever they are
FIELDS = {
    "number": Field((), torch.int64),
    "image": Field((2, 3), torch.uint8, torch.float32, 1 / 255),
    "half": Field((3,), torch.bfloat16),
    "flag": Field((), torch.bool),
}


def rows_of(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields of these global keys, as they are stored."""
    return {
        "number": keys * 7 + 1,
        "image": (keys[:, None, None] + torch.arange(6).view(2, 3)).remainder(256).to(torch.uint8),
        "half": (keys[:, None] % 50 + torch.arange(3)).to(torch.bfloat16),
        "flag": keys % 3 == 0,
    }


def sampled_rows_of(keys: torch.Tensor) -> dict[str, np.ndarray]:
    """The same, as they are sampled."""
    stored = rows_of(keys)
    stored["image"] = stored["image"].float().mul_(1 / 255)
    stored["half"] = stored["half"].float()
    return {name: tensor.numpy() for name, tensor in stored.items()}


def add_rows(buffer: ShardedReplayBuffer, rows: int, priority: Any = None) -> np.ndarray:
    """Add the next rows of this rank; returns their keys."""
    first = buffer._shard.added
    keys = torch.arange(first, first + rows) * buffer.ranks + buffer.rank
    found = buffer.add(**rows_of(keys), priority=priority)
    assert torch.equal(found, keys)
    return found.numpy()


def batch_of(batch: Any) -> dict[str, np.ndarray]:
    return {name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in batch.items()}


def shard_of(buffer: ShardedReplayBuffer) -> dict[str, Any]:
    """Masses in the order of slots, or ones for live slots, and the live keys."""
    shard = buffer._shard
    first, added = shard._draws.span()
    live = np.zeros(shard.capacity, dtype=np.int64)
    live[np.arange(first, added) % shard.capacity] = 1
    if buffer._plan.kind == "mass":
        live = shard.masses().numpy().copy()
    return {"masses": live, "first": first, "added": added}


def life(group: Any, sampler: Any, mode: str, capacity: int, batch: int, adds: list[list[int]]) -> list[dict[str, Any]]:
    """A buffer that adds, samples and updates, also rows of other ranks: what was there before each draw, and the draw.

    adds: rows of each rank, for each round.
    """
    rank = dist.get_rank(group)
    noise = np.random.default_rng(rank)
    buffer = ShardedReplayBuffer(capacity, FIELDS, sampler=sampler, mode=mode, group=group, seed=11, timeout=20)
    found = []
    for rows in adds:
        if rows[rank]:
            add_rows(buffer, rows[rank])
        before = shard_of(buffer)
        drawn = batch_of(buffer.sample(batch))
        # any keys that were ever drawn, wherever they live, and some that never were
        keys = np.concatenate([drawn["key"], noise.integers(-5, 3 * capacity, size=rank + 2)])
        buffer.update_priorities(torch.from_numpy(keys), torch.from_numpy(noise.random(keys.size) * 3))
        found.append({"before": before, "drawn": drawn})
    buffer.close()
    return found


class Whole:
    """One tree over the slots of all shards, rank after rank, and the random stream of one buffer."""

    def __init__(self, sampler: Any) -> None:
        self.plan = plan_of(sampler)
        self.block = self.step = 0
        self.words = HostWords(11)

    def draw(self, shards: list[dict[str, Any]], rows: int) -> dict[str, np.ndarray]:
        """Keys, probabilities and weights of all rows."""
        masses = np.concatenate([shard["masses"] for shard in shards])
        slots, ranks = shards[0]["masses"].size, len(shards)
        by_chance = rows - self.plan.newest_of(rows)
        if self.plan.kind == "mass":
            tree = MassTree(masses.size, torch.device("cpu"), "host", low=True)
            tree.masses.copy_(torch.from_numpy(masses))
            tree.build()
            beta = self.plan.beta
            exponent = beta(self.step) if isinstance(beta, LinearSchedule) else beta
            how = {"stratified": self.plan.stratified, "of_all": self.plan.lowest_of_all}
            found, probability, ratio, _ = draw_by_mass(tree, self._doubles(by_chance), **how)
            weight = weights_of(ratio, exponent)
        else:
            live = np.flatnonzero(masses)
            if not by_chance:
                places = np.zeros(0, dtype=np.int64)
            elif self.plan.replacement:
                places = independent_ranks(live.size, self._doubles(by_chance))
            else:
                words = self.words.words(self.block, PERMUTATION_WORDS)
                self.block += blocks_for(PERMUTATION_WORDS)
                places = permuted_ranks(live.size, by_chance, words)
            found = live[places]
            probability, weight = np.full(by_chance, 1 / live.size, np.float32), np.ones(by_chance, np.float32)
        self.step += 1
        keys = []
        for slot in found.tolist():
            shard = shards[slot // slots]
            # the live key of that slot
            key = next(k for k in range(shard["first"], shard["added"]) if k % slots == slot % slots)
            keys.append(key * ranks + slot // slots)
        live_keys = sorted(
            k * ranks + r for r, shard in enumerate(shards) for k in range(shard["first"], shard["added"])
        )
        newest = rows - by_chance
        sure = np.ones(newest, dtype=np.float32)
        return {
            "key": np.array([*keys, *live_keys[len(live_keys) - newest :]], dtype=np.int64),
            "probability": np.concatenate((probability, sure)),
            "weight": np.concatenate((weight, sure)),
        }

    def _doubles(self, count: int) -> np.ndarray:
        block, self.block = self.block, self.block + blocks_for(count)
        return self.words.doubles(block, count)


SAMPLERS = {
    "proportional": Proportional(alpha=0.7, beta=LinearSchedule(0.3, 1.0, 4)),
    "independent": Proportional(stratified=False),
    "of-the-buffer": Proportional(normalize="buffer", initial=0.5),
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "combined": Combined(Proportional(), newest=3),
    "combined-uniform": Combined(Uniform(), newest=2),
    "latest": Latest(),
}
