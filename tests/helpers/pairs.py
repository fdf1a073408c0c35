"""Buffers beside their models: every call goes to both, and all that comes back is compared.

Every stored number of a stream says when and where it was stored, so that a frame, an action or a reward taken from the
wrong step, the wrong environment or the wrong episode shows itself.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import on_device
from model import Drawn, Model, RowModel, Step, StepModel, View, is_observation
from tolerances import close
from transitions import EXACT, STORED, check_rows, fill, handed_in, transitions

from gpu_replay import Batch, Field, ReplayBuffer, TrajectoryReplayBuffer

FIELDS = {"obs": Field((2,), torch.int16), "action": Field((), torch.int64), "note": Field((2,), torch.float32)}
# what is beside the fields, and its type
RESULTS = dict.fromkeys(("reward", "discount"), torch.float32) | {"key": torch.int64}
RESULTS |= dict.fromkeys(("terminated", "truncated", "mask"), torch.bool)


def numbered(number: int, env: int, fields: Mapping[str, Field], **more: Any) -> Step:
    """A step whose every value says when and where it happened; `more` are its reward, its flags and so on."""
    step: Step = {"reward": 0.0, "terminated": False, "truncated": False}
    for name, kind in fields.items():
        # one number says both as far as it can
        place = [number + 1, env + 1] if kind.elements > 1 else [number + 1 + 100 * env]
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
    # NumPy has no bfloat16
    kinds = {name: torch.float32 if kind.dtype is torch.bfloat16 else kind.dtype for name, kind in fields.items()}
    dtypes = {name: torch.empty(0, dtype=kind).numpy().dtype for name, kind in kinds.items()}
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


def taken_by(buffer: Any, steps: Sequence[Step], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The arguments of `add`, without final observations where the buffer takes none."""
    given = columns(steps, fields)
    if buffer.autoreset == "next_step":
        return {name: value for name, value in given.items() if not name.startswith("final_")}
    return given


def lettered(
    number: int,
    letters: Sequence[str],
    fields: Mapping[str, Field] = FIELDS,
    *,
    final: bool = False,
    terminal: bool = False,
    **more: Any,
) -> list[Step]:
    """Step `number` of all environments: T terminated, U truncated, B both, a full stop none of them.

    final: whether final observations are given; `terminal`: also of terminated episodes. more: values of all of them;
    the reward is 2^number.
    """
    steps = []
    for env, letter in enumerate(letters):
        flags = {"terminated": letter in "TB", "truncated": letter in "UB"}
        step = numbered(number, env, fields, **{"reward": 2.0**number, **more}, **flags)
        steps.append(step | ({"final": final_of(step, letter in ("TUB" if terminal else "UB"))} if final else {}))
    return steps


def play(target: Any, *streams: str, fields: Mapping[str, Field] = FIELDS, final: bool = False) -> None:
    """Add steps to a `StepPair`, one text for each environment.

    In all texts at once "c" is a `clear` and "|" a `begin_episodes` of everything.
    """
    for letters in zip(*streams, strict=True):
        if letters[0] in "c|":
            (target.clear if letters[0] == "c" else target.begin_episodes)()
        else:
            target.add(lettered(target.model.count, letters, fields, final=final, terminal=target.model.terminal_obs))


# whoever copies a buffer to another process does it so
pickle = importlib.import_module("pickle")
# names of folders
NUMBERS = itertools.count()


def loaded(buffer: Any) -> Any:
    """The buffer that a checkpoint of this one gives back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        buffer.save(path)
        more = {"relabel": buffer.relabel} if getattr(buffer, "relabel", None) is not None else {}
        return type(buffer).load(path, buffer.device, **more)


RENEWED: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
    "checkpoint": loaded,
}


class Both:
    """What both kinds of buffer have in common: settings and model."""

    model: Model

    def __init__(self, made: type[Any], seed: int, folder: Path | None, **arguments: Any) -> None:
        """folder: where the fields of each buffer lie in a file, on a GPU in pinned memory instead, or None."""
        self.made, self.folder, self.arguments = made, folder, arguments
        self.buffer = self.empty(seed)

    def contents(self, batch: Batch) -> None:
        """Fail unless every row of the batch is the one that its key says."""

    def clear(self) -> None:
        self.buffer.clear()
        self.model.clear()

    def update(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        device = self.buffer.device
        self.buffer.update_priorities(
            torch.tensor(keys, dtype=torch.int64, device=device),
            torch.tensor(priorities, dtype=torch.float64, device=device),
        )
        self.model.update(keys, priorities)

    def exclude(self, keys: Sequence[int]) -> None:
        """Take these rows out, or fail unless a buffer without a tree says what to do."""
        given, keeps = torch.tensor(keys, dtype=torch.int64, device=self.buffer.device), self.model.keeps_tree()
        words = r"keeps no tree .*sampler=Proportional\(alpha=0\)"
        with nullcontext() if keeps else pytest.raises(RuntimeError, match=words):
            self.buffer.exclude(given)
        if keeps:
            self.model.exclude(keys)

    def write(self, keys: Sequence[int], names: Sequence[str], values: Sequence[Any], given: dict[str, Any]) -> None:
        """Write these values, which are given as rows of these fields."""
        self.buffer.write(torch.tensor(keys, dtype=torch.int64, device=self.buffer.device), **given)
        self.model.write(keys, names, values)

    def sample(self, count: int, beta: float | None = None) -> list[int]:
        """The keys that were drawn; none where the sample is refused as it must be."""
        found = len(self.model.eligible())
        error = self.model.refusal(count, found)
        with self.refusing(f"sample({count})", error, found):
            batch = self.buffer.sample(count, beta=beta)
        if error:
            return []
        self.check_drawn(batch, self.model.draw(count, beta))
        self.contents(batch)
        return batch.key.tolist()

    def epoch(self, rows: int, **given: bool) -> None:
        """Fail unless each row that can be sampled comes once, in the order of keys or of the next random words."""
        keys = self.model.eligible()
        assert self.buffer.keys(eligible=True).tolist() == keys
        with self.refusing(f"epoch({rows})", None if keys else RuntimeError, 0):
            walk = self.buffer.epoch(rows, **given)
        if not keys:
            return
        if given.get("shuffle", True):
            words = self.model.words(len(keys))
            keys = [keys[place] for place in sorted(range(len(keys)), key=words.__getitem__)]
        for first, batch in zip(range(0, len(keys), rows), walk, strict=True):
            assert batch.key.tolist() == keys[first : first + rows]
            assert {"probability", "weight"}.isdisjoint(batch)
            assert {value.device.type for value in batch.values()} == {self.buffer.device.type}
            self.contents(batch)

    def refusing(self, call: str, error: type[Exception] | None, found: int) -> Any:
        """What expects this error of a draw from what was found: it says how much there is and what to do."""
        least = rf"a batch of at least {self.model.newest}\. Raise"
        words = "the buffer holds .*Add more"
        if error is ValueError:
            words = rf"{least}|the buffer holds {found}\. Add more or lower the batch size"
        return pytest.raises(error, match=f"{re.escape(call)}.*({words})") if error else nullcontext()

    def check_drawn(self, batch: Batch, drawn: Drawn) -> None:
        assert (batch.key.dtype, batch.probability.dtype, batch.weight.dtype) == (torch.int64, *[torch.float32] * 2)
        assert {value.device.type for value in batch.values()} == {self.buffer.device.type}
        assert batch.key.tolist() == drawn.keys
        assert close(batch.probability, drawn.probability, "probability")
        assert close(batch.weight, drawn.weight, "weight")

    def renew(self, way: str) -> None:
        """Go on with what was copied, or saved and loaded."""
        old = self.buffer
        if way == "state":
            # what another buffer held before is forgotten
            self.buffer = self.empty(seed=77)
            self.buffer.load_state_dict(old.state_dict())
        else:
            self.buffer = RENEWED[way](old)
            known = ("device", "seed", "fields", "sampler", "capacity")
            assert [getattr(self.buffer, name) for name in known] == [getattr(old, name) for name in known]
            assert self.buffer.state_dict()["settings"] == old.state_dict()["settings"]
        # a copy is independent
        old.clear()

    def empty(self, seed: int) -> Any:
        """Another buffer with these settings."""
        placed: dict[str, Any] = {}
        if self.folder is not None and self.arguments["device"] == "cpu":
            placed["storage_path"] = self.folder / str(next(NUMBERS))
        elif self.folder is not None:
            placed["storage_device"] = "cpu"
        return self.made(**self.arguments, seed=seed, **placed)

    def walk(self, size: int = 29) -> Iterator[Batch]:
        """All that is stored; fails unless it comes in the order of keys."""
        live = list(self.model.live())
        for first, batch in zip(range(0, len(live), size), self.buffer.batches(size), strict=True):
            assert batch.key.tolist() == live[first : first + size]
            yield batch

    def check_counts(self) -> None:
        """Compare what costs little: counts, keys and masses."""
        buffer, model = self.buffer, self.model
        live = model.live()
        assert (buffer.added, len(buffer)) == (model.added, len(live))
        if model.by_mass:
            masses = model.masses()
            assert buffer.masses().tolist() == masses
            assert buffer.total_mass() == sum(masses)
        else:
            with pytest.raises(RuntimeError, match="masses"):
                buffer.total_mass()

    def check_all(self) -> None:
        """Compare all that is public, but for contents."""
        self.check_counts()
        buffer, model = self.buffer, self.model
        live = model.live()
        assert buffer.keys().tolist() == list(live)
        assert buffer.keys(eligible=True).tolist() == model.eligible()
        for key in (live.start - 1, live.start, model.added - 1, model.added):
            assert (key in buffer) == (key in live)
        found, expected = asdict(buffer.stats()), model.stats()
        assert set(found) == set(expected)
        for name, value in expected.items():
            kind = "priority" if "priority" in name else "statistic"
            assert close([found[name]], [value], kind) or (math.isnan(value) and math.isnan(found[name])), name
        if (model.by_mass or model.by_rank) and model.base.alpha:
            wanted = [model.told(key) for key in live]
            given = buffer.priorities(list(live))
            assert close(given, wanted, "priority") if model.by_mass else given.tolist() == wanted
        else:
            with pytest.raises(RuntimeError, match="no priorities"):
                buffer.priorities([])

    def check_refused(self, keys: Iterable[int]) -> None:
        """Fail unless each of these keys is refused by name, after one that is not and before another one."""
        good, all_of_them = self.model.eligible()[:1], list(keys)
        for key, other in zip(all_of_them, [*all_of_them[1:], 2**62], strict=True):
            wrong = "stored but not eligible" if key in self.model.live() else "not live"
            with pytest.raises(KeyError, match=rf"key {key} is {wrong}"):
                self.buffer[[*good, key, other]]


class RowPair(Both):
    """`ReplayBuffer`, filled with transitions that say their own number."""

    model: RowModel

    def __init__(
        self,
        capacity: int,
        sampler: Any,
        seed: int = 0,
        device: str = "cpu",
        *,
        fields: Mapping[str, Field] = STORED,
        folder: Path | None = None,
    ) -> None:
        settings = {"capacity": capacity, "fields": fields, "sampler": sampler, "device": device}
        super().__init__(ReplayBuffer, seed, folder, **settings)
        self.model = RowModel(capacity, sampler, seed)

    def add(self, count: int, priority: list[float] | None = None) -> None:
        assert fill(self.buffer, count, priority).tolist() == self.model.add(count, priority)

    def write_numbers(self, keys: Sequence[int], names: Sequence[str], first: int) -> None:
        """Write the values of the transitions from number `first` on."""
        numbers = range(first, first + len(keys))
        self.write(keys, names, numbers, transitions(numbers, names))

    def contents(self, batch: Batch) -> None:
        check_rows(batch, self.model.written)

    def check_contents(self) -> None:
        """Compare every row, and what is refused."""
        live = self.model.live()
        batch = self.buffer[list(live)]
        assert batch.key.tolist() == list(live)
        for each in (batch, *self.walk()):
            check_rows(each, self.model.written)
        self.check_refused((live.start - 1, live.stop))


class StepPair(Both):
    """A buffer of steps and its model; every call goes to both and is compared."""

    model: StepModel

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        *,
        sampler: Any = EXACT,
        fields: Mapping[str, Field] = FIELDS,
        device: str = "cpu",
        seed: int = 0,
        folder: Path | None = None,
        **settings: Any,
    ) -> None:
        settings = {"autoreset": "next_step", **settings}
        given = {"capacity": capacity, "num_envs": num_envs, "fields": fields, "sampler": sampler, "device": device}
        super().__init__(TrajectoryReplayBuffer, seed, folder, **given, **settings)
        self.fields, self.model = fields, StepModel(capacity, num_envs, sampler, seed, **settings)
        # the buffer that has warned of a flawed ending
        self.warned: Any = None
        assert self.buffer.capacity == self.model.capacity
        assert f"num_envs={num_envs}" in repr(self.buffer)

    def told(self, add: Callable[[], Any], steps: Iterable[Sequence[Step]]) -> tuple[Any, list[list[int]]]:
        """Add steps to buffer and model, and fail unless the first flawed ending is warned of, and no later one."""
        (name, before), expected = self.model.flaws(), [self.model.add(each) for each in steps]
        if self.model.flaws()[1] == before or self.warned is self.buffer:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return add(), expected
        self.warned = self.buffer
        # a device tells when it is asked
        early = add() if on_device(self.buffer) else None
        with pytest.warns(UserWarning, match=rf"stats\(\)\.{name} counts them") as seen:
            keys = self.buffer.stats() and early if on_device(self.buffer) else add()
        assert len(seen) == 1
        return keys, expected

    def add(self, steps: Sequence[Step]) -> list[int]:
        given = taken_by(self.buffer, steps, self.fields)
        handed = handed_in(given, self.model.count)
        keys, (expected,) = self.told(lambda: self.buffer.add(**handed), [steps])
        for value in given.values():
            # vector environments hand out the same arrays at every step
            value[...] = 0
        assert keys.dtype == torch.int64
        assert keys.tolist() == expected
        return expected

    def extend(self, many: Sequence[Sequence[Step]]) -> None:
        """Many steps in one call, all with priorities or final observations or none."""
        given = [taken_by(self.buffer, steps, self.fields) for steps in many]
        stacked = {name: np.stack([each[name] for each in given]) for name in given[0]}
        handed = handed_in(stacked, self.model.count, axes=2)
        # each step may say that it has none
        none = {"final_obs": [None] * len(many)} if "final" not in " ".join(given[0]) and self.model.count % 2 else {}
        keys, expected = self.told(lambda: self.buffer.extend(**handed, **none), many)
        assert keys.tolist() == expected

    def write_numbers(self, keys: Sequence[int], names: Sequence[str], first: int) -> None:
        """Write the values that steps of a tenth environment would have, from number `first` on."""
        steps = [numbered(first + row, 9, self.fields) for row in range(len(keys))]
        given = columns(steps, self.fields) if steps else {}
        empty = {name: torch.empty((0, *field.shape), dtype=field.dtype) for name, field in self.fields.items()}
        self.write(keys, names, steps, {name: given.get(name, empty[name]) for name in names})

    def begin_episodes(self, mask: Sequence[bool] | None = None) -> None:
        form = (np.array, torch.tensor, list)[self.model.count % 3]
        self.buffer.begin_episodes(*([] if mask is None else [form(mask)]))
        self.model.begin_episodes(mask)

    def contents(self, batch: Batch) -> None:
        self.check_rows(batch, self.model.view())

    def check_contents(self) -> None:
        """Compare every row, every step that is stored, and what is refused."""
        view = self.check()
        self.check_refused({-1, *range(view.live().start - 1, self.model.added + 2)} - set(view.eligible()))
        for batch in self.walk():
            for name in (*self.fields, "terminated", "truncated"):
                # of a dead step only the observation counts
                for row, (env, number) in zip(
                    self.stored(batch, name), map(view.place, batch.key.tolist()), strict=True
                ):
                    if is_observation(name) or not view.marks[env][number][1]:
                        assert row == self.model.steps[env][number][name], f"{name} of step {number}"

    def stored(self, batch: Batch, name: str) -> list[Any]:
        """Values of a batch as they were stored; fails unless they left in the type that was asked for."""
        found, field = batch[name].cpu(), self.fields.get(name.removeprefix("next_"))
        assert found.dtype == (RESULTS[name] if field is None else field.sample_dtype or field.dtype), name
        if name.startswith("next_"):
            # perhaps unspecified, but `discount * value(next_obs)` must be 0
            assert bool(found.isfinite().all()), name
        scaled = field is not None and field.scale is not None
        return (found.double() / field.scale if scaled else found).tolist()  # type: ignore[union-attr]

    def check(self) -> View:
        """Compare the sizes, the masses and every eligible row."""
        view = self.model.view()
        eligible = view.eligible()
        self.check_counts()
        if eligible:
            batch = self.buffer[eligible]
            after = {f"next_{name}" for name in self.fields if is_observation(name)}
            unused = {"mask"} if self.model.sequences is None else set()
            assert set(batch) == RESULTS.keys() - unused | self.fields.keys() | after
            self.check_rows(batch, view)
            assert batch.key.tolist() == eligible
        return view

    def check_rows(self, batch: Batch, view: View) -> None:
        """Fail unless every row of the batch is the one that its key says."""
        keys = batch.key.tolist()
        assert set(keys) <= set(view.eligible())
        if self.model.sequences is not None:
            self.check_sequences(batch, view, self.model.sequences.length)
            return
        rows = [view.row(key) for key in keys]
        for name in rows[0]:
            values = self.stored(batch, name)
            expected = [value if row[name] is None else row[name] for value, row in zip(values, rows, strict=True)]
            assert values == expected, f"field {name} of keys {keys}"

    def check_sequences(self, batch: Batch, view: View, length: int) -> None:
        """Fail unless every window of the batch is what its key says."""
        keys = batch.key.tolist()
        after = [f"next_{name}" for name in self.fields if is_observation(name)]
        names = [*self.fields, "reward", "discount", "terminated", "truncated", *after]
        assert {*names, "mask", "key"} <= set(batch)
        found = {name: self.stored(batch, name) for name in [*names, "mask"]}
        for row, key in enumerate(keys):
            sequence = view.sequence(key, length)
            assert found["mask"][row] == [step["mask"] for step in sequence], f"mask of key {key}"
            for name in names:
                assert len(found[name][row]) == length
                for value, step in zip(found[name][row], sequence, strict=True):
                    expected = step[name]
                    if name in after and (expected is None or not step["mask"]):
                        continue
                    if name == "reward" and not step["mine"]:
                        continue
                    if is_observation(name) and not step["mine"] and self.model.stack > 1:
                        # of a step beyond the episode only its own frame is promised
                        value, expected = value[-1], expected[-1]
                    if name == "discount" or not step["dead"] or is_observation(name):
                        assert value == expected, f"field {name} of key {key}"


def letters(draw: random.Random, envs: int, end: float) -> str:
    """What a step of each environment is: T terminated, U truncated, B both, a full stop none of them."""
    return "".join(draw.choice("TUB") if draw.random() < end else "." for _ in range(envs))


def live_through(pair: StepPair, steps: int, seed: int = 0, *, end: float = 0.15, final: float = 0.7) -> StepPair:
    """Play random steps to a pair: a share `end` of them ends an episode, a share `final` brings final observations."""
    draw = random.Random(seed)
    for _ in range(steps):
        ends = letters(draw, pair.model.num_envs, end)
        play(pair, *ends, fields=pair.fields, final=draw.random() < final)
    return pair
