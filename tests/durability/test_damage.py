"""Nothing damaged, foreign or misfitting is taken for a checkpoint, and the message names it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit, example, pieces_of, read_everything, saved

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import Checkpoint, read_checkpoint, read_manifest, write_checkpoint


def changed(data: bytes, place: float) -> bytes:
    place = int(place * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


# what becomes of the bytes of a file, at a place from 0 to 1
DAMAGE: dict[str, Callable[[bytes, float], bytes]] = {
    "cut": lambda data, place: data[: int(place * (len(data) - 1))],
    "changed": changed,
    "longer": lambda data, place: data + bytes(1 + int(98 * place)),
}


@pytest.mark.parametrize("damage, place", [*itertools.product(DAMAGE, (0, 0.01, 0.5, 1)), ("missing", 0)])
def test_a_damaged_piece_is_refused_by_name(tmp_path: Path, damage: str, place: float) -> None:
    saved(tmp_path / "c")
    pieces = pieces_of(tmp_path / "c")
    assert len(pieces) > 2
    for piece in pieces:
        kept = piece.read_bytes()
        piece.unlink()
        if damage in DAMAGE:
            piece.write_bytes(DAMAGE[damage](kept, place))
        with pytest.raises(CheckpointError, match=piece.name):
            read_everything(tmp_path / "c")
        piece.write_bytes(kept)
    read_everything(tmp_path / "c")


def test_no_changed_byte_of_the_manifest_goes_unnoticed(tmp_path: Path, full: bool) -> None:
    write_checkpoint(tmp_path / "c", {"added": 12345, "alpha": 0.6, "name": "obs"}, {"t": torch.arange(4)})
    file = tmp_path / "c" / "manifest.json"
    whole = file.read_bytes()
    for offset in range(0, len(whole), 1 if full else 3):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        file.write_bytes(changed)
        try:
            checkpoint = read_checkpoint(tmp_path / "c")
            unchanged = (checkpoint.manifest, checkpoint.read_all()["t"].tolist())
        except CheckpointError:
            continue
        # blanks between the values may change: they say nothing
        assert unchanged == ({"added": 12345, "alpha": 0.6, "name": "obs"}, [0, 1, 2, 3])
        assert json.loads(bytes(changed)) == json.loads(whole)


MANIFESTS = {
    "no JSON": (b"{]", "not valid JSON"),
    "too deep": (b"[" * 100_000, "not valid JSON"),
    "another program's": (b'{"format": "other", "version": 1}', "not a checkpoint of gpu_replay"),
    "a later version": (b'{"format": "gpu_replay checkpoint", "version": 99}', "99; .* A newer"),
    "no version": (b'{"format": "gpu_replay checkpoint", "version": true}', "version True; .* that wrote it"),
    "no body": (b'{"format": "gpu_replay checkpoint", "version": 1}', "changed after it was written"),
}


@pytest.mark.parametrize(("content", "message"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "c")


def overlap(body: dict[str, Any]) -> None:
    """A row in two pieces, in a body whose pieces keep their lengths."""
    for piece in body["pieces"]:
        if piece["holds"].get("obs", [0])[0]:
            piece["holds"]["obs"] = [each - 1 for each in piece["holds"]["obs"]]


# every other entry of a manifest is edited in `test_state.py`
@pytest.mark.parametrize(
    "change",
    [overlap, lambda body: body["pieces"].pop(), lambda body: body["tensors"]["obs"].update(shape=[101, 7, 9])],
    ids=["rows in two pieces", "a piece less", "more rows than pieces hold"],
)
def test_pieces_that_do_not_hold_every_row_once_are_refused(tmp_path: Path, change: Any) -> None:
    saved(tmp_path / "c")
    edit(tmp_path / "c", change)
    with pytest.raises(CheckpointError):
        read_everything(tmp_path / "c")


def test_reading_what_another_save_replaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tmp_path / "c")
    saved(tmp_path / "c", seed=9)
    with pytest.raises(CheckpointError, match="replaced by another save.* Open it again"):
        checkpoint.read_all()
    seeds = iter((0, 0))

    def overtaken(folder: Path) -> Checkpoint:
        found = read_manifest(folder)
        for seed in seeds:
            saved(folder, seed)
        return found

    monkeypatch.setattr("gpu_replay.checkpoint.format.read_manifest", overtaken)
    with pytest.raises(CheckpointError, match="replaced by another save.* Open it again"):
        read_checkpoint(tmp_path / "c")
    assert torch.equal(read_checkpoint(tmp_path / "c").read_all()["obs"], example()["obs"])
