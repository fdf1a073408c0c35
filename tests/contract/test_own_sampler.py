"""A sampler of a user's own: one class outside the package, which both buffers on a CPU draw by, count and save.

Shards refuse it, and so does a device, where it has no kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from devices import host_only, statistical
from distribution import check_counts
from interpreted import kernel_device as kernel_device
from pairs import RENEWED
from places import FIELDS, given, live, make
from refusals import whole_state
from test_distributions import lived
from tolerances import close
from transitions import same

from gpu_replay import CheckpointError, Combined, Proportional, ShardedReplayBuffer, Uniform
from gpu_replay.samplers import BaseSampler, LinearSchedule, Sampler

pytestmark = pytest.mark.contract


@dataclass(frozen=True)
class Recent(BaseSampler):
    """The newest `window`, equally likely, as in "Emphasizing Recent Experience", Wang and Ross 2019."""

    window: int = 1_000

    def places(self, total: int, rows: int, random: Any) -> np.ndarray:
        return total - 1 - (random.doubles(rows) * min(self.window, total)).astype(np.int64)

    def chances(self, places: np.ndarray, total: int) -> np.ndarray:
        window = min(self.window, total)
        return np.where(places >= total - window, 1 / window, 0.0)


@dataclass(frozen=True)
class Geometric(BaseSampler):
    """Each is `keep` times as likely as the next newer one."""

    keep: float = 0.9
    beta: float | LinearSchedule = 0.0

    def places(self, total: int, rows: int, random: Any) -> np.ndarray:
        age = np.log1p(random.doubles(rows) * (self.keep**total - 1)) / math.log(self.keep)
        return total - 1 - np.minimum(age, total - 1).astype(np.int64)

    def chances(self, places: np.ndarray, total: int) -> np.ndarray:
        return self.keep ** (total - 1.0 - places) * (1 - self.keep) / (1 - self.keep**total)


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
    chances = sampler.base.chances(np.arange(len(keys)), len(keys)).tolist()
    return dict(zip(keys, chances, strict=True))


def used(kind: str, sampler: Any, rounds: int = 3) -> Any:
    buffer = make(kind, sampler=sampler)
    list(live(buffer, rounds))
    return buffer


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


@host_only
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


@host_only
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("way", ["state", *RENEWED])
def test_a_copy_or_a_checkpoint_of_its_buffer_draws_on(way: str, kind: str) -> None:
    for sampler in (OWN["annealed"], OWN["combined"]):
        buffer = used(kind, sampler)
        if way == "state":
            again = used(kind, sampler, rounds=1)
            again.load_state_dict(buffer.state_dict())
        else:
            again = RENEWED[way](buffer)
        assert again.sampler == sampler
        for _ in range(2):
            same(again.sample(8), buffer.sample(8))


@host_only
@pytest.mark.parametrize("name", ["recent", "combined"])
def test_a_checkpoint_needs_its_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, kind = used("exact", OWN[name]), type(OWN[name].base)
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
    buffer = used("exact", type(name, (Recent,), {})(7))
    buffer.save(tmp_path / "saved")
    assert type(buffer).load(tmp_path / "saved", "cpu").sampler == buffer.sampler


# what refuses it


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@host_only
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.usefixtures("alone")
def test_shards_refuse_it(mode: Any) -> None:
    for sampler in (Recent(7), Combined(Recent(7))):
        with pytest.raises(ValueError, match=rf'mode="{mode}" cannot draw by .*Recent\(window=7\).*; use Uniform or'):
            ShardedReplayBuffer(10, FIELDS, sampler=sampler, mode=mode, device="cpu")


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_device_without_a_kernel_for_it_refuses_it(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("GPU_REPLAY_BACKEND", "triton")
    for sampler in (Recent(7), Combined(Recent(7))):
        with pytest.raises(ValueError, match=r'Recent\(window=7\).* has no kernel.*Give device="cpu"'):
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

    def places(self, total: int, rows: int, random: Any) -> Any:
        random.words(3)
        return WRONG[self.name][0](total, rows)

    def chances(self, places: np.ndarray, total: int) -> Any:
        return WRONG[self.name][1](places)


def ones(places: np.ndarray) -> np.ndarray:
    return np.ones(places.size)


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("places")


# its places, its chances, and the error
OUT, UNLIKELY = (
    r"places\(\d+, 5\) must return 5 integers from 0 to \d+\.",
    "chances of 5 drawn places must be 5 numbers above",
)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "past the newest": (lambda total, rows: np.full(rows, total), ones, ValueError, OUT),
    "before the oldest": (lambda total, rows: np.arange(rows) - 1, ones, ValueError, OUT),
    "too few": (lambda total, rows: np.zeros(rows - 1, np.int64), ones, ValueError, OUT),
    "a column": (lambda total, rows: np.zeros((rows, 1), np.int64), ones, ValueError, OUT),
    "an error": (fails, ones, ZeroDivisionError, "places"),
    "no chance": (lambda total, rows: np.arange(rows), lambda places: places / 9, ValueError, UNLIKELY),
    "not a number": (lambda total, rows: np.zeros(rows), lambda places: ones(places) * np.nan, ValueError, UNLIKELY),
    "too many chances": (lambda total, rows: np.zeros(rows), lambda places: np.ones(9), ValueError, UNLIKELY),
}


@host_only
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("name", WRONG)
def test_places_and_chances_that_cannot_be_are_refused_and_change_nothing(name: str, kind: str) -> None:
    *_, error, message = WRONG[name]
    for sampler, count in ((Wrong(name), 5), (Combined(Wrong(name), newest=2), 7)):
        buffer = make(kind, sampler=sampler)
        for _ in range(4):
            buffer.add(**given(buffer))
        before, calls = whole_state(buffer), [partial(buffer.sample, count)]
        for call in calls:
            with pytest.raises(error, match=message):
                call()
        assert whole_state(buffer) == before
