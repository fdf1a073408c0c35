"""Whenever a saving process dies, the checkpoint on disk is exactly the old one or the new one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from checkpoints import read_seed, saved
from children import ended, forked, needs_fork

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import files_in_force

pytestmark = needs_fork


def check_saved_over(path: Path, seed: int) -> None:
    """Save once more, and fail if anything stands in or beside the checkpoint that is no part of it."""
    saved(path, seed, 12_000)
    assert {*files_in_force(path), "manifest.json"} == set(os.listdir(path))
    assert read_seed(path, seed) == seed
    assert os.listdir(path.parent) == [path.name]


def save_until_killed(path: Path, generation: int, said: int) -> None:
    while True:
        os.write(said, f"begin {generation}\n".encode())
        saved(path, generation)
        os.write(said, f"end {generation}\n".encode())
        generation += 1


def test_killed_at_random_moments_leaves_the_old_or_the_new_one(tmp_path: Path, full: bool) -> None:
    kills, delays, path = 300 if full else 10, random.Random(0), tmp_path / "checkpoint"
    present: int | None = None
    interrupted = 0
    for kill in range(kills):
        if kill % 5 == 0:
            # from here the first save may be the one that is killed
            shutil.rmtree(path, ignore_errors=True)
            present = None
        reading, writing = os.pipe()
        child = forked(lambda first=1000 * kill, said=writing: save_until_killed(path, first, said))
        os.close(writing)
        with os.fdopen(reading) as lines:
            said = [next(lines)]
            time.sleep(delays.uniform(0.0, 0.15))
            os.kill(child, signal.SIGKILL)
            said += lines
        assert ended(child) == -signal.SIGKILL
        done = [int(line.split()[1]) for line in said if line.startswith("end")]
        begun = [int(line.split()[1]) for line in said if line.startswith("begin")]
        old, new = (done[-1] if done else present), begun[-1]
        interrupted += new != old
        if (path / "manifest.json").exists():
            read_seed(path, *{old, new} - {None})
        else:
            assert old is None
        present = 1000 * kill + 999
        check_saved_over(path, present)
    assert interrupted > kills // 2, "most kills must have hit a save, or this test shows nothing"


def save_and_die(path: Path, generation: int, step: int) -> None:
    """Save once and end at so many file operations without any cleaning up: Python announces each before it is made."""
    left, within = step, str(path.parent.resolve())

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "fcntl.")):
            named = [str(each) for each in arguments if isinstance(each, str | bytes | os.PathLike)]
            if event.startswith("fcntl.") or any(each.startswith(within) for each in named):
                left -= 1
                if left < 0:
                    os._exit(9)

    sys.addaudithook(count)
    saved(path, generation, 12_000)


@pytest.mark.parametrize("existing", ["a checkpoint", "nothing"])
def test_death_at_every_file_operation_leaves_the_old_or_the_new_one(tmp_path: Path, existing: str) -> None:
    found, path = [], tmp_path / "folder" / "checkpoint"
    before = tmp_path / "before"
    before.mkdir()
    if existing == "a checkpoint":
        saved(before / "checkpoint", 1, 12_000)
    for step in range(1000):
        shutil.copytree(before, path.parent)
        finished = ended(forked(lambda step=step: save_and_die(path, 2, step))) == 0
        try:
            found.append(read_seed(path, 1, 2))
        except CheckpointError:
            # nothing yet, and nothing that could be taken for a checkpoint
            assert existing != "a checkpoint"
            assert not (path / "manifest.json").exists()
            found.append(1)
        check_saved_over(path, 3)
        shutil.rmtree(path.parent)
        if finished:
            break
    # old up to one moment, new from then on
    assert finished
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)
    assert len(found) > 10
