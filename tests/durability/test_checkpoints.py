"""Checkpoint files: what comes back, what is written again, and that a save which fails leaves everything as it was."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MANIFEST, example, numbers, pieces_of, read_everything, saved, snapshot
from children import ended, forked, in_a_child, needs_fork
from torch import Tensor

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.files import save_lock
from gpu_replay.checkpoint.format import files_in_force, read_checkpoint, write_checkpoint
from gpu_replay.checkpoint.shards import in_parallel

load_file = pytest.importorskip("safetensors.torch").load_file
Patch = pytest.MonkeyPatch
PIECE = 4096


def test_everything_comes_back_and_is_what_the_library_reads(tmp_path: Path, device: str) -> None:
    tensors = {name: tensor.to(device) for name, tensor in example().items()}
    write_checkpoint(tmp_path / "a" / "b", MANIFEST, tensors, shard_bytes=5000)
    checkpoint = read_checkpoint(tmp_path / "a" / "b")
    assert (checkpoint.manifest, checkpoint.shapes.keys()) == (MANIFEST, set(tensors))
    parts: dict[str, list[Tensor]] = {}
    for piece in pieces_of(tmp_path / "a" / "b"):
        for name, part in load_file(piece).items():
            parts.setdefault(name, []).append(part)
    assert len(parts["obs"]) == 2
    for name, tensor in tensors.items():
        out = torch.zeros_like(tensor)
        checkpoint.fill({name: out})
        assert out.device == tensor.device
        for found in (out, checkpoint.read_all()[name], torch.cat(parts[name]) if tensor.dim() else parts[name][0]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.cpu(), tensor.cpu())


def test_pieces_keep_to_their_size_and_hold_each_row_once(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(12):
        shard_bytes = draw.choice((1, 300, 1000, 9000))
        shapes = [tuple(draw.choices((0, 1, 2, 5, 40), k=draw.randrange(3))) for _ in range(draw.randrange(7))]
        dtypes = draw.choices((torch.uint8, torch.bfloat16, torch.float32, torch.int64), k=7)
        tensors = {f"t{place}": numbers(shape, dtypes[place], place) for place, shape in enumerate(shapes)}
        write_checkpoint(tmp_path / str(number), {}, tensors, shard_bytes=shard_bytes)
        held = [load_file(piece) for piece in pieces_of(tmp_path / str(number))]
        for piece, parts in zip(pieces_of(tmp_path / str(number)), held, strict=True):
            (rows, *more) = [len(part) if part.dim() else 1 for part in parts.values()]
            assert piece.stat().st_size <= shard_bytes or (rows <= 1 and not more)
        for name, tensor in tensors.items():
            count = sum(len(part) if part.dim() else 1 for parts in held for key, part in parts.items() if key == name)
            assert count == (len(tensor) if tensor.dim() else 1)
            assert torch.equal(read_checkpoint(tmp_path / str(number)).read_all()[name], tensor)


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "c")
    for generation in range(2):
        write_checkpoint(tmp_path / "link", {"generation": generation}, {})
        assert read_checkpoint(tmp_path / "disk" / "c").manifest == {"generation": generation}
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


@pytest.mark.slow
@needs_fork
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs elsewhere")
def test_neither_saving_nor_loading_takes_a_second_copy(tmp_path: Path) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    def more() -> int:
        write_checkpoint(tmp_path / "small", {}, {"t": torch.ones(1000)})
        read_checkpoint(tmp_path / "small").read_all()
        tensor = torch.ones(192 << 20, dtype=torch.uint8).view(3, -1, 1 << 10).transpose(0, 1).contiguous()
        before = peak()
        write_checkpoint(tmp_path / "c", {}, {"t": tensor}, shard_bytes=100 << 20)
        read_checkpoint(tmp_path / "c").fill({"t": tensor})
        return peak() - before

    assert in_a_child(more) < 64  # MiB, for a tensor of 192


# what a second save writes


def save(path: Path, tensors: dict[str, Tensor]) -> int:
    """Save, fail unless all of it can be read back, and return the bytes of the pieces that were written."""
    before = {file.name: file.stat() for file in pieces_of(path)} if path.exists() else {}
    write_checkpoint(path, {}, tensors, shard_bytes=PIECE)
    read = read_everything(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert set(os.listdir(path)) == {"manifest.json", *(file.name for file in pieces_of(path))}
    kept = [file for file in pieces_of(path) if file.name in before]
    assert all(os.path.samestat(file.stat(), before[file.name]) for file in kept)
    return sum(file.stat().st_size for file in pieces_of(path) if file.name not in before)


def test_only_changed_pieces_are_written(tmp_path: Path) -> None:
    frames = torch.arange(2000 * 64, dtype=torch.int64).to(torch.uint8).view(2000, 64)
    tensors = {"frames": frames, "few": torch.zeros(3), "more": torch.ones(7, dtype=torch.int64)}
    assert save(tmp_path / "c", tensors) > frames.nbytes
    assert save(tmp_path / "c", tensors) == 0
    frames[1500] += 1
    assert 64 < save(tmp_path / "c", tensors) <= PIECE
    # the first row and the last one, and what shares a piece
    frames[0], frames[-1], tensors["few"] = 7, 8, torch.ones(3)
    assert PIECE < save(tmp_path / "c", tensors) <= 3 * PIECE
    # of what has grown the end; the row count has more digits
    tensors["frames"] = torch.cat((frames, frames.repeat(5, 1)))
    assert save(tmp_path / "c", tensors) <= 5.5 * frames.nbytes + PIECE
    # what shrinks to pieces that are kept, and grows again
    for rows in (500, 250, 500):
        save(tmp_path / "c", tensors | {"frames": frames[:rows]})


def test_a_piece_that_somebody_touched_is_written_again(tmp_path: Path) -> None:
    tensors = {"frames": torch.arange(5000)}
    save(tmp_path / "c", tensors)
    first, second, *_ = pieces_of(tmp_path / "c")
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    os.utime(first, ns=(1, 1))
    second.unlink()
    assert PIECE < save(tmp_path / "c", tensors) <= 2 * PIECE


# saves that are refused or fail


@pytest.mark.parametrize(
    ("manifest", "tensors", "error", "message"),
    [
        ({"a": {1, 2}}, {}, TypeError, "JSON serializable"),
        ({}, {"c": torch.zeros(2, dtype=torch.complex128)}, ValueError, "'c' is torch.complex128"),
        ({}, {"__metadata__": torch.zeros(2)}, ValueError, "reserves"),
    ],
)
def test_what_cannot_be_written_changes_nothing(
    tmp_path: Path, manifest: Any, tensors: Any, error: Any, message: str
) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)
    for path in (tmp_path / "c", tmp_path / "new"):
        with pytest.raises(error, match=message):
            write_checkpoint(path, manifest, tensors)
    assert snapshot(tmp_path) == before


def written(path: Path, text: str) -> Path:
    """A file in folders that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# what stands where a checkpoint should be, and what is said of it to who saves and who reads there
OCCUPIED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "other contents": (
        lambda path: written(path / "thesis.txt", "the only copy"),
        "holds thesis.txt.* Nothing was written",
        "manifest.json is missing",
    ),
    "another manifest": (
        lambda path: written(path / "manifest.json", '{"name": "web page"}'),
        "manifest.json.* Nothing was written",
        "not a checkpoint of gpu_replay",
    ),
    "a file": (lambda path: written(path, "text"), "is a file.* Nothing was written", "is not a"),
    "a pipe for a manifest": (
        lambda path: (saved(path), (path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
        "manifest.json",
        "manifest.json",
    ),
    "a foreign piece": (
        lambda path: (saved(path), written(path / "model.safetensors", "mine")),
        "no save wrote, model.safetensors",
        "no save wrote, model.safetensors",
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="makes a pipe")
@pytest.mark.parametrize("name", OCCUPIED)
def test_what_stands_in_the_way_is_neither_overwritten_nor_read(tmp_path: Path, name: str) -> None:
    make, *messages = OCCUPIED[name]
    make(tmp_path / "c")
    before = snapshot(tmp_path)
    for call, message in zip((saved, read_checkpoint), messages, strict=True):
        with pytest.raises(CheckpointError, match=message):
            call(tmp_path / "c")
    assert snapshot(tmp_path) == before


def test_there_is_no_checkpoint_in_nothing_and_in_an_empty_folder_and_notes_survive_saves(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "c")
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        read_checkpoint(tmp_path / "c")
    saved(tmp_path / "c")
    written(tmp_path / "c" / "notes.txt", "lr 3e-4")
    saved(tmp_path / "c", seed=9)
    assert (tmp_path / "c" / "notes.txt").read_text() == "lr 3e-4"


def test_a_damaged_checkpoint_can_be_saved_over(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    pieces_of(tmp_path / "c")[0].unlink()
    content = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    del content["body"]
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(content))
    assert saved(tmp_path / "c").manifest == MANIFEST
    assert len(pieces_of(tmp_path / "c")) == len(files_in_force(tmp_path / "c"))


@needs_fork
def test_a_process_that_is_forked_during_a_save_holds_no_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "c").mkdir()
    with save_lock(tmp_path / "c", tmp_path / "c"):
        # until the other end is closed
        child = forked(lambda: (os.close(writing), os.read(reading, 1)))
    saved(tmp_path / "c")
    os.close(writing)
    assert ended(child) == 0


def test_saves_and_samples_while_the_interpreter_ends(tmp_path: Path) -> None:
    program = f"""
        import atexit, torch
        from gpu_replay import Field, ReplayBuffer
        from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint

        torch.set_num_threads(4)
        ring = {str(tmp_path / "ring")!r}
        buffer = ReplayBuffer(64, {{"x": Field((65_536,), torch.uint8)}}, device="cpu", storage_path=ring)
        buffer.add(x=torch.ones(64, 65_536, dtype=torch.uint8))

        def late():
            print(len(buffer.sample(64)))
            write_checkpoint({str(tmp_path / "c")!r}, {{}}, {{"x": torch.ones(30, 100)}}, shard_bytes=4000)
            print(read_checkpoint({str(tmp_path / "c")!r}).read_all()["x"].sum().item())

        atexit.register(late)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["64", "3000.0"]
    # the file of the fields is gone with the process
    assert list((tmp_path / "ring").iterdir()) == []


def test_two_savers_of_one_path_are_kept_apart(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)
    (tmp_path / "new").mkdir()
    for path in (tmp_path / "c", tmp_path / "new"):
        with save_lock(path, path), pytest.raises(CheckpointError, match="another save to .* under way"):
            saved(path)
    (tmp_path / "new").rmdir()
    assert snapshot(tmp_path) == before


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


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "first"])
@pytest.mark.parametrize("failing", [0, 1, 3, "the last step"])
def test_a_save_that_fails_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: Patch, existing: bool, failing: Any
) -> None:
    path, calls = tmp_path / "c", itertools.count()
    if existing:
        saved(path)
    before, sync = snapshot(tmp_path), os.fsync
    full: BaseException = OSError(errno.ENOSPC, "No space left on device")
    message = "failed: No space left.* (unharmed|no checkpoint before)"

    def fails(*given: Any) -> None:
        if isinstance(failing, str) or next(calls) >= failing:
            raise full
        sync(*given)

    if failing == "the last step":
        full, message = KeyboardInterrupt(), "^$"
        monkeypatch.setattr(os, "replace", fails)
    else:
        monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises((OSError, KeyboardInterrupt), match=message) as error:
        write_checkpoint(path, {}, example(1), shard_bytes=2000)
    monkeypatch.undo()
    assert isinstance(error.value, KeyboardInterrupt) or error.value.errno == errno.ENOSPC
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == (["c"] if existing else [])


def test_too_little_space_is_seen_before_changed_rows_are_written(tmp_path: Path, monkeypatch: Patch) -> None:
    write_checkpoint(tmp_path / "c", {}, {"a": torch.zeros(3000), "b": torch.zeros(3000)}, shard_bytes=12_500)
    before = snapshot(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 20_000, 20_000))
    with pytest.raises(OSError, match=r"2\d{4} bytes are needed and 20000 are free"):
        write_checkpoint(tmp_path / "c", {}, {"a": torch.ones(3000), "b": torch.ones(3000)}, shard_bytes=12_500)
    assert snapshot(tmp_path) == before
    # what has not changed needs no room
    write_checkpoint(tmp_path / "c", {}, {"a": torch.ones(3000), "b": torch.zeros(3000)}, shard_bytes=12_500)


@needs_fork
def test_after_an_error_no_further_work_begins() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05 if item else 0.02)
        if not item:
            raise OSError(errno.ENOSPC, "full")
        ended.append(item)

    with pytest.raises(OSError, match="full"):
        in_parallel(work, range(1000), lambda result: None)
    # what had begun beside it has ended
    assert len(begun) == len(ended) + 1 < 500


@pytest.mark.usefixtures("collector_off")
def test_an_error_of_parallel_work_keeps_nothing_once_it_is_dropped() -> None:
    kept = torch.empty(1)
    alive = weakref.ref(kept)

    def work(item: int, tensor: torch.Tensor = kept) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as error:
        in_parallel(work, range(9), lambda result: None)
    del error, work, kept
    assert alive() is None


def test_a_write_that_the_system_cuts_short_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    before = snapshot(tmp_path)

    def said() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError, match="failed") as error:
            write_checkpoint(tmp_path / "c", {}, {"t": torch.ones(1_000_000)})
        return str(error.value)

    assert "File too large. The checkpoint that was there is unharmed." in in_a_child(said)
    assert snapshot(tmp_path) == before
    read_everything(tmp_path / "c")


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
    names = [piece.name for piece in pieces_of(tmp_path / "c")]
    new, gone = [sorted({*one} - {*other}) for one, other in ((names, old), (old, names))]
    pieces, rest = log[: len(new)], log[len(new) :]
    assert sorted(pieces) == [f"sync {name}" for name in new]
    hidden = ".manifest.json.saving"
    assert rest[:5] == ["sync c", f"unlink {hidden}", f"sync {hidden}", "replace", "sync c"]
    assert sorted(rest[5:]) == [f"unlink {name}" for name in gone]
