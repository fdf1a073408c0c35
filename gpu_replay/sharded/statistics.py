"""Statistics of all ranks' buffers together, computed from those of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gpu_replay.stats import Stats

_NAMES = [field.name for field in fields(Stats)]
# all that are no floats but the ages and times
_COUNTS = tuple(field.name for field in fields(Stats) if field.type == "int" and not field.name.startswith("max_"))


def combined(ranks: Sequence[dict[str, Any]]) -> Stats:
    """The statistics of all ranks' buffers; ranks: those of each, and the `total` of its masses or of its rows.

    The distribution over all rows is a mixture of the buffers' distributions, each with its share s of all masses: its
    entropy is sum s (entropy - log s), and its effective sample size 1 / sum (s ** 2 / effective sample size of one).
    """
    counts = {name: sum(each[name] for each in ranks) for name in _COUNTS}
    drawable = [each for each in ranks if each["eligible"]]
    found = {**dict.fromkeys(_NAMES, 0), **dict.fromkeys(("min_priority", "mean_priority", "max_priority"), math.nan)}
    if counts["size"]:
        sizes = np.array([each["size"] for each in ranks]) / counts["size"]
        for name in ("mean_age", "mean_times_sampled"):
            found[name] = float((sizes * [each[name] for each in ranks]).sum())
        for name in ("max_age", "max_times_sampled"):
            found[name] = max(each[name] for each in ranks)
    if drawable:
        of = {name: np.array([each[name] for each in drawable], dtype=np.float64) for name in [*_NAMES, "total"]}
        shares, rows = of["total"] / of["total"].sum(), of["eligible"] / of["eligible"].sum()
        found["min_priority"], found["max_priority"] = float(of["min_priority"].min()), float(of["max_priority"].max())
        found["mean_priority"] = float((rows * of["mean_priority"]).sum())
        found["entropy"] = float((shares * (of["entropy"] - np.log(shares))).sum())
        found["effective_sample_size"] = float(1 / (shares**2 / of["effective_sample_size"]).sum())
    return Stats(**found | counts)
