"""`ShardedReplayBuffer` where ranks die, stay away or take long, and the messages that its calls send."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from ranks import Gone, Raised, Ranks, ranks_of  # noqa: E402
from sharded_work import FIELDS, add_rows  # noqa: E402

from gpu_replay import Proportional, ReplayBuffer, ShardedReplayBuffer  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(3) as found:
        yield found


# ranks that die


def dying(group: Any, call: str, mode: str, path: str) -> tuple[str, str, float]:
    """The last rank is killed while the others make a call; what they raise, and after how many seconds."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = ShardedReplayBuffer(24, FIELDS, sampler=Proportional(), mode=mode, group=group, timeout=4)  # type: ignore[arg-type]
    add_rows(buffer, 8)
    batch = buffer.sample(2)
    if call == "load":
        buffer.save(path)
    if rank == size - 1:
        if call == "add":
            # it is gone before it has taken part in what the update agrees on
            buffer._group.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            buffer.update_priorities(batch.key, batch.weight)
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Any] = {
        "sample": lambda: buffer.sample(2),
        "update": lambda: buffer.update_priorities(batch.key, batch.weight),
        "add": lambda: (buffer.update_priorities(batch.key, batch.weight), add_rows(buffer, 1)),
        "stats": buffer.stats,
        "len": lambda: len(buffer),
        "clear": buffer.clear,
        "save": lambda: buffer.save(path),
        "load": lambda: ShardedReplayBuffer.load(path, group=group, timeout=4),
    }
    began = time.monotonic()
    try:
        calls[call]()
    except Exception as error:
        found = type(error).__name__, str(error), time.monotonic() - began
    else:
        return "nothing", "", 0.0
    if call != "load":
        # nothing hangs afterwards either
        with pytest.raises(RuntimeError, match="out of step"):
            buffer.sample(2)
    return found


def check_death(size: int, call: str, mode: str, path: Path) -> None:
    with ranks_of(size) as ranks:
        found = ranks.tried(size, dying, call, mode, str(path / "c"))
    assert found[-1] == Gone(-signal.SIGKILL)
    for each in found[:-1]:
        assert not isinstance(each, (Raised, Gone)), each
        kind, message, seconds = each
        assert kind == "RuntimeError"
        assert "lost another rank, or waited 4 s" in message
        assert seconds < 5
    if call == "save":
        assert not (path / "c").exists()


def test_a_killed_rank_makes_the_others_raise(tmp_path: Path) -> None:
    check_death(2, "sample", "local", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sample", "update", "add", "stats", "len", "clear", "save", "load"])
@pytest.mark.parametrize("mode", ["local", "global"])
def test_a_killed_rank_makes_the_others_raise_in_every_call(tmp_path: Path, call: str, mode: str) -> None:
    check_death(3, call, mode, tmp_path)


def absent(group: Any) -> tuple[str, float]:
    """The last rank lives but does not make the call."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = ShardedReplayBuffer(24, FIELDS, group=group, timeout=1)
    add_rows(buffer, 8)
    if rank == size - 1:
        time.sleep(3)
        return "absent", 0.0
    began = time.monotonic()
    try:
        buffer.sample(2)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    with ranks_of(2) as ranks:
        message, seconds = ranks.tried(2, absent)[0]
    assert "waited 1 s" in message
    assert 0.9 < seconds < 2.5


def slow_to_save(group: Any, path: str) -> float:
    import gpu_replay.sharded.saving as module

    write = module.write_shards
    if dist.get_rank(group) == 1:
        module.write_shards = lambda *arguments: (time.sleep(3), write(*arguments))[1]  # type: ignore[assignment]
    try:
        buffer = ShardedReplayBuffer(24, FIELDS, group=group, timeout=1)
        add_rows(buffer, 8)
        began = time.monotonic()
        buffer.save(path)
        return time.monotonic() - began
    finally:
        module.write_shards = write


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    assert min(ranks.run(2, slow_to_save, str(tmp_path / "c"))) > 2.5
    assert len(ReplayBuffer.load(tmp_path / "c", "cpu")) == 16


# messages


def counted(group: Any, mode: str, batch: int) -> dict[str, list[tuple[str, int]]]:
    """The operations of each call, with the bytes that this rank gives to them."""
    buffer = ShardedReplayBuffer(240, FIELDS, sampler=Proportional(), mode=mode, group=group, timeout=20)  # type: ignore[arg-type]
    add_rows(buffer, 40)
    found: dict[str, list[tuple[str, int]]] = {}
    seen: list[tuple[str, int]] = []
    reduce, exchange = dist.all_reduce, dist.all_to_all_single
    dist.all_reduce = lambda tensor, *args, **named: (
        seen.append(("all_reduce", tensor.nbytes)),
        reduce(tensor, *args, **named),
    )[1]
    dist.all_to_all_single = lambda out, given, *args, **named: (
        seen.append(("all_to_all", given.nbytes)),
        exchange(out, given, *args, **named),
    )[1]
    try:
        drawn = buffer.sample(batch)
        found["sample"], seen = seen.copy(), seen
        seen.clear()
        buffer.update_priorities(drawn.key, drawn.weight)
        found["update"] = seen.copy()
        seen.clear()
        add_rows(buffer, 3)
        found["add"] = seen.copy()
    finally:
        dist.all_reduce, dist.all_to_all_single = reduce, exchange
    buffer.close()
    with pytest.raises(RuntimeError, match=r"sample: the buffer was closed, and only .* own shard still work\.$"):
        buffer.sample(batch)
    add_rows(buffer, 3)
    return found


@pytest.mark.parametrize(("mode", "size"), [("local", 2), ("global", 3)])
def test_messages_and_bytes_are_those_on_paper(ranks: Ranks, mode: str, size: int) -> None:
    from gpu_replay.bench.sharding_cost import messages_of

    row = sum(field.row_bytes for field in FIELDS.values())
    found = ranks.run(size, counted, mode, 6)
    for call in ("sample", "update", "add"):
        expected = messages_of(call, mode, size, 6, row)
        for rank in found:
            assert [name for name, _ in rank[call]] == [message.operation for message in expected]
        for place, message in enumerate(expected):
            # what a rank gives depends on the draw; all ranks together give what paper says
            assert sum(rank[call][place][1] for rank in found) == size * message.bytes
