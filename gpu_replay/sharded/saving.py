"""Saving and loading the shards of all ranks as one checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

from gpu_replay.checkpoint.config import field_from, sampler_from
from gpu_replay.checkpoint.format import SHARD_BYTES, write_shards, writing
from gpu_replay.checkpoint.joint import JoinedSaved, JointCheckpoint, Place, name_of
from gpu_replay.checkpoint.manifest import described, shards_from, write_manifest
from gpu_replay.checkpoint.shards import check_length, plan_shards, settle
from gpu_replay.checkpoint.state import VERSION, BufferState
from gpu_replay.errors import CheckpointError
from gpu_replay.sharded.group import Agreed, Group
from gpu_replay.sharded.shard import Shard


def save(group: Group, shard: Shard, path: str | PathLike[str], config: dict[str, Any], seed: int) -> None:
    """Write the checkpoint of all ranks: rank 0 makes room, each writes its files, rank 0 writes the manifest."""
    name, own = "save", None
    state = shard._buffer_state()
    with ExitStack() as stack:
        folder, counters = "", state.lasting()
        if group.rank == 0:
            try:
                folder = str(stack.enter_context(writing(path))[0])
            except Exception as error:
                own = error
        told = [json.loads(each) for each in group.tell(json.dumps([folder, _said(own)]))]
        group.agree([error for _, error in told], own, name)
        place = Path(told[0][0])
        views = {name_of(group.rank, each): view for each, view in state.views(counters["ADDED"]).items()}
        plan = plan_shards(views, SHARD_BYTES)
        settle(views.values())
        written = group.together(lambda: write_shards(place, plan, views), name)
        answers = [json.loads(each) for each in group.tell(json.dumps([counters, described(written)]))]
        if group.rank == 0:
            try:
                shards = [shard for _, each in answers for shard in shards_from(each)]
                for each in shards:
                    _require_visible(place, each)
                manifest = {"version": VERSION, "settings": config, "seed": seed, "counters": [c for c, _ in answers]}
                write_manifest(place, manifest, shards)
                stack.close()
            except Exception as error:
                own = error
        group.agree([each or None for each in group.tell(_said(own) or "")], own, name)


def _said(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _require_visible(folder: Path, shard: Any) -> None:
    try:
        check_length(folder, shard)
    except CheckpointError as error:
        raise CheckpointError(
            f"rank 0 does not see what another rank wrote to {folder}; all need the same file system: {error}"
        ) from None


def load_arguments(found: JointCheckpoint) -> dict[str, Any]:
    """What to make a ShardedReplayBuffer with that is to hold this checkpoint; CheckpointError for no such settings."""
    try:
        fields = {name: field_from(each) for name, each in found.config["fields"].items()}
        mode = cast(Literal["local", "global"], found.config.get("mode", "local"))
        sampler = sampler_from(found.config["sampler"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{found.path}: its settings are not those of a buffer: {error}") from error
    return {"capacity": found.capacity, "fields": fields, "sampler": sampler, "mode": mode, "seed": found.seed}


def fill(group: Group, shard: Shard, found: JointCheckpoint) -> None:
    """Give each rank its part of a checkpoint: what it saved itself, or rows dealt by their numbers."""
    name = "load"
    if len(set(group.tell(found.checkpoint.sha256))) > 1:
        raise Agreed(CheckpointError(f"{found.path} is not the same checkpoint on every rank. Load it again."))
    state = shard._buffer_state()
    if found.ranks == group.size:
        group.together(lambda: _fill_own(state, found, group.rank, shard.seed), name)
    else:
        joined = JoinedSaved(found)
        joined.seed = shard.seed
        place = Place(group.size, group.rank, shard.capacity)
        group.together(lambda: joined.fill_as(state, place), name)


def _fill_own(state: BufferState, found: JointCheckpoint, rank: int, seed: int) -> None:
    counters = found.saved[rank]
    views = state.views(counters["ADDED"])
    found.checkpoint.fill({found.tensor_name(rank, each): view for each, view in views.items()})
    try:
        state.check(counters, views)
    except ValueError as error:
        raise CheckpointError(f"{found.path}: what it holds is no state of a buffer: {error}") from error
    state.finish(counters, seed)
