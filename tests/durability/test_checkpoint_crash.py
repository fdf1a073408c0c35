"""Whenever a saving process dies, the checkpoint on disk is exactly the old one or the new one."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from saving_process import load, save

from gpu_replay import CheckpointError
from gpu_replay.checkpoint.format import read_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Saver:
    """The process of saving_process.py."""

    def __init__(self) -> None:
        here = Path(__file__).resolve()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(here.parents[1] / "helpers" / "saving_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"},
        )

    def order(self, *words: object) -> int:
        """Start a child; returns its process id."""
        self.process.stdin.write("\t".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return int(self.answer("child (\\d+)")[-1])

    def answer(self, last: str) -> list[str]:
        """What is said up to and including a line that matches; its last group is the last element."""
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line.strip())
            if match := re.fullmatch(last, line.strip()):
                return [*said, *match.groups()]
        raise AssertionError(f"the saving process ended after {said}")

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    process = Saver()
    yield process
    process.close()


def leftovers(path: Path) -> set[str]:
    """What stands in and beside a checkpoint without being part of it."""
    pieces = set(read_checkpoint(path).files)
    return (set(os.listdir(path)) - pieces - {"manifest.json"}) | (set(os.listdir(path.parent)) - {path.name})


def test_killed_at_random_moments_leaves_the_old_or_the_new_one(saver: Saver, tmp_path: Path, full: bool) -> None:
    kills = 300 if full else 15
    delays = random.Random(0)
    path = tmp_path / "checkpoint"
    present: int | None = None
    interrupted = 0
    for kill in range(kills):
        if kill % 5 == 0:
            # from here the first save may be the one that is killed
            shutil.rmtree(path, ignore_errors=True)
            present = None
        first = 1000 * kill
        child = saver.order("save", path, first)
        saver.answer(f"begin {first}")
        time.sleep(delays.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        said = saver.answer("gone")
        ended = [int(line.split()[1]) for line in said if line.startswith("end")]
        begun = [int(line.split()[1]) for line in said if line.startswith("begin")]
        old = ended[-1] if ended else present
        new = begun[-1] if begun else first
        interrupted += new != old
        if (path / "manifest.json").exists():
            assert load(path) in (old, new)
        else:
            assert old is None
        present = first + 999
        save(path, present)
        assert load(path) == present
        assert not leftovers(path)
    assert interrupted > kills // 2, "most kills must have hit a save, or this test shows nothing"


@pytest.mark.parametrize("existing", ["a checkpoint", "nothing", "an empty folder"])
def test_death_at_every_file_operation_leaves_the_old_or_the_new_one(
    saver: Saver, tmp_path: Path, existing: str
) -> None:
    found = []
    for step in range(1000):
        folder = tmp_path / str(step)
        folder.mkdir()
        path = folder / "checkpoint"
        if existing == "a checkpoint":
            save(path, 1)
        elif existing == "an empty folder":
            path.mkdir()
        saver.order("die", path, 2, step)
        finished = "died" not in saver.answer("gone")
        if existing == "a checkpoint":
            found.append(load(path))
        else:
            try:
                found.append(load(path))
            except CheckpointError:
                # nothing yet, and nothing that could be taken for a checkpoint
                assert not (path / "manifest.json").exists()
                found.append(1)
        save(path, 3)
        assert load(path) == 3
        assert not leftovers(path)
        shutil.rmtree(folder)
        if finished:
            break
    # old up to one moment, new from then on
    assert finished
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 2
    assert len(found) > 10
