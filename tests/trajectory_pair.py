"""A trajectory buffer beside its oracle: every call goes to both, and what comes back is compared.

Every stored number says when and where it was stored, so that a frame, an action or a reward taken from the wrong step,
the wrong environment or the wrong episode shows itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from trajectory_oracle import History, Priorities, Step, View, is_observation
from transitions import EXACT

from gpu_replay import Batch, Combined, Field, Proportional, TrajectoryReplayBuffer

FIELDS = {"obs": Field((2,), torch.int16), "action": Field((), torch.int64), "note": Field((2,), torch.float32)}
RESULTS = {"reward", "discount", "terminated", "truncated", "key"}


def numbered(number: int, env: int, fields: Mapping[str, Field], **more: Any) -> Step:
    """A step whose every value says when and where it happened; `more` are its reward, its flags and so on."""
    step: Step = {"reward": 0.0, "terminated": False, "truncated": False}
    for name, kind in fields.items():
        # one number says both as far as it can
        place = [number + 1, env + 1] if kind.elements > 1 else [number + 1 + 1000 * env]
        values = np.resize(place, kind.shape)
        if kind.dtype is torch.bool:
            values = values % 2 == 0
        step[name] = values.astype(float).tolist() if kind.dtype.is_floating_point else values.tolist()
    return step | more


def final_of(step: Step, wanted: bool) -> dict[str, Any]:
    """A final observation that no step has, or, where none is wanted, what an environment leaves in such a row."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(part) for part in value]
        return -value if wanted else float("nan") if isinstance(value, float) else -9999

    return {name: changed(value) for name, value in step.items() if is_observation(name)}


def columns(steps: Sequence[Step], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The arguments of `add` for one step of each environment, as NumPy arrays."""
    dtypes = {name: torch.empty(0, dtype=kind.dtype).numpy().dtype for name, kind in fields.items()}
    given: dict[str, Any] = {
        name: np.array([step[name] for step in steps], dtype=dtypes[name]).reshape(-1, *kind.shape)
        for name, kind in fields.items()
    }
    given["reward"] = np.array([step["reward"] for step in steps], dtype=np.float64)
    for name in ("terminated", "truncated"):
        given[name] = np.array([step[name] for step in steps], dtype=bool)
    if steps[0].get("priority") is not None:
        given["priority"] = np.array([step["priority"] for step in steps])
    if steps[0].get("final") is not None:
        for name, kind in fields.items():
            if is_observation(name):
                rows = [step["final"][name] for step in steps]
                given[f"final_{name}"] = np.array(rows, dtype=dtypes[name]).reshape(-1, *kind.shape)
    return given


def play(target: Any, *streams: str, fields: Mapping[str, Field] = FIELDS, final: bool = False) -> None:
    """Add numbered steps to a `History` or a `Pair`, one text for each environment; the reward of step t is 2^t.

    T terminated, U truncated, B both, a full stop none of them; "c" is a `clear` and "|" a `begin_episodes` of
    everything, in all texts at once. `final` gives final observations with every step.
    """
    for letters in zip(*streams, strict=True):
        if letters[0] == "c":
            target.clear()
            continue
        if letters[0] == "|":
            target.begin_episodes()
            continue
        number = (target.history if isinstance(target, Pair) else target).count
        steps = []
        for env, letter in enumerate(letters):
            step = numbered(number, env, fields, reward=2.0**number)
            step |= {"terminated": letter in "TB", "truncated": letter in "UB"}
            steps.append(step | ({"final": final_of(step, letter in "UB")} if final else {}))
        target.add(steps)


class Pair:
    """A buffer and its oracle; every call goes to both and is compared."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        *,
        sampler: Any = EXACT,
        fields: Mapping[str, Field] = FIELDS,
        device: str = "cpu",
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.fields, self.sampler = fields, sampler
        self.buffer = TrajectoryReplayBuffer(
            capacity, num_envs, fields, sampler=sampler, device=device, seed=seed, **settings
        )
        self.history = History(capacity, num_envs, **settings)
        base = sampler.base if isinstance(sampler, Combined) else sampler
        self.priorities = Priorities(self.history, base) if isinstance(base, Proportional) else None
        assert self.buffer.capacity == self.history.capacity

    def add(self, steps: Sequence[Step]) -> list[int]:
        keys = self.buffer.add(**columns(steps, self.fields))
        expected = (self.history if self.priorities is None else self.priorities).add(steps)
        assert keys.dtype == torch.int64
        assert keys.tolist() == expected
        return expected

    def clear(self) -> None:
        self.buffer.clear()
        (self.history if self.priorities is None else self.priorities).clear()

    def begin_episodes(self, mask: Sequence[bool] | None = None) -> None:
        if mask is None:
            self.buffer.begin_episodes()
        else:
            self.buffer.begin_episodes(np.array(mask))
        self.history.begin_episodes(mask)

    def update(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        self.buffer.update_priorities(np.array(keys, dtype=np.int64), np.array(priorities, dtype=np.float64))
        if self.priorities is not None:
            self.priorities.update(keys, priorities)

    def check(self) -> View:
        """Compare the sizes, the masses and every eligible row."""
        view = self.history.view()
        eligible = view.eligible()
        assert self.buffer.added == self.history.added
        assert len(self.buffer) == len(view.live())
        if self.priorities is not None:
            assert self.buffer.masses().tolist() == self.priorities.masses()
            assert self.buffer.total_mass() == sum(self.priorities.masses())
        if eligible:
            batch = self.buffer[eligible]
            after = {f"next_{name}" for name in self.fields if is_observation(name)}
            assert set(batch) == RESULTS | set(self.fields) | after
            self.check_rows(batch, view)
            assert batch.key.tolist() == eligible
        return view

    def check_rows(self, batch: Batch, view: View) -> None:
        """Fail unless every row of the batch is the one that its key says."""
        keys = batch.key.tolist()
        assert set(keys) <= set(view.eligible())
        rows = [view.row(key) for key in keys]
        for name in rows[0]:
            found = batch[name].cpu()
            values = found.tolist()
            expected = [row[name] for row in rows]
            if name.startswith("next_"):
                # unspecified, but `discount * value(next_obs)` must be 0
                assert bool(found.isfinite().all()), name
                expected = [one if two is None else two for one, two in zip(values, expected, strict=True)]
            assert values == expected, f"field {name} of keys {keys}"

    def check_refusals(self, view: View) -> None:
        """Fail unless every key that is not eligible is refused by name."""
        around = set(range(-1, self.history.added + 2)) - set(view.eligible())
        for key in sorted(around):
            with pytest.raises(KeyError, match=rf"(?<!\d){key}(?!\d)"):
                self.buffer[[key]]

    def check_sequences(self, batch: Batch, view: View, length: int) -> None:
        """Fail unless every window of the batch is what its key says."""
        keys = batch.key.tolist()
        assert set(keys) <= set(view.sequence_starts(length))
        names = [*self.fields, "reward", "terminated", "truncated"]
        assert set(batch) == {*names, "mask", "key", "probability", "weight"}
        found = {name: batch[name].cpu().tolist() for name in [*names, "mask"]}
        for row, key in enumerate(keys):
            sequence = view.sequence(key, length)
            assert found["mask"][row] == [step["mask"] for step in sequence], f"mask of key {key}"
            for name in names:
                assert len(found[name][row]) == length
                for value, step in zip(found[name][row], sequence, strict=True):
                    expected = step[name]
                    if is_observation(name) and not step["mask"] and self.history.stack > 1:
                        # of a step beyond the episode only its own frame is promised
                        value, expected = value[-1], expected[-1]
                    if step["mask"] or not step["dead"] or is_observation(name):
                        assert value == expected, f"field {name} of key {key}"


def live_through(pair: Pair, steps: int, seed: int = 0, *, end: float = 0.15, final: float = 0.7) -> Pair:
    """Play random steps to a pair: a share `end` of them ends an episode, a share `final` brings final observations."""
    generator = random.Random(seed)
    for _ in range(steps):
        with_final, row = generator.random() < final, []
        for env in range(pair.history.num_envs):
            truncated, ended = generator.random() < 0.5, generator.random() < end
            step = numbered(pair.history.count, env, pair.fields, reward=generator.gauss(0, 1))
            step |= {"terminated": ended and not truncated, "truncated": ended and truncated}
            row.append(step | ({"final": final_of(step, step["truncated"])} if with_final else {}))
        pair.add(row)
    return pair


class Script:
    """A fixed sequence of calls, so that several buffers can be played the same from any call on."""

    def __init__(self, seed: int, calls: int, num_envs: int, end: float = 0.2) -> None:
        draw = random.Random(seed)
        self.num_envs = num_envs
        self.calls: list[tuple[str, Any]] = []
        number = 0
        for _ in range(calls):
            chance = draw.random()
            if chance < 0.04:
                self.calls.append(("clear", None))
            elif chance < 0.08:
                mask = [draw.random() < 0.5 for _ in range(num_envs)]
                self.calls.append(("begin_episodes", draw.choice((None, mask))))
            elif chance < 0.25:
                self.calls.append(("update", draw.random()))
            elif chance < 0.35:
                self.calls.append(("sample", draw.randint(1, 6)))
            else:
                self.calls.append(("add", self._steps(draw, number, end)))
                number += 1

    def _steps(self, draw: random.Random, number: int, end: float) -> list[Step]:
        with_final, with_priority = draw.random() < 0.7, draw.random() < 0.5
        steps = []
        for env in range(self.num_envs):
            truncated, ended = draw.random() < 0.6, draw.random() < end
            step = numbered(number, env, FIELDS, reward=draw.gauss(0, 1))
            step |= {"terminated": ended and not truncated, "truncated": ended and truncated}
            if with_final:
                step["final"] = final_of(step, step["truncated"])
            if with_priority:
                step["priority"] = draw.uniform(0.1, 9)
            steps.append(step)
        return steps

    def play(self, buffer: TrajectoryReplayBuffer, first: int, last: int) -> list[Any]:
        """Make these calls; returns all that came back from samples."""
        found: list[Any] = []
        for call, argument in self.calls[first:last]:
            if call == "add":
                buffer.add(**columns(argument, FIELDS))
            elif call == "update":
                keys = torch.arange(max(0, buffer.added - 25), buffer.added, 2)
                buffer.update_priorities(keys, torch.linspace(0.1, 4 + argument, len(keys)))
            elif call == "sample":
                count = min(argument, buffer.stats().eligible)
                newest = buffer.sampler.newest if isinstance(buffer.sampler, Combined) else 1
                if count >= newest:
                    found.append(buffer.sample(count))
            elif argument is None:
                getattr(buffer, call)()
            else:
                getattr(buffer, call)(torch.tensor(argument))
        return found
