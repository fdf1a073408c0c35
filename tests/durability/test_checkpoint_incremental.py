"""Saving over a checkpoint writes what has changed since, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from checkpoints import pieces_of, read_everything
from torch import Tensor

from gpu_replay import Field, ReplayBuffer
from gpu_replay.checkpoint.format import write_checkpoint

PIECE = 4096


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
    assert save(tmp_path / "c", tensors) == 0


def test_of_a_tensor_that_grows_the_end_is_written(tmp_path: Path) -> None:
    frames = torch.arange(150_000, dtype=torch.int64).view(-1, 3)
    save(tmp_path / "c", {"frames": frames[:900]})
    # nine rows, then many times as many; the row counts have more digits
    assert save(tmp_path / "c", {"frames": frames[:909]}) <= PIECE
    assert save(tmp_path / "c", {"frames": frames[:12_000]}) <= (12_000 - 909) * 24 * 1.1 + PIECE


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


@pytest.mark.slow
def test_a_buffer_writes_the_rows_that_were_added(tmp_path: Path) -> None:
    buffer = ReplayBuffer(200_000, {"obs": Field((512,), torch.uint8)}, device="cpu")
    buffer.add(obs=torch.zeros(200_000, 512, dtype=torch.uint8))
    sizes = []
    for _ in range(2):
        buffer.save(tmp_path / "c")
        sizes.append({file.name: file.stat().st_size for file in pieces_of(tmp_path / "c")})
        buffer.add(obs=torch.ones(10, 512, dtype=torch.uint8))
    new = set(sizes[1]) - set(sizes[0])
    written, whole = sum(sizes[1][name] for name in new), sum(sizes[1].values())
    # one of the pieces of frames, and the counts of draws of all slots
    assert whole > buffer.nbytes > 3 * 10**7
    assert written <= 2 * (64 << 20)
    assert written < 0.8 * whole
    assert ReplayBuffer.load(tmp_path / "c")[[200_009]].obs.sum() == 512
