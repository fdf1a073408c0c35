"""Buffers whose fields are elsewhere, beside buffers in memory, and the same calls for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import check_batches

from gpu_replay import Field, Hindsight, LinearSchedule, Proportional, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.engines.memory import Placement

FIELDS = {
    "obs": Field((6, 50), torch.uint8, torch.float32, 1 / 255),
    "action": Field((), torch.int64),
    "brain": Field((3,), torch.bfloat16),
    "terminated": Field((), torch.bool),
}
STEP_FIELDS = {"obs": Field((6, 50), torch.uint8), "action": Field((), torch.int64), "note": Field((3,), torch.float32)}
GOAL_FIELDS = {f"obs.{name}": Field((2,), torch.float32) for name in ("state", "achieved_goal", "desired_goal")}
GOAL_FIELDS["action"] = Field((), torch.int64)
ENVS = 3
# masses that no library rounds differently come from powers of two and alpha 1
EXACT = Proportional(alpha=1.0, beta=LinearSchedule(0.0, 1.0, 40), eps=0.0)


def reached(achieved: Tensor, desired: Tensor) -> Tensor:
    return (achieved - desired).abs().sum(-1)


STEPS: dict[str, dict[str, Any]] = {
    "same_step": {"autoreset": "same_step", "stack": 3, "n_step": 2},
    "next_step": {"autoreset": "next_step", "stack": 3, "n_step": 2},
    "goals": {"autoreset": "same_step", "relabel": Hindsight(reward_fn=reached, ratio=0.5)},
}


def make(kind: str, **more: Any) -> Any:
    """A buffer of transitions or of steps; keys of the last ones are what `given` made them of."""
    settings = {"device": "cpu", "seed": 3, "sampler": EXACT, **more}
    if kind not in STEPS:
        return ReplayBuffer(**{"capacity": 50, "fields": FIELDS, **settings})
    steps = {"capacity": 60, "num_envs": ENVS, "fields": GOAL_FIELDS if kind == "goals" else STEP_FIELDS}
    return TrajectoryReplayBuffer(**{**steps, **STEPS[kind], **settings})


def given(buffer: Any, rows: int = 20, ahead: int = 0) -> dict[str, Tensor]:
    """The next rows, or those so many keys later, each a function of its key; most have a priority."""
    steps = isinstance(buffer, TrajectoryReplayBuffer)
    key = torch.arange(ENVS if steps else rows) + buffer.added + ahead
    values = {}
    for name, field in buffer.fields.items():
        place = torch.arange(field.elements)
        value = (key[:, None] * 31 + place) % 127
        values[name] = (value > 60 if field.dtype == torch.bool else value).to(field.dtype).view(-1, *field.shape)
    if int(key[0]) % 4 < 3:
        values["priority"] = torch.bitwise_left_shift(torch.ones_like(key), key * 7919 % 16).double() / 16
    if steps:
        hashed = key * 7919 % 1009 % 11
        values |= {"reward": (key % 17).float() / 4, "terminated": hashed == 1, "truncated": hashed == 2}
        if buffer.autoreset != "next_step":
            values |= {f"final_{name}": value + 1 for name, value in values.items() if name.startswith("obs")}
    return {name: value.to(buffer.device) for name, value in values.items()}


def live(buffer: Any, rounds: int) -> Iterator[Any]:
    """Add, sample, update and read for a while; gives all that comes back."""
    steps = isinstance(buffer, TrajectoryReplayBuffer)
    for _ in range(rounds):
        for _ in range(8 if steps else 1):
            yield buffer.add(**given(buffer))
        if steps and buffer.added % 5 == 0:
            buffer.begin_episodes()
        batch = buffer.sample(min(16, buffer.stats().eligible))
        yield batch
        # of repeated keys the last counts, of overwritten ones none
        keys = torch.cat((batch.key, batch.key[:3], batch.key[:2] - buffer.capacity))
        buffer.update_priorities(keys, (keys + torch.arange(len(keys), device=keys.device)) % 8 + 1)
        yield buffer[batch.key[:5]]
    yield from buffer.batches(13)


def used(kind: str, rounds: int, **settings: Any) -> Any:
    """A buffer that was used for so many rounds, and stopped in the middle of episodes and windows."""
    buffer = make(kind, **settings)
    list(live(buffer, rounds))
    for _ in range(rounds % 4):
        buffer.add(**given(buffer))
    return buffer


def check_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found.cpu(), expected.cpu())
    else:
        check_batches(found, expected.to("cpu"))


@contextmanager
def pinned_on_the_cpu() -> Iterator[None]:
    """Within it new buffers keep their fields in "pinned" memory although their device is the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_replay.base.state.check_placement", lambda device, *_: Placement(device, pinned=True))
        yield
