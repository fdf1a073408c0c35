"""Transitions that carry their own number, and the buffers that hold them.

Every field of transition `n` is a function of `n`, so that a row taken from the wrong slot, torn between two
transitions or cast wrongly shows itself, whatever the sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from devices import INTERPRETED
from model import UNIT
from torch import Tensor

from gpu_replay import Batch, Field, LinearSchedule, Proportional, ReplayBuffer, Uniform

FIELDS = {
    "obs": Field((2, 3), torch.float32),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "next_obs": Field((2, 3), torch.float32),
    "terminated": Field((), torch.bool),
}
# what `make` stores: every field costs the interpreter as much again
STORED = {name: FIELDS[name] for name in ("obs", "action")} if INTERPRETED else FIELDS
NUMBER = {"number": Field((), torch.int64)}
ANNEALED = Proportional(alpha=0.7, beta=LinearSchedule(0.1, 1.0, steps=40), normalize="buffer")
EXACT = Proportional(alpha=1.0, beta=1.0, eps=0.0)  # the mass is the priority times 2^20, nothing else


def transitions(numbers: Iterable[int], names: Iterable[str] = tuple(STORED)) -> dict[str, Tensor]:
    """The fields with these names of the transitions with these numbers, on the CPU."""
    number = torch.tensor(list(numbers), dtype=torch.int64)
    cells = torch.arange(6).reshape(2, 3) / 8
    obs = number[:, None, None] + cells
    fields = {
        "obs": obs.float(),
        "action": number * 1_000_003,
        "reward": -number.float(),
        "next_obs": obs.float() + 1,
        "terminated": number % 3 == 0,
    }
    return {name: fields[name] for name in names}


def make(capacity: int, sampler: Any = None, *, device: str = "cpu", seed: int = 0, **fields: Field) -> ReplayBuffer:
    """An empty buffer of the numbered transitions, or of other fields."""
    settings = Uniform() if sampler is None else sampler
    return ReplayBuffer(capacity, fields or STORED, sampler=settings, device=device, seed=seed)


def handed_in(given: Mapping[str, Any], number: int, axes: int = 1) -> dict[str, Any]:
    """The same rows in a form that people have them in: flags of other types, scalars as columns, one without an axis.

    number: of the first row; `axes`: of a scalar, 2 where there are several steps.
    """
    form, single = number % 5, axes == 1 and {len(value) for value in given.values()} == {1}
    if form < 2:
        # 0 or 1, as whole and as floating numbers
        flags = {name: value * (1, 1.0)[form] for name, value in given.items() if str(value.dtype)[-4:] == "bool"}
        return {**given, **flags}
    if form == 2:
        scalars = {name: value for name, value in given.items() if value.ndim == axes and name[:5] != "final"}
        columns = {name: value[..., None] for name, value in scalars.items()}
        return {**given, **columns}
    return {name: value[0] for name, value in given.items()} if single and form == 3 else dict(given)


def fill(buffer: ReplayBuffer, count: int, priority: Sequence[float] | None = None) -> Tensor:
    """Add the next `count` numbered transitions; the number of each is its key."""
    first = buffer.added
    given = None if priority is None else torch.tensor(priority, dtype=torch.float64, device=buffer.device)
    fields = {
        name: value.to(buffer.device) for name, value in transitions(range(first, first + count), buffer.fields).items()
    }
    return buffer.add(**handed_in(fields | ({} if given is None else {"priority": given}), first))


def with_masses(masses: Sequence[int], *, device: str, seed: int = 0) -> ReplayBuffer:
    """A full buffer of numbers with exactly these masses in slot order."""
    capacity = len(masses)
    buffer = ReplayBuffer(capacity, NUMBER, sampler=EXACT, device=device, seed=seed)
    given = torch.tensor(masses, dtype=torch.float64) / UNIT
    buffer.add(number=torch.arange(capacity, device=device), priority=given.to(device))
    assert buffer.masses().tolist() == list(masses)
    return buffer


def check_rows(batch: Batch, written: Mapping[tuple[int, str], int] = {}) -> None:
    """Fail unless every row of the batch is the transition that its key says, or that `written` says of a field."""
    keys = batch.key.tolist()
    names = [name for name in batch if name not in ("key", "probability", "weight")]
    assert names
    for name in names:
        expected = transitions([written.get((key, name), key) for key in keys], [name])[name]
        found = batch[name].cpu()
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), f"field {name} of keys {keys}"


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Fail unless two batches are equal in every tensor."""
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(one[name].cpu(), other[name].cpu()), name


def same_draws(one: ReplayBuffer, other: ReplayBuffer, count: int, times: int = 3) -> None:
    """Fail unless the next samples of both buffers are equal in every tensor."""
    for _ in range(times):
        same(one.sample(count), other.sample(count))


def leaves(state: Any) -> list[Any]:
    """What a nested state is made of."""
    if isinstance(state, (dict, list, tuple)):
        parts = state.values() if isinstance(state, dict) else state
        return [leaf for part in parts for leaf in leaves(part)]
    return [state]
