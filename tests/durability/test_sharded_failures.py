"""`ShardedReplayBuffer` where ranks die, stay away or take long, and the messages that its calls send."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
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
from gpu_replay.sharded.group import Group  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(3) as found:
        yield found


# ranks that die


def die_at_the_end(buffer: ShardedReplayBuffer) -> None:
    """Let this rank be gone before it has taken part in the last message of an update, the largest priority."""
    reduce = buffer._group.all_reduce

    def all_reduce(tensor: torch.Tensor, *, largest: bool = False) -> Any:
        return os.kill(os.getpid(), signal.SIGKILL) if largest else reduce(tensor)

    buffer._group.all_reduce = all_reduce  # type: ignore[method-assign]


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
            die_at_the_end(buffer)
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


# calls that one rank gets wrong


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """What a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


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
    "another path": lambda buffer, path: buffer.save(f"{path}2"),
    "no path": lambda buffer, path: buffer.save(None),  # type: ignore[arg-type]
}
SAID = {"another size": "batch size is 2", "another beta": "beta is None", "another path": "path is "}


def one_sided(group: Any, path: str, mode: str) -> list[tuple[str, tuple[str, str], tuple[str, str], float]]:
    """The last rank makes other calls than the first, or with wrong arguments; the buffer is as it was, and goes on."""
    last, found = dist.get_rank(group) > 0, []
    both = [
        ShardedReplayBuffer(24, FIELDS, sampler=Proportional(), mode=mode, group=group, seed=2, timeout=20)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    for buffer in both:
        add_rows(buffer, 8)
    buffer, untouched = both
    meetings = {f"{one} meets {other}": (CALLS[one], CALLS[other]) for one in CALLS for other in CALLS if one != other}
    for name, call in WRONG.items():
        right = "save" if "path" in name else "update_priorities" if name == "keys" else "sample"
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
    buffer = ShardedReplayBuffer(**right)
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


def doubtful(group: Any) -> list[tuple[str, str]]:
    """As on GPUs: a rank that does not look at what the others told, and learns of it from the next call."""
    last = dist.get_rank(group) > 0
    ranks = Group(group, "cpu", 20)

    def agree(name: str = "sample", **named: Any) -> None:
        with ranks.call(name):
            ranks.agree(name, lambda: ({"beta": last and not named.get("alike")}, None), late=True, unread=True)

    def read() -> None:
        with ranks.call("len"):
            ranks.agree("len", lambda: ({}, None))

    return [outcome(agree), outcome(read), outcome(read), outcome(lambda: agree(alike=True)), outcome(read)]


def test_a_rank_that_did_not_look_learns_of_it_with_the_next_call(ranks: Ranks) -> None:
    doubt = ("RuntimeError", "a rank failed in an earlier sample, or made another call instead.")
    nothing = ("nothing", "")
    assert ranks.run(2, doubtful) == [[nothing, doubt, nothing, nothing, nothing]] * 2


def lost(group: Any) -> list[tuple[str, str]]:
    """The other rank is gone before all know of the largest priority."""
    buffer = ShardedReplayBuffer(24, FIELDS, sampler=Proportional(), group=group, timeout=1)
    add_rows(buffer, 8)
    if dist.get_rank(group):
        die_at_the_end(buffer)
    buffer.update_priorities([0], [2.0])
    return [outcome(lambda: buffer.sample(2)), outcome(buffer.stats)]


def test_what_failed_first_is_what_later_calls_say() -> None:
    with ranks_of(2) as ranks:
        first, later = ranks.tried(2, lost)[0]
    assert first[1].startswith("update_priorities: rank 0 of 2 lost another rank, or waited 1 s")
    assert later == (
        "RuntimeError",
        "stats: an earlier call failed (update_priorities); the ranks are out of step. "
        "Load a checkpoint in new processes.",
    )


# messages


def counted(group: Any, mode: str, batch: int) -> dict[str, list[tuple[str, int]]]:
    """The operations of each call, with the bytes that this rank gives to them."""
    buffer = ShardedReplayBuffer(240, FIELDS, sampler=Proportional(), mode=mode, group=group, timeout=20)  # type: ignore[arg-type]
    add_rows(buffer, 40)
    found: dict[str, list[tuple[str, int]]] = {}
    seen: list[tuple[str, int]] = []
    operations = {"all_gather": 1, "all_reduce": 0, "all_to_all_single": 1}

    def counting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **named: Any) -> Any:
            seen.append((name.removesuffix("_single"), given[operations[name]].nbytes))
            return operation(*given, **named)

        return count

    before = {name: getattr(dist, name) for name in operations}
    for name, operation in before.items():
        setattr(dist, name, counting(name, operation))
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
        for name, operation in before.items():
            setattr(dist, name, operation)
    buffer.close()
    with pytest.raises(RuntimeError, match=r"sample: the buffer was closed, and only .* own shard still work\.$"):
        buffer.sample(batch)
    add_rows(buffer, 3)
    return found


@pytest.mark.parametrize(("mode", "size"), [("local", 2), ("global", 3)])
def test_messages_and_bytes_are_those_on_paper(ranks: Ranks, mode: str, size: int) -> None:
    from sharded_messages import messages_of

    row = sum(field.row_bytes for field in FIELDS.values())
    found = ranks.run(size, counted, mode, 6)
    for call in ("sample", "update", "add"):
        expected = messages_of(call, mode, size, 6, row)
        for rank in found:
            assert [name for name, _ in rank[call]] == [message.operation for message in expected]
        for place, message in enumerate(expected):
            # what a rank gives depends on the draw; all ranks together give what paper says
            assert sum(rank[call][place][1] for rank in found) == size * message.bytes
