"""Global mode: all ranks sample as one buffer over all slots, then send each row to the rank that asked for it.

The slots of all shards, in the order of ranks, form one sum tree; the totals of the shards say where each begins. Every
rank computes the same targets from the same random words, so each knows which rank stores a row and which one gets it,
and the only large message is the one with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.ops.counters import HostWords
from gpu_replay.ops.draw import weights_of
from gpu_replay.samplers import Sampler
from gpu_replay.sharded.shard import Column, Shard

# bytes of a message between ranks before its rows: the smallest mass that the shard sampled
HEADER = 8

Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


class Assignment(NamedTuple):
    """The rows of one sample of all ranks.

    owner:  (rows,) the rank that stores each row.
    place:  (rows,) where it is stored there: a target within the shard's total mass, or an index among its live slots;
            from row `chance` on a local key.
    total:  the sum of the masses of all shards, or, with uniform sampling, of their sizes.
    random: the Philox blocks used so far, this sample included.
    """

    owner: np.ndarray
    place: np.ndarray
    chance: int
    total: int
    random: int


def assign_rows(sampler: Sampler, table: np.ndarray, rows: int, seed: int) -> Assignment:
    """Choose `rows` rows of all shards, which store enough; table: (R, 7 or more) int64, `Shard.row` of each rank."""
    newest = sampler.newest_of(rows)
    chance, block = rows - newest, int(table[:, Column.RANDOM].max())
    bounds = np.cumsum([0, *table[:, Column.TOTAL].tolist()])
    total, random = int(bounds[-1]), HostWords(seed, block=block)
    numbers = sampler.base.places(total, chance, random) if chance else np.zeros(0, dtype=np.int64)
    owner = bounds[1:].searchsorted(numbers, "right")
    numbers = numbers - bounds[owner]
    if newest:
        keys = newest_keys(table, newest)
        owner = np.concatenate((owner, keys % len(table)))
        numbers = np.concatenate((numbers, keys // len(table)))
    return Assignment(owner, numbers, chance, total, random.block)


def newest_keys(table: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest global keys, ascending."""
    ranks = len(table)
    by_rank = [
        np.arange(added - min(size, count), added) * ranks + rank
        for rank, (added, size) in enumerate(table[:, [Column.ADDED, Column.SIZE]].tolist())
    ]
    return np.sort(np.concatenate(by_rank))[-count:]


def exchange_rows(
    shard: Shard, assigned: Assignment, table: np.ndarray, rank: int, beta: float, exchange: Exchange
) -> dict[str, Tensor]:
    """Send every rank its rows, in one exchange of bytes, and return those of this rank as fields of a batch.

    exchange: `Group.all_to_all`: takes the data, and the number of bytes to and from each rank.
    """
    ranks, batch = len(table), assigned.owner.size // len(table)
    added, size = int(table[rank, Column.ADDED]), int(table[rank, Column.SIZE])
    mine = np.flatnonzero(assigned.owner == rank)
    by_chance = int(np.searchsorted(mine, assigned.chance))
    numbers = torch.from_numpy(assigned.place[mine[by_chance:]]).to(shard.device)
    slots = torch.cat([shard.find(assigned.place[mine[:by_chance]], added, size), numbers % shard.capacity])
    masses = shard.masses_at(slots)
    step = int(table[:, Column.STEP].max())
    shard.count_draw(slots, assigned.random, step + 1)

    # the rows sent to each rank: rows ascend, so those of one rank lie together
    tail = torch.stack([shard.keys_at(slots, added) * ranks + rank, masses], dim=1)
    packed = torch.cat([*shard.stored_bytes(slots), tail.view(torch.uint8)], dim=1)
    if shard.sampler.base.normalizes_over_buffer:
        lowest = shard.lowest()
    else:
        lowest = masses[:by_chance].min() if by_chance else masses.new_full((), 2**63 - 1)
    header = lowest.view(1).view(torch.uint8)
    counts = np.bincount(mine // batch, minlength=ranks).tolist()
    parts = [part for rows in packed.split(counts) for part in (header, rows.reshape(-1))]
    width = packed.shape[1]
    from_each = np.bincount(assigned.owner[rank * batch : (rank + 1) * batch], minlength=ranks)
    sent = [HEADER + count * width for count in counts]
    received_bytes = [HEADER + count * width for count in from_each.tolist()]
    received = exchange(torch.cat(parts), sent, received_bytes).split(received_bytes)

    # the received rows, in the order of the draw
    rows = torch.cat([part[HEADER:].view(-1, width) for part in received])
    order = np.argsort(assigned.owner[rank * batch : (rank + 1) * batch], kind="stable")
    if (order[1:] < order[:-1]).any():
        places = torch.from_numpy(order).to(rows.device)
        rows = torch.empty_like(rows).index_copy_(0, places, rows)
    tensors, rest = shard.from_bytes(rows)
    key, mass = rest.contiguous().view(torch.int64).unbind(1)
    lows = torch.stack([part[:HEADER].clone().view(torch.int64)[0] for part in received])
    chance = min(max(assigned.chance - rank * batch, 0), batch)
    probability, weight = _weighed(mass[:chance], int(lows.min()), assigned.total, beta)
    sure = torch.ones(batch - chance, dtype=torch.float32, device="cpu")
    named = {"probability": torch.cat([probability, sure]), "weight": torch.cat([weight, sure])}
    return {**tensors, "key": key.contiguous(), **{name: each.to(shard.device) for name, each in named.items()}}


def _weighed(masses: Tensor, lowest: int, total: int, beta: float) -> tuple[Tensor, Tensor]:
    """Probabilities and weights of (n,) masses, computed on the host as a single buffer computes them."""
    array = masses.cpu().numpy()
    probability = (array / total).astype(np.float32)
    return torch.from_numpy(probability), torch.from_numpy(weights_of(lowest / array, beta))
