"""`ShardedReplayBuffer` on several ranks: draws, weights, updates, errors, checkpoints, messages, dead ranks."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from model import Drawn, Model  # noqa: E402
from ranks import Gone, Raised, Ranks, ranks_of  # noqa: E402
from tolerances import close  # noqa: E402

from gpu_replay import (  # noqa: E402
    CheckpointError,
    Combined,
    Field,
    Latest,
    LinearSchedule,
    Proportional,
    RankBased,
    ReplayBuffer,
    ShardedReplayBuffer,
    TrajectoryReplayBuffer,
    Uniform,
)
from gpu_replay.sharded.global_draw import HEADER, TAIL  # noqa: E402
from gpu_replay.sharded.group import Group, row_length  # noqa: E402

# what a row holds follows from its global key, so that rows can be told from each other wherever they are
FIELDS = {
    "number": Field((), torch.int64),
    "image": Field((2, 3), torch.uint8, torch.float32, 1 / 255),
    "half": Field((3,), torch.bfloat16),
    "flag": Field((), torch.bool),
}
SAMPLERS = {
    "proportional": Proportional(alpha=0.7, beta=LinearSchedule(0.3, 1.0, 4)),
    "independent": Proportional(stratified=False),
    "of-the-buffer": Proportional(normalize="buffer", initial=0.5),
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "combined": Combined(Proportional(), newest=3),
    "combined-uniform": Combined(Uniform(), newest=2),
    "latest": Latest(),
}
BATCH = 3


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


def sampled_rows_of(keys: torch.Tensor) -> dict[str, np.ndarray]:
    """The same, as they are sampled."""
    stored = rows_of(keys)
    stored["image"] = stored["image"].float().mul_(1 / 255)
    stored["half"] = stored["half"].float()
    return {name: tensor.numpy() for name, tensor in stored.items()}


def made(group: Any, capacity: int = 24, **settings: Any) -> ShardedReplayBuffer:
    return ShardedReplayBuffer(capacity, FIELDS, group=group, **{"timeout": 20, "sampler": Proportional()} | settings)


def add_rows(buffer: ShardedReplayBuffer, rows: int, priority: Any = None) -> np.ndarray:
    """Add the next rows of this rank; returns their keys."""
    first = buffer._shard.added
    keys = torch.arange(first, first + rows) * buffer.ranks + buffer.rank
    found = buffer.add(**rows_of(keys), priority=priority)
    assert torch.equal(found, keys)
    return found.numpy()


def batch_of(batch: Any) -> dict[str, np.ndarray]:
    return {name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in batch.items()}


def shard_of(buffer: ShardedReplayBuffer) -> dict[str, np.ndarray]:
    """The keys of this rank, and its masses in the order of slots, or ones for what is stored."""
    slots, keys = buffer.capacity // buffer.ranks, buffer.keys().numpy()
    masses = np.zeros(slots, dtype=np.int64)
    masses[keys // buffer.ranks % slots] = 1
    with suppress(RuntimeError):
        masses = buffer._shard.masses().numpy().copy()
    return {"masses": masses, "keys": keys}


def life(group: Any, sampler: Any, mode: str, capacity: int, batch: int, adds: list[list[int]]) -> list[dict[str, Any]]:
    """A buffer that adds, samples and updates, also rows of other ranks: what was there before each draw, and the draw.

    adds: rows of each rank, for each round.
    """
    rank = dist.get_rank(group)
    noise = np.random.default_rng(rank)
    buffer = made(group, capacity, sampler=sampler, mode=mode, seed=11)
    found = []
    for rows in adds:
        if rows[rank]:
            add_rows(buffer, rows[rank])
        before = shard_of(buffer)
        drawn = batch_of(buffer.sample(batch))
        # any keys that were ever drawn, wherever they live, and some that never were
        keys = np.concatenate([drawn["key"], noise.integers(-5, 3 * capacity, size=rank + 2)])
        buffer.update_priorities(torch.from_numpy(keys), torch.from_numpy(noise.random(keys.size) * 3))
        found.append({"before": before, "drawn": drawn})
    buffer.close()
    return found


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """What a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# draws


class Whole(Model):
    """One buffer with the slots of all shards, rank after rank; what it draws are places among these."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(1, sampler, seed=11)
        self.last, self.newest = self.newest, 0
        self.numbers: list[int] = []

    def eligible(self) -> list[int]:
        return list(self.held)

    def mass(self, key: int) -> int:
        return self.numbers[key]

    def rows(self, shards: list[dict[str, np.ndarray]], count: int) -> Drawn:
        """So many rows, and their global keys."""
        slots, ranks = shards[0]["masses"].size, len(shards)
        self.numbers = np.concatenate([shard["masses"] for shard in shards]).tolist()
        self.capacity = len(self.numbers)
        self.held = {place: 1.0 for place, mass in enumerate(self.numbers) if mass}
        newest = count if isinstance(self.base, Latest) else self.last
        drawn = self.draw(count - newest) if count > newest else Drawn([], [], [])
        keys = np.concatenate([shard["keys"] for shard in shards]).tolist()
        key_at = {key % ranks * slots + key // ranks % slots: key for key in keys}
        latest = sorted(keys)[len(keys) - newest :]
        sure = [1.0] * newest
        return Drawn([key_at[place] for place in drawn.keys] + latest, drawn.probability + sure, drawn.weight + sure)


def adds_of(size: int, rounds: int, seed: int) -> list[list[int]]:
    """How many rows each rank adds in each round: enough for every batch at first, then also none, or a whole lap."""
    noise = np.random.default_rng(seed)
    return [[5] * size, *noise.choice([0, 1, 2, 5, 9], size=(rounds - 1, size)).tolist()]


def check_drawn(found: list[list[dict[str, Any]]], sampler: Any) -> None:
    """found: for each rank what `life` returned."""
    whole = Whole(sampler)
    for one_round in zip(*found, strict=True):
        expected = whole.rows([rank["before"] for rank in one_round], BATCH * len(one_round))
        drawn = {name: np.concatenate([rank["drawn"][name] for rank in one_round]) for name in one_round[0]["drawn"]}
        assert (drawn["key"].dtype, drawn["probability"].dtype, drawn["weight"].dtype) == (np.int64, *[np.float32] * 2)
        assert drawn["key"].tolist() == expected.keys
        assert close(drawn["probability"], expected.probability, "probability")
        assert close(drawn["weight"], expected.weight, "weight")
        for name, rows in sampled_rows_of(torch.from_numpy(drawn["key"])).items():
            np.testing.assert_array_equal(drawn[name], rows, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["proportional", "uniform"])
def test_ranks_together_draw_what_one_tree_draws(ranks: Ranks, name: str, size: int) -> None:
    # shards of 8 slots, some of them wrapped; 3 slots more than they share
    found = ranks.run(size, life, SAMPLERS[name], "global", 8 * size + size - 1, BATCH, adds_of(size, 4, size))
    check_drawn(found, SAMPLERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_together_draw_what_one_tree_draws_with_every_sampler(ranks: Ranks, name: str, size: int) -> None:
    for seed in range(4):
        # shards of 300 slots have several levels above the masses
        capacity = size * (8 if seed % 2 else 300)
        found = ranks.run(size, life, SAMPLERS[name], "global", capacity, BATCH, adds_of(size, 12, seed))
        check_drawn(found, SAMPLERS[name])


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_local_weights_are_those_of_the_whole(ranks: Ranks, normalize: str) -> None:
    sampler = Proportional(alpha=0.8, beta=0.6, normalize=normalize)  # type: ignore[arg-type]
    found = ranks.run(3, life, sampler, "local", 3 * 8, 5, [[2, 5, 8], [1, 0, 3], [4, 1, 0]])
    for one_round in zip(*found, strict=True):
        shards = [rank["before"]["masses"].astype(float) for rank in one_round]
        totals = np.array([masses.sum() for masses in shards])
        stored = sum(int((masses > 0).sum()) for masses in shards)

        def weight(masses: np.ndarray, rank: int, totals: Any = totals, stored: int = stored) -> np.ndarray:
            chance = masses / totals.sum()
            return totals[rank] / totals.sum() * (stored * chance) ** -0.6

        drawn = []
        for rank, each in enumerate(one_round):
            keys = each["drawn"]["key"]
            assert (keys % 3 == rank).all()
            drawn.append(shards[rank][keys // 3 % 8])
            np.testing.assert_allclose(each["drawn"]["probability"], drawn[-1] / totals[rank] / 3, rtol=1e-6)
        over = shards if normalize == "buffer" else drawn
        largest = max(weight(masses[masses > 0], rank).max() for rank, masses in enumerate(over))
        for rank, each in enumerate(one_round):
            np.testing.assert_allclose(each["drawn"]["weight"], weight(drawn[rank], rank) / largest, rtol=1e-5)
    if normalize == "batch":
        assert max(rank["drawn"]["weight"].max() for rank in one_round) == 1


def uniform_and_by_rank(group: Any) -> list[dict[str, np.ndarray]]:
    rank = dist.get_rank(group)
    found = []
    for sampler in (Uniform(), RankBased(alpha=0.5, beta=1.0)):
        buffer = made(group, 40, sampler=sampler, seed=1)
        add_rows(buffer, 4 * (rank + 1), priority=torch.arange(4.0 * (rank + 1)))
        found.append(batch_of(buffer.sample(3)))
        buffer.close()
    return found


def test_uniform_and_rank_based_shards_count_by_their_size(ranks: Ranks) -> None:
    uniform, by_rank = zip(*ranks.run(2, uniform_and_by_rank), strict=True)
    np.testing.assert_array_equal([each["weight"] for each in uniform], [[0.5] * 3, [1.0] * 3])
    np.testing.assert_allclose([each["probability"] for each in uniform], [[1 / 8] * 3, [1 / 16] * 3])
    # with beta = 1 a row weighs (n_r / N) / (n_r p): the inverse of its chance in the shard
    chances = np.concatenate([2 * each["probability"] for each in by_rank])
    weights = np.concatenate([each["weight"] for each in by_rank])
    np.testing.assert_allclose(weights, chances.min() / chances, rtol=1e-5)


def alone(group: Any, mode: str, sampler: Any) -> Any:
    """A buffer of one rank beside a ReplayBuffer: the same numbers, bit by bit."""
    sharded = made(group, 20, sampler=sampler, mode=mode, seed=5)
    single = ReplayBuffer(20, FIELDS, sampler=sampler, seed=5, device="cpu")
    for step in range(6):
        rows = rows_of(torch.arange(5) + 5 * step)
        assert torch.equal(sharded.add(**rows), single.add(**rows))
        batches = sharded.sample(4), single.sample(4)
        assert batches[0].keys() == batches[1].keys()
        for name in batches[0]:
            assert torch.equal(batches[0][name], batches[1][name]), name
        for buffer, batch in zip((sharded, single), batches, strict=True):
            buffer.update_priorities(batch.key, batch.number.float() / 100 % 1)
    assert sharded.stats() == single.stats()
    assert len(sharded) == len(single) == 20
    assert torch.equal(sharded.keys(), single.keys())
    assert 29 in sharded
    assert 3 not in sharded
    assert torch.equal(sharded[[12, 29]].number, single[[12, 29]].number)
    with pytest.raises(TypeError, match=r"write `buffer = ShardedReplayBuffer\.load\(\.\.\.\)`\.$"):
        sharded.load("c")
    sharded.clear()
    assert len(sharded) == 0
    sharded.close()


@pytest.mark.parametrize("mode", ["local", "global"])
def test_one_rank_is_a_replay_buffer(ranks: Ranks, mode: str) -> None:
    ranks.run(1, alone, mode, Proportional(alpha=0.7))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["local", "global"])
def test_one_rank_on_a_gpu_adds_samples_updates_and_saves(tmp_path: Path, mode: str) -> None:
    with ranks_of(1, "nccl") as found:
        found.run(1, alone_on_a_gpu, str(tmp_path / "c"), mode)


def alone_on_a_gpu(group: Any, path: str, mode: str) -> None:
    buffer = made(group, 20, mode=mode)
    assert buffer.device.type == "cuda"
    buffer.add(**rows_of(torch.arange(8)))
    for _ in range(3):
        batch = buffer.sample(4)
        assert torch.equal(batch.number, batch.key * 7 + 1)
        buffer.update_priorities(batch.key, batch.weight)
    with pytest.raises(ValueError, match="batch size"):
        buffer.sample(0)
    buffer.save(path)
    loaded = ShardedReplayBuffer.load(path, group=group, timeout=20)
    assert loaded.stats() == buffer.stats()
    assert len(loaded) == 8
    drawn = buffer.sample(4), loaded.sample(4)
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    buffer.clear()
    assert len(buffer) == 0


# updates and statistics


def updated(group: Any) -> tuple[dict[int, int], Any, list[float], int]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = made(group, 4 * size, sampler=Proportional(alpha=1.0, eps=0.0))
    add_rows(buffer, 5)
    # rank r gives key k the priority 10 r + k, twice; only rank 0 knows key 7, and no key lives at 0
    keys = [6, 8, 6, 0] if rank else [6, 7, 8, -1, 0]
    buffer.update_priorities(keys, torch.tensor([10.0 * rank + key + place / 10 for place, key in enumerate(keys)]))
    newest = add_rows(buffer, 1)
    slots = buffer.keys() // size % 4
    found = dict(zip(buffer.keys().tolist(), buffer._shard.masses()[slots].tolist(), strict=True))
    priorities = buffer.priorities(newest.tolist()).tolist()
    stats = buffer.stats()
    total = len(buffer)
    buffer.close()
    return found, stats, priorities, total


def test_updates_reach_the_rank_that_owns_the_key_and_the_last_one_wins(ranks: Ranks) -> None:
    found = ranks.run(2, updated)
    masses = {**found[0][0], **found[1][0]}
    # of rank 1 the third entry counts for key 6
    expected = dict.fromkeys((4, 5), 1.0) | {6: 16.2, 7: 7.1, 8: 18.1, 9: 1.0}
    for key, priority in expected.items():
        if key in masses:
            # priority ** 1 as masses are made, which NumPy 1 rounds otherwise than NumPy 2
            power = np.exp2(np.log2(np.float64(np.float32(priority))))
            assert masses[key] == math.floor(power * 2**20 + 0.5), key
    assert masses.keys() == {4, 6, 8, 10, 5, 7, 9, 11}
    # the largest priority ever given, whichever rank was told it
    assert found[0][2] == found[1][2] == [pytest.approx(18.1, rel=1e-6)]
    for _, stats, _, total in found:
        assert stats == found[0][1]
        assert (stats.size, stats.added, stats.stale_updates, total) == (8, 12, 3, 8)
        assert stats.max_priority == pytest.approx(18.1, rel=1e-6)


def with_stats(group: Any) -> Any:
    rank = dist.get_rank(group)
    buffer = made(group, 30, mode="global")
    add_rows(buffer, 4 + 3 * rank, priority=torch.arange(4.0 + 3 * rank))
    buffer.sample(2)
    found = buffer.stats()
    buffer.close()
    return found


def test_statistics_are_those_of_one_buffer(ranks: Ranks) -> None:
    single = ReplayBuffer(30, FIELDS, sampler=Proportional(), device="cpu")
    for rows in (4, 7, 10):
        single.add(**rows_of(torch.arange(rows)), priority=torch.arange(float(rows)))
    single.sample(6)
    for stats in ranks.run(3, with_stats):
        assert vars(stats) == pytest.approx(vars(single.stats()), nan_ok=True)


# calls and arguments that one rank gets wrong


CALLS: dict[str, Callable[[ShardedReplayBuffer, str], Any]] = {
    "sample": lambda buffer, _: buffer.sample(2),
    "update_priorities": lambda buffer, _: buffer.update_priorities([0], [1.0]),
    "stats": lambda buffer, _: buffer.stats(),
    "len": lambda buffer, _: len(buffer),
    "clear": lambda buffer, _: buffer.clear(),
    "save": lambda buffer, path: buffer.save(path),
}
WRONG: dict[str, Callable[[ShardedReplayBuffer, str], Any]] = {
    "nothing to draw": lambda buffer, _: buffer.sample(0),
    "no number": lambda buffer, _: buffer.sample("a"),  # type: ignore[arg-type]
    "another size": lambda buffer, _: buffer.sample(3),
    "beta below 0": lambda buffer, _: buffer.sample(2, beta=-1),
    "another beta": lambda buffer, _: buffer.sample(2, beta=0.25),
    "keys": lambda buffer, _: buffer.update_priorities("a", [1.0]),
    "no priority": lambda buffer, _: buffer.update_priorities([0], [math.nan]),
    "another path": lambda buffer, path: buffer.save(f"{path}2"),
    "no path": lambda buffer, path: buffer.save(None),  # type: ignore[arg-type]
}
SAID = {"another size": "batch size is 2", "another beta": "beta is None", "another path": "path is "}


def one_sided(group: Any, path: str, mode: str) -> list[tuple[str, tuple[str, str], tuple[str, str], float]]:
    """The last rank makes other calls than the first, or with wrong arguments; the buffer is as it was, and goes on."""
    last, found = dist.get_rank(group) > 0, []
    both = [made(group, mode=mode, seed=2) for _ in range(2)]
    for buffer in both:
        add_rows(buffer, 8)
    buffer, untouched = both
    meetings = {f"{one} meets {other}": (CALLS[one], CALLS[other]) for one in CALLS for other in CALLS if one != other}
    for name, call in WRONG.items():
        right = "save" if "path" in name else "update_priorities" if name in ("keys", "no priority") else "sample"
        meetings[name] = CALLS[right], call
    for name, calls in meetings.items():
        began = time.monotonic()
        told = outcome(lambda calls=calls: calls[last](buffer, path))
        seconds = time.monotonic() - began
        drawn = [each.sample(3) for each in both]
        alike = all(torch.equal(drawn[0][field], drawn[1][field]) for field in drawn[0])
        found.append((name, told, ("state", str(alike and buffer.stats() == untouched.stats())), seconds))
    found.append(("saved", ("nothing", str(os.path.exists(path))), ("state", "True"), 0.0))
    for each in both:
        each.close()
    return found


@pytest.mark.parametrize("mode", ["local", "global"])
def test_a_call_that_one_rank_gets_wrong_is_raised_by_all_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    check_one_sided(ranks.run(2, one_sided, str(tmp_path / "c"), mode))


def check_one_sided(found: Any) -> None:
    """found: what `one_sided` gave on each rank."""
    for first, last in zip(*found, strict=True):
        name, (kind, message), state, seconds = first
        assert state == last[2] == ("state", "True"), name
        assert seconds < 5, name
        if " meets " in name:
            one, other = name.split(" meets ")
            assert (kind, last[1][0]) == ("RuntimeError", "RuntimeError"), name
            assert message.startswith(f"{one}: rank 1 of 2 called {other} instead, and neither was done."), name
            assert last[1][1].startswith(f"{other}: rank 0 of 2 called {one} instead"), name
        elif name in SAID:
            assert first[1] == last[1], name
            assert kind == "ValueError"
            assert SAID[name] in message
        elif name != "saved":
            assert kind == "RuntimeError", name
            assert message.endswith(f"rank 1 of 2 failed: {last[1][0]}: {last[1][1]}"), name
            assert last[1][0] in ("ValueError", "TypeError")
        else:
            assert message == "False"


def made_differently(group: Any, path: str) -> list[tuple[tuple[str, str], float]]:
    """One rank makes or loads a buffer with what is wrong, or something else."""
    last, found = dist.get_rank(group) > 0, []
    right: dict[str, Any] = {"capacity": 10, "fields": FIELDS, "group": group, "timeout": 20}
    buffer = ShardedReplayBuffer(**right | {"capacity": 11})
    assert buffer.capacity == 10
    add_rows(buffer, 2)
    buffer.save(path)
    wrong: list[dict[str, Any]] = [
        {"capacity": "many"},
        {"capacity": 1},
        {"fields": {}},
        {"fields": dict(reversed(FIELDS.items()))},
        {"sampler": Proportional(alpha=0.5)},
        {"mode": "both"},
        {"device": "nowhere"},
        {"timeout": -1},
        {"seed": "a"},
        {"seed": 1},
        {"storage_path": 3},
    ]
    calls: list[Callable[[], Any]] = [
        lambda each=each: ShardedReplayBuffer(**(right | (each if last else {})))  # type: ignore[misc]
        for each in wrong
    ]
    calls.append(lambda: ShardedReplayBuffer.load(f"{path}/none" if last else path, group=group, timeout=20))
    calls.append(lambda: ShardedReplayBuffer.load(path, mode="both" if last else None, group=group, timeout=20))  # type: ignore[arg-type]
    calls.append(
        lambda: ShardedReplayBuffer(**right) if last else ShardedReplayBuffer.load(path, group=group, timeout=20)
    )
    for call in calls:
        began = time.monotonic()
        found.append((outcome(call), time.monotonic() - began))
    found.append((outcome(lambda: ShardedReplayBuffer.load(path, group=group, timeout=20)), 0.0))
    return found


def test_a_buffer_that_one_rank_cannot_make_is_made_by_none(ranks: Ranks, tmp_path: Path) -> None:
    found = list(zip(*ranks.run(2, made_differently, str(tmp_path / "c")), strict=True))
    for ((kind, message), seconds), (last, _) in found[:-1]:
        assert kind in ("RuntimeError", "ValueError"), (kind, last)
        assert "rank 1" in message
        assert last[0] != "nothing"
        assert seconds < 5, message
        if "failed" in message:
            # the reason is that of the rank that failed
            assert message.endswith(f"{last[0]}: {last[1]}")
    assert found[-1] == ((("nothing", ""), 0.0),) * 2
    same = "making a ShardedReplayBuffer needs the same arguments on every rank; seed is 0 on rank 0 and 1 on rank 1."
    assert ((("ValueError", same)), ("ValueError", same)) in [(first, last) for (first, _), (last, _) in found]


def refusals(group: Any) -> list[tuple[str, str]]:
    """What is raised in calls that are wrong on all ranks, or for the rows that a rank has; the buffer goes on."""
    rank = dist.get_rank(group)
    found = [outcome(lambda: made(group, 1)), outcome(lambda: made(group, sampler=RankBased(), mode="global"))]
    buffer = made(group)
    found.append(outcome(lambda: buffer.sample(3)))
    if rank:
        add_rows(buffer, 3)
    found.append(outcome(lambda: buffer.sample(3)))
    if not rank:
        add_rows(buffer, 2)
    found += [outcome(lambda: buffer[[rank, 1]]), outcome(lambda: buffer.sample(3))]
    buffer.close()
    return found


def test_errors_of_one_rank_are_raised_by_all_and_the_buffer_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusals)
    assert first[0] == second[0] == ("ValueError", "capacity must be at least 1 on each of 2 ranks; found 1.")
    assert first[1] == second[1]
    assert first[1][0] == "ValueError"
    assert 'mode="local"' in first[1][1]
    assert first[2] == second[2] == ("RuntimeError", "sample(3): the buffer holds no transitions. Add more first.")
    assert first[3] == first[2]
    assert second[3] == ("RuntimeError", f"sample: rank 0 of 2 failed: RuntimeError: {first[2][1]}")
    assert first[4] == ("KeyError", "'key 1 is held by rank 1; this is rank 0 of 2.'")
    assert second[4] == first[5] == second[5] == ("nothing", "")


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

    return [outcome(agree), outcome(read), outcome(read), outcome(lambda: agree(alike=True)), outcome(read)]


def test_a_rank_that_did_not_look_learns_of_it_with_the_next_call(ranks: Ranks) -> None:
    doubt = ("RuntimeError", "a rank failed in an earlier sample, or made another call instead.")
    nothing = ("nothing", "")
    assert ranks.run(2, doubtful) == [[nothing, doubt, nothing, nothing, nothing]] * 2


# checkpoints


def saving(group: Any, path: str, mode: str, rows: list[int]) -> dict[str, Any]:
    rank = dist.get_rank(group)
    buffer = made(group, mode=mode, seed=3)
    add_rows(buffer, rows[rank], priority=1.0 + torch.arange(rows[rank]) % 7)
    buffer.sample(3)
    buffer.save(path)
    state = {"keys": buffer.keys().numpy(), "masses": buffer._shard.masses().numpy()}
    state["next"] = batch_of(buffer.sample(3))
    buffer.close()
    return state


def loading(group: Any, path: str) -> dict[str, Any]:
    buffer = ShardedReplayBuffer.load(path, group=group, timeout=20)
    keys = buffer.keys()
    held = {"keys": keys.numpy(), "numbers": buffer[keys].number.numpy(), "mode": buffer.mode, "stats": buffer.stats()}
    slots = keys // buffer.ranks % buffer._shard.capacity
    held |= {"masses": buffer._shard.masses()[slots].numpy(), "next": batch_of(buffer.sample(3))}
    held["capacity"] = buffer.capacity
    buffer.close()
    return held


@pytest.mark.parametrize("mode", ["local", "global"])
def test_the_same_ranks_continue_exactly(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    saved = ranks.run(2, saving, str(tmp_path / "c"), mode, [15, 9])
    for before, after in zip(saved, ranks.run(2, loading, str(tmp_path / "c")), strict=True):
        assert after["mode"] == mode
        np.testing.assert_array_equal(after["keys"], before["keys"])
        for name, rows in before["next"].items():
            np.testing.assert_array_equal(after["next"][name], rows)


@pytest.mark.parametrize(("rows", "alike"), [([15, 15], True), ([15, 4], False), ([3, 3], True)])
def test_a_checkpoint_loads_on_other_ranks_and_as_one_buffer(
    ranks: Ranks, tmp_path: Path, rows: list[int], alike: bool
) -> None:
    path = str(tmp_path / "c")
    saved = ranks.run(2, saving, path, "local", rows)
    old = np.sort(np.concatenate([each["keys"] for each in saved]))
    mass = {int(key): each["masses"][key // 2 % 12] for each in saved for key in each["keys"]}
    # numbered again in the order of keys, the newest last; keys stay where all ranks had added as many
    new = np.arange(sum(rows) - old.size, sum(rows))
    if alike:
        np.testing.assert_array_equal(new, old)
    number_of = dict(zip(new.tolist(), old.tolist(), strict=True))
    single = ReplayBuffer.load(path, "cpu")
    assert single.capacity == 24
    np.testing.assert_array_equal(single.keys(), new)
    np.testing.assert_array_equal(single[new].number, old * 7 + 1)
    np.testing.assert_array_equal(single.masses()[new % 24], [mass[key] for key in old.tolist()])
    assert single.stats().mean_times_sampled == 6 / old.size
    single.sample(5)
    for size in (1, 3):
        held = ranks.run(size, loading, path)
        found = np.sort(np.concatenate([each["keys"] for each in held]))
        np.testing.assert_array_equal(found, new)
        for rank, each in enumerate(held):
            assert each["capacity"] == 24
            assert (each["keys"] % size == rank).all()
            keys = [number_of[int(key)] for key in each["keys"]]
            np.testing.assert_array_equal(each["numbers"], np.array(keys) * 7 + 1)
            np.testing.assert_array_equal(each["masses"], [mass[key] for key in keys])
    # and from one buffer to several
    single.save(tmp_path / "one")
    held = ranks.run(2, loading, str(tmp_path / "one"))
    np.testing.assert_array_equal(np.sort(np.concatenate([each["keys"] for each in held])), new)


def test_a_checkpoint_of_ranks_names_itself_to_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saving, str(tmp_path / "c"), "local", [3, 3])
    with pytest.raises(CheckpointError, match="ShardedReplayBuffer"):
        TrajectoryReplayBuffer.load(tmp_path / "c")
    first = sorted((tmp_path / "c").glob("piece*"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert {each.kind for each in ranks.tried(2, loading, str(tmp_path / "c"))} == {"CheckpointError"}


def slow_to_save(group: Any, path: str) -> float:
    """The second rank has a disk that takes three seconds."""
    buffer, sync = made(group, timeout=1), os.fsync
    add_rows(buffer, 8)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if buffer.rank == 1:
            patch.setattr(os, "fsync", lambda file: (time.sleep(3), sync(file))[1])
        buffer.save(path)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    assert min(ranks.run(2, slow_to_save, str(tmp_path / "c"))) > 2.5
    assert len(ReplayBuffer.load(tmp_path / "c", "cpu")) == 16


# messages


def messages_of(call: str, mode: str, size: int, batch: int) -> list[tuple[str, int]]:
    """What a rank sends in a call on paper, with Proportional: operations, and the bytes that it gives on average."""
    row = sum(field.row_bytes for field in FIELDS.values())
    agreed = ("all_gather", row_length(size) * 8)
    if call == "sample":
        return [agreed, ("all_to_all", size * HEADER + batch * (row + TAIL))][: 2 if mode == "global" else 1]
    # keys and priorities, the largest mass
    return [agreed, ("all_to_all", batch * 16), ("all_reduce", 8)] if call == "update" else []


def counted(group: Any, mode: str, batch: int) -> dict[str, list[tuple[str, int]]]:
    """The operations of each call, with the bytes that this rank gives to them."""
    buffer = made(group, 240, mode=mode)
    add_rows(buffer, 40)
    found: dict[str, list[tuple[str, int]]] = {}
    seen: list[tuple[str, int]] = []
    operations = {"all_gather": 1, "all_reduce": 0, "all_to_all_single": 1}

    def counting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **named: Any) -> Any:
            seen.append((name.removesuffix("_single"), given[operations[name]].nbytes))
            return operation(*given, **named)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in operations:
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        batch_of_all = buffer.sample(batch)
        for call in ("sample", "update", "add"):
            if call == "update":
                buffer.update_priorities(batch_of_all.key, batch_of_all.weight)
            elif call == "add":
                add_rows(buffer, 3)
            found[call] = seen.copy()
            seen.clear()
    buffer.close()
    with pytest.raises(RuntimeError, match=r"sample: the buffer was closed, and only .* own shard still work\.$"):
        buffer.sample(batch)
    add_rows(buffer, 3)
    return found


@pytest.mark.parametrize(("mode", "size"), [("local", 2), ("global", 3)])
def test_messages_and_bytes_are_those_on_paper(ranks: Ranks, mode: str, size: int) -> None:
    found = ranks.run(size, counted, mode, 6)
    for call in ("sample", "update", "add"):
        expected = messages_of(call, mode, size, 6)
        for rank in found:
            assert [name for name, _ in rank[call]] == [name for name, _ in expected]
        for place, (_, paper) in enumerate(expected):
            # what a rank gives depends on the draw; all ranks together give what paper says
            assert sum(rank[call][place][1] for rank in found) == size * paper


# ranks that die, or stay away


def die_at_the_end(buffer: ShardedReplayBuffer) -> None:
    """Let this rank be gone before it has taken part in the last message of an update, the largest priority."""
    reduce = buffer._group.all_reduce

    def all_reduce(tensor: torch.Tensor, *, largest: bool = False) -> Any:
        return os.kill(os.getpid(), signal.SIGKILL) if largest else reduce(tensor)

    buffer._group.all_reduce = all_reduce  # type: ignore[method-assign]


# the call that fails where the last rank is gone, and the one that its error names
DEADLY: dict[str, tuple[Callable[[Any, Any, str], Any], str]] = {
    "sample": (lambda buffer, batch, path: buffer.sample(2), "sample"),
    "update": (lambda buffer, batch, path: buffer.update_priorities(batch.key, batch.weight), "update_priorities"),
    "add": (
        lambda buffer, batch, path: (buffer.update_priorities(batch.key, batch.weight), add_rows(buffer, 1)),
        "update_priorities",
    ),
    "stats": (lambda buffer, batch, path: buffer.stats(), "stats"),
    "len": (lambda buffer, batch, path: len(buffer), "len"),
    "clear": (lambda buffer, batch, path: buffer.clear(), "clear"),
    "save": (lambda buffer, batch, path: buffer.save(path), "save"),
    "load": (lambda buffer, batch, path: ShardedReplayBuffer.load(path, timeout=4), ""),
}


def dying(group: Any, call: str, mode: str, path: str, sleeps: bool) -> tuple[tuple[str, str], float, tuple[str, str]]:
    """The last rank is killed, or sleeps, while the others make a call: what they raise, after how many seconds, and
    what a later call raises.
    """
    buffer = made(group, mode=mode, timeout=1 if sleeps else 4)
    add_rows(buffer, 8)
    batch = buffer.sample(2)
    if call == "load":
        buffer.save(path)
    if buffer.rank == buffer.ranks - 1:
        if call == "add":
            die_at_the_end(buffer)
            buffer.update_priorities(batch.key, batch.weight)
        time.sleep(3 * sleeps)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    found = outcome(lambda: DEADLY[call][0](buffer, batch, path))
    return found, time.monotonic() - began, outcome(buffer.stats)


def check_death(size: int, call: str, mode: str, path: Path, sleeps: bool = False) -> None:
    with ranks_of(size) as ranks:
        found = ranks.tried(size, dying, call, mode, str(path / "c"), sleeps)
    assert found[-1] == Gone(-signal.SIGKILL)
    name, most = DEADLY[call][1], 1 if sleeps else 4
    for rank, each in enumerate(found[:-1]):
        assert not isinstance(each, (Raised, Gone)), each
        (kind, message), seconds, later = each
        assert kind == "RuntimeError"
        assert f"{name}: rank {rank} of {size} lost another rank, or waited {most} s" in message or call == "load"
        assert f"lost another rank, or waited {most} s" in message
        assert 0.9 * sleeps < seconds < most + 1.5
        if call != "load":
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
