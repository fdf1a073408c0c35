"""Statistics of all shards together, computed from those of each shard."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from gpu_replay.stats import Stats

_NAMES = [field.name for field in fields(Stats)]
# all that are no floats but the ages and times
_COUNTS = tuple(field.name for field in fields(Stats) if field.type == "int" and not field.name.startswith("max_"))


def numbers_of(stats: Stats, total: int) -> Tensor:
    """The statistics of one shard and the total of its masses, as the bits of float64."""
    numbers = [float(getattr(stats, name)) for name in _NAMES]
    return torch.tensor([*numbers, float(total)], dtype=torch.float64, device="cpu").view(torch.int64)


def combined(table: Tensor) -> Stats:
    """The statistics of all shards; table: (R, 18) int64, a row of `numbers_of` for each.

    The distribution over all transitions is a mixture of the shards' distributions, each with its share s of all masses
    (without masses, of all transitions): its entropy is sum s (entropy - log s), and its effective sample size
    1 / sum (s ** 2 / effective sample size of the shard).
    """
    numbers = table[:, : len(_NAMES) + 1].cpu().contiguous().view(torch.float64).numpy()
    columns = dict(zip([*_NAMES, "total"], numbers.T, strict=True))
    counts: dict[str, float] = {name: int(columns[name].sum()) for name in _COUNTS}
    size = int(counts["size"])
    filled = columns["size"] > 0
    if not filled.any():
        ends = dict.fromkeys(("min_priority", "mean_priority", "max_priority"), math.nan)
        return Stats(**{**dict.fromkeys(_NAMES, 0), **counts, **ends})  # type: ignore[arg-type]
    of = {name: column[filled] for name, column in columns.items()}
    shares = of["total"] / of["total"].sum()
    rows = of["size"] / size
    return Stats(
        **counts,  # type: ignore[arg-type]
        min_priority=float(of["min_priority"].min()),
        mean_priority=float((rows * of["mean_priority"]).sum()),
        max_priority=float(of["max_priority"].max()),
        entropy=float((shares * (of["entropy"] - np.log(shares))).sum()),
        effective_sample_size=float(1 / (shares**2 / of["effective_sample_size"]).sum()),
        mean_age=(size - 1) / 2,
        max_age=size - 1,
        mean_times_sampled=float((rows * of["mean_times_sampled"]).sum()),
        max_times_sampled=int(of["max_times_sampled"].max()),
    )
