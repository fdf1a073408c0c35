"""What a `ShardedReplayBuffer` sends in a step: messages and bytes, and how long they take at least on given links.

    python -m gpu_replay.bench.sharding_cost

By calculation: `tests/test_sharded_buffer.py` counts the messages and bytes on gloo; the times follow from the stated
rates of links and were measured nowhere.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpu_replay.sharded.global_draw import HEADER, TAIL
from gpu_replay.sharded.shard import Column

Mode = Literal["local", "global"]
Call = Literal["sample", "update", "add"]


class Message(NamedTuple):
    """One operation of the group, and the bytes that a rank gives to it: all ranks give as many on average."""

    operation: Literal["all_reduce", "all_to_all"]
    bytes: int


class Link(NamedTuple):
    """Bytes a second out of one GPU, and seconds that a message between two of them takes at least."""

    name: str
    rate: float
    latency: float


# stated by their makers, one direction; the share of one of 8 GPUs of a node in what leaves it
LINKS = (
    Link("8 GPUs, NVLink (450 GB/s each way)", 450e9, 10e-6),
    Link("64 GPUs, 400 Gb/s for each GPU", 50e9, 30e-6),
    Link("64 GPUs, 400 Gb/s for each node of 8", 50e9 / 8, 30e-6),
)


def messages_of(call: str, mode: str, ranks: int, batch: int, row: int) -> list[Message]:
    """The messages of one call on R ranks, for batches of B rows of `row` stored bytes each, with Proportional."""
    if call == "sample":
        # every rank gives a table in which its own row is filled
        agreed = [Message("all_reduce", ranks * Column.COUNT * 8)]
        if mode == "local":
            return agreed
        return [*agreed, Message("all_to_all", ranks * HEADER + batch * (row + TAIL))]
    if call == "update":
        # how many keys go to each rank, keys and priorities, the largest mass
        return [Message("all_to_all", ranks * 16), Message("all_to_all", batch * 16), Message("all_reduce", 8)]
    return []


def wire_bytes(message: Message, ranks: int) -> float:
    """What of a message leaves a rank: an all-reduce sends it twice, less its own part; of an exchange it keeps 1/R."""
    return message.bytes * (1 - 1 / ranks) * (2 if message.operation == "all_reduce" else 1)


def least_seconds(messages: list[Message], ranks: int, link: Link) -> float:
    """One latency for each message and its bytes at the link's rate, one after the other."""
    return sum(link.latency + wire_bytes(message, ranks) / link.rate for message in messages)


def table() -> str:
    """A table in Markdown: bytes and least times of a step, sample and update, for rows of two sizes."""
    lines = [
        "| link | mode | rows | messages | bytes out of a GPU | least time |",
        "| ---- | ---- | ---- | -------: | -----------------: | ---------: |",
    ]
    for link in LINKS:
        ranks = int(link.name.split()[0])
        for mode in ("local", "global"):
            for what, batch, row in (("512 of 49 B", 512, 49), ("512 of 56 KB", 512, 2 * 4 * 84 * 84 + 13)):
                if mode == "local" and row > 100:
                    continue
                found = messages_of("sample", mode, ranks, batch, row) + messages_of("update", mode, ranks, batch, row)
                size = sum(wire_bytes(message, ranks) for message in found)
                least = least_seconds(found, ranks, link)
                rows = "512 of any size" if mode == "local" else what
                lines.append(f"| {link.name} | {mode} | {rows} | {len(found)} | {size:,.0f} | {least * 1e6:,.0f} µs |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
