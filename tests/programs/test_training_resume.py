"""Checkpoints of whole runs, and runs that go on from one: bit for bit as if they had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import CATCH, make_trainer, read_rows, summary, tensorboard_of, without_times
from transitions import same_draws

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.training.checkpoints import CheckpointManager, flatten, latest, save_run, unflatten
from gpu_replay.training.settings import Settings
from gpu_replay.training.team import Team
from gpu_replay.training.train import Trainer, beta_schedule

ALONE = Team(Settings())
pytestmark = pytest.mark.usefixtures("no_pictures")
Capture = pytest.CaptureFixture[str]


# checkpoints


class Buffer(TrajectoryReplayBuffer):
    """Saves a number where a replay buffer would save itself."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.number, self.fails = number, fails

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir()
        (Path(path) / "number").write_text(str(self.number))
        if self.fails:
            raise OSError(28, "no space left on the disk")


def state(step: int) -> dict[str, Any]:
    return {"inner": {"step": torch.tensor(step), "none": None}, "empty": {}, "note": [1.5, "a state"]}


def check_only(folder: Path, step: int, number: int | None = None) -> None:
    """The folder holds a checkpoint of this step, whose buffer has this number."""
    saved = latest(folder)
    assert saved is not None
    assert saved.state == state(step)
    assert int((saved.replays[0] / "number").read_text()) == (step if number is None else number)


def test_a_folder_has_one_whole_checkpoint_whatever_happens(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for step in (640, 1_280, 10**13):
        save_run(tmp_path, step, state(step), Buffer(step), ALONE)
        check_only(tmp_path, step)
        assert len(list(tmp_path.iterdir())) == 1
    # one that fails leaves the one before
    with pytest.raises(OSError, match="no space"):
        save_run(tmp_path, step + 1, state(6), Buffer(6, fails=True), ALONE)
    assert len(list(tmp_path.iterdir())) == 1
    check_only(tmp_path, step)


def test_what_a_crash_left_counts_for_nothing_and_goes_with_the_next_save(tmp_path: Path) -> None:
    save_run(tmp_path, 5, state(5), Buffer(5), ALONE)
    # died after the buffer was written, in this step and in one that comes again
    for step in (7, 9):
        (tmp_path / f"{step:012d}").mkdir()
        Buffer(step).save(tmp_path / f"{step:012d}" / "replay")
    check_only(tmp_path, 5)
    save_run(tmp_path, 7, state(7), Buffer(77), ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007"]
    check_only(tmp_path, 7, 77)
    # died after the new one was complete, before the old one went
    save_run(tmp_path / "other", 8, state(8), Buffer(8), ALONE)
    (tmp_path / "other" / "000000000008").rename(tmp_path / "000000000008")
    check_only(tmp_path, 8)


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: Capture) -> None:
    manager = CheckpointManager(tmp_path, 60.0, lambda: (3, state(3), Buffer(3, fails=True)), ALONE)
    manager.save()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint was written: [Errno 28] no space left" in line


# runs that were stopped


class After(StopRequest):
    """A signal that comes at the n-th look for one."""

    left: int | None = None

    def check(self) -> None:
        super().check()
        if After.left is not None:
            After.left -= 1
            if After.left < 0:
                raise Stopped("SIGINT")


@pytest.fixture(autouse=True)
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gpu_replay.training.run.StopRequest", After)
    yield
    After.left = None


def train(folder: Path, arguments: Any, looks: int | None = None) -> int:
    """Train in `folder`, until so many looks for a signal were made."""
    After.left = looks
    return main([*arguments, "--output", str(folder)])


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch, heard: None) -> None:
    """As `timeout` sends it; the next one is from somebody who waits no longer."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop() == "SIGINT"
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


RESUME = ("train", "--resume")


def last_state(folder: Path) -> dict[str, Any]:
    saved = latest(folder / "checkpoint")
    assert saved is not None
    return saved.state | {"replay": saved.replays}


def check_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    pairs = {name: (torch.nan_to_num(one[name], -7.0), torch.nan_to_num(other[name], -7.0)) for name in one}
    assert [name for name, pair in pairs.items() if not torch.equal(*pair)] == []


def check_same_run(one: Path, other: Path) -> None:
    """Rows, networks, figures and all of the last checkpoint but times, the replay buffer included."""
    found: list[Any] = []
    for folder in (one, other):
        values, tensors = flatten(last_state(folder))
        progress, told = values["trainer"]["progress"], summary(folder)
        replay = TrajectoryReplayBuffer.load(values["replay"][0], "cpu").state_dict()
        counts = [value for name, value in progress.items() if isinstance(value, int) and name != "resumed"]
        names = ("steps", "updates", "episodes", "best_step", "eval_return_mean", "eval_fresh", "stopped_by")
        # the order of its metadata is by chance
        network = (folder / "network.safetensors").read_bytes()
        size = 8 + int.from_bytes(network[:8], "little")
        counts += [without_times(folder), [told[name] for name in names], progress["mark"][:2], replay["counters"]]
        found.append(([*counts, json.loads(network[8:size]), network[size:]], tensors | replay["tensors"]))
    (told, tensors), (wanted, same) = found
    assert told == wanted
    check_same(tensors, same)


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, catch_run: Path) -> None:
    folder = tmp_path / "run"
    # in the warm-up, while learning, within an evaluation
    often = (*CATCH, "--checkpoint-every", "0.05")
    for arguments, looks in ((often, 20), (RESUME, 31), (RESUME, 20)):
        assert train(folder, arguments, looks) == 130
    stopped = summary(folder)
    assert 0 < stopped["steps"] < 3_008
    # a row of its own, which the run that goes on does not have
    assert str(stopped["steps"]) in [row["step"] for row in without_times(folder)]
    assert train(folder, RESUME) == 0
    check_same_run(folder, catch_run)
    assert summary(folder)["wall_seconds"] > stopped["wall_seconds"]
    told = tensorboard_of(folder).Scalars("epsilon")
    assert [str(event.step) for event in told] == [row["step"] for row in without_times(folder)]


def snapshot(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values, tensors = flatten(trainer.state_dict())
    return json.loads(json.dumps(values)), {name: tensor.clone() for name, tensor in tensors.items()}


def restored(before: Trainer, folder: Path, name: str, **settings: Any) -> Trainer:
    """A trainer that goes on from a checkpoint of another one."""
    before.buffer.save(folder / "replay")
    after = make_trainer(name, seed=1, buffer=TrajectoryReplayBuffer.load(folder / "replay", "cpu"), **settings)
    after.load_state_dict(unflatten(*snapshot(before)))
    return after


CLASSIC = {"eval_episodes": 2, "warmup": 200, "eval_max_steps": 30, "log_every": 9_999, "eval_every": 9_999}


def test_games_whose_state_can_be_set_go_on_in_mid_episode(tmp_path: Path) -> None:
    whole, before = (make_trainer("CartPole-v1", seed=1, steps=1_120, **CLASSIC) for _ in range(2))
    whole.run(None, StopRequest())
    for _ in range(40):
        before.advance()
    after = restored(before, tmp_path, "CartPole-v1", steps=1_120, **CLASSIC)
    assert after.run(None, StopRequest()) == "steps"
    check_same(snapshot(after)[1], snapshot(whole)[1])
    assert torch.equal(after.buffer.masses(), whole.buffer.masses())
    same_draws(after.buffer, whole.buffer, 5)


UNKNOWN = "UnknownCartPole-v0"
CARTPOLE = {"warmup": 500, "eval_every": 1_000, "eval_max_steps": 30, "log_every": 300, "eval_episodes": 2}


def test_games_that_cannot_be_saved_begin_anew_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    import gymnasium
    from gymnasium.envs.classic_control import CartPoleEnv

    if UNKNOWN not in gymnasium.registry:
        # of another module, so that nobody knows what its state is made of
        gymnasium.register(UNKNOWN, type("Unknown", (CartPoleEnv,), {"__module__": "elsewhere"}), max_episode_steps=500)
    before = make_trainer(UNKNOWN, seed=1, steps=1_600, **CARTPOLE)
    assert before.run(None, StopRequest()) == "steps"
    after = restored(before, tmp_path, UNKNOWN, steps=2_400, **CARTPOLE)
    (_, tensors), (_, same) = snapshot(before), snapshot(after)
    # running episodes are given up, finished ones count, and the first actions of new ones are chosen anew
    parts = ("_extra_state", "random", "exploring")
    for name in ("statistics/returns", "statistics/lengths", "actions", *(f"agent/explorer.{part}" for part in parts)):
        tensors.pop(name), same.pop(name)
    check_same(same, tensors)
    # no window joins what was before with what comes after
    buffer, seam = after.buffer, after.buffer.added
    assert after.run(None, StopRequest()) == "steps"
    eligible, reach = buffer.masses() > 0, torch.arange(seam - 10 * 16, seam)
    batch = buffer[reach[eligible[reach]]]
    # starts whose episode ended in time can be drawn; all others never will
    assert bool((batch.terminated | batch.truncated).all())
    assert bool(eligible[seam : seam + 16].all())
    # new episodes, and not those with which the run began
    first = buffer[torch.arange(seam, seam + 16)].obs
    assert float(first.abs().max()) <= 0.05
    assert not torch.equal(first, buffer[torch.arange(16)].obs)


def test_without_its_replay_buffer_a_run_warms_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, [*CATCH, "--no-checkpoint-replay"], 66) == 130
    before = last_state(folder)["trainer"]
    updates, done = before["agent"]["_extra_state"]["updates"], before["progress"]["step"] // 32
    assert train(folder, [*RESUME, "--checkpoint-replay"]) == 0
    after = last_state(folder)["trainer"]
    # of the steps that follow 35 fill the new buffer: a warm-up of 1,000, and windows of three
    assert after["progress"]["added"] == (94 - done) * 32
    assert after["agent"]["_extra_state"]["updates"] == updates + 2 * max(94 - done - 35, 0)
    # the schedule of beta goes on where it was
    sampler: Any = TrajectoryReplayBuffer.load(last_state(folder)["replay"][0], "cpu").sampler
    whole = beta_schedule(make_trainer(eval_episodes=1, steps=3_000).settings)
    steps = (0, 5, 999)
    assert [sampler.beta(step) for step in steps] == pytest.approx([whole(updates + step) for step in steps])


def test_a_finished_run_goes_on_with_more_steps_alone(tmp_path: Path, catch_run: Path, capsys: Capture) -> None:
    assert train(catch_run, RESUME) == 0
    assert "is finished: all 3,000 steps are done. Raise --steps" in capsys.readouterr().out
    folder = tmp_path / "run"
    shutil.copytree(catch_run, folder)
    assert train(folder, [*RESUME, "--steps", "3200"]) == 0
    assert json.loads((folder / "settings.json").read_text())["steps"] == summary(folder)["steps"] == 3_200
    assert [row["step"] for row in read_rows(folder)] == [*(row["step"] for row in read_rows(catch_run)), 3_200]
    # a byte of its checkpoint is wrong
    (piece, *_) = (folder / "checkpoint").glob("*/state/piece-*")
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert train(folder, [*RESUME, "--steps", "6400"]) == 2
    assert "is damaged" in capsys.readouterr().err


# runs that branch off


def test_a_branch_goes_on_from_the_checkpoint_with_other_settings(catch_run: Path, tmp_path: Path) -> None:
    files = {path: path.read_bytes() for path in sorted(catch_run.rglob("*")) if path.is_file()}
    # a step size of zero shows whose weights they are
    rates = ["--learning-rate", "0", "--learning-rate-end", "0"]
    assert train(tmp_path, ["train", "--from", str(catch_run), "--steps", "3200", *rates]) == 0
    agents = [last_state(folder)["trainer"]["agent"] for folder in (tmp_path, catch_run)]
    check_same(*({name: agent[name] for name in agent if name.startswith("online")} for agent in agents))
    rows, before = read_rows(tmp_path), read_rows(catch_run)
    assert [row["step"] for row in rows] == [*(row["step"] for row in before), 3_200]
    assert rows[-1]["updates"] > before[-1]["updates"]
    assert {path: path.read_bytes() for path in sorted(catch_run.rglob("*")) if path.is_file()} == files


def test_a_branch_with_another_buffer_fills_it_anew(catch_run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path, ["train", "--from", str(catch_run), "--n-step", "1", "--steps", "4400"]) == 0
    assert "a new replay buffer is filled, for another n_step" in capsys.readouterr().err
    rows = {row["step"]: row for row in read_rows(tmp_path)}
    # it learned once the warm-up was there again
    assert rows[3_008]["updates"] == rows[3_520]["updates"] < rows[4_416]["updates"]
    assert rows[4_416]["stored"] == 4_416 - 3_008


# processes
