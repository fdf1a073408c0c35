"""`buffer.exclude(keys)`: rows that are never sampled again, whatever comes later.

What is no key is refused with the other calls of `refusals.py`; that rows stay excluded as those of another kind and
under another sampler is in `test_sequences.py` and `test_other_sampler.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices import loops, scale
from pairs import RENEWED, RowPair, StepPair, live_through
from programs import SAMPLERS

from gpu_replay import ReplayBuffer, Uniform

pytestmark = pytest.mark.contract

# kernels are compared with the host by programs with these calls, see test_kernels_in_buffers.py
NAMES = scale(list(SAMPLERS), ["uniform", "combined-proportional", "combined-rank"])
WAYS = ["state", *RENEWED]


def pair_of(kind: str, sampler: str, device: str) -> Any:
    """A pair that holds a few rows."""
    with loops():
        if kind == "rows":
            pair: Any = RowPair(24, SAMPLERS[sampler], seed=3, device=device)
            pair.add(30)
        else:
            pair = StepPair(48, 2, sampler=SAMPLERS[sampler], seed=3, device=device, n_step=2, stack=2)
            live_through(pair, 40)
    pair.renew("state")
    return pair


@pytest.mark.parametrize("sampler", NAMES)
@pytest.mark.parametrize("kind", ["rows", "steps"])
def test_rows_are_excluded_under_every_sampler_that_keeps_a_tree(kind: str, sampler: str, device: str) -> None:
    """The others say what to do, and nothing changes."""
    pair = pair_of(kind, sampler, device)

    def add(seed: int) -> None:
        pair.add(5) if kind == "rows" else live_through(pair, 5, seed)
        pair.sample(4)

    keys = pair.model.eligible()
    # of the newest ones some, one of the middle twice, one that is not live, one that is not eligible yet, and no key
    later = sorted(pair.model.later() - set(keys))[:1] if kind == "steps" else []
    pair.exclude([keys[-1], keys[-2], keys[-4], keys[3], keys[3], 0, *later, -1])
    pair.check_all()
    pair.sample(5)
    pair.update([keys[-1], keys[3], keys[5], *later], [100.0, 200.0, 2.0, 300.0][: 3 + len(later)])
    pair.check_all()
    pair.epoch(5)
    pair.renew(WAYS[NAMES.index(sampler) % len(WAYS)])
    for _ in range(2):
        pair.sample(8)
    # what overwrites one is like any other
    for seed in range(scale(6, 2)):
        add(seed)
    pair.check_all()
    pair.exclude(pair.model.eligible())
    pair.sample(4)
    add(7)
    pair.check_all()


def test_excluded_rows_need_a_sampler_that_keeps_a_tree(device: str, tmp_path: Path) -> None:
    pair = pair_of("rows", "proportional", device)
    pair.exclude(pair.model.eligible()[:5])
    pair.buffer.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"were excluded, .* Uniform\(.*Proportional\(alpha=0\)"):
        ReplayBuffer.load(tmp_path / "saved", device, sampler=Uniform())
