"""Nothing damaged, foreign or misfitting is taken for a checkpoint, and the message names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import MANIFEST, example, pieces_of, read_everything, saved

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint


def changed(data: bytes, place: float) -> bytes:
    place = int(place * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


# what becomes of the bytes of a file; None for a file that is gone, and a folder in its place
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda data: data[:-1],
    "lengthened": lambda data: data + b"\0",
    "emptied": lambda data: b"",
    "missing": lambda data: None,
    "a folder": lambda data: None,
    "changed at its first byte": lambda data: changed(data, 0.0),
    "changed in its header": lambda data: changed(data, 0.01),
    "changed in the middle": lambda data: changed(data, 0.5),
    "changed at its last byte": lambda data: changed(data, 1.0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_piece_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    saved(tmp_path / "c")
    pieces = pieces_of(tmp_path / "c")
    assert len(pieces) > 2
    for piece in pieces:
        kept = piece.read_bytes()
        data = DAMAGE[damage](kept)
        piece.unlink()
        if data is not None:
            piece.write_bytes(data)
        elif damage == "a folder":
            piece.mkdir()
        with pytest.raises(CheckpointError, match=piece.name):
            read_everything(tmp_path / "c")
        if damage == "a folder":
            piece.rmdir()
        piece.write_bytes(kept)
    read_everything(tmp_path / "c")


def test_a_piece_of_another_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    other = {name: tensor.roll(1) if tensor.dim() else tensor + 1 for name, tensor in example().items()}
    write_checkpoint(tmp_path / "b", MANIFEST, other, shard_bytes=5000)
    for own, foreign in zip(pieces_of(tmp_path / "a"), pieces_of(tmp_path / "b"), strict=True):
        kept = own.read_bytes()
        assert len(kept) == foreign.stat().st_size
        shutil.copy(foreign, own)
        with pytest.raises(CheckpointError, match=own.name):
            read_everything(tmp_path / "a")
        own.write_bytes(kept)
    read_everything(tmp_path / "a")


def test_a_safetensors_file_that_was_put_there_is_refused_and_other_files_survive_saves(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("lr 3e-4")
    saved(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").write_bytes(b"mine")
    for call in (read_checkpoint, saved):
        with pytest.raises(CheckpointError, match="foreign piece, model.safetensors"):
            call(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "c" / "notes.txt").read_text() == "lr 3e-4"


def test_no_changed_byte_of_the_manifest_goes_unnoticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"added": 12345, "alpha": 0.6, "name": "obs"}, {"t": torch.arange(4)})
    file = tmp_path / "c" / "manifest.json"
    whole = file.read_bytes()
    for offset in range(len(whole)):
        for bit in (1, 1 << offset % 8):
            changed = bytearray(whole)
            changed[offset] ^= bit
            file.write_bytes(changed)
            try:
                checkpoint = read_checkpoint(tmp_path / "c")
                unchanged = (checkpoint.manifest, checkpoint.read("t").tolist())
            except CheckpointError:
                continue
            # blanks between the values may change: they say nothing
            assert unchanged == ({"added": 12345, "alpha": 0.6, "name": "obs"}, [0, 1, 2, 3])
            assert json.loads(bytes(changed)) == json.loads(whole)


MANIFESTS = {
    "no JSON": (b"{]", "not valid JSON"),
    "no text": (b"\xff\xfe\x00", "not valid JSON"),
    "nothing": (b"", "not valid JSON"),
    "too deep": (b"[" * 100_000, "not valid JSON"),
    "a list": (b"[1]", "not a checkpoint of gpu_replay"),
    "another program's": (b'{"format": "other", "version": 1}', "not a checkpoint of gpu_replay"),
    "a later version": (b'{"format": "gpu_replay checkpoint", "version": 99}', "schema version 99; .* reads version 1"),
    "no body": (b'{"format": "gpu_replay checkpoint", "version": 1}', "changed after it was written"),
}


@pytest.mark.parametrize(("content", "message"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "c")


PATHS = {"none": "there is no checkpoint", "file": "is not a", "folder": "manifest.json is missing"}


@pytest.mark.parametrize("name, message", PATHS.items())
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("obs", (100, 7, 8), torch.uint8),
        ("obs", (100 * 63,), torch.uint8),
        ("obs", (100, 7, 9), torch.int8),
        ("step", (1,), torch.int64),
    ],
)
def test_reading_into_something_else_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    checkpoint = saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"tensor '{name}' .* asked to read it into {dtype}"):
        checkpoint.read_into(name, torch.empty(shape, dtype=dtype))
    with pytest.raises(CheckpointError, match="holds no tensor 'oops'; it holds .*'obs'"):
        checkpoint.read("oops")
