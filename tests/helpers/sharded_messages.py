"""What a `ShardedReplayBuffer` sends in a call, counted on paper."""

from __future__ import annotations

from typing import NamedTuple

from gpu_replay.sharded.global_draw import HEADER, TAIL
from gpu_replay.sharded.group import row_length


class Message(NamedTuple):
    """One operation of the group, and the bytes that a rank gives to it: all ranks give as many on average."""

    operation: str
    bytes: int


def messages_of(call: str, mode: str, ranks: int, batch: int, row: int) -> list[Message]:
    """The messages of one call on R ranks, for batches of B rows of `row` stored bytes each, with Proportional."""
    agreed = Message("all_gather", row_length(ranks) * 8)
    if call == "sample":
        rows = [Message("all_to_all", ranks * HEADER + batch * (row + TAIL))]
        return [agreed, *(rows if mode == "global" else [])]
    if call == "update":
        # keys and priorities, the largest mass
        return [agreed, Message("all_to_all", batch * 16), Message("all_reduce", 8)]
    return []
