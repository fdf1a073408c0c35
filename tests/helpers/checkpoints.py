"""Small checkpoints of every kind of tensor, and what a folder holds, for the tests of checkpoint files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.format import Checkpoint, read_checkpoint, write_checkpoint

MANIFEST = {
    "settings": {"capacity": 7, "alpha": 0.1, "clip": None},
    "counters": {"added": 2**60 + 1},
    "names": ["é", "b"],
}


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits that make a valid, comparable tensor of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 127, shape, generator=generator).to(dtype)


def example(seed: int = 0) -> dict[str, Tensor]:
    """Large and small, wide and narrow, empty and without dimensions; with shard_bytes=5000, many pieces."""
    return {
        "obs": numbers((100, 7, 9), torch.uint8, seed),
        "reward": numbers((1000,), torch.float32, seed + 1),
        "done": numbers((13,), torch.bool, seed + 2),
        "mass": numbers((5,), torch.int64, seed + 3),
        "step": torch.tensor(-3),
        "nothing": torch.empty(0, 4),
    }


def saved(path: Path, seed: int = 0) -> Checkpoint:
    write_checkpoint(path, MANIFEST, example(seed), shard_bytes=5000)
    return read_checkpoint(path)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest of a checkpoint says, and make its checksum right again."""
    outer = json.loads((path / "manifest.json").read_bytes())
    change(outer["body"])
    text = json.dumps(outer["body"], sort_keys=True, separators=(",", ":"))
    outer["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(outer))


def pieces_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_everything(path: Path) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.tensor_names}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
