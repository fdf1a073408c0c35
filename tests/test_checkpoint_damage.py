"""Nothing damaged, foreign or misfitting is taken for a checkpoint, and the message names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import MANIFEST, example, pieces_of, read_everything, saved
from torch import Tensor

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def change(offset: float) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(offset * (len(data) - 1))] ^= 0x10
        file.write_bytes(data)

    return flip


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = {
    "truncated": truncate,
    "lengthened": lengthen,
    "emptied": empty,
    "missing": Path.unlink,
    "a folder": replace_by_folder,
    "changed at its first byte": change(0.0),
    "changed in its header": change(0.01),
    "changed in the middle": change(0.5),
    "changed at its last byte": change(1.0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_piece_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saved(tmp_path / "c")
    names = [piece.name for piece in pieces_of(tmp_path / "c")]
    assert len(names) > 2
    for name in names:
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        damage(tmp_path / "d" / name)
        with pytest.raises(CheckpointError, match=name):
            read_everything(tmp_path / "d")


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


def test_a_safetensors_file_that_was_put_there_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="foreign piece, model.safetensors"):
        read_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="foreign piece, model.safetensors"):
        saved(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == b"mine"


def test_other_files_in_the_folder_survive_saves(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("lr 3e-4")
    saved(tmp_path / "c")
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


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("none", "there is no checkpoint"),
        ("file", "is not a"),
        ("folder", "manifest.json is missing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("obs", torch.empty(100, 7, 8, dtype=torch.uint8)),
        ("obs", torch.empty(100 * 63, dtype=torch.uint8)),
        ("obs", torch.empty(100, 7, 9, dtype=torch.int8)),
        ("step", torch.empty(1, dtype=torch.int64)),
    ],
)
def test_reading_into_something_else_is_refused(tmp_path: Path, name: str, out: Tensor) -> None:
    checkpoint = saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"tensor '{name}' .* asked to read it into {out.dtype}"):
        checkpoint.read_into(name, out)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensor 'oops'; it holds .*'obs'"):
        saved(tmp_path / "c").read("oops")
