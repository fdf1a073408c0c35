"""A process that saves checkpoints until somebody kills it, for test_checkpoint_crash.py.

Torch takes seconds to import, so this process imports it once and forks a child for each order on its standard input:

    save PATH FIRST          save generation FIRST, FIRST + 1, ... until killed, saying `begin G` and `end G`
    die PATH GENERATION STEP save once and end at file operation STEP without any cleaning up, saying `died` or `end G`

It answers `child PID` first and `gone` when the child is dead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from gpu_replay.checkpoint.format import read_checkpoint, write_checkpoint

ROWS = 60_000
PIECE_BYTES = 150_000


def tensors(generation: int) -> dict[str, torch.Tensor]:
    """Contents that belong to one generation: two large tensors of several pieces and two small ones.

    Of the second large one only the last piece differs, so that saves go on using the others.
    """
    long = torch.arange(ROWS // 2)
    long[-1] = generation
    return {
        "wide": torch.full((ROWS // 8, 8), generation, dtype=torch.int32),
        "long": long,
        "small": torch.full((3, 5), float(generation)),
        "scalar": torch.tensor(generation),
    }


def save(path: str, generation: int) -> None:
    write_checkpoint(path, {"generation": generation}, tensors(generation), shard_bytes=PIECE_BYTES)


def load(path: str | Path) -> int:
    """The generation of a checkpoint, after comparing every element with it."""
    checkpoint = read_checkpoint(path)
    generation = int(checkpoint.manifest["generation"])
    expected = tensors(generation)
    assert set(checkpoint.tensor_names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    return generation


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _save_until_killed(path: str, first: int) -> None:
    generation = first
    while True:
        _say(f"begin {generation}")
        save(path, generation)
        _say(f"end {generation}")
        generation += 1


def _die_at(path: str, generation: int, step: int) -> None:
    """Python announces each file operation before it is made; end the process at the given one."""
    left = step
    within = os.path.dirname(os.path.realpath(path))

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "fcntl.")):
            named = [str(each) for each in arguments if isinstance(each, str | bytes | os.PathLike)]
            if event.startswith("fcntl.") or any(each.startswith(within) for each in named):
                left -= 1
                if left < 0:
                    _say("died")
                    os._exit(9)

    sys.addaudithook(count)
    save(path, generation)
    _say(f"end {generation}")


def main() -> None:
    torch.set_num_threads(1)
    for order in sys.stdin:
        verb, path, *numbers = order.split("\t")
        child = os.fork()
        if child == 0:
            _say(f"child {os.getpid()}")
            if verb == "save":
                _save_until_killed(path, int(numbers[0]))
            else:
                _die_at(path, int(numbers[0]), int(numbers[1]))
            os._exit(0)
        os.waitpid(child, 0)
        _say("gone")


if __name__ == "__main__":
    main()
