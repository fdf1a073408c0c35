"""A sampler of a user's own: one class outside the package, which both buffers draw by, count and save anywhere."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only, scale, statistical
from distribution import check_counts
from interpreted import kernel_device as kernel_device
from pairs import RENEWED
from places import given, make, used
from refusals import whole_state
from test_distributions import lived
from tolerances import close
from torch import Tensor
from transitions import same

from gpu_replay import CheckpointError, Combined, Field, Proportional, ReplayBuffer, Uniform
from gpu_replay.samplers import BaseSampler, LinearSchedule, Sampler

pytestmark = pytest.mark.contract


@dataclass(frozen=True)
class Recent(BaseSampler):
    """The newest `window`, equally likely, as in "Emphasizing Recent Experience", Wang and Ross 2019."""

    window: int = 1_000

    def places(self, total: Tensor, rows: int, random: Any) -> Tensor:
        return total - 1 - (random.doubles(rows) * total.clamp(max=self.window)).long()

    def chances(self, places: Tensor, total: Tensor) -> Tensor:
        window = total.clamp(max=self.window)
        return torch.where(places >= total - window, 1.0 / window.double(), 0.0)


@dataclass(frozen=True)
class Geometric(BaseSampler):
    """Each is `keep` times as likely as the next newer one."""

    keep: float = 0.9
    beta: float | LinearSchedule = 0.0

    def places(self, total: Tensor, rows: int, random: Any) -> Tensor:
        age = torch.log1p(random.doubles(rows) * (self.keep ** total.double() - 1)) / math.log(self.keep)
        return total - 1 - age.long().minimum(total - 1)

    def chances(self, places: Tensor, total: Tensor) -> Tensor:
        return self.keep ** (total - 1 - places).double() * (1 - self.keep) / (1 - self.keep ** total.double())


OWN: dict[str, Any] = {
    "recent": Recent(7),
    "all are recent": Recent(),
    "geometric": Geometric(0.8, beta=0.5),
    "annealed": Geometric(0.9, beta=LinearSchedule(0.0, 1.0, 4)),
    "combined": Combined(Geometric(0.8, beta=1.0), newest=2),
}
BUFFERS = ("exact", "next_step", "same_step")


def chances_of(sampler: Any, keys: list[int]) -> dict[int, float]:
    """The probability of each of these keys, the oldest first, of one row that is not among the newest."""
    chances = sampler.base.chances(torch.arange(len(keys)), torch.tensor(len(keys))).tolist()
    return dict(zip(keys, chances, strict=True))


@statistical
@pytest.mark.parametrize("kind", ["rows", "steps", "windows"])
@pytest.mark.parametrize("name", OWN)
def test_keys_probabilities_and_weights_are_those_that_the_sampler_says(name: str, kind: str) -> None:
    sampler, rows, found = OWN[name], 6, Counter[int]()
    pair, keys = lived(kind, sampler, "cpu", seed=1)
    chance, newest, beta = chances_of(sampler, keys), pair.model.newest, sampler.base.beta
    for step in range(500):
        batch = pair.buffer.sample(rows)
        drawn, latest = batch.key.tolist()[: rows - newest], batch.key.tolist()[rows - newest :]
        expected = [chance[key] for key in drawn]
        exponent = beta(step) if isinstance(beta, LinearSchedule) else beta
        weights = [(min(expected) / each) ** exponent for each in expected]
        assert latest == keys[len(keys) - newest :]
        assert close(batch.probability, expected + [1.0] * newest, "probability")
        assert close(batch.weight, weights + [1.0] * newest, "weight")
        found.update(drawn)
    check_counts(found, chance)


@pytest.mark.parametrize("kind", ["rows", "steps"])
@pytest.mark.parametrize("name", OWN)
def test_statistics_are_those_of_its_chances(name: str, kind: str) -> None:
    pair, _ = lived(kind, OWN[name], "cpu", seed=2)
    stats, chances = pair.buffer.stats(), chances_of(OWN[name], pair.model.eligible()).values()
    assert stats.entropy == pytest.approx(-sum(each * math.log(each) for each in chances if each))
    assert stats.effective_sample_size == pytest.approx(1 / sum(each**2 for each in chances))
    assert math.isnan(stats.mean_priority)
    empty = make("exact", sampler=OWN[name]).stats()
    assert (empty.entropy, empty.effective_sample_size) == (0.0, 0.0)


TENTH = np.float32(0.1)


@dataclass(frozen=True)
class Kept(Recent):
    """Has a field of each kind that a checkpoint keeps, names that it uses itself, and one that is computed."""

    shares: Any = field(default_factory=lambda: {"push": 0.5, "kind": {"": (1, [2.5])}, "tuple": None})
    parts: Any = (0.5, (1, "a", (), []), [(True, None)], {"dict": (math.inf, -0.0, 2**70)})
    kind: str = "recent"
    resort_every: int = 4
    schedules: Any = (LinearSchedule(0.0, 1.0, 4),)
    number: Any = TENTH
    table: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.arange(self.window))


def check_kept(found: Any, sampler: Any) -> None:
    """Each field is as it was, tuples and lists too."""
    assert type(found) is Kept
    names = [name for name in vars(sampler) if name not in ("table", "number")]
    assert [repr(getattr(found, name)) for name in names] == [repr(getattr(sampler, name)) for name in names]
    assert (found.number, found.table.tolist()) == (sampler.number, list(range(found.window)))


@pytest.mark.parametrize("kind", scale(BUFFERS, BUFFERS[:1]))
@pytest.mark.parametrize("way", ["state", *RENEWED])
def test_a_copy_or_a_checkpoint_of_its_buffer_draws_on_and_has_its_fields(way: str, kind: str) -> None:
    for sampler in (OWN["annealed"], Kept(7), Combined(Kept(7), newest=2)):
        buffer = used(kind, 3, sampler=sampler)
        if way == "state":
            again = used(kind, 1, sampler=sampler)
            again.load_state_dict(buffer.state_dict())
        else:
            again = RENEWED[way](buffer)
        if isinstance(sampler.base, Kept):
            check_kept(again.sampler.base, sampler.base)
        # a state of one is a state of the other
        for one, other in ((again, buffer), (buffer, again)):
            one.load_state_dict(other.state_dict())
        for _ in range(2):
            same(again.sample(8), buffer.sample(8))


def test_a_list_in_a_field_is_no_tuple() -> None:
    other = make("exact", sampler=Kept(7, parts=[*Kept.parts]))
    with pytest.raises(ValueError, match=r"another buffer: sampler is .*'parts': \["):
        other.load_state_dict(make("exact", sampler=Kept(7)).state_dict())


@dataclass(frozen=True)
class Given(Recent):
    value: Any = None


class Order(enum.IntEnum):
    NEW = 1


class Text(str): ...


LOST: dict[str, tuple[Any, str]] = {
    "array": (np.ones(3), r"Given\.value is array"),
    "tensor": (torch.ones(3), r"Given\.value is tensor"),
    "dtype": (torch.float32, r"Given\.value is torch\.float32"),
    "enum": (Order.NEW, r"Given\.value is .*Order"),
    "set": ({1}, r"Given\.value is \{1\}"),
    "function": (len, r"Given\.value is .*len"),
    "sampler": (Recent(7), r"Given\.value is Recent"),
    "not a number": (math.nan, r"Given\.value is nan"),
    "complex": (1j, r"Given\.value is 1j"),
    "bytes": (b"a", r"Given\.value is b'a'"),
    "time": (np.timedelta64(1, "s"), r"Given\.value is .*timedelta64"),
    "keys of numbers": ({0: 0.5}, r"Given\.value is \{0: 0\.5\}"),
    "keys of two kinds": ({0: 0.5, "a": 0.5}, r"Given\.value is \{0: 0\.5"),
    "within": ((1, {"a": [None, {2}]}), r"Given\.value\[1\]\['a'\]\[1\] is \{2\}"),
    "kind of dictionary": (OrderedDict(a=1), r"Given\.value is OrderedDict"),
    "kind of text": (Text("a"), r"Given\.value is 'a' \(Text\)"),
    "kind of schedule": (type("Cosine", (LinearSchedule,), {})(0.4, 1.0, 10), r"Given\.value is Cosine"),
}


@host_only
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("name", LOST)
def test_a_field_that_a_checkpoint_would_not_give_back_is_refused(name: str, kind: str) -> None:
    value, words = LOST[name]
    for sampler in (Given(7, value), Combined(Given(7, value))):
        with pytest.raises(TypeError, match=rf"{words}.*numbers \(not NaN\), strings, .*string-keyed dicts"):
            make(kind, sampler=sampler)


@dataclass(frozen=True)
class Halved(Recent):
    def __post_init__(self) -> None:
        object.__setattr__(self, "window", self.window // 2)


@dataclass(frozen=True)
class Told(Recent):
    extra: InitVar[int] = None  # type: ignore[assignment]

    def __post_init__(self, extra: int | None) -> None:
        if extra is None:
            raise ValueError("extra must be given")


@host_only
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_sampler_that_its_fields_do_not_make_again_is_refused(kind: str) -> None:
    with pytest.raises(TypeError, match=r"Halved\(window=10\) .* is another one: window is 10 here and 5 there"):
        make(kind, sampler=Halved(20))
    with pytest.raises(TypeError, match=r"Told\(window=7\) cannot be made again .*extra must be given"):
        make(kind, sampler=Told(7, extra=1))


@pytest.mark.parametrize("name", ["recent", "combined"])
def test_a_checkpoint_needs_its_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, kind = used("exact", 3, sampler=OWN[name]), type(OWN[name].base)
    buffer.save(tmp_path / "saved")
    monkeypatch.delitem(Sampler.kinds, kind.__name__)
    with pytest.raises(CheckpointError, match=rf"{kind.__name__}, which is not defined here\. Import the module that"):
        type(buffer).load(tmp_path / "saved", "cpu")
    monkeypatch.undo()
    same(type(buffer).load(tmp_path / "saved", "cpu").sample(8), buffer.sample(8))


@host_only
@pytest.mark.parametrize("name", ["Baseline", "_Recent"])
def test_its_class_may_have_any_other_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "kinds", dict(Sampler.kinds))
    buffer = used("exact", 3, sampler=type(name, (Recent,), {})(7))
    buffer.save(tmp_path / "saved")
    assert type(buffer).load(tmp_path / "saved", "cpu").sampler == buffer.sampler


# what refuses it


@dataclass(frozen=True)
class InNumPy(BaseSampler):
    """As version 0.3 wanted it, in one of its methods or in both."""

    places_too: bool = True

    def places(self, total: Any, rows: int, random: Any) -> Any:
        if self.places_too:
            return (random.doubles(rows) * total).astype(np.int64)
        return (random.doubles(rows) * total).long()

    def chances(self, places: Any, total: Any) -> Any:
        return np.full(len(places), 1 / int(total))


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("places_too", [True, False])
def test_a_class_in_numpy_is_refused_with_the_form_in_torch(places_too: bool, kind: str, device: str) -> None:
    words = (
        r"methods of InNumPy must take and return tensors .*places\(self, total, rows, random\): return .*\.long\(\)"
    )
    for sampler in (InNumPy(places_too), Combined(InNumPy(places_too))):
        with pytest.raises(TypeError, match=words):
            make(kind, sampler=sampler, device=device)


def test_a_class_that_would_be_taken_for_another_sampler_is_refused() -> None:
    known, places = dict(Sampler.kinds), {"places": Recent.places}
    for name, what in (("Uniform", "sampler"), ("Combined", "sampler"), ("LinearSchedule", "schedule")):
        with pytest.raises(TypeError, match=f"{name} is a {what} of gpu_replay; name yours differently"):
            type(name, (BaseSampler,), places)
    with pytest.raises(TypeError, match="Nearest derives from Uniform, .* Derive it from BaseSampler"):
        type("Nearest", (Uniform,), places)
    with pytest.raises(TypeError, match=r"beta must be a number or LinearSchedule\(start, end, steps\)"):
        Proportional(beta=type("Cosine", (LinearSchedule,), {})(0.4, 1.0, 10))
    assert Sampler.kinds == known


def test_a_class_that_is_no_dataclass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "kinds", dict(Sampler.kinds))
    plain: Any = type("Plain", (BaseSampler,), {"places": Recent.places})
    for sampler in (plain(), Combined(plain())):
        with pytest.raises(TypeError, match="Plain must be a dataclass"):
            make("exact", sampler=sampler)


@dataclass(frozen=True)
class Wrong(BaseSampler):
    """Says what cannot be."""

    name: str

    def places(self, total: Tensor, rows: int, random: Any) -> Any:
        random.doubles(3)
        # not before the buffer is there
        return WRONG[self.name][0](total, rows) if rows > 2 else torch.zeros(rows, dtype=torch.int64)

    def chances(self, places: Tensor, total: Tensor) -> Any:
        return WRONG[self.name][1](places) if len(places) > 2 else ones(places)


def ones(places: Tensor) -> Tensor:
    return torch.ones(places.shape, dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("places")


# its places, its chances, and the error
OUT, UNLIKELY = (
    r"places\(\d+, 5\) must return 5 integers",
    "chances of 5 sampled places must be 5 numbers above",
)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "past the newest": (lambda total, rows: total.repeat(rows), ones, ValueError, rf"{OUT} from 0 to \d+;"),
    "before the oldest": (lambda total, rows: torch.arange(rows) - 1, ones, ValueError, rf"{OUT} from 0 to \d+;"),
    "too few": (lambda total, rows: whole(rows - 1), ones, ValueError, rf"{OUT} on cpu; .* shape \[4\]"),
    "a column": (lambda total, rows: whole(rows, 1), ones, ValueError, rf"{OUT} on cpu; .* shape \[5, 1\]"),
    "no integers": (lambda total, rows: torch.zeros(rows), ones, ValueError, rf"{OUT} on cpu; found float32"),
    "an array": (lambda total, rows: np.zeros(rows, np.int64), ones, ValueError, rf"{OUT} on cpu; found array"),
    "an error": (fails, ones, ZeroDivisionError, "places"),
    "no chance": (lambda total, rows: torch.arange(rows), lambda places: places / 9, ValueError, UNLIKELY),
    "not a number": (lambda total, rows: whole(rows), lambda places: ones(places) * math.nan, ValueError, UNLIKELY),
    "too many chances": (lambda total, rows: whole(rows), lambda places: torch.ones(9), ValueError, UNLIKELY),
}


# how often chances of all places were asked for, and what is wrong with them
ASKED: Counter[int] = Counter()
NO_SUM = r"Improbable\(name=.* chances of all \d+ places .* sum to 1; found"
IMPROBABLE: dict[str, Any] = {
    "too large": lambda places, total: ones(places),
    "too small": lambda places, total: ones(places) * (1 - 2e-6) / total,
    "negative": lambda places, total: ones(places) / total + (places == 1) * 2 / total - (places == 0) * 2 / total,
    "not a number": lambda places, total: torch.where(places == 0, math.nan, ones(places) / total),
    "one too few": lambda places, total: ones(places[len(places) == total :]) / total,
}


@dataclass(frozen=True)
class Improbable(BaseSampler):
    """The newest row, with chances that are none, or nearly."""

    name: str

    def places(self, total: Tensor, rows: int, random: Any) -> Tensor:
        return (total - 1).repeat(rows)

    def chances(self, places: Tensor, total: Tensor) -> Any:
        ASKED[int(total)] += len(places) == total
        if self.name == "nearly":
            return ones(places) * (1 + 5e-7) / total
        return IMPROBABLE[self.name](places, total)


# its sampler, the error, and whether the statistics ask for the chances too
REFUSED: dict[str, tuple[BaseSampler, type[Exception], str, bool]] = {
    **{name: (Wrong(name), *expected, False) for name, (_, _, *expected) in WRONG.items()},
    **{f"chances {name}": (Improbable(name), ValueError, NO_SUM, True) for name in IMPROBABLE},
}


@pytest.mark.parametrize("kind", scale(BUFFERS, BUFFERS[:1]))
@pytest.mark.parametrize("name", REFUSED)
def test_places_and_chances_that_cannot_be_are_refused_and_change_nothing(name: str, kind: str) -> None:
    own, error, message, in_statistics = REFUSED[name]
    # five rows by the sampler itself
    for sampler, count in ((own, 5), (Combined(own, newest=2), 7)):
        buffer = make(kind, sampler=sampler)
        for _ in range(4):
            buffer.add(**given(buffer))
        before, calls = whole_state(buffer), [partial(buffer.sample, count), *([buffer.stats] * in_statistics)]
        for call in calls * 2:
            with pytest.raises(error, match=message):
                call()
        assert whole_state(buffer) == before


def test_chances_of_all_places_are_asked_for_once_in_a_buffer_of_up_to_a_million_rows(tmp_path: Path) -> None:
    fields = {"x": Field((), torch.uint8)}
    buffer = ReplayBuffer(1_000_001, fields, sampler=Improbable("nearly"), device="cpu")
    buffer.add(x=np.zeros(1_000, np.uint8))
    ASKED.clear()
    for _ in range(3):
        buffer.sample(4)
    buffer.save(tmp_path / "saved")
    for other in (ReplayBuffer.load(tmp_path / "saved", "cpu"), RENEWED["copy"](buffer)):
        other.sample(4)
    buffer.load_state_dict(buffer.state_dict())
    for _ in range(2):
        buffer.sample(4)
    assert +ASKED == {1_000: 4}
    large = ReplayBuffer(1_000_001, fields, sampler=Improbable("too large"), device="cpu")
    large.add(x=np.zeros(1_000_001, np.uint8))
    assert large.sample(2).probability.tolist() == [1.0, 1.0]
    large.clear()
    large.add(x=np.zeros(1_000_000, np.uint8))
    with pytest.raises(ValueError, match="chances of all 1000000 places"):
        large.sample(2)
