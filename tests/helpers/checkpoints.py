"""Small checkpoints of every kind of tensor, and what a folder holds, for the tests of checkpoint files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay.checkpoint.format import Checkpoint, read_checkpoint, write_checkpoint
from gpu_replay.checkpoint.shards import DTYPE_NAMES

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


@functools.cache
def example(seed: int = 0) -> dict[str, Tensor]:
    """Large and small, of every dtype, empty and without dimensions; with shard_bytes=5000, many pieces.

    Of the long one only the end depends on the seed, so that a second save goes on using its other pieces.
    """
    long = torch.arange(2500)
    long[-1] = seed
    return {
        "obs": numbers((100, 7, 9), torch.uint8, seed),
        "long": long,
        "mass": numbers((5,), torch.int64, seed + 3),
        "step": torch.tensor(-3),
        "nothing": torch.empty(0, 4),
        **{str(dtype): numbers((3, 5), dtype, seed) for dtype in DTYPE_NAMES},
    }


def saved(path: Path, seed: int = 0, shard_bytes: int = 5000) -> Checkpoint:
    write_checkpoint(path, MANIFEST, example(seed), shard_bytes=shard_bytes)
    return read_checkpoint(path)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change what the manifest of a checkpoint says, and make its checksum right again."""
    outer = json.loads((path / "manifest.json").read_bytes())
    change(outer["body"])
    text = json.dumps(outer["body"], sort_keys=True, separators=(",", ":"))
    outer["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(outer))


STRANGE = (None, -1, 0, 2**62, 0.5, True, "x", "../outside", "/etc/passwd", "manifest.json", "F32", [], {}, {"more": 1})


def spoiled(value: Any) -> Iterator[tuple[str, Any]]:
    """Every way to change one entry of nested JSON: another value, one less, more or twice; and what that gives."""
    for strange in STRANGE:
        if (type(strange), strange) != (type(value), value):
            yield repr(strange), strange
    if isinstance(value, dict):
        yield "more", value | {"more": 1}
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        if isinstance(value, list):
            yield f"{name} twice", [*value, value[name]]
        rest, whole = value.copy(), value.copy()
        del rest[name]
        yield f"no {name}", rest
        for way, part in spoiled(value[name]):
            whole[name] = part
            yield f"{name}: {way}", whole.copy()


def pieces_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_everything(path: Path) -> dict[str, Tensor]:
    return read_checkpoint(path).read_all()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def read_seed(path: Path, *seeds: int) -> int:
    """The one of these seeds whose example a checkpoint holds, to the last bit."""
    found = read_everything(path)
    (seed,) = (
        seed
        for seed in seeds
        if found.keys() == example(seed).keys()
        and all(torch.equal(found[name], each) for name, each in example(seed).items())
    )
    return seed
