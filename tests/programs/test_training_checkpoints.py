"""Checkpoints of whole runs: parts that fit together whatever happens, and runs that go on after kill -9."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import read_rows, start, wait_for, without_times

from gpu_replay import CheckpointError, TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.training.checkpoints import COST, CheckpointManager, flatten, latest, save_run, unflatten


class Buffer(TrajectoryReplayBuffer):
    """Saves a number where a replay buffer would save itself."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.number = number
        self.fails = fails

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir()
        (Path(path) / "number").write_text(str(self.number))
        if self.fails:
            raise OSError(28, "no space left on the disk")


def numbers(folder: Path) -> tuple[int, int]:
    """The step that the state tells of, and the one that the buffer does."""
    saved = latest(folder)
    assert saved.replay is not None
    return int(saved.state["inner"]["step"]), int((saved.replay / "number").read_text())


def state(step: int) -> dict[str, Any]:
    return {"inner": {"step": torch.tensor(step)}, "note": "a state"}


def test_a_tree_comes_back_as_it_was() -> None:
    tree = {"a": 1, "b": {"c": torch.arange(3), "d": {}, "e": [1.5, None]}, "f": torch.tensor(True), "g": None}
    values, tensors = flatten(tree)
    assert set(tensors) == {"b/c", "f"}
    back = unflatten(json.loads(json.dumps(values)), tensors)
    assert back.keys() == tree.keys()
    assert torch.equal(back["b"].pop("c"), torch.arange(3))
    assert back["b"] == {"d": {}, "e": [1.5, None]}
    assert bool(back["f"])


def test_the_newest_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for step in (640, 1_280, 10**13):
        save_run(tmp_path, step, state(step), Buffer(step))
        assert numbers(tmp_path) == (step, step)
        assert len(list(tmp_path.iterdir())) == 1
    # a complete checkpoint of the same step is not written twice
    save_run(tmp_path, step, state(step), Buffer(6, fails=True))
    assert numbers(tmp_path) == (step, step)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    save_run(tmp_path, 5, state(5), Buffer(5))
    with pytest.raises(OSError, match="no space"):
        save_run(tmp_path, 6, state(6), Buffer(6, fails=True))
    with pytest.raises(ValueError, match="cannot hold"):
        save_run(tmp_path, 7, state(7) | {"bad": torch.zeros(2, dtype=torch.complex64)}, Buffer(7))
    assert [path.name for path in tmp_path.iterdir()] == ["000000000005"]
    assert numbers(tmp_path) == (5, 5)


def test_what_a_crash_left_counts_for_nothing_and_goes_with_the_next_save(tmp_path: Path) -> None:
    save_run(tmp_path, 5, state(5), Buffer(5))
    # died after the buffer was written, in this step and in one that comes again
    for step in (7, 9):
        (tmp_path / f"{step:012d}").mkdir()
        Buffer(step).save(tmp_path / f"{step:012d}" / "replay")
    assert numbers(tmp_path) == (5, 5)
    save_run(tmp_path, 7, state(7), Buffer(77))
    assert numbers(tmp_path) == (7, 77)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007"]
    # died after the new one was complete, before the old one went
    save_run(tmp_path / "other", 8, state(8), Buffer(8))
    (tmp_path / "other" / "000000000008").rename(tmp_path / "000000000008")
    assert numbers(tmp_path) == (8, 8)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_replay.training.checkpoints.VERSION", 99)
    save_run(tmp_path, 5, state(5), None)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has version 99"):
        latest(tmp_path)


def test_saving_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    takes = [0.5]

    def collect() -> tuple[int, dict[str, Any], None]:
        now[0] += takes[0]
        return int(now[0]), {}, None

    manager = CheckpointManager(tmp_path, 60.0, collect)
    now[0] = 159.0
    assert time.perf_counter() < manager.due
    now[0] = 160.0
    assert time.perf_counter() >= manager.due
    manager.save()
    assert manager.seconds == 0.5
    now[0] = 160.5 + 60
    assert time.perf_counter() >= manager.due
    # a large buffer on a slow disk
    takes[0] = 10.0
    manager.save()
    now[0] += COST * 10.0 - 1
    assert time.perf_counter() < manager.due
    now[0] += 1
    assert time.perf_counter() >= manager.due


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = CheckpointManager(tmp_path, 60.0, lambda: (3, state(3), Buffer(3, fails=True)))
    manager.save()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint was written" in line
    assert "no space left" in line
    assert time.perf_counter() < manager.due


# real processes

FLAGS = ["--device", "cpu", "--log-every", "2000", "--eval-every", "4000", "--eval-episodes", "32", "--seed", "4"]


def steps_saved(folder: Path) -> int:
    names = [path.parent.parent.name for path in (folder / "checkpoint").glob("*/state/manifest.json")]
    return max(map(int, names), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["catch", "CartPole-v1"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, name: str) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    steps = ["--steps", "14000"]
    process = start(folder, name, *FLAGS, *steps, "--checkpoint-every", "0.4")
    wait_for(process, lambda: steps_saved(folder) > 1_500)
    process.kill()
    process.communicate()
    process = start(folder, "--resume")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert main(["train", name, *FLAGS, *steps, "--output", str(whole)]) == 0
    assert without_times(folder) == without_times(whole)
    assert len(read_rows(folder)) >= 4
    from safetensors.torch import load_file

    mine, theirs = (load_file(each / "network.safetensors") for each in (folder, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    seconds = [row["seconds"] for row in read_rows(folder)]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_pong_goes_on_after_a_signal_with_new_games(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    flags = ["--num-envs", "4", "--capacity", "4000", "--warmup", "200", "--batch-size", "8", "--log-every", "100"]
    flags += ["--eval-episodes", "1", "--eval-max-steps", "30", "--device", "cpu"]
    process = start(tmp_path, "pong", "--steps", "1e7", *flags)
    wait_for(process, lambda: len(read_rows(tmp_path)) >= 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "interrupted by SIGTERM" in out
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert steps_saved(tmp_path) == stopped["steps"]
    process = start(tmp_path, "--resume", "--max-seconds", str(stopped["loop_seconds"] + 1))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    after = json.loads((tmp_path / "summary.json").read_text())
    assert after["stopped_by"] == "max_seconds"
    assert after["steps"] > stopped["steps"]
    assert after["updates"] > stopped["updates"] > 0
    assert after["wall_seconds"] > stopped["wall_seconds"]
    found = [row["step"] for row in read_rows(tmp_path)]
    assert found == sorted(set(found))
    assert steps_saved(tmp_path) == after["steps"]
