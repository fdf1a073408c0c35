"""A save that fails or is refused leaves everything as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MANIFEST, example, pieces_of, read_everything, saved, snapshot
from torch import Tensor

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint
from gpu_replay.checkpoint.fsync import save_lock

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("manifest", "tensors", "error", "message"),
    [
        ({"a": {1, 2}}, {}, TypeError, "JSON serializable"),
        ({}, {"c": torch.zeros(2, dtype=torch.complex128)}, ValueError, "'c' is torch.complex128"),
        ({}, {"__metadata__": torch.zeros(2)}, ValueError, "reserves"),
    ],
)
def test_what_cannot_be_written_changes_nothing(
    tmp_path: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)
    for path in (tmp_path / "c", tmp_path / "new"):
        with pytest.raises(error, match=message):
            write_checkpoint(path, manifest, tensors)
    assert snapshot(tmp_path) == before
    with pytest.raises(ValueError, match="shard_bytes"):
        write_checkpoint(tmp_path / "c", {}, {}, shard_bytes=0)


def test_a_folder_with_other_contents_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("the only copy")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "manifest.json").write_text('{"name": "web page"}')
    (tmp_path / "file").write_text("text")
    before = snapshot(tmp_path)
    for name, message in (("results", "holds thesis.txt"), ("package", "manifest.json"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=f"{message}.* Nothing was written"):
            saved(tmp_path / name)
    assert snapshot(tmp_path) == before


def test_a_damaged_checkpoint_can_be_saved_over(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    pieces_of(tmp_path / "c")[0].unlink()
    content = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    del content["body"]
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(content))
    assert saved(tmp_path / "c").manifest == MANIFEST
    assert len(pieces_of(tmp_path / "c")) == len(read_checkpoint(tmp_path / "c").files)


def test_two_savers_of_one_path_are_kept_apart(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)
    (tmp_path / "new").mkdir()
    for path in (tmp_path / "c", tmp_path / "new"):
        with save_lock(path, path), pytest.raises(CheckpointError, match="another save to .* under way"):
            saved(path)
    (tmp_path / "new").rmdir()
    assert snapshot(tmp_path) == before


def test_what_a_crashed_first_save_left_is_no_checkpoint_and_is_removed_by_a_later_one(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    left = [piece.name for piece in pieces_of(tmp_path / "c")]
    (tmp_path / "c" / "manifest.json").rename(tmp_path / "c" / ".manifest.json.saving")
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        read_checkpoint(tmp_path / "c")
    saved(tmp_path / "c", seed=9)
    assert not {*left, ".manifest.json.saving"} & set(os.listdir(tmp_path / "c"))


@pytest.mark.skipif(sys.platform == "win32", reason="makes links")
def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"format": "gpu_replay checkpoint"}')
    (tmp_path / "mine" / "piece-00000000-00000.safetensors").write_text("the only copy")
    before = snapshot(tmp_path / "mine")
    for target in (tmp_path / "mine" / "manifest.json", tmp_path / "gone"):
        saved(tmp_path / "c")
        (tmp_path / "c" / ".manifest.json.saving").symlink_to(target)
        saved(tmp_path / "c", seed=9)
        assert not (tmp_path / "c" / ".manifest.json.saving").is_symlink()
    assert snapshot(tmp_path / "mine") == before
    assert not (tmp_path / "gone").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="makes a pipe")
def test_a_manifest_that_is_no_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    for make in (os.mkdir, os.mkfifo):
        (tmp_path / "c" / "manifest.json").unlink() if make is os.mkdir else (tmp_path / "c" / "manifest.json").rmdir()
        make(tmp_path / "c" / "manifest.json")
        for call in (saved, read_checkpoint):
            with pytest.raises(CheckpointError, match="manifest.json"):
                call(tmp_path / "c")


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "first"])
@pytest.mark.parametrize("failing", range(4))
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: Patch, existing: bool, failing: int) -> None:
    path = tmp_path / "c"
    if existing:
        saved(path)
    before, sync, calls = snapshot(tmp_path), os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="failed: No space left.* (unharmed|no checkpoint before)") as error:
        write_checkpoint(path, {}, example(), shard_bytes=2000)
    monkeypatch.undo()
    assert (error.value.errno, snapshot(tmp_path)) == (errno.ENOSPC, before)
    assert os.listdir(tmp_path) == (["c"] if existing else [])


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))
    with pytest.raises(OSError, match=r"\d+ bytes are needed and 100 are free"):
        saved(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_changed_rows_are_written(tmp_path: Path, monkeypatch: Patch) -> None:
    write_checkpoint(tmp_path / "c", {}, {"a": torch.zeros(3000), "b": torch.zeros(3000)}, shard_bytes=12_500)
    before = snapshot(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 20_000, 20_000))
    with pytest.raises(OSError, match=r"2\d{4} bytes are needed and 20000 are free"):
        write_checkpoint(tmp_path / "c", {}, {"a": torch.ones(3000), "b": torch.ones(3000)}, shard_bytes=12_500)
    assert snapshot(tmp_path) == before
    # what has not changed needs no room
    write_checkpoint(tmp_path / "c", {}, {"a": torch.ones(3000), "b": torch.zeros(3000)}, shard_bytes=12_500)


@pytest.mark.skipif(sys.platform == "win32", reason="sets a limit that Windows does not have")
def test_a_write_that_the_system_cuts_short_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)
    program = """
import resource, sys, torch
from gpu_replay.checkpoint.format import write_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_checkpoint(sys.argv[1], {}, {"t": torch.ones(1_000_000)})
except OSError as error:
    print(error)
"""
    root = str(Path(__file__).resolve().parents[2])
    arguments = [sys.executable, "-c", program, str(tmp_path / "c")]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root})
    assert "File too large. The checkpoint that was there is unharmed." in done.stdout
    assert snapshot(tmp_path) == before
    read_everything(tmp_path / "c")


def test_an_interrupted_save_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)

    def interrupt(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", {}, {"t": torch.ones(3)})
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names the descriptors through /proc")
def test_every_piece_is_on_the_disk_before_the_manifest_names_it(tmp_path: Path, monkeypatch: Patch) -> None:
    saved(tmp_path / "c")
    old = [piece.name for piece in pieces_of(tmp_path / "c")]
    log: list[str] = []

    def logged(owner: Any, name: str, entry: Callable[[Any], str]) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, **more: (log.append(entry(given[0])), function(*given, **more))[1]
        )

    logged(os, "fsync", lambda file: "sync " + os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
    logged(os, "replace", lambda _: "replace")
    logged(Path, "unlink", lambda file: "unlink " + file.name)
    saved(tmp_path / "c", seed=9)
    monkeypatch.undo()
    new = [piece.name for piece in pieces_of(tmp_path / "c")]
    pieces, rest = log[: len(new)], log[len(new) :]
    assert sorted(pieces) == [f"sync {name}" for name in new]
    hidden = ".manifest.json.saving"
    assert rest[:5] == ["sync c", f"unlink {hidden}", f"sync {hidden}", "replace", "sync c"]
    assert sorted(rest[5:]) == [f"unlink {name}" for name in old]
