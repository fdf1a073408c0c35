"""`ShardedReplay` on several ranks: weights, errors, checkpoints, messages, dead ranks."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import random
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import thinned
from model import Drawn, RowModel
from programs import SAMPLERS, numbers
from ranks import Gone, Raised, Ranks, ranks_of
from refusals import whole_state
from test_own_sampler import Geometric
from tolerances import close

from gpu_replay import (
    CheckpointError,
    Field,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    ShardedReplay,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.checkpoint.format import write_checkpoint
from gpu_replay.console.inspection import of_checkpoint
from gpu_replay.sharded import saving
from gpu_replay.sharded.group import Group

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

FIELDS = {"number": Field((), torch.int64), "flag": Field((), torch.bool)}
BATCH = 3
# what each rank does in each round
Rounds = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(3) as found:
        yield found


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# what ranks do


def made(group: Any, timeout: float = 20, rows: int = 0, **settings: Any) -> ShardedReplay:
    """A small buffer of this rank, which holds so many rows."""
    given = {"capacity": 12, "fields": FIELDS, "sampler": Proportional(), "device": "cpu"} | settings
    shard = ShardedReplay(ReplayBuffer(**{"seed": dist.get_rank(group), **given}), group, timeout)
    if rows:
        add_rows(shard, rows)
    return shard


def add_rows(shard: ShardedReplay, rows: int, first: int = 0, priority: Any = None) -> None:
    """Add rows of this rank, which has added so many before."""
    keys = torch.arange(first, first + rows)
    assert torch.equal(shard.add(number=keys * 8 + shard.rank, flag=keys % 2 == 0, priority=priority), keys)


def batch_of(shard: ShardedReplay, batch: Any) -> dict[str, Any]:
    """What a rank can send: the numbers of a batch, whose rows are its own."""
    assert torch.equal(batch.number, batch.key * 8 + shard.rank)
    names = ("key", "probability", "weight")
    assert [batch[name].dtype for name in names] == [torch.int64, torch.float32, torch.float32]
    return {name: batch[name].tolist() for name in names}


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """What a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def life(group: Any, name: str, slots: int, rounds: Rounds, path: str) -> list[dict[str, Any]]:
    """A memory that adds, samples and updates, is cleared, saved and loaded; what it says of itself after each round.

    rounds: for each, what every rank does.
    """
    shard = made(group, capacity=slots, sampler=SAMPLERS[name])
    found, added = [], 0
    assert vars(shard.global_stats()) == pytest.approx(vars(shard.stats()), nan_ok=True)
    for each in (of_all[shard.rank] for of_all in rounds):
        if each["clear"]:
            shard.clear()
            assert len(shard) == 0
        if each["rows"]:
            add_rows(shard, each["rows"], added, each["priority"])
        added += each["rows"]
        drawn = batch_of(shard, shard.sample(BATCH))
        shard.update_priorities(*each["update"])
        if each["save"]:
            shard.save(path)
            shard.close()
            shard = ShardedReplay.load(path, "cpu", group=group, timeout=20)
            assert (shard.buffer.sampler, shard.buffer.capacity) == (SAMPLERS[name], slots)
        keys = shard.keys().tolist()
        assert [key in shard for key in (-1, keys[-1], keys[-1] + 1)] == [False, True, False]
        assert len(shard) == len(keys) == shard.stats().size
        found.append({"drawn": drawn, "keys": keys, "stats": vars(shard.global_stats())})
    shard.close()
    return found


# draws, against a model of every rank


class Whole:
    """A model of every rank's buffer, and of the weights over all of them."""

    def __init__(self, name: str, slots: int, ranks: int) -> None:
        self.parts = [RowModel(slots, SAMPLERS[name], seed=rank) for rank in range(ranks)]
        self.base, self.by_mass = self.parts[0].base, self.parts[0].by_mass

    def share(self) -> list[float]:
        sizes = [sum(map(part.mass, part.held)) if self.by_mass else len(part.held) for part in self.parts]
        return [size / sum(sizes) for size in sizes]

    def sample(self) -> list[Drawn]:
        beta = getattr(self.base, "beta", 0.0)
        beta = beta(self.parts[0].samples) if isinstance(beta, LinearSchedule) else beta
        known, size = [each.running for each in self.parts if each.running is not None], sum(map(len, self.held()))
        weights = [
            {key: share * (size * share * mine) ** -beta for key, mine in part.shares().items()}
            for part, share in zip(self.parts, self.share(), strict=True)
        ]
        drawn = [part.draw(BATCH) for part in self.parts]
        for part in self.parts:
            part.running = max(known, default=None)
        chance = BATCH - self.parts[0].sampler.newest_of(BATCH)
        seen = [of[key] for of, rows in zip(weights, drawn, strict=True) for key in rows.keys[:chance]]
        if getattr(self.base, "normalize", "batch") == "buffer":
            seen = [weight for of in weights for weight in of.values()]
        largest = max(seen, default=1.0)
        return [
            Drawn(
                rows.keys,
                [each / len(self.parts) for each in rows.probability[:chance]] + rows.probability[chance:],
                [of[key] / largest for key in rows.keys[:chance]] + rows.weight[chance:],
            )
            for of, rows in zip(weights, drawn, strict=True)
        ]

    def held(self) -> list[dict[int, float]]:
        return [part.held for part in self.parts]

    def check_stats(self, found: dict[str, float]) -> None:
        shares = [
            share * mine
            for part, share in zip(self.parts, self.share(), strict=True)
            for mine in part.shares().values()
        ]
        each = [part.stats() for part in self.parts]
        size = sum(map(len, self.held()))
        expected = {
            "size": size,
            "added": sum(part.added for part in self.parts),
            "stale_updates": sum(part.stale for part in self.parts),
            "entropy": -sum(share * math.log(share) for share in shares),
            "effective_sample_size": 1 / sum(share**2 for share in shares),
            "mean_age": sum(one["mean_age"] * one["size"] for one in each) / size,
            "max_age": max(one["max_age"] for one in each),
            "mean_times_sampled": sum(one["mean_times_sampled"] * one["size"] for one in each) / size,
        }
        for name, value in expected.items():
            assert close([found[name]], [value], "statistic"), (name, found[name], value)


def check_life(name: str, slots: int, rounds: Rounds, found: list[list[dict[str, Any]]]) -> None:
    """Compare what the ranks said after each round with what the models say."""
    whole = Whole(name, slots, len(found))
    for plays, one_round in zip(rounds, zip(*found, strict=True), strict=True):
        check_round(whole, plays, list(one_round))


def check_round(whole: Whole, plays: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for part, play in zip(whole.parts, plays, strict=True):
        if play["clear"]:
            part.clear()
        if play["rows"]:
            part.add(play["rows"], play["priority"])
    for rank, expected in enumerate(whole.sample()):
        drawn = found[rank]["drawn"]
        assert drawn["key"] == expected.keys
        assert close(drawn["probability"], expected.probability, "probability")
        assert close(drawn["weight"], expected.weight, "weight"), (drawn["weight"], expected.weight)
    for part, play in zip(whole.parts, plays, strict=True):
        part.update(*play["update"])
    for each, part in zip(found, whole.parts, strict=True):
        assert each["keys"] == list(part.live())
        whole.check_stats(each["stats"])


def any_rounds(size: int, count: int, seed: int) -> Rounds:
    """What each rank does: it adds enough for every batch at first, then also nothing, or a whole lap."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        clear, save, plays = number > 1 and draw.random() < 0.2, number == 1 or draw.random() < 0.2, []
        for _ in range(size):
            rows = 5 if number == 0 or clear else draw.choice((0, 1, 2, 5, 9))
            keys = [draw.randrange(-3, 6 * (number + 1)) for _ in range(draw.randint(0, 9))]
            own = numbers(draw, rows, "wide") if rows and draw.random() < 0.3 else None
            plays.append({"clear": clear, "save": save, "rows": rows, "priority": own})
            plays[-1]["update"] = keys, numbers(draw, len(keys), "wide")
        found.append(plays)
    return found


@thinned("name, size", SAMPLERS, [2, 3, 1], every=2)
def test_rows_are_each_buffers_and_weights_those_of_the_whole(
    ranks: Ranks, tmp_path: Path, name: str, size: int, full: bool
) -> None:
    for seed in range(4 if full else 1):
        slots = 300 if seed % 2 else 8
        rounds = any_rounds(size, 12 if full else 3, seed + size)
        check_life(name, slots, rounds, ranks.run(size, life, name, slots, rounds, str(tmp_path / str(seed))))


# against one real buffer that holds the rows of all ranks


def trajectory(ranks: int, rank: int | None, sampler: Any) -> TrajectoryReplayBuffer:
    """Two environments of this rank, or of all ranks; episodes end now and then."""
    envs = [rank] if rank is not None else list(range(ranks))
    fields = {"obs": Field((1,), torch.float32), "action": Field((), torch.int64), "number": Field((), torch.int64)}
    settings = {"n_step": 3, "gamma": 0.9, "stack": 2, "sampler": sampler, "seed": len(envs) + envs[0]}
    buffer = TrajectoryReplayBuffer(2 * len(envs) * 16, 2 * len(envs), fields, device="cpu", **settings)
    own = torch.tensor([2 * each + env for each in envs for env in (0, 1)])
    for step in range(23):
        number = step * 100 + own
        ends = number % 7 == 0
        given = {"obs": number.float()[:, None], "action": number, "number": number, "reward": number.float()}
        keys = buffer.add(**given, terminated=ends, truncated=torch.zeros_like(ends))
        buffer.update_priorities(keys, 0.1 + (number * 37 % 11).double())
    oldest = buffer.keys()
    stored = buffer.batches(len(oldest)).__next__()
    buffer.update_priorities(oldest, 0.1 + (stored.number * 37 % 11).double())
    return buffer


def single(ranks: int, rank: int | None, sampler: Any, alike: bool = False) -> ReplayBuffer:
    """Rows of this rank, more the larger it is, or those of all ranks; of equal masses if alike."""
    own = range(ranks) if rank is None else [rank]
    rows = [each * 100 + row for each in own for row in range(5 if alike else 3 + 4 * each)]
    buffer = ReplayBuffer(64, {"number": Field((), torch.int64)}, sampler=sampler, device="cpu", seed=rank or 0)
    numbers = torch.tensor(rows)
    buffer.add(number=numbers, priority=0.2 + (numbers % 100 if alike else numbers * 37 % 11).double())
    return buffer


KINDS: dict[str, Any] = {"rows": single, "alike": partial(single, alike=True), "steps": trajectory}
Seen = dict[int, tuple[float, float]]
OVER_BUFFER = {
    "proportional": Proportional(normalize="buffer", stratified=False),
    "flat": Proportional(alpha=0.0, normalize="buffer", beta=1.0),
    "full": Proportional(alpha=1.0, beta=1.0, normalize="buffer", stratified=False),
    "uniform": Uniform(replacement=True),
}


def seen_of(memory: Any, times: int) -> Seen:
    """Probability and weight of every row that is drawn, by its number: they follow from the row alone."""
    found: Seen = {}
    for _ in range(times):
        batch = memory.sample(2048)
        told = np.stack([batch.probability.numpy(), batch.weight.numpy()], 1)
        numbers, first, place = np.unique(batch.number.numpy(), return_index=True, return_inverse=True)
        assert np.allclose(told, told[first[place]], rtol=1e-6, atol=0)
        for number, both in zip(numbers.tolist(), told[first].tolist(), strict=True):
            assert found.setdefault(number, tuple(both)) == pytest.approx(tuple(both), rel=1e-6)
    return found


def seen_by_rank(group: Any) -> dict[tuple[str, str], Seen]:
    found = {}
    for kind, name in itertools.product(KINDS, OVER_BUFFER):
        buffer = KINDS[kind](dist.get_world_size(group), dist.get_rank(group), OVER_BUFFER[name])
        shard = ShardedReplay(buffer, group, 20)
        found[kind, name] = seen_of(shard, 8)
        shard.close()
    return found


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_expected_step_is_that_of_one_buffer(ranks: Ranks, size: int) -> None:
    """Each row is enumerated: q(i) w(i) over all ranks is P(i) w(i) of one buffer, times one constant."""
    shards = ranks.run(size, seen_by_rank)
    for kind, name in itertools.product(KINDS, OVER_BUFFER):
        one = seen_of(KINDS[kind](size, None, OVER_BUFFER[name]), 8 * size)
        many = {number: told for each in shards for number, told in each[kind, name].items()}
        assert many.keys() == one.keys(), (kind, name)
        assert sum(probability for probability, _ in many.values()) == pytest.approx(1, rel=1e-5)
        assert max(weight for _, weight in many.values()) == pytest.approx(1, rel=1e-6)
        ratios = [math.prod(many[number]) / math.prod(one[number]) for number in one]
        assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=2e-6), (kind, name)
        if kind == "alike":
            assert [many[number] for number in one] == [pytest.approx(one[number], rel=2e-6) for number in one]


SHARES = [*itertools.product(("rows", "steps"), (RankBased(), RankBased(normalize="buffer"), Geometric(0.9, beta=0.5)))]
Told = tuple[int, dict[str, list[float]]]


def by_rows(group: Any) -> list[Told]:
    found = []
    for kind, sampler in SHARES:
        shard = ShardedReplay(KINDS[kind](3, dist.get_rank(group), sampler), group, 20)
        batch = shard.sample(256)
        told = {name: batch[name].tolist() for name in ("probability", "weight")}
        found.append((shard.stats().eligible, told))
        shard.close()
    return found


def test_a_buffer_without_masses_has_the_share_of_its_rows(ranks: Ranks) -> None:
    by_rank: list[list[Told]] = ranks.run(3, by_rows)
    for (_, sampler), found in zip(SHARES, zip(*by_rank, strict=True), strict=True):
        weights = [rows * (rows * 3 * chance) ** -0.5 for rows, told in found for chance in told["probability"]]
        told = [weight for _, each in found for weight in each["weight"]]
        # of all rows the largest weight is one that was drawn, or that of the last rank of a buffer
        largest = max(weights)
        if sampler == RankBased(normalize="buffer"):
            shares = [[rank**-0.7 for rank in range(1, rows + 1)] for rows, _ in found]
            largest = max(len(each) * (len(each) * each[-1] / sum(each)) ** -0.5 for each in shares)
        assert told == pytest.approx([weight / largest for weight in weights], rel=1e-5), sampler


# calls and arguments that one rank gets wrong


def calls_of(shard: Any, path: str) -> dict[str, Callable[[], Any]]:
    """Calls that all ranks make together, by the names that errors give them."""
    return {
        "sample": partial(shard.sample, 2),
        "global_stats": shard.global_stats,
        "clear": shard.clear,
        "save": partial(shard.save, path),
        "close": shard.close,
    }


def pairs_of(shard: Any, path: str, group: Any, full: bool) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Calls by what is wrong: that of the first rank, and that of the last. A name with "another" is an argument that
    is right by itself.
    """
    make, load = partial(made, group), partial(ShardedReplay.load, device="cpu", group=group, timeout=20)
    calls = calls_of(shard, path)
    sample, save = (calls[name] for name in ("sample", "save"))
    meeting = itertools.permutations(calls, 2) if full else itertools.pairwise([*calls, "sample"])
    return {
        **{f"{one} meets {other}": (calls[one], calls[other]) for one, other in meeting},
        "making a ShardedReplay meets load": (make, partial(load, f"{path}0")),
        "another sampler": (make, partial(make, sampler=Proportional(alpha=0.5))),
        "fields in another order": (make, partial(make, fields=dict(reversed(FIELDS.items())))),
        "another class": (make, lambda: ShardedReplay(trajectory(1, 1, Proportional()), group, 20)),
        "no buffer": (make, lambda: ShardedReplay(3, group, 20)),  # type: ignore[arg-type]
        "no timeout": (make, partial(make, timeout=1e300)),
        "no such device": (partial(load, f"{path}0"), partial(load, f"{path}0", device="cuda:99")),
        "no checkpoint": (partial(load, f"{path}0"), partial(load, f"{path}none")),
        "nothing to draw": (sample, partial(shard.sample, 0)),
        "another size": (sample, partial(shard.sample, 3)),
        "beta below 0": (sample, partial(shard.sample, 2, beta=-1)),
        "another beta": (sample, partial(shard.sample, 2, beta=0.25)),
        "another path": (save, partial(shard.save, f"{path}2")),
    }


def one_sided(group: Any, path: str, full: bool = True) -> list[tuple[str, tuple[str, str], bool, float]]:
    """The last rank makes other calls than the first, or with wrong arguments: what each raises, whether the buffer is
    as it was, and after how many seconds; then they go on.
    """
    found, shard = [], made(group, rows=8)
    shard.save(f"{path}0")
    for name, calls in pairs_of(shard, path, group, full).items():
        before, began = whole_state(shard.buffer), time.monotonic()
        told = outcome(calls[shard.rank == shard.ranks - 1])
        seconds = time.monotonic() - began
        found.append((name, told, whole_state(shard.buffer) == before, seconds))
    batch_of(shard, shard.sample(3))
    assert not os.path.exists(path)
    shard.close()
    return found


def check_one_sided(found: Any) -> None:
    """found: what `one_sided` gave on each rank."""
    for (name, (kind, message), *state), (_, told, *other) in zip(*found, strict=True):
        assert (state[0], other[0], state[1] < 5) == (True, True, True), name
        if " meets " in name:
            one, two = name.split(" meets ")
            assert (kind, told[0]) == ("RuntimeError", "RuntimeError"), name
            assert message.startswith(f"{one}: rank 1 of 2 called {two} instead, and neither was done."), name
            assert told[1].startswith(f"{two}: rank 0 of 2 called {one} instead"), name
        elif "another" in name:
            assert (kind, message) == told, name
            assert re.search(r"(?s)on every rank; .* on rank 0 .* on rank 1\.$", message), message
            named = "kind" if name == "another class" else name.split()[-1]
            assert (kind, named in message or "order" in name) == ("ValueError", True), message
        else:
            assert kind == "RuntimeError", (name, kind, message)
            assert message.endswith(f"rank 1 of 2 failed: {told[0]}: {told[1]}"), (name, message)
            assert told[0] in ("ValueError", "TypeError", "CheckpointError"), name


def test_a_call_that_one_rank_gets_wrong_is_raised_by_all(ranks: Ranks, tmp_path: Path, full: bool) -> None:
    check_one_sided(ranks.run(2, one_sided, str(tmp_path / "c"), full))


def refusals(group: Any) -> tuple[list[tuple[str, str]], list[bool]]:
    """What is raised where ranks disagree, or hold too little, and whether each left this rank's buffer as it was."""
    sampler = Proportional(beta=LinearSchedule(0.0, 1.0, 5))
    found = [outcome(lambda: made(group, seed=0))]
    shard, same = made(group, sampler=sampler), []

    def tell(call: Callable[[], Any]) -> None:
        before = whole_state(shard.buffer)
        found.append(outcome(call))
        same.append(whole_state(shard.buffer) == before)

    if shard.rank == 1:
        add_rows(shard, 3)
    tell(lambda: shard.sample(3))
    if shard.rank == 0:
        add_rows(shard, 3)
    tell(lambda: shard.sample(3))
    if shard.rank == 0:
        shard.buffer.sample(1)
    tell(lambda: shard.sample(3))
    tell(lambda: shard.sample(3, beta=0.5))
    shard.close()
    tell(lambda: shard.sample(3))
    shard.close()
    tell(lambda: add_rows(shard, 1, 3))
    return found, same


def check_refusals(told: Any) -> None:
    """told: what `refusals` gave on each of two ranks."""
    (first, one), (second, two) = told
    nothing = ("nothing", "")
    assert one == two == [True, False, True, False, True, False]
    assert first[0] == second[0]
    assert "seed=rank; the ranks have [0, 0]" in first[0][1]
    empty = "sample(3): the buffer holds no transitions. Add more first."
    assert first[1] == ("RuntimeError", empty)
    assert second[1] == ("RuntimeError", f"sample: rank 0 of 2 failed: RuntimeError: {empty}")
    assert first[2] == second[2] == nothing
    assert first[3] == second[3]
    assert first[3][0] == "ValueError"
    assert "another beta" in first[3][1]
    assert first[4] == second[4] == nothing
    assert "was closed" in first[5][1]
    assert first[6] == nothing


def test_errors_of_one_rank_are_raised_by_all_and_the_buffer_goes_on(ranks: Ranks) -> None:
    check_refusals(ranks.run(2, refusals))


def by_kernels(group: Any, *played: Any) -> tuple[Any, Any]:
    """The same, and a life, through interpreted kernels."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1", "GPU_REPLAY_BACKEND": "triton"}):
        return refusals(group), life(group, *played)


def test_kernels_that_count_what_they_gather_are_agreed_on_before(ranks: Ranks, tmp_path: Path) -> None:
    rounds = any_rounds(2, 3, seed=2)
    found = ranks.run(2, by_kernels, "proportional", 8, rounds, str(tmp_path / "c"))
    check_refusals([each for each, _ in found])
    check_life("proportional", 8, rounds, [each for _, each in found])


def dropped(group: Any, path: str) -> list[str]:
    """After which calls, right ones and wrong ones, a buffer stays where it is dropped."""
    gc.collect()
    gc.disable()
    kept = []
    wrong = {
        "sample": lambda shard: shard.sample(0),
        "save": lambda shard: shard.save(f"{path}/file/c"),
        "load": lambda shard: ShardedReplay.load(f"{path}/none", "cpu", group=group),
        "make": lambda shard: made(group, timeout=1e300),
        "close": lambda shard: (shard.close(), shard.sample(1)),
    }
    for name, call in wrong.items():
        shard = made(group, rows=3)
        batch_of(shard, shard.sample(3))
        for right in [*calls_of(shard, f"{path}/{name}").values()][:-1]:
            right()
        assert outcome(partial(call, shard))[0] != "nothing"
        seen = weakref.ref(shard), weakref.ref(shard.buffer)
        del shard, right
        kept += [name] if seen[0]() is not None or seen[1]() is not None else []
    gc.enable()
    return kept


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_dropped_buffer_is_freed_at_once(ranks: Ranks, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_text("in the way")
    assert ranks.run(size, dropped, str(tmp_path)) == [[]] * size


@pytest.mark.usefixtures("alone")
def test_what_concerns_the_ranks_own_buffer_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = trajectory(1, 0, Proportional())
    shard = ShardedReplay(buffer)
    monkeypatch.delattr(dist, "all_gather")
    for name in ("exclude", "epoch"):
        monkeypatch.setattr(TrajectoryReplayBuffer, name, lambda self, given: (self, given), raising=False)
        assert getattr(shard, name)(3) == (buffer, 3)
    no = torch.zeros(2, dtype=torch.bool)
    own = {"obs": torch.zeros(2, 1), "action": no.long(), "number": no.long()}
    keys = shard.add(**own, reward=no.float(), terminated=no, truncated=no)
    assert torch.equal(keys, shard.keys()[-2:])
    shard.begin_episodes()
    shard.update_priorities(shard.keys(), torch.ones(len(shard)))
    shard.write(keys, number=[7, 8])
    assert (next(shard.batches(len(buffer))).number[-2:].tolist(), len(shard)) == ([7, 8], len(buffer))
    some = shard.keys()[buffer.masses()[shard.keys() % buffer.capacity] > 0]
    assert torch.equal(shard[some].number, buffer[some].number)
    assert torch.equal(shard.priorities(some), buffer.priorities(some))
    assert (int(keys[0]) in shard, -1 in shard, shard.stats() == buffer.stats()) == (True, False, True)
    assert repr(shard) == f"ShardedReplay(rank 0 of 1 with {buffer!r})"
    assert shard.extend is not None
    for name in ("capture", "plot", "state_dict", "device", "capacity", "sample_sequences"):
        with pytest.raises(AttributeError, match=rf"no '{name}'; shard\.buffer, "):
            getattr(shard, name)
    with pytest.raises(TypeError, match="batches"):
        iter(shard)
    with pytest.raises(TypeError, match="belongs to its process group"):
        copy.deepcopy(shard)
    with pytest.raises(TypeError, match=r"buffer = ShardedReplay\.load"):
        shard.load("c")


@pytest.mark.usefixtures("alone")
def test_what_went_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"buffer of its own, with another seed, and write ShardedReplay\(buffer\)"):
        exec("from gpu_replay import ShardedReplayBuffer")
    saved, buffer = tmp_path / "saved", ReplayBuffer(12, FIELDS, device="cpu")
    state = buffer.state_dict()
    settings = {**state["settings"], "kind": "ShardedReplayBuffer", "ranks": 2, "mode": "local"}
    given = {"version": 1, "settings": settings, "seed": 0, "counters": [state["counters"]] * 2}
    write_checkpoint(saved, given, state["tensors"])
    for load in (ReplayBuffer.load, ShardedReplay.load, of_checkpoint):
        with pytest.raises(CheckpointError, match=r"ShardedReplayBuffer; gpu_replay 0\.3 is the last version"):
            load(saved)
    buffer.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"of one ReplayBuffer; load it with ReplayBuffer\.load"):
        ShardedReplay.load(tmp_path / "one", "cpu")
    add_rows(shard := ShardedReplay(buffer), 3)
    shard.save(tmp_path / "set")
    # all ranks may be given another sampler
    again = ShardedReplay.load(tmp_path / "set", "cpu", sampler=Proportional(initial=2.0))
    assert again.priorities(again.keys()).tolist() == pytest.approx([2.0] * 3, rel=1e-5)
    with pytest.raises(CheckpointError, match=r"of several ranks; give that of one, such as .*set/save-0/rank0"):
        of_checkpoint(tmp_path / "set")
    assert of_checkpoint(tmp_path / "set" / "save-0" / "rank0").added == 3


def test_without_a_process_group_it_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedReplay(ReplayBuffer(10, FIELDS, device="cpu"))


def doubtful(group: Any) -> list[tuple[str, str]]:
    """As on GPUs: a rank that does not look at what the others told, and learns of it from the next call."""
    last = dist.get_rank(group) > 0
    told = Group(group, torch.device("cpu"), 20)

    def agree(name: str = "sample", **named: Any) -> None:
        with told.call(name):
            told.agree(name, lambda: ({"beta": last and not named.get("alike")}, None), late=True, unread=True)

    def read() -> None:
        with told.call("clear"):
            told.agree("clear", lambda: ({}, None))

    alike = partial(agree, alike=True)
    return [outcome(call) for call in (agree, read, read, alike, read, agree, alike, read)]


def test_a_rank_that_did_not_look_learns_of_it_with_the_next_call(ranks: Ranks) -> None:
    doubt = ("RuntimeError", "a rank failed in an earlier sample, or made another call instead.")
    nothing = ("nothing", "")
    assert ranks.run(2, doubtful) == [[nothing, doubt, nothing, nothing, nothing, nothing, nothing, doubt]] * 2


# checkpoints


def saved_twice(group: Any, path: str, dies: str, first: bool = False) -> Any:
    """Save, change, and save again, where a rank is killed at some moment of that save, or of the first one.

    Returns what the last save raised.
    """
    shard = made(group, rows=5)
    if not first:
        shard.save(path)
        add_rows(shard, 2, 5)
    if dies:
        rank, moment, work = dies.split()
        if shard.rank == int(rank):
            owner: Any = Group if work == "agree" else saving
            done = getattr(owner, work)

            def dying(*given: Any) -> Any:
                # of three agreements of a save the last one
                if work == "agree" and given[2].__name__ != "finish":
                    return done(*given)
                if moment == "after":
                    done(*given)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, work, dying)
    told = outcome(lambda: shard.save(path))
    shard.close()
    return told


def loaded(group: Any, path: str) -> list[int]:
    shard = ShardedReplay.load(path, "cpu", group=group, timeout=20)
    found = shard.keys().tolist()
    shard.sample(3)
    shard.save(path)
    shard.close()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_part_is_a_checkpoint_of_its_own(ranks: Ranks, tmp_path: Path, size: int) -> None:
    path = tmp_path / "c"
    assert ranks.run(size, saved_twice, str(path), "") == [("nothing", "")] * size
    assert sorted(os.listdir(path)) == ["ranks.json", "save-1"]
    for rank in range(size):
        part = ReplayBuffer.load(path / "save-1" / f"rank{rank}", "cpu")
        assert part[part.keys()].number.tolist() == [key * 8 + rank for key in range(7)]
    others = ranks.tried(size - 1, loaded, str(path))
    assert {each.kind for each in others} == {"CheckpointError"}
    assert f"saved by {size} ranks and cannot be loaded by {size - 1}" in others[0].message
    assert f"ReplayBuffer.load('{path}/save-1/rank0')" in others[0].message
    assert ranks.run(size, loaded, str(path)) == [[0, 1, 2, 3, 4, 5, 6]] * size
    with pytest.raises(CheckpointError, match=r"several ranks: use ShardedReplay\.load"):
        ReplayBuffer.load(path)
    # what does not change is not written again, and stands there once
    inodes = [{file.stat().st_ino for file in (path / "save-2" / "rank0").glob("piece*")}]
    ranks.run(size, loaded, str(path))
    inodes.append({file.stat().st_ino for file in (path / "save-3" / "rank0").glob("piece*")})
    assert len(inodes[0] & inodes[1]) >= len(inodes[0]) - 1


def reseeded(group: Any, path: str) -> tuple[list[Any], list[tuple[str, str]]]:
    """What is drawn after loads with and without another seed, and what wrong seeds raise."""
    shard = made(group, rows=9)
    shard.save(path)
    load = partial(ShardedReplay.load, path, "cpu", group=group, timeout=20)
    drawn = [shard.sample(8).key.tolist()]
    for seed in (None, shard.rank, 7 + shard.rank):
        again = load(seed=seed)
        drawn.append(again.sample(8).key.tolist())
        assert again.buffer.seed == (shard.rank if seed is None else seed)
        again.close()
    other = ReplayBuffer(12, FIELDS, sampler=Proportional(), device="cpu", seed=7 + shard.rank)
    add_rows(ShardedReplay(other, group, 20), 9)
    drawn.append(other.sample(8).key.tolist())
    return drawn, [outcome(partial(load, seed=seed)) for seed in (7, "none" if shard.rank else 8)]


def test_a_load_goes_on_with_the_saved_streams_or_those_of_other_seeds(ranks: Ranks, tmp_path: Path) -> None:
    (one, told), (two, other) = ranks.run(2, reseeded, str(tmp_path / "c"))
    for saved, plain, given, renewed, expected in (one, two):
        assert saved == plain == given != renewed == expected
    assert told[0] == other[0]
    assert "the ranks have [7, 7]" in told[0][1]
    assert (told[1][0], other[1][0]) == ("RuntimeError", "TypeError")
    assert told[1][1].endswith(f"failed: TypeError: {other[1][1]}")


# by the rank, the moment and the work during which it is killed: what was written before is loaded, or what was new
DEATHS = {
    "1 before _write_part": "old",
    "1 after _write_part": "old",
    "0 before _write_part": "old",
    "1 before agree": "new",
    "0 after _put_in_force": "new",
    "0 after _write_part": "old",
    "0 before _put_in_force": "old",
    "0 before agree": "old",
}


@thinned("dies, first", DEATHS, [True, False], every=3)
def test_a_killed_rank_leaves_the_old_set_or_the_new_one(
    ranks: Ranks, tmp_path: Path, dies: str, first: bool, full: bool
) -> None:
    path = tmp_path / "c"
    with ranks_of(2) as mortal:
        found = mortal.tried(2, saved_twice, str(path), dies, first)
    rank = int(dies[0])
    assert found[rank] == Gone(-signal.SIGKILL)
    assert found[1 - rank][0] == "RuntimeError", found
    whole = dies not in ("1 before _write_part", "0 before _write_part")
    if first and not whole:
        refused = ranks.tried(2, loaded, str(path))
        assert {each.kind for each in refused} == {"CheckpointError"}
        assert f"{path} holds no set of all ranks: its first save did not end, and " in refused[0].message
        assert f"rank{rank} is not complete" in refused[0].message
        ranks.run(2, saved_twice, str(path), "", True)
    # a first set that is complete is one, whoever died since
    assert ranks.run(2, loaded, str(path)) == [list(range(5 if first or DEATHS[dies] == "old" else 7))] * 2
    names = sorted(os.listdir(path))
    assert (names[0], len(names)) == ("ranks.json", 2)


def test_a_first_set_is_put_in_force_by_the_next_save(ranks: Ranks, tmp_path: Path) -> None:
    """Else a crash of the second save would cost what the first one had written."""
    path = tmp_path / "c"
    ranks.run(2, saved_twice, str(path), "", True)
    (path / "ranks.json").unlink()
    with ranks_of(2) as others:
        others.tried(2, saved_twice, str(path), "1 before _write_part", True)
    assert sorted(os.listdir(path)) == ["ranks.json", "save-0", "save-1"]
    assert ranks.run(2, loaded, str(path)) == [list(range(5))] * 2


def replaced(group: Any, path: str) -> tuple[str, str]:
    shard = made(group, rows=5)
    shard.save(path)
    if shard.rank == 1:
        add_rows(shard, 1, 5)
        shard.buffer.save(f"{path}/save-0/rank1")
    shard.close()
    return outcome(lambda: ShardedReplay.load(path, "cpu", group=group, timeout=20))


def test_a_part_that_was_replaced_or_damaged_is_named(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    one, two = ranks.run(2, replaced, path)
    assert "rank1 is not what the ranks saved together" in two[1]
    assert one[0] == "RuntimeError"
    assert "rank 1 of 2 failed: CheckpointError" in one[1]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "letter").write_text("mine")
    kinds = [each.kind for each in ranks.tried(2, saved_twice, str(tmp_path / "d"), "")]
    assert kinds == ["CheckpointError", "RuntimeError"]
    assert os.listdir(tmp_path / "d") == ["letter"]
    file = tmp_path / "c" / "ranks.json"
    outside = '{"version": 1, "folder": "../x", "parts": ["a"]}'
    for text in ("", "[]", '{"version": 1}', '{"version": 2}', outside):
        file.write_text(text)
        assert {each.kind for each in ranks.tried(2, loaded, path)} == {"CheckpointError"}, text


# messages


def sent(group: Any) -> list[list[int]]:
    """Of each message that a sample, an update and an add make, the bytes that it sends to each rank."""
    shard = made(group, capacity=240, rows=40)
    batch, found = shard.sample(6), []
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
        for call in (
            lambda: shard.sample(6),
            lambda: shard.update_priorities(batch.key, batch.weight),
            lambda: add_rows(shard, 3, 40),
        ):
            gathered.reset_mock()
            call()
            found.append([each.args[1].nbytes for each in gathered.call_args_list])
    shard.close()
    return found


def test_few_messages_are_sent(ranks: Ranks) -> None:
    assert ranks.run(2, sent) == [[[32], [], []]] * 2


# ranks that die, or stay away

CALLS = ("sample", "save", "global_stats", "clear", "close", "load", "making a ShardedReplay")


def dying(group: Any, call: str, path: str, sleeps: bool) -> tuple[tuple[str, str], float, tuple[str, str]]:
    """The last rank is killed, or sleeps, while the others make a call: what they raise, after how many seconds, and
    what a later call raises.
    """
    timeout = 1 if sleeps else 10
    shard = made(group, timeout, rows=8)
    shard.sample(2)
    shard.save(f"{path}0")
    if shard.rank == shard.ranks - 1:
        time.sleep(3 * sleeps)
        os.kill(os.getpid(), signal.SIGKILL)
    more = {
        "load": lambda: ShardedReplay.load(f"{path}0", "cpu", group=group, timeout=timeout),
        "making a ShardedReplay": lambda: made(group, timeout),
    }
    began = time.monotonic()
    found = outcome((calls_of(shard, path) | more)[call])
    return found, time.monotonic() - began, outcome(shard.global_stats)


DEATHS_IN_CALLS = [
    *((2, call, False) for call in CALLS[:2]),
    *(pytest.param(2, call, False, marks=pytest.mark.slow) for call in CALLS[2:]),
    *(pytest.param(3, call, False, marks=pytest.mark.slow) for call in CALLS),
    # one that does not come is waited for no longer than the timeout
    pytest.param(2, "sample", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size, call, sleeps", DEATHS_IN_CALLS)
def test_a_killed_rank_makes_the_others_raise(tmp_path: Path, size: int, call: str, sleeps: bool) -> None:
    with ranks_of(size) as ranks:
        found = ranks.tried(size, dying, call, str(tmp_path / "c"), sleeps)
    assert found[-1] == Gone(-signal.SIGKILL)
    most = 1 if sleeps else 10
    for rank, each in enumerate(found[:-1]):
        assert not isinstance(each, (Raised, Gone)), each
        (kind, message), seconds, later = each
        assert kind == "RuntimeError"
        assert f"{call}: rank {rank} of {size} lost another rank, or waited {most} s" in message
        assert 0.9 * sleeps < seconds < most + 1.5
        # nothing hangs afterwards either
        assert later[0] == "RuntimeError"
        if call in CALLS[:5]:
            assert f"global_stats: an earlier call failed ({call}); the ranks are out of step. Load a" in later[1]
