"""`ShardedReplayBuffer` on several ranks: weights, updates, errors, statistics, checkpoints, dead ranks, messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from ranks import Ranks, ranks_of  # noqa: E402
from sharded_work import FIELDS, add_rows, batch_of, life, rows_of  # noqa: E402

from gpu_replay import (  # noqa: E402
    CheckpointError,
    Proportional,
    RankBased,
    ReplayBuffer,
    ShardedReplayBuffer,
    Uniform,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(3) as found:
        yield found


# local mode


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
        buffer = ShardedReplayBuffer(40, FIELDS, sampler=sampler, group=group, seed=1, timeout=20)
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
    sharded = ShardedReplayBuffer(20, FIELDS, sampler=sampler, mode=mode, group=group, seed=5, timeout=20)  # type: ignore[arg-type]
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
    buffer = ShardedReplayBuffer(20, FIELDS, sampler=Proportional(), mode=mode, group=group, timeout=20)  # type: ignore[arg-type]
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
    sampler = Proportional(alpha=1.0, eps=0.0)
    buffer = ShardedReplayBuffer(4 * size, FIELDS, sampler=sampler, group=group, timeout=20)
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
    buffer = ShardedReplayBuffer(30, FIELDS, sampler=Proportional(), mode="global", group=group, timeout=20)
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


# errors


def refusals(group: Any) -> list[tuple[str, str]]:
    """What is raised in calls that one rank or all get wrong; the buffer goes on after each."""
    rank = dist.get_rank(group)
    found = []

    def note(call: Any, *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("nothing", ""))

    def made(capacity: int = 10, **named: Any) -> Any:
        return ShardedReplayBuffer(capacity, FIELDS, group=group, timeout=20, **named)

    note(made, seed=rank)
    note(made, 1)
    note(made, sampler=RankBased(), mode="global")
    buffer = made(11, sampler=Proportional())
    found.append(("capacity", str(buffer.capacity)))
    note(buffer.sample, 3)
    if rank:
        add_rows(buffer, 3)
    note(buffer.sample, 3)
    if not rank:
        add_rows(buffer, 2)
    note(buffer.sample, 3 + rank)
    note(buffer.update_priorities, [0], [math.nan if rank else 1.0])
    note(buffer.__getitem__, [rank, 1])
    note(buffer.sample, 3)
    buffer.close()
    note(buffer.sample, 3)
    return found


def test_errors_of_one_rank_are_raised_by_all_and_the_buffer_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusals)
    made = "making a ShardedReplayBuffer needs the same arguments on every rank; seed is 0 on rank 0 and 1 on rank 1."
    disagree = ("ValueError", made)
    assert first[0] == second[0] == disagree
    assert first[1] == second[1] == ("ValueError", "capacity must be at least 1 on each of 2 ranks; found 1.")
    assert first[2][0] == "ValueError"
    assert 'mode="local"' in first[2][1]
    assert first[3] == second[3] == ("capacity", "10")
    assert first[4] == second[4] == ("RuntimeError", "sample(3): the buffer holds no transitions. Add more first.")
    assert first[5] == first[4]
    assert second[5] == ("RuntimeError", f"sample: rank 0 of 2 failed: RuntimeError: {first[4][1]}")
    batches = (
        "ValueError",
        "sample needs the same arguments on every rank; batch size is 3 on rank 0 and 4 on rank 1.",
    )
    assert first[6] == second[6] == batches
    assert second[7][0] == "ValueError"
    assert first[7][0] == "RuntimeError"
    assert "rank 1 of 2 failed" in first[7][1]
    assert first[8] == ("KeyError", "'key 1 is held by rank 1; this is rank 0 of 2.'")
    assert second[8] == ("nothing", "")
    assert first[9] == second[9] == ("nothing", "")
    assert first[10][0] == second[10][0] == "RuntimeError"


def test_without_a_process_group_it_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedReplayBuffer(10, FIELDS)


# checkpoints


def saving(group: Any, path: str, mode: str, rows: list[int]) -> dict[str, Any]:
    rank = dist.get_rank(group)
    buffer = ShardedReplayBuffer(24, FIELDS, sampler=Proportional(), mode=mode, group=group, seed=3, timeout=20)  # type: ignore[arg-type]
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
    from gpu_replay import TrajectoryReplayBuffer

    ranks.run(2, saving, str(tmp_path / "c"), "local", [3, 3])
    with pytest.raises(CheckpointError, match="ShardedReplayBuffer"):
        TrajectoryReplayBuffer.load(tmp_path / "c")
    first = sorted((tmp_path / "c").glob("piece*"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert {each.kind for each in ranks.tried(2, loading, str(tmp_path / "c"))} == {"CheckpointError"}
