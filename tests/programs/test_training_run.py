"""Whole runs: what they leave behind, that they learn, that they repeat, and that they can be interrupted."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from gpu_twins import waiting_is_an_error
from training_runs import CPU, Events, advanced, read_rows, start, train, wait_for

from gpu_replay import Batch, TrajectoryReplayBuffer
from gpu_replay.cli import main
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.training.agent import Agent
from gpu_replay.training.device_games import Catch
from gpu_replay.training.evaluation import Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.records import REPLAY_STATS
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import Trainer, beta_schedule

PROMISED_COLUMNS = {
    *("step", "seconds", "episodes", "return_mean", "length_mean", "loss", "td_error", "beta", "epsilon"),
    "updates_per_second",
}
PROMISED_SUMMARY = {
    *("env", "seed", "device", "steps", "wall_seconds", "eval_return_mean", "eval_return_std", "eval_episodes"),
    *("best_step", "steps_per_second", "updates_per_second", "replay_share"),
}
SHORT = ["--device", "cpu", "--steps", "3000", "--eval-every", "1500", "--eval-episodes", "32"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of Catch."""
    folder = tmp_path_factory.mktemp("run") / "catch"
    assert main(["train", "catch", *SHORT, "--seed", "3", "--output", str(folder)]) == 0
    return folder


def test_catch_is_learned() -> None:
    trainer, events, reason = train(steps=20_000)
    assert reason == "steps"
    assert events.rows[1]["return_mean"] < -0.2
    assert events.rows[-1]["return_mean"] >= 0.9
    final = trainer.evaluator.final()
    assert final.return_mean >= 0.9
    assert final.episodes == 256
    assert events.rows[-1]["td_error"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "combined", "rank"])
def test_the_other_samplers_learn_too(sampler: str) -> None:
    _, events, _ = train(sampler=sampler, steps=12_000, epsilon_steps=6_000, eval_every=12_000)
    # chance gives -0.5, with a standard error of 0.06
    assert events.evaluations[-1] > -0.2


def test_a_solved_environment_ends_the_run_and_can_be_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # a threshold that every network reaches
    monkeypatch.setattr(Catch, "spec", dataclasses.replace(Catch.spec, reward_threshold=-2.0))
    for early_stop, reason in ((True, "solved"), (False, "steps")):
        trainer, events, ended = train(steps=3_000, eval_every=2_000, eval_episodes=64, early_stop=early_stop)
        assert ended == reason
        assert len(events.evaluations) == (1 if early_stop else 2)
        assert trainer.evaluator.best.solved


@pytest.mark.parametrize(("least", "evaluations"), [(-1.0, 3), (2.0, 1)])
def test_evaluations_wait_for_a_return_of_training(least: float, evaluations: int) -> None:
    _, events, reason = train(steps=3_000, eval_every=1_250, eval_episodes=32, eval_from=least)
    assert (reason, len(events.evaluations)) == ("steps", evaluations)


@pytest.fixture(scope="module")
def short() -> tuple[Trainer, Events]:
    """A short run of Catch in this process."""
    trainer, events, _ = train(steps=3_000)
    return trainer, events


def test_the_seed_decides_the_network(short: tuple[Trainer, Events]) -> None:
    trainers = [short[0], *(train(seed, steps=3_000)[0] for seed in (0, 1))]
    first, same, other = (torch.cat([weight.flatten() for weight in t.agent.online.parameters()]) for t in trainers)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_rates_and_counts_of_a_row_agree(short: tuple[Trainer, Events]) -> None:
    trainer, events = short
    last = events.rows[-1]
    assert last["step"] == trainer.step == 3_008
    # warm-up of 1,000 ends after 32 steps of all 32, and three more wait for their windows
    assert last["updates"] == 2 * (94 - 32 - 3)
    assert last["episodes"] == 3_008 // 32 // 11 * 32
    assert last["stored"] == trainer.buffer.added == 3_008
    assert last["beta"] == pytest.approx(beta_schedule(trainer.settings)(trainer.agent.updates))
    assert 0.4 < last["beta"] <= 1.0
    assert last["epsilon"] == pytest.approx(1 - 0.98 * 3_008 / 10_000)


def test_updates_of_a_step_can_share_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    learn, give = Agent.update, TrajectoryReplayBuffer.update_priorities

    def learning(agent: Agent, batch: Batch) -> torch.Tensor:
        learned.append(batch.key)
        return learn(agent, batch)

    def updating(buffer: TrajectoryReplayBuffer, keys: torch.Tensor, priorities: torch.Tensor) -> None:
        given.append(keys)
        give(buffer, keys, priorities)

    monkeypatch.setattr(Agent, "update", learning)
    monkeypatch.setattr(TrajectoryReplayBuffer, "update_priorities", updating)
    trainer, _, _ = train(updates=3, shared_draw=True, steps=2_000)
    samples = trainer.buffer.state_dict()["counters"]["STEP"]
    assert trainer.agent.updates == len(learned) == 3 * samples > 0
    assert trainer.state_dict()["samples"] == samples
    assert trainer.last_row["beta"] == pytest.approx(beta_schedule(trainer.settings)(samples))
    assert {len(keys) for keys in learned} == {trainer.settings.batch_size}
    for number, keys in enumerate(given):
        # the three batches are what was drawn, each spread over all strata
        three = learned[3 * number : 3 * number + 3]
        assert torch.equal(keys, torch.cat(three))
        assert all(int(part.max() - part.min()) > trainer.buffer.added // 2 for part in three)


def test_td_errors_become_priorities(short: tuple[Trainer, Events]) -> None:
    trainer, _ = short
    assert len(trainer.buffer.masses().unique()) > 500
    # what was just learned is no longer at the priority of the new
    stats = trainer.buffer.stats()
    assert stats.min_priority < 0.5 * stats.max_priority
    assert stats.stale_updates == stats.rejected_priorities == 0
    assert stats.mean_times_sampled == pytest.approx(64 * trainer.agent.updates / trainer.buffer.added)


@pytest.mark.gpu
def test_a_step_on_the_gpu_does_not_wait_for_it() -> None:
    # past the warm-up, and between the steps that are timed
    trainer = advanced(70, device=torch.device("cuda"))
    with waiting_is_an_error():
        for _ in range(10):
            trainer.advance()
    assert trainer.agent.updates == 2 * (80 - 13)


@pytest.mark.gpu
def test_catch_is_learned_on_the_gpu(tmp_path: Path) -> None:
    assert main(["train", "catch", "--device", "cuda", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_return_mean"] >= 0.9


def test_events_hold_the_same_numbers_as_the_rows(finished: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    rows = read_rows(finished)
    tags = {"epsilon": "epsilon", "loss": "loss", "eval_return_mean": "eval_return_mean"}
    tags |= {name: f"replay/{name}" for name in REPLAY_STATS}
    for name, tag in tags.items():
        expected = [(row["step"], pytest.approx(row[name], rel=1e-4)) for row in rows if math.isfinite(row[name])]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == expected


def test_everything_promised_is_there(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} - {"tensorboard"}
    files = {"progress.csv", "curve.png", "buffer.png", "network.safetensors", "settings.json", "summary.json"}
    assert names == files | {"checkpoint"}
    rows = read_rows(finished)
    assert [row["step"] for row in rows] == [512, 1_024, 1_504, 2_016, 2_528, 3_008]
    assert set(rows[0]) >= PROMISED_COLUMNS
    for row in rows[3:]:
        assert all(math.isfinite(row[name]) for name in PROMISED_COLUMNS)
        assert row["updates_per_second"] > 0
    assert rows[0]["epsilon"] > rows[-1]["epsilon"]
    assert rows[0]["effective_sample_size"] == rows[0]["step"] - 3 * 32
    assert 1_000 < rows[-1]["effective_sample_size"] < rows[-1]["step"]
    assert (rows[-1]["max_age"], rows[-1]["stale_updates"]) == (3_007, 0)
    assert sum(math.isfinite(row["eval_return_mean"]) for row in rows) == 2
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) >= PROMISED_SUMMARY
    assert (summary["env"], summary["seed"], summary["device"]) == ("catch", 3, "cpu")
    assert (summary["epsilon"], summary["persistence"]) == (pytest.approx(rows[-1]["epsilon"]), 0)
    assert (summary["steps"], summary["stopped_by"], summary["eval_episodes"]) == (3_008, "steps", 32)
    assert -1 <= summary["eval_return_mean"] <= 1
    assert 0 < summary["replay_share"] < 1
    assert sum(summary["time_split"].values()) == pytest.approx(summary["loop_seconds"])
    assert summary["steps_per_second"] == pytest.approx(summary["steps"] / summary["wall_seconds"])
    assert summary["versions"]["torch"] == torch.__version__


def test_settings_beside_a_run_say_how_to_repeat_it(finished: Path) -> None:
    values = json.loads((finished / "settings.json").read_text())
    assert [values.pop(name) for name in ("env", "seed", "device")] == ["catch", 3, "cpu"]
    expected = Settings.for_family("catch", steps=3_000, eval_every=1_500, eval_episodes=32)
    assert Settings.from_dict(values) == expected


def test_the_saved_network_is_the_one_that_was_evaluated(finished: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = str(finished / "network.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    settings = Settings.from_dict(json.loads(metadata["settings"]))
    network = QNetwork(Catch.spec.observation, int(metadata["actions"]), settings)
    network.load_state_dict(load_file(path))
    summary = json.loads((finished / "summary.json").read_text())
    assert int(metadata["step"]) == summary["best_step"]
    # played again on the seeds of the last evaluation of the run
    evaluator = Evaluator(Catch(32, CPU), settings, device=CPU, seed=3, stop=StopRequest())
    evaluator.evaluate(network, 0)
    final = evaluator.final()
    assert final.return_mean == pytest.approx(summary["eval_return_mean"])


def test_the_curve_has_lines_of_three_colours(finished: Path) -> None:
    from matplotlib.image import imread

    picture = imread(finished / "curve.png")
    assert picture.shape[:2] >= (400, 600)
    colours = {tuple(pixel) for pixel in (picture[..., :3].reshape(-1, 3) * 255).astype(int).tolist()}
    # training, evaluation, epsilon
    assert {(31, 119, 180), (255, 127, 14), (148, 103, 189)} <= colours


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_with_everything_written(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # a run that would take hours
    process = start(tmp_path, "catch", "--device", "cpu", "--steps", "1e8")
    wait_for(process, lambda: len(read_rows(tmp_path)) >= 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert f"interrupted by {number.name}" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= PROMISED_SUMMARY
    assert summary["stopped_by"] == number.name
    rows = read_rows(tmp_path)
    assert rows[-1]["step"] == summary["steps"]
    assert (tmp_path / "network.safetensors").stat().st_size > 10_000
    assert "training episodes explore: return " in out
    for picture in ("curve.png", "buffer.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_diverges_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--steps", "300", "--warmup", "100", "--batch-size", "8", "--output", str(tmp_path)]
    assert main(["train", "catch", *small, "--learning-rate", "1e30"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("gpu-replay train: the network's weights are not finite after ")
    assert f"Lower --learning-rate; {tmp_path} has the run so far." in last
    assert (tmp_path / "progress.csv").is_file()


def test_time_is_a_limit_too(tmp_path: Path) -> None:
    arguments = ["train", "catch", "--device", "cpu", "--max-seconds", "0.5", "--output", str(tmp_path)]
    # the limit falls between two evaluations, and no row is written just before it, whose time would be the loop's
    arguments += ["--eval-every", "25000", "--log-every", "25000"]
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped_by"] == "max_seconds"
    assert summary["steps"] < 25_000
    assert 0.5 <= summary["loop_seconds"] < 5
    assert summary["eval_episodes"] == 256


def test_cartpole_runs_through_the_same_door(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    arguments = ["train", "CartPole-v1", "--device", "cpu", "--steps", "3000", "--eval-episodes", "3"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env"] == "CartPole-v1"
    assert summary["reward_threshold"] == 475
    assert 8 <= summary["eval_return_mean"] <= 500
    assert read_rows(tmp_path)[-1]["episodes"] > 50


def test_pong_runs_on_real_frames(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    arguments = ["train", "pong", "--device", "cpu", "--steps", "1600", "--num-envs", "4", "--capacity", "2000"]
    arguments += ["--warmup", "1500", "--batch-size", "8", "--log-every", "400"]
    arguments += ["--eval-episodes", "2", "--eval-max-steps", "50"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env"] == "pong"
    assert summary["updates"] > 20
    assert summary["eval_length_mean"] == 50
    last = read_rows(tmp_path)[-1]
    assert math.isfinite(last["loss"])
    assert last["stored"] == 1_600
