"""A resumed run against one that never stopped: bit for bit the same, and clear words where that cannot be."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_runs import make_trainer, read_rows, start, wait_for, without_times
from transitions import same_draws

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.cli import main
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.training import run
from gpu_replay.training.checkpoints import flatten, latest, unflatten
from gpu_replay.training.host_envs import make_gymnasium
from gpu_replay.training.records import NETWORK
from gpu_replay.training.train import Trainer

pytestmark = pytest.mark.usefixtures("no_pictures")
CATCH = ["train", "catch", "--device", "cpu", "--steps", "3000", "--eval-every", "800", "--eval-episodes", "16"]
CATCH += ["--log-every", "300", "--seed", "5", "--warmup", "500"]
SHORT = ["train", "catch", "--device", "cpu", "--steps", "640", "--warmup", "200", "--log-every", "320"]


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


def train(folder: Path, arguments: list[str], looks: int | None = None) -> int:
    """Train in `folder`, until so many looks for a signal were made."""
    After.left = looks
    return main([*arguments, "--output", str(folder)])


def final_state(folder: Path) -> dict[str, Tensor]:
    """Everything in the last checkpoint, the replay buffer included, but for times."""
    saved = latest(folder / "checkpoint")
    assert saved.replay is not None
    values, tensors = flatten(saved.state)
    progress = values["trainer"]["progress"]
    counts = [value for name, value in progress.items() if isinstance(value, int) and name != "resumed"]
    tensors["progress"] = torch.tensor([*counts, *progress["mark"][:2]])
    replay = read_checkpoint(saved.replay)
    tensors |= {f"replay/{name}": replay.read(name) for name in replay.tensor_names}
    tensors["replay/counters"] = torch.tensor(list(replay.manifest["counters"].values()))
    return tensors


def check_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [
        name for name in one if not torch.equal(torch.nan_to_num(one[name], -7.0), torch.nan_to_num(other[name], -7.0))
    ]
    assert different == []


def check_same_network(one: Path, other: Path) -> None:
    """network.safetensors and what it says of itself; the library writes its metadata in no order."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(str(one / NETWORK), "pt") as mine, safe_open(str(other / NETWORK), "pt") as theirs:
        assert mine.metadata() == theirs.metadata()
    check_same(load_file(one / NETWORK), load_file(other / NETWORK))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Catch that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([*CATCH, "--output", str(folder)]) == 0
    return folder


# in the warm-up, while learning, within the second evaluation, one step before the end
@pytest.mark.parametrize(
    "looks", [*(pytest.param([look], marks=pytest.mark.slow) for look in (3, 40, 103)), [66], [20, 50, 1]]
)
def test_a_resumed_run_of_catch_is_the_run_that_never_stopped(tmp_path: Path, whole: Path, looks: list[int]) -> None:
    folder = tmp_path / "run"
    assert train(folder, CATCH, looks[0]) == 130
    for look in looks[1:]:
        assert train(folder, ["train", "--resume"], look) == 130
    stopped_at = json.loads((folder / "summary.json").read_text())["steps"]
    assert 0 < stopped_at < 3_008
    assert train(folder, ["train", "--resume"]) == 0
    assert without_times(folder) == without_times(whole)
    check_same_network(folder, whole)
    check_same(final_state(folder), final_state(whole))
    mine, other = (json.loads((each / "summary.json").read_text()) for each in (folder, whole))
    for name in ("steps", "updates", "episodes", "best_step", "eval_return_mean", "eval_fresh", "stopped_by"):
        assert mine[name] == other[name]


def test_events_of_rows_that_were_dropped_count_no_more(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    # a row of its own where it was stopped, which the run that goes on does not have
    assert train(folder, CATCH, 41) == 130
    stopped_at = json.loads((folder / "summary.json").read_text())["steps"]
    assert str(stopped_at) in [row["step"] for row in without_times(folder)]
    assert train(folder, ["train", "--resume"]) == 0
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = [row["step"] for row in without_times(folder)]
    assert str(stopped_at) not in steps
    assert [str(event.step) for event in events.Scalars("epsilon")] == steps


# environments that cannot be saved


def snapshot(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values, tensors = flatten(trainer.state_dict())
    return json.loads(json.dumps(values)), {name: tensor.clone() for name, tensor in tensors.items()}


OTHERS = ("MountainCar-v0", "Acrobot-v1")
CLASSIC = {"eval_episodes": 2, "warmup": 200, "eval_max_steps": 30, "log_every": 9_999, "eval_every": 9_999}


@pytest.mark.parametrize("name", ["CartPole-v1", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_games_whose_state_can_be_set_go_on_in_mid_episode(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    whole, before = (make_trainer(name, seed=1, steps=1_120, **CLASSIC) for _ in range(2))
    whole.run(None, StopRequest())
    for _ in range(40):
        before.advance()
    before.buffer.save(tmp_path / "replay")
    buffer = TrajectoryReplayBuffer.load(tmp_path / "replay", "cpu")
    after = make_trainer(name, seed=1, steps=1_120, buffer=buffer, **CLASSIC)
    after.load_state_dict(unflatten(*snapshot(before)), filled=True)
    assert after.run(None, StopRequest()) == "steps"
    tensors = [snapshot(each)[1] for each in (after, whole)]
    check_same(*tensors)
    assert torch.equal(after.buffer.masses(), whole.buffer.masses())
    same_draws(after.buffer, whole.buffer, 5)


def test_the_random_stream_of_a_game_comes_back() -> None:
    pytest.importorskip("gymnasium")
    one, other = (make_gymnasium("CartPole-v1", 2) for _ in range(2))
    one.reset(3)
    # a half word is kept by the stream
    for environment in one._vector.envs:
        environment.unwrapped.np_random.integers(7, dtype=np.uint32)
    other.reset(4)
    other.set_extra_state(one.get_extra_state())
    for _ in range(60):
        for each in (one, other):
            each.send(torch.tensor([0, 1]))
        steps = [each.recv() for each in (one, other)]
        assert torch.equal(steps[0].frame, steps[1].frame)
    mine, theirs = one.get_extra_state(), other.get_extra_state()
    assert (mine["elapsed"], mine["random"]) == (theirs["elapsed"], theirs["random"])
    check_same(mine["states"], theirs["states"])


UNKNOWN = "UnknownCartPole-v0"
CARTPOLE = {"steps": 3_200, "warmup": 500, "eval_every": 1_000, "eval_max_steps": 30, "log_every": 300}


@pytest.fixture
def cartpole(tmp_path: Path) -> tuple[Trainer, TrajectoryReplayBuffer]:
    """A trainer at the end of its steps, and its buffer as a checkpoint gives it back."""
    gymnasium = pytest.importorskip("gymnasium")
    kind = pytest.importorskip("gymnasium.envs.classic_control").CartPoleEnv
    # of another module, so that nobody knows what its state is made of
    other = type("Unknown", (kind,), {"__module__": "elsewhere"})
    if UNKNOWN not in gymnasium.registry:
        gymnasium.register(UNKNOWN, other, max_episode_steps=500)
    trainer = make_trainer(UNKNOWN, seed=1, eval_episodes=2, **CARTPOLE)
    assert trainer.run(None, StopRequest()) == "steps"
    trainer.buffer.save(tmp_path / "replay")
    return trainer, TrajectoryReplayBuffer.load(tmp_path / "replay", "cpu")


def test_what_gymnasium_cannot_save_is_reset_and_all_else_is_as_it_was(
    cartpole: tuple[Trainer, TrajectoryReplayBuffer],
) -> None:
    before, buffer = cartpole
    values, tensors = snapshot(before)
    after = make_trainer(UNKNOWN, seed=1, buffer=buffer, eval_episodes=2, **CARTPOLE)
    first_obs = after._actors.stack.obs.clone()
    after.load_state_dict(unflatten(values, tensors), filled=True)
    found, same = snapshot(after)
    # running episodes are given up, finished ones count
    for name in ("statistics/returns", "statistics/lengths"):
        assert tensors.pop(name).any()
        assert not same.pop(name).any()
    # the first actions of new episodes are chosen anew
    for name in ("actions", "agent/explorer._extra_state", "agent/explorer.random", "agent/explorer.exploring"):
        tensors.pop(name), same.pop(name)
    check_same(same, tensors)
    assert values["actors"] is None
    seconds = found["progress"]["seconds"]
    assert seconds >= values["progress"]["seconds"]
    times = {"seconds": seconds, "resumed": 1, "lost": 10 * 16}
    assert found == values | {"progress": values["progress"] | times}
    # new episodes, and not those with which the run began
    obs = after._actors.stack.obs
    assert obs.abs().max() <= 0.05
    assert not torch.equal(obs, first_obs)


def test_no_window_joins_what_was_before_with_what_comes_after(
    cartpole: tuple[Trainer, TrajectoryReplayBuffer],
) -> None:
    before, buffer = cartpole
    changes = CARTPOLE | {"steps": 4_800}
    after = make_trainer(UNKNOWN, seed=1, buffer=buffer, eval_episodes=2, **changes)
    after.load_state_dict(unflatten(*snapshot(before)), filled=True)
    seam = buffer.added
    assert after.run(None, StopRequest()) == "steps"
    eligible = buffer.masses() > 0
    reach = (seam - 10 * 16, seam)
    # starts before the seam whose episode ended in time can be drawn; all others never will
    keys = torch.arange(*reach)
    drawn = keys[eligible[reach[0] : reach[1]]]
    batch = buffer[drawn]
    assert len(drawn) < len(keys)
    assert bool((batch.terminated | batch.truncated).all())
    assert bool(eligible[seam : seam + 16].all())


def test_without_its_replay_buffer_a_run_warms_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, [*CATCH, "--no-checkpoint-replay"], 60) == 130
    saved = latest(folder / "checkpoint")
    assert saved.replay is None
    before = saved.state["trainer"]
    updates, done = before["agent"]["_extra_state"]["updates"], before["progress"]["step"] // 32
    assert updates > 0
    assert train(folder, ["train", "--resume"]) == 0
    saved = latest(folder / "checkpoint")
    # without another flag it is left out again
    assert saved.replay is None
    after = saved.state["trainer"]
    # of the steps that follow 19 fill the new buffer: a warm-up of 500, and windows of three
    assert after["progress"]["added"] == (94 - done) * 32
    assert after["agent"]["_extra_state"]["updates"] == updates + 2 * (94 - done - 19)
    # the schedule of beta went on, one step for each update
    assert after["samples"] == after["agent"]["_extra_state"]["updates"]


def test_beta_goes_on_where_a_new_buffer_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = run.make_buffer

    def noted(*arguments: Any) -> TrajectoryReplayBuffer:
        made.append(arguments[2])
        return make(*arguments)

    monkeypatch.setattr(run, "make_buffer", noted)
    folder = tmp_path / "run"
    assert train(folder, [*CATCH, "--no-checkpoint-replay"], 60) == 130
    samples = latest(folder / "checkpoint").state["trainer"]["samples"]
    assert train(folder, ["train", "--resume"], 1) == 130
    first, second = made
    assert samples > 0
    assert [second(step) for step in (0, 5, 999)] == pytest.approx([first(samples + step) for step in (0, 5, 999)])


# what cannot be resumed


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose folder tests leave alone."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert main([*SHORT, "--output", str(folder)]) == 0
    return folder


needs_ray = pytest.mark.skipif(not (find_spec("ray") and find_spec("zstandard")), reason="Ray is asked for first")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gamma", "0.5"], "--gamma 0.5 (it has 0.99)"),
        (["--steps", "600"], "--steps 600 (it has 640, which can only be raised)"),
        (["--seed", "1"], "--seed 1 (it has 0)"),
        (["device-pong"], "ENV device-pong (it has catch)"),
        (["--hidden", "64,64", "--updates", "1"], "--updates 1 (it has 2), --hidden (64, 64) (it has (128, 128))"),
        pytest.param(["--actors", "2"], "--actors 2 (it has none)", marks=needs_ray),
        (["--steps", "1e4", "--max-seconds", "0.001"], "--max-seconds 0.001 is used up"),
    ],
)
def test_flags_that_contradict_the_run_are_named(
    done: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    files = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert main(["train", *flags, "--resume", "--output", str(done)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == files


def test_a_finished_run_says_so(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "--output", str(done)]) == 0
    assert "is finished: all 640 steps are done. Raise --steps to go on." in capsys.readouterr().out
    # flags that agree are no contradiction
    assert main(["train", "catch", "--seed", "0", "--steps", "640", "--resume", "--output", str(done)]) == 0


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path, done: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    assert main(["train", "--resume", "--steps", "1280", "--output", str(folder)]) == 0
    assert json.loads((folder / "settings.json").read_text())["steps"] == 1_280
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1_280
    assert [row["step"] for row in without_times(folder)] == ["320", "640", "960", "1280"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "checkpoint").rename(folder / "gone"), "holds no checkpoint"),
        (lambda folder: damage(folder / "checkpoint"), "is damaged"),
    ],
)
def test_a_folder_that_cannot_be_resumed_is_refused(
    tmp_path: Path, done: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    spoil(folder)
    assert main(["train", "--resume", "--steps", "1280", "--output", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def damage(checkpoint: Path) -> None:
    (piece, *_) = checkpoint.glob("*/state/piece-*")
    content = bytearray(piece.read_bytes())
    content[-1] ^= 1
    piece.write_bytes(content)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume"], "--resume needs --output"),
        (["--resume", "--output", "nowhere"], "there is no such folder"),
        ([], "the following arguments are required: ENV, such as pong, or --resume"),
    ],
)
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["train", *flags]) == 2
    assert message in capsys.readouterr().err


# runs that branch off

SMALL = ("--eval-episodes", "4", "--log-every", "320", "--warmup", "320")


def learned(folder: Path) -> torch.Tensor:
    """The weights of the newest checkpoint, flat."""
    saved = latest(folder / "checkpoint")
    assert saved is not None
    agent = saved.state["trainer"]["agent"]
    return torch.cat([agent[name].flatten() for name in sorted(agent) if name.startswith("online")])


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branch") / "parent"
    assert main(["train", "catch", "--device", "cpu", "--steps", "960", *SMALL, "--output", str(folder)]) == 0
    return folder


def test_a_branch_goes_on_from_the_checkpoint_with_other_settings(parent: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(parent.rglob("*")) if path.is_file()}
    # a step size of zero shows whose weights they are
    rates = ["--learning-rate", "0", "--learning-rate-end", "0"]
    branch = tmp_path / "branch"
    assert main(["train", "--from", str(parent), "--steps", "1280", *rates, "--output", str(branch)]) == 0
    settings = json.loads((branch / "settings.json").read_text())
    assert (settings["env"], settings["learning_rate"], settings["warmup"], settings["steps"]) == (
        "catch",
        0,
        320,
        1280,
    )
    assert torch.equal(learned(branch), learned(parent))
    assert [row["step"] for row in read_rows(branch)] == [320, 640, 960, 1280]
    assert json.loads((branch / "summary.json").read_text())["updates"] > read_rows(parent)[-1]["updates"]
    assert {path: path.read_bytes() for path in sorted(parent.rglob("*")) if path.is_file()} == before


def test_a_branch_with_another_buffer_fills_it_anew(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--n-step", "1", "--steps", "1600", "--output", str(tmp_path / "branch")]
    assert main(["train", "--from", str(parent), *flags]) == 0
    assert "a new replay buffer is filled, for another n_step" in capsys.readouterr().err
    rows = read_rows(tmp_path / "branch")
    assert rows[-1]["stored"] == 640
    # it learned once the warm-up was there again
    assert rows[2]["updates"] == rows[3]["updates"] < rows[-1]["updates"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "8"], r"--hidden \(8,\) \(it has \(128, 128\)\)"),
        (["--steps", "960"], "--steps 960 are done: .* is at step 960"),
        (["--actors", "2"], "--from does not go with --actors"),
        (["CartPole-v1"], "ENV CartPole-v1 .it has catch."),
    ],
)
def test_a_branch_that_cannot_be_is_refused(
    flags: list[str], message: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags[0].startswith("CartPole"):
        pytest.importorskip("gymnasium")
    assert main(["train", *flags, "--from", str(parent), "--output", str(tmp_path / "branch")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)


def test_a_folder_without_a_run_and_the_run_itself_are_refused(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (str(tmp_path / "none"), str(tmp_path)):
        assert main(["train", "--from", source, "--output", str(tmp_path / "branch")]) == 2
        assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["train", "--from", str(parent), "--steps", "1280", "--output", str(parent)]) == 2
    assert "already holds a run" in capsys.readouterr().err


# one run in a folder


def test_a_run_that_is_going_on_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(tmp_path, "catch", "--device", "cpu", "--steps", "1e8", "--eval-episodes", "4")
    try:
        wait_for(process, lambda: len(read_rows(tmp_path)) >= 1)
        for flags in (["--resume"], ["catch", "--device", "cpu", "--overwrite"]):
            assert main(["train", *flags, "--output", str(tmp_path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "a run in it is still going on" in line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 130, err
        # the lock is gone with the process
        steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
        more = ["--steps", str(10**8 + 1), "--max-seconds", "0.001"]
        assert main(["train", "--resume", "--output", str(tmp_path), *more]) == 2
        assert "is used up" in capsys.readouterr().err
        assert steps > 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    "flags", [["--network", "nature"], ["--capacity", "2e9"], ["--stop-at", "nan"]], ids=["network", "memory", "value"]
)
def test_a_refused_run_leaves_no_folder(flags: list[str], tmp_path: Path) -> None:
    assert main(["train", "catch", "--device", "cpu", *flags, "--output", str(tmp_path / "runs" / "new")]) == 2
    assert list(tmp_path.iterdir()) == []
    # nor anything in one that is there
    assert main(["train", "catch", "--device", "cpu", *flags, "--output", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
