"""`ShardedReplayBuffer` on several ranks: draws, weights, updates, errors, checkpoints, messages, dead ranks."""

from __future__ import annotations

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

import pytest
import torch
import torch.distributed as dist
from devices import thinned
from model import UNIT, Drawn, Model, RowModel
from programs import SAMPLERS, numbers
from ranks import Gone, Raised, Ranks, ranks_of
from tolerances import close

from gpu_replay import (
    CheckpointError,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    ShardedReplayBuffer,
    TrajectoryReplayBuffer,
)
from gpu_replay.sharded.buffer import seed_of
from gpu_replay.sharded.group import Group

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

# what a row holds follows from its global key, so that rows can be told from each other wherever they are
FIELDS = {
    "number": Field((), torch.int64),
    "image": Field((2, 3), torch.uint8, torch.float32, 1 / 255),
    "half": Field((3,), torch.bfloat16),
    "flag": Field((), torch.bool),
}
BATCH = 3
# what each rank does in each round
Rounds = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(4) as found:
        yield found


# what ranks do


def rows_of(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields of these global keys, as they are stored."""
    return {
        "number": keys * 7 + 1,
        "image": (keys[:, None, None] + torch.arange(6).view(2, 3)).remainder(256).to(torch.uint8),
        "half": (keys[:, None] % 50 + torch.arange(3)).to(torch.bfloat16),
        "flag": keys % 3 == 0,
    }


def made(group: Any, **settings: Any) -> ShardedReplayBuffer:
    given = {"capacity": 24, "fields": FIELDS, "timeout": 20, "sampler": Proportional()} | settings
    return ShardedReplayBuffer(**given, group=group)


def add_rows(buffer: ShardedReplayBuffer, rows: int, first: int = 0, priority: Any = None) -> None:
    """Add rows of this rank, which has added so many before."""
    keys = torch.arange(first, first + rows) * buffer.ranks + buffer.rank
    assert torch.equal(buffer.add(**rows_of(keys), priority=priority).cpu(), keys)


def batch_of(batch: Any) -> dict[str, Any]:
    """What a rank can send: the numbers of a batch, whose rows are those that their keys say."""
    stored = rows_of(batch.key.cpu()) | {"image": rows_of(batch.key.cpu())["image"].float().mul_(1 / 255)}
    assert all(torch.equal(batch[name].cpu(), rows) for name, rows in stored.items())
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


def life(group: Any, case: str, capacity: int, rounds: Rounds, path: str) -> list[dict[str, Any]]:
    """A buffer that adds, samples and updates, also rows of other ranks, is cleared, saved and loaded; what it says of
    itself after each round.

    rounds: for each, what every rank does.
    """
    mode, name = case.split()
    buffer = made(group, capacity=capacity, sampler=SAMPLERS[name], mode=mode, seed=11)
    found, added = [], 0
    assert vars(buffer.stats()) == pytest.approx(vars(ReplayBuffer(1, FIELDS).stats()), nan_ok=True)
    for each in (of_all[buffer.rank] for of_all in rounds):
        if each["clear"]:
            buffer.clear()
            assert (len(buffer), bool(buffer)) == (0, False)
        if each["rows"]:
            add_rows(buffer, each["rows"], added, each["priority"])
        added += each["rows"]
        drawn = batch_of(buffer.sample(BATCH))
        buffer.update_priorities(*each["update"])
        if each["save"]:
            buffer.save(path)
            buffer.close()
            buffer = ShardedReplayBuffer.load(path, group=group, timeout=20)
            assert (buffer.mode, buffer.sampler, buffer.capacity % buffer.ranks) == (mode, SAMPLERS[name], 0)
        keys = buffer.keys().tolist()
        assert torch.equal(buffer[keys].number.cpu(), rows_of(torch.tensor(keys))["number"])
        assert [key in buffer for key in (-1, keys[-1], keys[-1] + buffer.ranks)] == [False, True, False]
        found.append({"drawn": drawn, "keys": keys, "stats": vars(buffer.stats()), "len": len(buffer)})
        if isinstance(getattr(buffer.sampler, "base", buffer.sampler), Proportional | RankBased):
            found[-1]["priorities"] = buffer.priorities(keys).tolist()
    buffer.close()
    return found


# draws


class Whole(Model):
    """A model for each shard, and one buffer with the slots of all of them, rank after rank.

    A key of the whole is such a slot; `key_at` says which transition is there.
    """

    def __init__(self, case: str, slots: int, ranks: int) -> None:
        mode, name = case.split()
        super().__init__(slots * ranks, SAMPLERS[name], seed=11)
        self.local, self.last, self.newest, self.slots, self.ranks = mode == "local", self.newest, 0, slots, ranks
        self.shards = [RowModel(slots, SAMPLERS[name], seed_of(11, rank)) for rank in range(ranks)]

    def eligible(self) -> list[int]:
        return sorted(self.held)

    live = eligible  # type: ignore[assignment]

    def look(self) -> None:
        """See what the shards hold by now; each knows the largest priority that any was given."""
        known = [shard.running for shard in self.shards if shard.running is not None]
        self.held, self.key_at = {}, {}
        for rank, shard in enumerate(self.shards):
            shard.running = max(known, default=None)
            for key, priority in shard.held.items():
                place = rank * self.slots + key % self.slots
                self.held[place], self.key_at[place] = priority, key * self.ranks + rank
                self.times[place] = shard.times[key]
        self.added, self.stale = (sum(getattr(shard, name) for shard in self.shards) for name in ("added", "stale"))

    def parts(self) -> list[float]:
        """The share of each shard in all masses, or of all transitions."""
        sizes = [sum(map(shard.mass, shard.held)) if self.by_mass else len(shard.held) for shard in self.shards]
        return [size / sum(sizes) for size in sizes]

    def shares(self) -> dict[int, float]:
        return {
            rank * self.slots + key % self.slots: part * share
            for rank, (part, shard) in enumerate(zip(self.parts(), self.shards, strict=True))
            for key, share in shard.shares().items()
        }

    def add(self, plays: list[dict[str, Any]]) -> None:
        for shard, play in zip(self.shards, plays, strict=True):
            if play["clear"]:
                shard.clear()
            if play["rows"]:
                shard.add(play["rows"], play["priority"])
        self.look()

    def update_all(self, plays: list[dict[str, Any]]) -> None:
        """What the ranks are told, in their order: of a key that is repeated the last priority counts."""
        told = [pair for play in plays for pair in zip(*play["update"], strict=True)]
        for rank, shard in enumerate(self.shards):
            mine = [(key // self.ranks, priority) for key, priority in told if key % self.ranks == rank]
            shard.update([key for key, _ in mine], [priority for _, priority in mine])
        self.look()

    def sample_all(self) -> list[Drawn]:
        """The rows of each rank."""
        beta = getattr(self.base, "beta", 0.0)
        beta = beta(self.samples) if isinstance(beta, LinearSchedule) else beta
        return self._sample_local(beta) if self.local else self._sample_global()

    def _sample_global(self) -> list[Drawn]:
        count = BATCH * self.ranks
        newest = count if isinstance(self.base, Latest) else self.last
        drawn = self.draw(count - newest) if count > newest else Drawn([], [], [])
        latest = sorted(self.key_at.values())[len(self.held) - newest :]
        keys, sure = [self.key_at[place] for place in drawn.keys] + latest, [1.0] * newest
        for key in keys:
            self.shards[key % self.ranks].times[key // self.ranks] += 1
        rows = (keys, drawn.probability + sure, drawn.weight + sure)
        return [Drawn(*(each[first : first + BATCH] for each in rows)) for first in range(0, count, BATCH)]

    def _sample_local(self, beta: float) -> list[Drawn]:
        self.samples += 1
        chance = 0 if isinstance(self.base, Latest) else BATCH - self.last
        weight = {
            self.key_at[place]: self.parts()[place // self.slots] * (len(self.held) * share) ** -beta
            for place, share in self.shares().items()
        }
        drawn = []
        for rank, shard in enumerate(self.shards):
            local = shard.draw(BATCH)
            keys = [key * self.ranks + rank for key in local.keys]
            probability = [each / self.ranks for each in local.probability[:chance]] + local.probability[chance:]
            drawn.append(Drawn(keys, probability, local.weight))
        seen = [key for rows in drawn for key in rows.keys[:chance]]
        over = weight if getattr(self.base, "normalize", "batch") == "buffer" else seen
        largest = max((weight[key] for key in over), default=1.0)
        return [
            rows._replace(weight=[weight[key] / largest for key in rows.keys[:chance]] + rows.weight[chance:])
            for rows in drawn
        ]


def check_round(whole: Whole, plays: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Compare what the ranks said after a round with what the models say."""
    whole.add(plays)
    for rank, expected in enumerate(whole.sample_all()):
        drawn = found[rank]["drawn"]
        assert drawn["key"] == expected.keys
        assert close(drawn["probability"], expected.probability, "probability")
        assert close(drawn["weight"], expected.weight, "weight")
    whole.look()
    whole.update_all(plays)
    for rank, (each, shard) in enumerate(zip(found, whole.shards, strict=True)):
        assert each["keys"] == [key * whole.ranks + rank for key in shard.live()]
        assert each["len"] == len(whole.held)
        for name, value in whole.stats().items():
            kind, told = "priority" if "priority" in name else "statistic", each["stats"][name]
            assert close([told], [value], kind) or (math.isnan(told) and math.isnan(value)), name
        if "priorities" in each:
            seen = [shard.mass(key) / UNIT - whole.base.eps if whole.by_mass else shard.held[key] for key in shard.held]
            assert close(each["priorities"], seen, "priority")


def check_lives(ranks: Ranks, case: str, size: int, capacity: int, rounds: Rounds, path: Path) -> None:
    """Compare what the ranks say in all rounds with what the models say."""
    found, whole = ranks.run(size, life, case, capacity, rounds, str(path)), Whole(case, capacity // size, size)
    for plays, one_round in zip(rounds, zip(*found, strict=True), strict=True):
        check_round(whole, plays, list(one_round))


def any_rounds(size: int, count: int, seed: int) -> Rounds:
    """What each rank does: it adds enough for every batch at first, then also nothing, or a whole lap."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        clear, save, plays = number > 1 and draw.random() < 0.2, number == 1 or draw.random() < 0.2, []
        for _ in range(size):
            rows = 5 if number == 0 or clear else draw.choice((0, 1, 2, 5, 9))
            # any keys, wherever they live, and some that are gone or never were
            keys = [draw.randrange(-3, 6 * size * (number + 1)) for _ in range(draw.randint(0, 9))]
            own = numbers(draw, rows, "wide") if rows and draw.random() < 0.3 else None
            plays.append({"clear": clear, "save": save, "rows": rows, "priority": own})
            plays[-1]["update"] = keys, numbers(draw, len(keys), "wide")
        found.append(plays)
    return found


# ranks of all shards would need a sort of all
CASES = [f"local {name}" for name in SAMPLERS if name not in ("rank-independent", "combined-rank")]
CASES += [f"global {name}" for name in SAMPLERS if "rank" not in name]


@thinned("case, size", CASES, [1, 2, 3, 4])
def test_ranks_together_are_what_one_buffer_is(ranks: Ranks, tmp_path: Path, case: str, size: int, full: bool) -> None:
    for seed in range(4 if full else 1):
        # shards of 300 slots have several levels above the masses; 3 slots more than the ranks share
        slots = 300 if seed % 2 else 8
        rounds = any_rounds(size, 12 if full else 4, seed + size)
        check_lives(ranks, case, size, slots * size + size - 1, rounds, tmp_path / str(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["local proportional", "global combined-proportional"])
def test_a_rank_on_a_gpu_is_what_one_buffer_is(tmp_path: Path, case: str) -> None:
    with ranks_of(1, "nccl") as found:
        check_lives(found, case, 1, 20, any_rounds(1, 6, 1), tmp_path / "c")


# calls and arguments that one rank gets wrong


def calls_of(buffer: Any, path: str) -> dict[str, Callable[[], Any]]:
    """Calls that all ranks make together, by the names that errors give them."""
    return {
        "sample": partial(buffer.sample, 2),
        "update_priorities": partial(buffer.update_priorities, [0], [1.0]),
        "stats": buffer.stats,
        "len": partial(len, buffer),
        "clear": buffer.clear,
        "save": partial(buffer.save, path),
    }


def pairs_of(buffer: Any, path: str, group: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Calls by what is wrong: that of the first rank, and that of the last. A name with "another" is an argument that
    is right by itself.
    """
    make, load = partial(made, group), partial(ShardedReplayBuffer.load, group=group, timeout=20)
    calls = calls_of(buffer, path)
    sample, update, save = (calls[name] for name in ("sample", "update_priorities", "save"))
    makings: dict[str, dict[str, Any]] = {
        "a capacity in words": {"capacity": "many"},
        "fields in another order": {"fields": dict(reversed(FIELDS.items()))},
        "another sampler": {"sampler": Proportional(alpha=0.5)},
        "no device": {"device": "nowhere"},
        "another seed": {"seed": 1},
        "no path of fields": {"storage_path": 3},
    }
    return {
        **{f"{one} meets {other}": (calls[one], calls[other]) for one, other in itertools.permutations(calls, 2)},
        "making a ShardedReplayBuffer meets load": (make, partial(load, f"{path}0")),
        **{name: (make, partial(make, **given)) for name, given in makings.items()},
        "no checkpoint": (partial(load, f"{path}0"), partial(load, f"{path}none")),
        "nothing to draw": (sample, partial(buffer.sample, 0)),
        "another size": (sample, partial(buffer.sample, 3)),
        "beta below 0": (sample, partial(buffer.sample, 2, beta=-1)),
        "another beta": (sample, partial(buffer.sample, 2, beta=0.25)),
        "keys": (update, partial(buffer.update_priorities, "a", [1.0])),
        "no priority": (update, partial(buffer.update_priorities, [0], [math.nan])),
        "another path": (save, partial(buffer.save, f"{path}2")),
    }


def one_sided(group: Any, path: str, mode: str) -> list[tuple[str, tuple[str, str], bool, float]]:
    """The last rank makes other calls than the first, or with wrong arguments: what each raises, whether the buffer is
    as it was and goes on, and after how many seconds.
    """
    found = []
    buffer, untouched = both = [made(group, mode=mode, seed=2) for _ in range(2)]
    for each in both:
        add_rows(each, 8)
    buffer.save(f"{path}0")
    for name, calls in pairs_of(buffer, path, group).items():
        began = time.monotonic()
        told = outcome(calls[buffer.rank > 0])
        seconds = time.monotonic() - began
        drawn = [batch_of(each.sample(3)) for each in both]
        found.append((name, told, drawn[0] == drawn[1] and buffer.stats() == untouched.stats(), seconds))
    assert not os.path.exists(path)
    for each in both:
        each.close()
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
            assert (kind, name.split()[-1] in message or "order" in name) == ("ValueError", True), message
        else:
            assert kind == "RuntimeError", name
            assert message.endswith(f"rank 1 of 2 failed: {told[0]}: {told[1]}"), (name, message)
            assert told[0] in ("ValueError", "TypeError", "CheckpointError"), name


@pytest.mark.parametrize("mode", ["local", "global"])
def test_a_call_that_one_rank_gets_wrong_is_raised_by_all_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    check_one_sided(ranks.run(2, one_sided, str(tmp_path / "c"), mode))


def refusals(group: Any) -> list[tuple[str, str]]:
    """What is raised in calls that are wrong on all ranks, or for the rows that a rank has; the buffer goes on."""
    buffer = made(group)
    found = [outcome(lambda: made(group, sampler=RankBased(), mode="global"))]
    found += [outcome(lambda seconds=seconds: made(group, timeout=seconds)) for seconds in (1e300, 1e-300)]
    for rank in (1, 0):
        if buffer.rank == rank:
            add_rows(buffer, 3)
        found.append(outcome(lambda: buffer.sample(3)))
    found.append(outcome(lambda: buffer[[buffer.rank, 1]]))
    buffer.close()
    return [*found, outcome(lambda: buffer.sample(3))]


def test_errors_of_one_rank_are_raised_by_all_and_the_buffer_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusals)
    for found in (first, second):
        assert [found.pop(1) for _ in range(2)] == [
            ("ValueError", f"timeout must be from 0.001 to 1e+09; found {seconds}.") for seconds in (1e300, 1e-300)
        ]
    assert first[0] == second[0]
    assert first[0][0] == "ValueError"
    assert 'mode="local"' in first[0][1]
    empty, nothing = "sample(3): the buffer holds no transitions. Add more first.", ("nothing", "")
    assert first[1] == ("RuntimeError", empty)
    assert second[1] == ("RuntimeError", f"sample: rank 0 of 2 failed: RuntimeError: {empty}")
    assert first[2] == second[2] == second[3] == nothing
    assert first[3] == ("KeyError", "'key 1 is held by rank 1; this is rank 0 of 2.'")
    assert "was closed" in first[4][1]


def dropped(group: Any, path: str, mode: str) -> list[str]:
    """After which calls, right ones and wrong ones, a buffer stays where it is dropped."""
    gc.collect()
    gc.disable()
    kept = []
    wrong = {
        "sample": lambda buffer: buffer.sample(0),
        "update": lambda buffer: buffer.update_priorities([0.5], [1.0]),
        "save": lambda buffer: buffer.save(f"{path}/file/c"),
        "load": lambda buffer: ShardedReplayBuffer.load(f"{path}/none", group=group),
        "make": lambda buffer: made(group, timeout=1e300),
        "read": lambda buffer: buffer[[-1]],
        "close": lambda buffer: (buffer.close(), buffer.sample(1)),
    }
    for name, call in wrong.items():
        buffer = made(group, mode=mode)
        add_rows(buffer, 3)
        batch_of(buffer.sample(3))
        for right in calls_of(buffer, f"{path}/{name}").values():
            right()
        assert outcome(partial(call, buffer))[0] != "nothing"
        seen = weakref.ref(buffer)
        del buffer, right
        kept += [name] if seen() is not None else []
    gc.enable()
    return kept


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["local", "global"])
def test_a_dropped_buffer_is_freed_at_once(ranks: Ranks, tmp_path: Path, mode: str, size: int) -> None:
    (tmp_path / "file").write_text("in the way")
    assert ranks.run(size, dropped, str(tmp_path), mode) == [[]] * size


def added_after_close(group: Any) -> list[int]:
    buffer = ShardedReplayBuffer(8, {"number": FIELDS["number"]}, group=group)
    # the largest mass of all ranks is still under way
    buffer.update_priorities(buffer.add(number=[1]), [3.0])
    buffer.close()
    return buffer.add(number=[2]).tolist()


def test_seeds_of_ranks_stay_what_they_are() -> None:
    """So that a seed gives the draws of earlier versions."""
    assert [seed_of(11, 0), seed_of(11, 1), seed_of(-1, 3)] == [11, 9080609714381269916, 5957258398962347266]


def test_a_closed_buffer_still_takes_rows(ranks: Ranks) -> None:
    assert ranks.run(2, added_after_close) == [[2], [3]]


def test_without_a_process_group_it_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedReplayBuffer(10, FIELDS)


def doubtful(group: Any) -> list[tuple[str, str]]:
    """As on GPUs: a rank that does not look at what the others told, and learns of it from the next call."""
    last = dist.get_rank(group) > 0
    told = Group(group, "cpu", 20)

    def agree(name: str = "sample", **named: Any) -> None:
        with told.call(name):
            told.agree(name, lambda: ({"beta": last and not named.get("alike")}, None), late=True, unread=True)

    def read() -> None:
        with told.call("len"):
            told.agree("len", lambda: ({}, None))

    alike = partial(agree, alike=True)
    return [outcome(call) for call in (agree, read, read, alike, read, agree, alike, read)]


def test_a_rank_that_did_not_look_learns_of_it_with_the_next_call(ranks: Ranks) -> None:
    doubt = ("RuntimeError", "a rank failed in an earlier sample, or made another call instead.")
    nothing = ("nothing", "")
    assert ranks.run(2, doubtful) == [[nothing, doubt, nothing, nothing, nothing, nothing, nothing, doubt]] * 2


# checkpoints


def saving(group: Any, path: str, rows: list[int]) -> list[tuple[int, float]]:
    """Save a buffer to which each rank added so many rows; returns the keys of this rank and their priorities."""
    buffer = made(group, sampler=SAMPLERS["proportional"])
    add_rows(buffer, rows[buffer.rank], priority=1.0 + torch.arange(rows[buffer.rank]) % 7)
    buffer.sample(3)
    # too late for what no longer is
    buffer.update_priorities([-7], [1.0])
    buffer.save(path)
    found = buffer.priorities(buffer.keys().tolist()).tolist()
    buffer.close()
    return list(zip(buffer.keys().tolist(), found, strict=True))


def at_home(group: Any, home: str) -> list[str]:
    """What is in the home folder while a buffer with fields and a checkpoint there is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        buffer = made(group, storage_path="~/ring")
        add_rows(buffer, 3)
        buffer.save("~/c")
        ShardedReplayBuffer.load("~/c", group=group, timeout=20).close()
        found = sorted(os.listdir(home))
        buffer.close()
    return found


def test_a_tilde_is_the_home_folder(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, at_home, str(tmp_path)) == [["c", "ring"]] * 2


def loading(group: Any, path: str) -> list[tuple[int, int, float]]:
    """What a rank has of a checkpoint: the keys, the numbers, and the priorities."""
    buffer = ShardedReplayBuffer.load(path, group=group, timeout=20)
    keys = buffer.keys()
    assert (buffer.capacity, *set((keys % buffer.ranks).tolist())) == (24, buffer.rank)
    buffer.sample(3)
    assert buffer.stats().stale_updates == 2
    buffer.close()
    return list(zip(keys.tolist(), buffer[keys].number.tolist(), buffer.priorities(keys).tolist(), strict=True))


@pytest.mark.parametrize(("rows", "alike"), [([15, 15], True), ([15, 4], False), ([3, 3], True)])
def test_a_checkpoint_loads_on_other_ranks_and_as_one_buffer(
    ranks: Ranks, tmp_path: Path, rows: list[int], alike: bool
) -> None:
    path = str(tmp_path / "c")
    old = sorted(each for held in ranks.run(2, saving, path, rows) for each in held)
    # numbered again in the order of keys, the newest last; keys stay where all ranks had added as many
    new = range(sum(rows) - len(old), sum(rows))
    assert not alike or [key for key, _ in old] == list(new)
    expected = [(key, of * 7 + 1, priority) for key, (of, priority) in zip(new, old, strict=True)]
    single = ReplayBuffer.load(path, "cpu")
    assert (single.capacity, single.keys().tolist()) == (24, list(new))
    held = single[list(new)].number.tolist(), single.priorities(list(new)).tolist()
    assert list(zip(new, *held, strict=True)) == expected
    assert (single.stats().mean_times_sampled, single.stats().stale_updates) == (6 / len(old), 2)
    single.sample(5)
    # and from one buffer to several
    single.save(tmp_path / "one")
    for size, where in ((1, path), (3, path), (2, str(tmp_path / "one"))):
        assert sorted(each for held in ranks.run(size, loading, where) for each in held) == expected


def test_a_checkpoint_of_ranks_names_itself_to_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saving, str(tmp_path / "c"), [3, 3])
    with pytest.raises(CheckpointError, match="ShardedReplayBuffer"):
        TrajectoryReplayBuffer.load(tmp_path / "c")
    first = sorted((tmp_path / "c").glob("piece*"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert {each.kind for each in ranks.tried(2, loading, str(tmp_path / "c"))} == {"CheckpointError"}


# messages


def sent(group: Any, mode: str) -> list[list[str]]:
    """The operations of torch that a sample, an update and an add make."""
    buffer = made(group, capacity=240, mode=mode)
    add_rows(buffer, 40)
    batch = buffer.sample(6)
    found: list[list[str]] = []

    def noting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (found[-1].append(name), operation(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        for call in (
            lambda: buffer.sample(6),
            lambda: buffer.update_priorities(batch.key, batch.weight),
            lambda: add_rows(buffer, 3, 40),
        ):
            found.append([])
            call()
    buffer.close()
    return found


@pytest.mark.parametrize(("mode", "rows"), [("local", []), ("global", ["all_to_all_single"])])
def test_few_messages_are_sent(ranks: Ranks, mode: str, rows: list[str]) -> None:
    # what a rank says of itself, and the rows that others asked for; keys with priorities, and the largest of these
    expected = [["all_gather", *rows], ["all_gather", "all_to_all_single", "all_reduce"], []]
    assert ranks.run(2, sent, mode) == [expected] * 2


# ranks that die, or stay away


def die_at_the_end(buffer: ShardedReplayBuffer) -> None:
    """Let this rank be gone before it has taken part in the last message of an update, the largest priority."""
    reduce = buffer._group.all_reduce

    def all_reduce(tensor: torch.Tensor, *, largest: bool = False) -> Any:
        return os.kill(os.getpid(), signal.SIGKILL) if largest else reduce(tensor)

    buffer._group.all_reduce = all_reduce  # type: ignore[method-assign]


# the calls that fail where the last rank is gone, and what their errors name
DEADLY = {name: name for name in ("sample", "update_priorities", "stats", "len", "clear", "save")}
DEADLY["add"] = "update_priorities"


def dying(group: Any, call: str, mode: str, path: str, sleeps: bool) -> tuple[tuple[str, str], float, tuple[str, str]]:
    """The last rank is killed, or sleeps, while the others make a call: what they raise, after how many seconds, and
    what a later call raises.
    """
    buffer = made(group, mode=mode, timeout=1 if sleeps else 4)
    add_rows(buffer, 8)
    buffer.sample(2)
    if buffer.rank == buffer.ranks - 1:
        if call == "add":
            die_at_the_end(buffer)
            buffer.update_priorities([0], [1.0])
        time.sleep(3 * sleeps)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    calls = calls_of(buffer, path)
    calls["add"] = lambda: (calls["update_priorities"](), add_rows(buffer, 1))
    found = outcome(calls[call])
    return found, time.monotonic() - began, outcome(buffer.stats)


def check_death(size: int, call: str, mode: str, path: Path, sleeps: bool = False) -> None:
    with ranks_of(size) as ranks:
        found = ranks.tried(size, dying, call, mode, str(path / "c"), sleeps)
    assert found[-1] == Gone(-signal.SIGKILL)
    name, most = DEADLY[call], 1 if sleeps else 4
    for rank, each in enumerate(found[:-1]):
        assert not isinstance(each, (Raised, Gone)), each
        (kind, message), seconds, later = each
        assert kind == "RuntimeError"
        assert f"{name}: rank {rank} of {size} lost another rank, or waited {most} s" in message
        assert 0.9 * sleeps < seconds < most + 1.5
        # nothing hangs afterwards either
        assert later[1].startswith(f"stats: an earlier call failed ({name}); the ranks are out of step. Load a")
    if call == "save":
        assert not (path / "c").exists()


@pytest.mark.parametrize("call", ["sample", "add"])
def test_a_killed_rank_makes_the_others_raise(tmp_path: Path, call: str) -> None:
    check_death(2, call, "local", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", DEADLY)
@pytest.mark.parametrize("mode", ["local", "global"])
def test_a_killed_rank_makes_the_others_raise_in_every_call(tmp_path: Path, call: str, mode: str) -> None:
    check_death(3, call, mode, tmp_path)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    check_death(2, "sample", "local", tmp_path, sleeps=True)
