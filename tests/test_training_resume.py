"""A resumed run against one that never stopped: bit for bit the same, and clear words where that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_runs import TIMES, make_trainer, without_times
from transitions import same_draws

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.checkpoint.format import read_checkpoint
from gpu_replay.cli import main
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.training.checkpoints import flatten, latest, unflatten
from gpu_replay.training.run_dir import NETWORK
from gpu_replay.training.trainer import Listener, Trainer
from gpu_replay.training.vector_envs import make_gymnasium

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
    monkeypatch.setattr("gpu_replay.training.session.StopRequest", After)
    yield
    After.left = None


def train(folder: Path, arguments: list[str], looks: int | None = None) -> int:
    """Train in `folder`, until so many looks for a signal were made."""
    After.left = looks
    return main([*arguments, "--output", str(folder)])


def final_state(folder: Path) -> dict[str, Tensor]:
    """Everything in the last checkpoint, the replay buffer included, but for times."""
    saved = latest(folder / "checkpoint")
    # the names in checkpoints stay, so that runs of earlier versions can be resumed
    assert saved.values.keys() == {"settings", "wall_seconds", "trainer", "examiner", "recorder"}
    _, tensors = flatten(saved.state())
    assert saved.replay is not None
    replay = read_checkpoint(saved.replay)
    tensors |= {f"replay/{name}": replay.read(name) for name in replay.tensor_names}
    tensors["replay/counters"] = torch.tensor(list(replay.manifest["counters"].values()))
    rows = tensors.pop("recorder/rows")
    columns = saved.values["recorder"]["columns"]
    tensors["recorder/rows"] = rows[:, [columns.index(name) for name in columns if name not in TIMES]]
    return {name: tensor for name, tensor in tensors.items() if name.split("/")[-1] not in TIMES}


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
    values, tensors = flatten(trainer.state())
    return json.loads(json.dumps(values)), {name: tensor.clone() for name, tensor in tensors.items()}


OTHERS = ("MountainCar-v0", "Acrobot-v1")
CLASSIC = {"eval_episodes": 2, "warmup": 200, "eval_max_steps": 30, "log_every": 9_999, "eval_every": 9_999}


@pytest.mark.parametrize("name", ["CartPole-v1", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_games_whose_state_can_be_set_go_on_in_mid_episode(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    whole, before = (make_trainer(name, seed=1, steps=1_120, **CLASSIC) for _ in range(2))
    whole.run(Listener(), StopRequest())
    for _ in range(40):
        before._advance()
    before.buffer.save(tmp_path / "replay")
    buffer = TrajectoryReplayBuffer.load(tmp_path / "replay", "cpu")
    after = make_trainer(name, seed=1, steps=1_120, buffer=buffer, **CLASSIC)
    after.restore(unflatten(*snapshot(before)), filled=True)
    assert after.run(Listener(), StopRequest()) == "steps"
    tensors = [snapshot(each)[1] for each in (after, whole)]
    check_same(*({path: found[path] for path in found if path.split("/")[-1] not in TIMES} for found in tensors))
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
    assert torch.equal(other.restore(one.state()), one._frame)
    for _ in range(60):
        for each in (one, other):
            each.send(torch.tensor([0, 1]))
        steps = [each.recv() for each in (one, other)]
        assert torch.equal(steps[0].obs, steps[1].obs)
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(one.state()[name], other.state()[name]) for name in one.state())


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
    assert trainer.run(Listener(), StopRequest()) == "steps"
    trainer.buffer.save(tmp_path / "replay")
    return trainer, TrajectoryReplayBuffer.load(tmp_path / "replay", "cpu")


def test_what_gymnasium_cannot_save_is_reset_and_all_else_is_as_it_was(
    cartpole: tuple[Trainer, TrajectoryReplayBuffer],
) -> None:
    before, buffer = cartpole
    values, tensors = snapshot(before)
    after = make_trainer(UNKNOWN, seed=1, buffer=buffer, eval_episodes=2, **CARTPOLE)
    first_obs = after._cycle.obs.clone()
    after.restore(unflatten(values, tensors), filled=True)
    found, same = snapshot(after)
    # running episodes are given up, finished ones count
    for name in ("statistics/return", "statistics/length"):
        assert tensors.pop(name).any()
        assert not same.pop(name).any()
    check_same(same, tensors)
    assert values["actors"] is None
    times = {"seconds": values["seconds"], "resumed": 1, "lost": 10 * 16}
    assert found == values | times | {"seconds": found["seconds"]}
    assert found["seconds"] >= values["seconds"]
    # new episodes, and not those with which the run began
    assert after._cycle.obs.abs().max() <= 0.05
    assert not torch.equal(after._cycle.obs, first_obs)


def test_no_window_joins_what_was_before_with_what_comes_after(
    cartpole: tuple[Trainer, TrajectoryReplayBuffer],
) -> None:
    before, buffer = cartpole
    changes = CARTPOLE | {"steps": 4_800}
    after = make_trainer(UNKNOWN, seed=1, buffer=buffer, eval_episodes=2, **changes)
    after.restore(unflatten(*snapshot(before)), filled=True)
    seam = buffer.added
    assert after.run(Listener(), StopRequest()) == "steps"
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
    before = saved.state()["trainer"]
    updates, done = before["agent"]["updates"], before["step"] // 32
    assert updates > 0
    assert train(folder, ["train", "--resume"]) == 0
    saved = latest(folder / "checkpoint")
    after = saved.state()["trainer"]
    # of the steps that follow 19 fill the new buffer: a warm-up of 500, and windows of three
    assert after["added"] == (94 - done) * 32
    assert after["agent"]["updates"] == updates + 2 * (94 - done - 19)
    # the schedule of beta went on, one step for each update
    assert after["samples"] == after["agent"]["updates"]


# what cannot be resumed


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose folder tests leave alone."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert main([*SHORT, "--output", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gamma", "0.5"], "--gamma 0.5 (it has 0.99)"),
        (["--steps", "600"], "--steps 600 (it has 640, which can only be raised)"),
        (["--seed", "1"], "--seed 1 (it has 0)"),
        (["device-pong"], "device-pong (the run is of catch)"),
        (["--hidden", "64,64", "--no-double"], "--double False (it has True), --hidden (64, 64) (it has (128, 128))"),
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
        (lambda folder: (folder / "settings.json").unlink(), "holds no run to resume: settings.json is missing"),
        (lambda folder: (folder / "settings.json").write_text("{"), "settings.json cannot be read"),
        (lambda folder: (folder / "checkpoint").rename(folder / "gone"), "holds no checkpoint"),
        (lambda folder: change(folder, "gamma", 0.5), "settings.json was changed: gamma is 0.5"),
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


def change(folder: Path, name: str, value: float) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {name: value}))


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
