"""Checkpoint files: what comes back, and what the safetensors library sees in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MANIFEST, example, numbers, pieces_of, saved
from torch import Tensor

from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint
from gpu_replay.checkpoint.shards import DTYPE_NAMES, file_bytes, plan_shards

hypothesis = pytest.importorskip("hypothesis")
load_file = pytest.importorskip("safetensors.torch").load_file
st = hypothesis.strategies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_everything_comes_back(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "a" / "b")
    assert (checkpoint.manifest, set(checkpoint.tensor_names)) == (MANIFEST, set(example()))
    for name, tensor in example().items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype_comes_back_and_is_what_the_library_reads(tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    tensors = {"odd": numbers((3, 5), dtype).to(device), "scalar": numbers((), dtype).to(device)}
    write_checkpoint(tmp_path / "c", {}, tensors)
    (piece,) = pieces_of(tmp_path / "c")
    library, checkpoint = load_file(piece), read_checkpoint(tmp_path / "c")
    assert set(library) == set(tensors)
    for name, tensor in tensors.items():
        out = torch.zeros_like(tensor)
        checkpoint.fill({name: out})
        assert out.device == tensor.device
        assert torch.equal(out.cpu(), tensor.cpu())
        assert library[name].dtype == dtype
        assert torch.equal(library[name], tensor.cpu())


def test_slices_in_the_pieces_join_to_the_tensor_in_the_library(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    parts: dict[str, list[Tensor]] = {}
    for piece in pieces_of(tmp_path / "c"):
        for name, part in load_file(piece).items():
            parts.setdefault(name, []).append(part)
    assert len(parts["obs"]) == 2
    for name, tensor in example().items():
        joined = torch.cat(parts[name]) if tensor.dim() else parts[name][0]
        assert torch.equal(joined, tensor)


@hypothesis.given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
        ),
        max_size=6,
    ),
    st.integers(1, 9000),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_pieces_keep_to_their_size_and_hold_each_row_once(shapes: Any, shard_bytes: int) -> None:
    tensors = {f"t{index}": torch.empty(shape, dtype=dtype) for index, (shape, dtype) in enumerate(shapes)}
    rows: dict[str, list[int]] = {name: [] for name in tensors}
    for parts in plan_shards(tensors, shard_bytes):
        assert parts
        assert file_bytes(parts) <= shard_bytes or (len(parts) == 1 and parts[0].stop - parts[0].start <= 1)
        for part in parts:
            rows[part.name].extend(range(part.start, part.stop))
    for name, tensor in tensors.items():
        assert rows[name] == list(range(tensor.shape[0] if tensor.dim() else 1))


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_are_written_and_filled(tmp_path: Path, device: str) -> None:
    source = torch.arange(600, device=device).view(20, 30).t()
    write_checkpoint(tmp_path / "c", {}, {"t": source}, shard_bytes=2000)
    out = torch.zeros(40, 30, dtype=torch.int64, device=device)[::2].t()
    read_checkpoint(tmp_path / "c").fill({"t": out})
    assert torch.equal(out, source)


def test_reading_into_a_view_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {}, {"t": torch.ones(10, 3)})
    memory = torch.full((14, 3), -7.0)
    read_checkpoint(tmp_path / "c").fill({"t": memory[2:12]})
    assert torch.equal(memory[2:12], torch.ones(10, 3))
    assert bool((memory[:2] == -7).all())
    assert bool((memory[12:] == -7).all())


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    write_checkpoint(tmp_path / "c", {"second": True}, {"t": torch.ones(3)})
    assert (read_checkpoint(tmp_path / "c").manifest, len(pieces_of(tmp_path / "c"))) == ({"second": True}, 1)
    assert (sorted(os.listdir(tmp_path)), len(os.listdir(tmp_path / "c"))) == (["c"], 2)


def test_an_empty_checkpoint_is_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"only": "settings"}, {})
    assert read_checkpoint(tmp_path / "c").manifest == {"only": "settings"}
    assert read_checkpoint(tmp_path / "c").tensor_names == ()


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "c")
    for generation in range(2):
        write_checkpoint(tmp_path / "link", {"generation": generation}, {})
        assert read_checkpoint(tmp_path / "disk" / "c").manifest == {"generation": generation}
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs elsewhere")
def test_neither_saving_nor_loading_takes_a_second_copy(tmp_path: Path) -> None:
    program = """
import resource, sys, torch
from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
write_checkpoint(sys.argv[1] + "-small", {}, {"t": torch.ones(1000)})
read_checkpoint(sys.argv[1] + "-small").read("t")
tensor = torch.ones(192 << 20, dtype=torch.uint8).view(3, -1, 1 << 10).transpose(0, 1).contiguous()
before = peak()
write_checkpoint(sys.argv[1], {}, {"t": tensor}, shard_bytes=100 << 20)
read_checkpoint(sys.argv[1]).fill({"t": tensor})
print(peak() - before)
"""
    root = str(Path(__file__).resolve().parents[2])
    arguments = [sys.executable, "-c", program, str(tmp_path / "c")]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root})
    assert int(done.stdout) < 64  # MiB, for a tensor of 192
