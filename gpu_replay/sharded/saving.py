"""Saving and loading the shards of all ranks as one checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from gpu_replay.checkpoint.format import SHARD_BYTES, write_shards, writing
from gpu_replay.checkpoint.joint import BufferCheckpoint, Share, name_of
from gpu_replay.checkpoint.manifest import described, shards_from, write_manifest
from gpu_replay.checkpoint.shards import check_length, split_into_shards, synchronize
from gpu_replay.checkpoint.state import VERSION
from gpu_replay.errors import CheckpointError
from gpu_replay.sharded.group import Contribution, Group
from gpu_replay.sharded.shard import Shard
from gpu_replay.validation import check_path


def save(group: Group, shard: Shard, path: str | PathLike[str], config: dict[str, Any], seed: int) -> None:
    """Write the checkpoint of all ranks: rank 0 makes the folder, each writes its files, rank 0 writes the manifest."""
    name, state = "save", shard._buffer_state()
    with ExitStack() as stack:
        folder = ""

        def room() -> Contribution:
            nonlocal folder
            if group.rank == 0:
                folder = str(stack.enter_context(writing(path))[0])
            return {"path": str(check_path("path", path))}, None

        group.agree(name, room)
        place, counters = Path(group.all_gather_text(folder)[0]), state.lasting()

        def write() -> str:
            views = {name_of(group.rank, each): view for each, view in state.views(counters["ADDED"]).items()}
            plan = split_into_shards(views, SHARD_BYTES)
            synchronize(views.values())
            return json.dumps([counters, described(write_shards(place, plan, views))])

        answers = [json.loads(each) for each in group.all_gather_text(group.run_on_all(write, name))]

        def finish() -> Contribution:
            if group.rank == 0:
                shards = [shard for _, each in answers for shard in shards_from(each)]
                try:
                    for each in shards:
                        check_length(place, each)
                except CheckpointError as error:
                    raise CheckpointError(f"all ranks need the same file system; rank 0 does not see {error}") from None
                manifest = {"version": VERSION, "settings": config, "seed": seed, "counters": [c for c, _ in answers]}
                write_manifest(place, manifest, shards)
                stack.close()
            return {}, None

        group.agree(name, finish)


def fill(group: Group, shard: Shard, saved: BufferCheckpoint) -> None:
    """Load each rank's part: its own saved state, or, on another number of ranks, rows dealt out by their keys."""
    state, share = shard._buffer_state(), Share(group.size, group.rank, shard.capacity)
    group.run_on_all(lambda: saved.restore(state, share, shard.seed), "load")
