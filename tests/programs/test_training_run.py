"""Whole runs: what they leave behind, that they learn, when they end, and that they can be interrupted."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_twins import waiting_is_an_error
from training_runs import CPU, Events, make_trainer, read_rows, start, summary, tensorboard_of, train, wait_for

from gpu_replay import Batch, TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.console import clock
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.training.checkpoints import latest
from gpu_replay.training.device_games import Catch
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import Stopwatch, beta_schedule

Capture = pytest.CaptureFixture[str]
COLUMNS = "step seconds episodes return_mean length_mean loss td_error beta epsilon updates_per_second"
SUMMARY = "env seed device steps wall_seconds eval_return_mean eval_return_std eval_episodes best_step replay_share"


def test_catch_is_learned() -> None:
    trainer, events, reason = train(steps=20_000)
    assert reason == "steps"
    assert events.rows[1]["return_mean"] < -0.2
    assert events.rows[-1]["return_mean"] >= 0.9
    final = trainer.evaluator.final()
    assert (final.return_mean >= 0.9, final.episodes) == (True, 256)
    assert events.rows[-1]["td_error"] < 0.5


SHORT: dict[str, dict[str, Any]] = {
    "catch": {"warmup": 200, "eval_episodes": 32},
    "device-pong": {"hidden": (8,), "warmup": 160, "eval_max_steps": 3, "eval_episodes": 2, "frame_size": 36},
}
ENDS: list[tuple[str, dict[str, Any], str, int]] = [
    # a return that every network reaches ends the run, unless told not to
    ("catch", {"stop_at": -2.0, "early_stop": True}, "solved", 1),
    ("catch", {"stop_at": -2.0, "early_stop": False}, "steps", 2),
    # evaluations wait for a return of training; the last one closes the run
    ("catch", {"eval_from": 2.0}, "steps", 1),
    # or for points, where a game takes hundreds of steps
    ("device-pong", {"eval_from": -21.0}, "steps", 2),
    ("device-pong", {"eval_from": 20.0}, "steps", 1),
]


@pytest.mark.parametrize("name, changes, reason, evaluations", ENDS)
def test_a_run_ends_and_is_evaluated_when_it_should(name: str, changes: Any, reason: str, evaluations: int) -> None:
    trainer, events = make_trainer(name, steps=1_600, eval_every=1_000, **SHORT[name], **changes), Events()
    assert (trainer.run(events, StopRequest()), len(events.evaluations)) == (reason, evaluations)
    assert trainer.evaluator.best.solved == ("stop_at" in changes)
    assert math.isnan(events.rows[-1]["return_mean"]) == (name == "device-pong")


def test_an_evaluation_that_waits_comes_with_the_row_after_the_return_rose(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"steps": 4_000, "eval_every": 1_000, "eval_from": 0.5, "log_every": 320}
    trainer, events, steps = make_trainer(**settings, **SHORT["catch"]), Events(), []
    monkeypatch.setattr(trainer, "_recent_return", lambda: 1.0 if trainer.step >= 1_700 else -1.0)
    monkeypatch.setattr(events, "evaluated", lambda step, *_: steps.append(step))
    trainer.run(events, StopRequest())
    # due from 1,000 on and asked for at 1,320, 1,640 and 1,960; the next ones are due 1,000 steps after that
    assert steps == [1_984, 2_976, 3_968, 4_000]


def test_rates_counts_and_priorities_agree(catch_run: Path) -> None:
    last, saved = read_rows(catch_run)[-1], latest(catch_run / "checkpoint")
    assert saved is not None
    buffer = TrajectoryReplayBuffer.load(saved.replays[0], "cpu")
    stats, settings = buffer.stats(), Settings.for_family("catch", steps=3_000)
    # warm-up of 1,000 ends after 32 steps of all 32, and three more wait for their windows
    assert last["updates"] == 2 * (94 - 32 - 3)
    assert last["episodes"] == 3_008 // 32 // 11 * 32
    assert last["stored"] == buffer.added == last["step"] == 3_008
    assert last["beta"] == pytest.approx(beta_schedule(settings)(2 * 59), rel=1e-4)
    assert last["epsilon"] == pytest.approx(1 - 0.98 * 3_008 / 10_000, rel=1e-4)
    # TD errors are the priorities: what was just learned is no longer at the priority of the new
    assert len(buffer.masses().unique()) > 500
    assert stats.min_priority < 0.5 * stats.max_priority
    assert stats.stale_updates == stats.rejected_priorities == 0


def test_updates_of_a_step_can_share_a_draw() -> None:
    trainer = make_trainer(updates=3, shared_draw=True, steps=2_000, eval_episodes=2)
    learned: list[torch.Tensor] = []
    errors: list[torch.Tensor] = []
    aim, learn, give = trainer.agent.targets, trainer.agent.update, trainer.buffer.update_priorities
    aimed: dict[int, float] = {}

    def aiming(batch: Batch) -> torch.Tensor:
        target = aim(batch)
        aimed.update(zip(batch.key.tolist(), target.tolist(), strict=True))
        return target

    def learning(batch: Batch, target: torch.Tensor) -> torch.Tensor:
        # the targets of its own rows, made before the first of the updates
        assert [aimed[key] for key in batch.key.tolist()] == target.tolist()
        learned.append(batch.key)
        errors.append(learn(batch, target))
        return errors[-1]

    def updating(keys: torch.Tensor, priorities: torch.Tensor) -> None:
        # the three batches are what was drawn, each spread over all strata
        assert torch.equal(priorities, torch.cat(errors[-3:]))
        assert torch.equal(keys, torch.cat(learned[-3:]))
        assert all(int(part.max() - part.min()) > trainer.buffer.added // 2 for part in learned[-3:])
        give(keys, priorities)

    trainer.agent.targets = aiming  # type: ignore[method-assign]
    trainer.agent.update = learning  # type: ignore[method-assign]
    trainer.buffer.update_priorities = updating  # type: ignore[method-assign]
    trainer.run(Events(), StopRequest())
    samples = trainer.buffer.state_dict()["counters"]["STEP"]
    assert trainer.agent.updates == len(learned) == 3 * samples > 0
    assert trainer.last_row["beta"] == pytest.approx(beta_schedule(trainer.settings)(samples))
    assert {len(keys) for keys in learned} == {trainer.settings.batch_size}


def test_compiling_counts_for_no_part_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(CPU)
    watch.begin()
    time.sleep(0.02)
    watch.lap("env")
    time.sleep(0.2)
    monkeypatch.setattr(clock.compiling, "waited_seconds", clock.compiling.waited_seconds + 0.2)
    watch.lap("replay")
    assert 0 <= watch.seconds["replay"] < 0.1
    assert watch.seconds["env"] >= 0.02


@pytest.mark.usefixtures("no_pictures")
def test_a_run_ends_with_what_to_do_next_and_says_no_nan(capsys: Capture, tmp_path: Path) -> None:
    short, flags = tmp_path / "a run", ["train", "catch", "--device", "cpu", "--eval-episodes", "4", "--output"]
    assert main([*flags, str(short), "--steps", "100"]) == 0
    out, bar = capsys.readouterr()
    assert ("no training episode has ended yet" in out, "no episode has ended" in bar) == (True, True)
    assert "nan" not in out + bar
    assert "\nwritten to" in out
    assert ": returns over steps in curve.png, the replay buffer in buffer.png\n" in out
    assert out.endswith(
        f"next:\n  gpu-replay play '{short}'     # record a video of its network\n"
        f"  gpu-replay inspect '{short}'  # plot its replay buffer\n"
    )
    assert main([*flags, str(tmp_path / "cut"), "--max-seconds", "0.1", "--no-checkpoint-replay"]) == 0
    *_, resume, play = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert resume.startswith(f"gpu-replay train --resume --output {tmp_path / 'cut'} #")
    assert play.startswith(f"gpu-replay play {tmp_path / 'cut'} #")
    assert (summary(tmp_path / "cut")["stopped_by"], summary(tmp_path / "cut")["steps"] < 25_000) == (
        "max_seconds",
        True,
    )


@pytest.mark.usefixtures("no_pictures")
def test_a_first_run_says_that_it_compiles_before_its_bar(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("numba")
    code, said = clock.compiling, []
    loop = vars(sys.modules["gpu_replay.loops.steps"])["add_steps"]
    for name in ("first", "second"):
        with monkeypatch.context() as patch:
            # as in a process that has loaded nothing; the first one finds no machine code on the disk
            patch.setattr(loop, "_code", None)
            patch.setattr(code, "_notified", False)
            patch.setattr(code, "_kept", code._kept if name == "second" else lambda *_: [])
            assert main(["train", "catch", "--device", "cpu", "--steps", "16", "--output", str(tmp_path / name)]) == 0
        said.append(capsys.readouterr().err.partition("%|")[0])
    assert ["gpu_replay compiles its loops for this machine, once" in each for each in said] == [True, False]


@pytest.mark.gpu
def test_a_step_on_the_gpu_does_not_wait_for_it() -> None:
    # past the warm-up, and between the steps that are timed
    trainer = make_trainer(device=torch.device("cuda"), eval_episodes=4, warmup=320)
    for _ in range(70):
        trainer.advance()
    with waiting_is_an_error():
        for _ in range(10):
            trainer.advance()
    assert trainer.agent.updates == 2 * (80 - 13)


def test_rows_and_summary_say_what_happened(catch_run: Path) -> None:
    names = {path.name for path in catch_run.iterdir() if not path.name.startswith(".")}
    files = {"progress.csv", "curve.png", "buffer.png", "network.safetensors", "settings.json", "summary.json"}
    assert names == files | {"checkpoint", "tensorboard"}
    rows, found = read_rows(catch_run), summary(catch_run)
    assert [row["step"] for row in rows] == [512, 1_024, 1_504, 2_016, 2_528, 3_008]
    assert set(rows[0]) >= {*COLUMNS.split()}
    for row in rows[3:]:
        assert all(math.isfinite(row[name]) for name in {*COLUMNS.split()})
    assert [row["step"] for row in rows if math.isfinite(row["eval_return_mean"])] == [1_504, 3_008]
    assert rows[0]["effective_sample_size"] == rows[0]["step"] - 3 * 32
    assert set(found) >= {*SUMMARY.split(), "steps_per_second", "updates_per_second"}
    assert (found["env"], found["seed"], found["device"]) == ("catch", 3, "cpu")
    assert (found["steps"], found["stopped_by"], found["eval_episodes"]) == (3_008, "steps", 32)
    assert 0 < found["replay_share"] < 1
    assert sum(found["time_split"].values()) == pytest.approx(found["loop_seconds"])
    assert found["steps_per_second"] == pytest.approx(found["steps"] / found["wall_seconds"])
    # what repeats the run stands beside it
    values = json.loads((catch_run / "settings.json").read_text())
    assert [values.pop(name) for name in ("env", "seed", "device")] == ["catch", 3, "cpu"]
    assert Settings.from_dict(values) == Settings.for_family("catch", steps=3_000, eval_every=1_500, eval_episodes=32)


def test_events_and_curve_show_the_rows(catch_run: Path) -> None:
    from matplotlib.image import imread

    picture = imread(catch_run / "curve.png")
    assert picture.shape[:2] >= (400, 600)
    colours = {tuple(pixel) for pixel in (picture[..., :3].reshape(-1, 3) * 255).astype(int).tolist()}
    # training, evaluation, epsilon
    assert {(31, 119, 180), (255, 127, 14), (148, 103, 189)} <= colours
    told, rows = tensorboard_of(catch_run), read_rows(catch_run)
    for name, tag in {"loss": "loss", "eval_return_mean": "eval_return_mean", "max_age": "replay/max_age"}.items():
        expected = [(row["step"], pytest.approx(row[name], rel=1e-4)) for row in rows if math.isfinite(row[name])]
        assert [(event.step, event.value) for event in told.Scalars(tag)] == expected


def test_the_saved_network_is_the_one_that_was_evaluated(catch_run: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = str(catch_run / "network.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    settings = Settings.from_dict(json.loads(metadata["settings"]))
    network = QNetwork(Catch.spec.observation, int(metadata["actions"]), settings)
    network.load_state_dict(load_file(path))
    assert int(metadata["step"]) == summary(catch_run)["best_step"]
    # played again on the seeds of the last evaluation of the run
    evaluator = Evaluator(Catch(32, CPU), settings, device=CPU, seed=3, stop=StopRequest())
    evaluator.evaluate(network, 0)
    assert evaluator.final().return_mean == pytest.approx(summary(catch_run)["eval_return_mean"])


def test_a_run_that_goes_on_is_not_resumed_and_ends_with_everything_written(tmp_path: Path, capsys: Capture) -> None:
    # a run that would take hours
    process = start(tmp_path, "catch", "--device", "cpu", "--steps", "1e8", "--eval-episodes", "4")
    try:
        wait_for(process, lambda: len(read_rows(tmp_path)) >= 2)
        for flags in (["--resume"], ["catch", "--device", "cpu", "--overwrite"]):
            assert main(["train", *flags, "--output", str(tmp_path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "still going on" in line
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert "interrupted by SIGTERM" in out
    found = summary(tmp_path)
    assert (found["stopped_by"], found["steps"]) == ("SIGTERM", read_rows(tmp_path)[-1]["step"])
    for file in ("network.safetensors", "curve.png", "buffer.png"):
        assert (tmp_path / file).stat().st_size > 10_000
    assert not list(tmp_path.glob(".*"))
    # the lock is gone with the process
    assert main(["train", "--resume", "--output", str(tmp_path), "--max-seconds", "0.001"]) == 2
    assert "is used up" in capsys.readouterr().err


def test_a_run_that_diverges_says_so_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    small = ["--device", "cpu", "--steps", "300", "--warmup", "100", "--batch-size", "8", "--output", str(tmp_path)]
    assert main(["train", "catch", *small, "--learning-rate", "1e30"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(part in last for part in ("not finite after ", "Lower --learning-rate", str(tmp_path)))
    assert (tmp_path / "progress.csv").is_file()


# each through the same door: flags, and what the summary says beside
ATARI = ["--num-envs", "4", "--capacity", "1000", "--warmup", "300", "--batch-size", "8", "--steps", "400"]
SMALL = ["--steps", "3000", "--eval-episodes", "1"]
DOORS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "CartPole-v1": (SMALL, {"reward_threshold": 475, "stopped_by": "steps"}),
    # a module that registers it
    "gpu_replay.examples.key_door:KeyDoor-v0": (SMALL, {"reward_threshold": 0.99}),
    "pong": ([*ATARI, "--eval-episodes", "2", "--eval-max-steps", "50"], {"eval_length_mean": 50}),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", DOORS)
def test_runs_of_all_kinds_end_with_their_figures(name: str, tmp_path: Path) -> None:
    flags, told = DOORS[name]
    if name == "pong":
        pytest.importorskip("ale_py")
    assert main(["train", name, "--device", "cpu", *flags, "--output", str(tmp_path)]) == 0
    found, last = summary(tmp_path), read_rows(tmp_path)[-1]
    told = told | {"env": name, "steps": last["stored"]}
    assert {name: found[name] for name in told} == told
    assert found["updates"] > 20
    assert math.isfinite(last["loss"])
