"""The command line: help without extras, one clear line on bad input, estimates and versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gpu_replay import Field, Proportional, ReplayBuffer, Sequences, TrajectoryReplayBuffer, __version__
from gpu_replay.cli import main
from gpu_replay.console.sizes import SAMPLERS
from gpu_replay.ops.advice import install

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[2]


# without extras: one process, and what each command must say
SAID = {
    "": (0, ["usage: gpu-replay", "estimate"]),
    "--help": (0, [f"    {command} " for command in ("train", "bench", "estimate", "info", "soak")]),
    # what an interruption ends with
    "train --help": (0, ["--steps", "--max-seconds", "--device", "--output", "--n-step", "--no-early-stop", "130"]),
    "info": (0, [__version__]),
    "--version": (0, [f"gpu_replay {__version__}\n"]),
    "train catch": (2, ["not installed", "pip install", "[training]"]),
}
# adapters that need a library, and which
NEEDED = {"fasttd3": "tensordict", "gymnasium": "gymnasium", "minari": "minari", "skrl": "skrl"}
NEEDED |= {"sb3": "stable_baselines3", "torchrl": "tensordict"}
NEED_NOTHING = {"__init__", "flashsac", "streams"}
# what an import of the package leaves to those who use it; torch brings some of it along where it is installed
HEAVY = "triton numba gymnasium ale_py matplotlib tqdm safetensors tensorboard hypothesis pandas scipy"


def test_the_package_loads_nothing_heavy_and_without_extras_commands_work_or_say_what_brings_them() -> None:
    """In one process that has none of the optional packages."""
    program = f"""
import contextlib, importlib, io, json, sys, torch
before = {{*sys.modules}}
import gpu_replay
print(json.dumps([*{{*sys.modules}} - before]))
for name in ("ale_py", "tqdm", "matplotlib", "tensorboard", "safetensors", *{[*NEEDED.values()]}):
    sys.modules[name] = None
from gpu_replay.cli import main
for command in {list(SAID)}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command.split())
        except SystemExit as stop:
            code = stop.code
    print(json.dumps((code, out.getvalue(), err.getvalue())))
said = {{}}
for name in {[*NEEDED, "flashsac"]}:
    try:
        importlib.import_module(f"gpu_replay.integrations.{{name}}")
    except ImportError as error:
        said[name] = str(error), error.name
print(json.dumps(said))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded, *lines, adapters = done.stdout.splitlines()
    assert "gpu_replay" in json.loads(loaded)
    assert {*HEAVY.split()} & {*json.loads(loaded)} == set()
    for (command, (wanted, parts)), line in zip(SAID.items(), lines, strict=True):
        code, out, err = json.loads(line)
        assert code == wanted, command
        assert [part for part in parts if part not in (err if code else out)] == []
        assert (out == "" and len(err.splitlines()) == 1) if code else err == "", command
    said = json.loads(adapters)
    assert said.keys() == NEEDED.keys()
    assert {path.stem for path in (ROOT / "gpu_replay" / "integrations").glob("*.py")} == {*NEEDED} | NEED_NOTHING
    for name, (message, missing) in said.items():
        assert missing.partition(".")[0] in (NEEDED[name], "gymnasium")
        assert re.search(rf"\.{name} cannot be imported: .*{missing}.*\. Run: pip install .*\[integrations\]", message)


# what is refused with one line on standard error: a command, and parts of the line after =>
REFUSED = """
fly => invalid choice: 'fly'
info --foo => gpu-replay info: unrecognized arguments: --foo
train catch --step 100 => gpu-replay train: unrecognized arguments: --step 100. Did you mean --steps?
bench cpu --qui => gpu-replay bench cpu: unrecognized arguments: --qui. Did you mean --quick?
bench nonsense => invalid choice
bench cpu --only B=7 => matches no case
bench kernels --device cpu --timing graph => --timing graph needs a GPU
soak --minutes 1 => needs the tests/ of a checkout | pip install -e .
inspect {here} => neither a checkpoint of a buffer nor a run
inspect {here}/saved => saved.png is there, and no picture of a buffer
inspect {done} --output a.jpeg2 => .png, .pdf, .svg
train => required: ENV | --resume
train catch --steps many => --steps: must be a whole number | 1e6 | 'many'
train catch --steps 0 => --steps must be at least 1; found 0
train catch --max-seconds 0 => --max-seconds: must be above 0
train catch --device cuda => --device: device 'cuda' | no CUDA device
train catch --network nature => --network nature needs images
train catch --device cpu --capacity 2e9 => the buffer needs | Lower --capacity
study cliffwalk --states-max 21 --output new => must be 2 to 20
train no_such_module:Maze-v0 => cannot be imported: No module named 'no_such_module'
train stops:Maze-v0 => 'stops', which cannot be imported: it exits with 3
train CartPoel-v1 => unknown environment 'CartPoel-v1'. Did you mean CartPole-v1
train Pendulum-v1 => actions Box | needs Discrete ones
train catch --output {here}/file/run => cannot be written: Not a directory
train catch --actors 0 => --actors must be a number | ray://HOST:PORT
train catch --output {done} => already holds a run | --overwrite
train catch --steps 1e30 => --steps must be finite and no larger than 1e+15; found 1000000000000000019884624838656
train catch --epsilon-steps 1e16 => --epsilon-steps must be finite and no larger than 1e+15
train catch --beta-end 1e300 => --beta-end must be finite and no larger than 1e+100; found 1e+300
train catch --learning-rate nan => --learning-rate must be finite and no larger than 1e+100; found nan
train catch --hidden 1000000000 => --hidden must be widths from 1 to 65,536
train catch --eval-episodes 1e30 => --eval-episodes must be from 1 to 1,000,000
train catch --return-window 1e30 => --return-window must be from 1 to 1,000,000
train pong --frame-size 1e9 => --frame-size must be from 36 to 1,024
train catch --steps 0 --output= => --output: invalid pathname value: ''
train --from= => --from: invalid pathname value: ''
train --resume => --resume needs --output
train --resume --output nowhere => no such folder
train --resume --output {here} => holds no checkpoint
train --resume --output {done} --steps 600 => --steps 600 (it has 3000, which can only be raised)
train --resume --output {done} --hidden 64,64 --updates 1 => --updates 1 (it has 2), --hidden (64, 64) (it has (128,
train --resume --output {done} --steps 1e4 --max-seconds 0.001 => --max-seconds 0.001 is used up
train --from {done} --hidden 8 => --hidden (8,) (it has (128, 128))
train --from {done} --steps 960 => --steps 960 are done | at step 3008
train --from {done} --actors 2 => --from does not go with --actors
play run --epsilon 2 => --epsilon: must be from 0 to 1; found 2
play run --episodes 0 => --episodes: must be at least 1; found 0
play run --scale 100000 => --scale must be from 1 to 16; found 100000
play run --output= --epsilon 2 => --output: invalid pathname value: ''
inspect {done} --output= => --output: invalid pathname value: ''
bench cpu --output= --only B=7 => --output: invalid pathname value: ''
bench report --update= => --update: invalid pathname value: ''
play nowhere => nowhere is not there
play file => cannot be read
play {done} --output video.avi => must end in .gif or .mp4
play {done} --output no/where/video.gif => there is no folder
play {here}/other => not written by `gpu-replay train`
estimate --capacity 0 --field a=int64 => capacity must be at least 1
estimate --capacity 1 --field a => 'a' is not NAME=SHAPE:DTYPE
estimate --capacity 9 --field a=int64 --sequences 3 => --sequences is of a trajectory buffer | --num-envs E
estimate --capacity 1 --field a=3:int65 => unknown dtype 'int65'
estimate --capacity 1 --field a=int64 --field a=int8 => --field a is given twice
estimate --capacity 9 --field a=int8 --frame-size 42 => --frame-size is of Atari's frames
estimate --capacity 9 --field a=int8 --storage-path= => storage_path is empty
estimate --capacity 9 --field a=99999999999999999999:int8 => elements
study Pong-v5 --output= => --output: invalid pathname value: ''
study cliffwalk --states-max 21 --output= => --output: invalid pathname value: ''
study cliffwalk --seeds 1e30 --output new => --seeds: must be less than 2^31
study Pong-v5 --output new => ENV: 'Pong-v5' is not part | CartPole-v1, Acrobot-v1, MountainCar-v0
study --output file/study => cannot be written: Not a directory
study cliffwalk --output file/below => cannot be written
"""
REFUSALS = [line.split(" => ") for line in REFUSED.strip().splitlines()]


@pytest.mark.parametrize("command, said", REFUSALS)
def test_bad_input_is_one_line_and_exit_2_and_leaves_nothing(
    command: str, said: str, catch_run: Path, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    for package in ("gymnasium", "ale_py", "pandas", "scipy"):
        pytest.importorskip(package)
    from safetensors.torch import save_file

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("gpu_replay.cli.TESTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "stops.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    # of the module that is imported
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "other").mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "other" / "network.safetensors")
    ReplayBuffer(1, {"x": Field((), torch.bool)}, device="cpu").save(tmp_path / "saved")
    (tmp_path / "saved.png").write_text("mine")
    if command.startswith("train") and "--output" not in command and "--resume" not in command:
        command += " --output {here}/runs/new"
    files = {path: path.stat().st_mtime_ns for folder in (catch_run, tmp_path) for path in folder.rglob("*")}
    try:
        code: object = main(command.format(here=tmp_path, done=catch_run).split())
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out, len(captured.err.splitlines())) == (2, "", 1), captured.err
    assert captured.err.startswith("gpu-replay")
    assert [part for part in said.split(" | ") if part not in captured.err] == []
    assert {path: path.stat().st_mtime_ns for folder in (catch_run, tmp_path) for path in folder.rglob("*")} == files


def test_print_settings_lists_all_flags(catch_run: Path, capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for command, steps in (
        ("train catch --print-settings --steps 70", 70),
        (f"train --from {catch_run} --print-settings --steps 9e9 --device cpu", 9 * 10**9),
    ):
        assert main([*command.split(), "--device", "cpu"]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        given = shlex.split(" ".join(line.partition("  ")[0] for line in lines if " auto " not in line))
        assert (first[:5], f"--steps {steps}" in " ".join(given)) == ("catch", True)
        # they can be given as they are printed
        assert main(["train", "catch", "--print-settings", "--device", "cpu", *given]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == lines
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_ends_early_ends_the_command_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gpu_replay", "train", "catch", "--print-settings"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipe_of_its_own_that_breaks_is_an_error(capsys: Capture, monkeypatch: Patch) -> None:
    broken = mock.Mock(side_effect=BrokenPipeError("the encoder has ended"))
    monkeypatch.setattr("gpu_replay.console.info.run", broken)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "gpu-replay info: the encoder has ended\n"


@pytest.mark.parametrize("command", ["train catch --actors 2", "play {done} --output video.mp4"])
def test_what_is_not_installed_is_named(command: str, catch_run: Path, capsys: Capture, monkeypatch: Patch) -> None:
    hidden = {"train": "ray", "play": "imageio"}[command.split()[0]]
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name.startswith(hidden) else find_spec(name) or object()
    )
    assert main(command.format(done=catch_run).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install" in line
    assert {"ray": "[training,ray]", "imageio": "imageio[ffmpeg]"}[hidden] in line


@pytest.mark.usefixtures("no_pictures")
def test_a_run_is_written_over_another_when_asked(catch_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(catch_run, folder)
    others = [folder / name for name in ("notes.txt", "tensorboard/notes.txt", "checkpoint/best.pt")]
    for path in others:
        path.write_text("mine")
    (events,) = folder.glob("tensorboard/events*")
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt):
        assert main([*SHORT, "--overwrite", "--output", str(folder)]) == 130
    # it is still known as a run
    assert main([*SHORT, "--overwrite", "--output", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 64
    assert [path.name for path in folder.glob("checkpoint/0*")] == [f"{64:012}"]
    assert not events.exists()
    assert [path.read_text() for path in others] == ["mine"] * 3


SHORT = ["train", "catch", "--device", "cpu", "--steps", "64", "--eval-episodes", "4"]


# files under the names of a run's
FOREIGN = {
    "tensorboard/events.out.tfevents.1.mine": "events",
    "checkpoint/000000000064/model.pt": "weights",
    "summary.json": "{}",
    "settings.json": '{"environments": {}, "methods": {}, "seeds": []}',
}


@pytest.mark.parametrize("flags", [[], ["--overwrite"]], ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_run_wrote_is_never_removed(name: str, flags: list[str], capsys: Capture, tmp_path: Path) -> None:
    for package in ("tqdm", "matplotlib", "safetensors"):
        pytest.importorskip(package)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FOREIGN[name])
    assert main([*SHORT, *flags, "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"holds {name.split('/')[0]}, but no settings.json of a run" in line
    assert [each.read_text() for each in tmp_path.rglob("*") if each.is_file()] == [FOREIGN[name]]


@pytest.mark.parametrize(
    "command",
    [
        *("train --resume --output=~/file", "train --from=~/file", "play ~/file/none", "bench report ~/file"),
        "study CartPole-v1 --seeds 1 --episodes 1 --methods none --jobs 1 --output=~/file/below",
        *("study cliffwalk --states-max 2 --seeds 1 --jobs 1 --output=~/file/below", "bench plot ~/file"),
    ],
)
def test_a_tilde_is_the_home_folder(command: str, capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    for package in ("gymnasium", "tqdm", "matplotlib", "safetensors", "pandas", "scipy"):
        pytest.importorskip(package)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "file").write_text("in the way")
    assert main(command.split()) == 2
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
def test_ctrl_c_while_torch_loads_is_one_line(heard: None) -> None:
    command = [sys.executable, "-m", "gpu_replay", "train", "catch"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert (out, err.splitlines()) == ("", ["gpu-replay train: interrupted"])
    # a shell shows 130 for both
    assert process.returncode in (130, -signal.SIGINT)


# estimates


def sizes(capsys: Capture, arguments: str) -> tuple[dict[str, int], str]:
    """The sizes that `estimate` prints on a CPU, by name, and all of its output."""
    assert main(["estimate", "--device", "cpu", "--capacity", *arguments.split()]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if " bytes " in line and line.startswith("  ")]
    found = {words[0]: int(words[1].replace(",", "")) for words in lines}
    assert found["total"] == sum(found.values()) - found["total"]
    return found, out


def test_estimate_agrees_with_the_buffer_it_describes(capsys: Capture) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    fields = {"obs": Field((4, 3), torch.uint8), "action": Field((), torch.int64), "reward": Field((), torch.float32)}
    given = "--field obs=4x3:uint8 --field action=int64 --field reward=:float32 --sampler"
    spaces = [gymnasium.spaces.Box(-1, 1, shape, np.float64) for shape in ((3,), (1,))]
    for arguments, buffer in (
        *((f"{given} {name}", ReplayBuffer(1_000, fields, **CPU | {"sampler": SAMPLERS[name]})) for name in SAMPLERS),
        # nothing is asked of an agent
        ("--env Pendulum-v1", ReplayBuffer.from_spaces(1_000, *spaces, **CPU)),
        ("--env Pendulum-v1 --num-envs 8", TrajectoryReplayBuffer.from_spaces(1_000, 8, *spaces, **CPU)),
        (
            "--env Pendulum-v1 --num-envs 8 --sequences 100",
            TrajectoryReplayBuffer.from_spaces(1_000, 8, *spaces, sequences=Sequences(100), **CPU),
        ),
    ):
        found, out = sizes(capsys, f"1000 {arguments}")
        assert found["obs"] == 12_000
        # the buffer also counts a few bytes that do not grow with the capacity
        assert found["total"] == pytest.approx(buffer.nbytes, rel=0.1)
    assert "`gpu-replay train` cannot learn here: Pendulum-v1 has actions Box" in out


FRAMES = {"obs": Field((84, 84), torch.uint8)}
CPU: dict[str, Any] = {"sampler": Proportional(), "device": "cpu"}
# each frame once, whatever the stack, in several environments
ESTIMATES = {
    "1_000 --env CartPole-v1": {"obs": 16_000, "action": 8_000, "next_obs": 16_000, "terminated": 1_000},
    "20_000 --env catch": {"obs": 20_000 * 144, "next_obs": 20_000 * 144},
    "20_000 --env pong --stack 4 --frame-size 84": {"obs": 564_480_000, "next_obs": 564_480_000},
    "20_000 --env pong --stack 4 --num-envs 8": {"obs": 141_120_000},
}


@pytest.mark.parametrize("arguments", ESTIMATES)
def test_estimate_counts_frames_stacks_and_what_the_trainer_takes(arguments: str, capsys: Capture) -> None:
    for package in ("gymnasium", "ale_py"):
        pytest.importorskip(package)
    found, out = sizes(capsys, arguments)
    assert {name: found[name] for name in ESTIMATES[arguments]} == ESTIMATES[arguments]
    assert ("next_obs" in found) == ("next_obs" in ESTIMATES[arguments])
    if "--stack 4 --frame-size" in arguments:
        fields = {**FRAMES, "action": Field((), torch.int64)}
        frames = TrajectoryReplayBuffer(20_000, 1, fields, autoreset="next_step", **CPU)
        # counters do not grow with the capacity
        first = re.search(r"^each frame stored once, TrajectoryReplayBuffer: ([\d,]+) bytes", out, re.MULTILINE)
        assert int(first[1].replace(",", "")) == pytest.approx(frames.nbytes, rel=1e-3)  # type: ignore[index]
        assert f"the buffer alone takes {found['total']:,} bytes" in out
        assert out.startswith("20,000 transitions, pong, obs 84x84:uint8, stacks of 4, sampler proportional, on cpu\n")
        text = (
            r"pong --capacity 20000 --frame-size 84 --frame-stack 4` would take ([\d,]+) bytes: ([\d,]+) for its buffer"
        )
        whole, buffer = (int(text.replace(",", "")) for text in re.search(text, out).groups())  # type: ignore[union-attr]
        _, out = sizes(capsys, "20_000 --env pong --stack 4")
        assert "with its own frames of 42x42 (--frame-size 84 for those above): " in out
        # and networks
        assert 141_120_000 < buffer < 150_000_000
        assert 1_000_000 < whole - buffer < 100_000_000


def test_estimate_says_how_many_final_observations_are_kept(capsys: Capture) -> None:
    given = "--field obs=84x84:uint8 --field action=int64 --num-envs 8 --autoreset"
    assert "final observations" not in sizes(capsys, f"64_000 {given} next_step")[1]
    found, out = sizes(capsys, f"64_000 {given} same_step")
    assert "final observations of 2,000 truncated episodes are kept (3.1% of the steps)" in out
    assert found["final_obs"] == 2_000 * 84 * 84


@pytest.mark.parametrize("more", ["", "--storage-device cpu"])
def test_estimate_for_a_gpu_that_is_not_here(more: str, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = f"1e6 --field obs=84x84:uint8 --field action=int64 --num-envs 64 --device cuda {more}"
    assert main(["estimate", "--capacity", *arguments.split()]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  obs +7,056,000,000 bytes", out, re.MULTILINE)
    assert out.splitlines()[-1] == "not checked: whether it fits on cuda, since torch finds no CUDA device here"
    # host memory is there
    assert ("GB are free in pinned host memory" in out) == bool(more)
    assert "free on cuda" not in out


# the rest


def test_advice_is_for_the_clone_that_runs_or_for_a_wheel(tmp_path: Path, monkeypatch: Patch) -> None:
    assert install("training") == 'pip install -e ".[training]" in the clone'
    monkeypatch.setattr("gpu_replay.ops.advice.__file__", str(tmp_path / "gpu_replay" / "ops" / "advice.py"))
    assert install("training,ray") == 'pip install "gpu-replay[training,ray]"'


def test_info_names_versions_devices_and_code(capsys: Capture) -> None:
    assert main(["info", "--compile"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["gpu_replay"], lines["torch"]) == (__version__, torch.__version__)
    assert "triton" in lines
    assert re.search(r"code: (host, loops compiled by Numba|host, loops as Python, .*|triton)$", lines["cpu"])
    assert re.search(r"\d+ loops in [\d.]+ s|nothing: Numba", lines["compiled"])
    assert lines["default"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
