"""Checkpoints that are kept, so that those of every version go on loading: how they were made, and what they must give.

    python tests/golden.py FOLDER

writes those of this version with what their buffers draw next, for `test_golden.py`. Those that are there never change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_replay import (
    Combined,
    Field,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)

Buffer = ReplayBuffer | TrajectoryReplayBuffer
FOLDER = Path(__file__).resolve().parent / "golden"
EXPECTED = "expected.json"


def transitions(sampler: Any) -> ReplayBuffer:
    """A ring that went round, with fields of several kinds."""
    fields = {
        "obs.picture": Field((2, 3), torch.uint8, torch.float16, 1 / 255),
        "obs.speed": Field((), torch.bfloat16),
        "action": Field((), torch.int64),
        "done": Field((), torch.bool),
    }
    buffer = ReplayBuffer(23, fields, sampler=sampler, device="cpu", seed=2**63 + 5)
    for first in range(0, 30, 6):
        number = torch.arange(first, first + 6)
        picture = (number[:, None, None] * 7 + torch.arange(6).view(2, 3)).to(torch.uint8)
        speed = {"obs.picture": picture, "obs.speed": number.bfloat16()}
        buffer.add(**speed, action=number, done=number % 4 == 0)
        keys = buffer.sample(4).key
        buffer.update_priorities(keys, (keys % 5 + 1).float())
    return buffer


def steps(sampler: Any, **settings: Any) -> TrajectoryReplayBuffer:
    """Two environments in the middle of episodes, with stacks, windows, final observations and priorities to come."""
    fields = {"obs": Field((3,), torch.int16), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(26, 2, fields, sampler=sampler, device="cpu", seed=3, **settings)
    for number in range(20):
        both = torch.tensor([number, number + 100])
        given: dict[str, Any] = {"obs": both[:, None] + torch.arange(3), "action": both, "reward": both.float()}
        ends = {"terminated": both % 7 == 3, "truncated": both % 5 == 4}
        final = {} if buffer.autoreset == "next_step" else {"final_obs": -given["obs"]}
        buffer.add(**given, **ends, **final, priority=both % 3 + 0.5)
    return buffer


MADE: dict[str, Callable[[], Buffer]] = {
    "proportional": lambda: transitions(
        Combined(Proportional(0.3, LinearSchedule(0.2, 0.9, 7), 0.01, 5.0, 2.0, "buffer", False), newest=2)
    ),
    "rank": lambda: transitions(RankBased()),
    "steps": lambda: steps(Proportional(alpha=1.0, eps=0.0), stack=3, n_step=2, autoreset="same_step", padding="zero"),
    "steps-uniform": lambda: steps(Uniform(), n_step=3, gamma=0.5),
}


def drawn(buffer: Buffer) -> list[dict[str, Any]]:
    """What the next calls give, as far as it is the same on every machine."""
    found = []
    for size in (5, 3):
        batch = buffer.sample(size)
        names = [name for name in batch if name not in ("probability", "weight")]
        # where the discount is 0 the observation after it means nothing
        counts = batch["discount"] != 0 if "discount" in batch else torch.ones(size, dtype=torch.bool)
        rows = {name: batch[name][counts] if name.startswith("next_") else batch[name] for name in names}
        found.append({name: value.double().tolist() for name, value in rows.items()})
        buffer.update_priorities(batch.key, torch.arange(size) + 1.0)
    return found


def main(folder: Path) -> None:
    """Write all of them."""
    for name, make in MADE.items():
        buffer = make()
        buffer.save(folder / name)
        (folder / name / EXPECTED).write_text(json.dumps(drawn(buffer)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
