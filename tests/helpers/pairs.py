"""A buffer beside its model: every call goes to both, and all that comes back is compared."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from model import Drawn, Model, RowModel
from tolerances import close
from transitions import STORED, check_rows, fill

from gpu_replay import Batch, Field, Proportional, ReplayBuffer

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


class Pair:
    """What both kinds of buffer have in common."""

    buffer: Any
    model: Model
    # where the fields of each buffer lie in a file of their own, or None for memory
    folder: Path | None

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

    def sample(self, count: int, beta: float | None = None) -> list[int]:
        """The keys that were drawn; none where the sample is refused as it must be."""
        found = len(self.model.eligible())
        error = self.model.refusal(count, found)
        with self.refusing(f"sample({count})", error, found):
            batch = self.buffer.sample(count, beta=beta)
        if error:
            return []
        relabelled = getattr(self.model, "relabel", None) is not None
        draw = self.model.draw_relabelled if relabelled else self.model.draw  # type: ignore[attr-defined]
        self.check_drawn(batch, draw(count, beta))
        self.contents(batch)
        return batch.key.tolist()

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
        # a copy is independent
        old.clear()

    def empty(self, seed: int) -> Any:
        """Another buffer with these settings."""

    def placed(self) -> dict[str, Any]:
        """The settings of a new buffer that say where its fields lie."""
        return {} if self.folder is None else {"storage_path": self.folder / str(next(NUMBERS))}

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
        for key in (live.start - 1, live.start, model.added - 1, model.added):
            assert (key in buffer) == (key in live)
        found, expected = asdict(buffer.stats()), model.stats()
        assert set(found) == set(expected)
        for name, value in expected.items():
            kind = "priority" if "priority" in name else "statistic"
            assert close([found[name]], [value], kind) or (math.isnan(value) and math.isnan(found[name])), name
        if (model.by_mass or model.by_rank) and model.base.alpha:
            wanted = [model.held.get(key, 0.0) for key in live]
            given = buffer.priorities(list(live))
            if model.by_mass:
                wanted = [self._seen(key) if key in model.held else 0.0 for key in live]
            assert close(given, wanted, "priority") if model.by_mass else given.tolist() == wanted
        else:
            with pytest.raises(RuntimeError, match="no priorities"):
                buffer.priorities([])

    def _seen(self, key: int) -> float:
        """A priority as its mass says it."""
        base: Proportional = self.model.base
        return max((self.model.mass(key) / 2**20) ** (1 / base.alpha) - base.eps, 0.0)

    def check_refused(self, keys: Iterable[int]) -> None:
        """Fail unless each of these keys is refused by name, after one that is not and before another one."""
        good, all_of_them = self.model.eligible()[:1], list(keys)
        for key, other in zip(all_of_them, [*all_of_them[1:], 2**62], strict=True):
            wrong = "stored but not eligible" if key in self.model.live() else "not live"
            with pytest.raises(KeyError, match=rf"key {key} is {wrong}"):
                self.buffer[[*good, key, other]]


class RowPair(Pair):
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
        self.folder = folder
        self.arguments = {"capacity": capacity, "fields": fields, "sampler": sampler, "device": device}
        self.buffer = self.empty(seed)
        self.model = RowModel(capacity, sampler, seed)

    def empty(self, seed: int) -> ReplayBuffer:
        return ReplayBuffer(**self.arguments, seed=seed, **self.placed())

    def add(self, count: int, priority: list[float] | None = None) -> None:
        assert fill(self.buffer, count, priority).tolist() == self.model.add(count, priority)

    def contents(self, batch: Batch) -> None:
        check_rows(batch)

    def check_contents(self) -> None:
        """Compare every row, and what is refused."""
        live = self.model.live()
        batch = self.buffer[list(live)]
        assert batch.key.tolist() == list(live)
        for each in (batch, *self.walk()):
            check_rows(each)
        self.check_refused((live.start - 1, live.stop))
