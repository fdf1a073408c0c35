"""The command line: help without extras, one clear line on bad input, estimates and versions."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_replay import Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer, Uniform, __version__
from gpu_replay.cli import main

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
Outcomes = dict[str, tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("gymnasium", "ale_py", "tqdm", "matplotlib", "tensorboard", "safetensors")


def one_line_of(capsys: Capture, arguments: list[str]) -> tuple[int, str]:
    """Exit code and the one line on standard error, of which there must be exactly one."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return code, lines[0]


COMMANDS = ("--help", "train --help", "info", "train catch", "train CartPole-v1", "train pong")


@pytest.fixture(scope="module")
def without_extras() -> Outcomes:
    """Exit code, output and errors of some commands in a Python that has none of the optional packages."""
    program = f"""
import contextlib, io, json, sys
for name in {EXTRAS}:
    sys.modules[name] = None
from gpu_replay.cli import main
found = {{}}
for command in {COMMANDS}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command.split())
        except SystemExit as stop:
            code = stop.code
    found[command] = code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return {command: (code, out, err) for command, (code, out, err) in json.loads(done.stdout).items()}


FLAGS = ("steps", "max-seconds", "seed", "device", "output", "n-step", "sampler", "no-early-stop")
SHOWN = {
    "--help": [f"    {command} " for command in ("train", "bench", "estimate", "info")],
    # what an interruption ends with
    "train --help": [*(f"--{flag}" for flag in FLAGS), "130"],
    "info": [__version__],
}


@pytest.mark.parametrize("command", SHOWN)
def test_help_and_info_work_without_extras(without_extras: Outcomes, command: str) -> None:
    code, out, err = without_extras[command]
    assert (code, err) == (0, "")
    assert [part for part in SHOWN[command] if part not in out] == []


@pytest.mark.parametrize("environment", ["catch", "CartPole-v1", "pong"])
def test_missing_extras_are_named_with_the_command_that_brings_them(without_extras: Outcomes, environment: str) -> None:
    code, out, err = without_extras[f"train {environment}"]
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "not installed" in line
    assert 'pip install -c constraints.txt -e ".[training]" in the checkout' in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--"], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train"], "the following arguments are required: ENV"),
        (["train", "catch", "--stepz", "3"], "unrecognized arguments: --stepz 3"),
        (
            ["train", "catch", "--steps", "many"],
            "argument --steps: must be a whole number, such as 1000 or 1e6; found 'many'",
        ),
        (["train", "catch", "--steps", "0"], "--steps must be at least 1; found 0"),
        (["train", "catch", "--capacity", "3e9"], "--capacity must be from 1 to 2,147,483,647; found 3000000000"),
        (["train", "catch", "--seed", "-1"], "argument --seed: must be at least 0"),
        (["train", "catch", "--max-seconds", "long"], "argument --max-seconds: must be a number; found 'long'"),
        (["train", "catch", "--max-seconds", "0"], "argument --max-seconds: must be above 0"),
        (["train", "catch", "--sampler", "best"], "argument --sampler: invalid choice: 'best'"),
        (["train", "catch", "--device", "abacus"], "--device: device 'abacus' is not one that torch knows"),
        (["train", "catch", "--device", "mps"], "--device: device 'mps' is not supported"),
        (["train", "catch", "--network", "nature"], "--network nature needs images"),
        (["play", "run", "--epsilon", "2"], "argument --epsilon: must be from 0 to 1; found 2"),
        (["play", "run", "--episodes", "0"], "argument --episodes: must be at least 1; found 0"),
        (["estimate"], "required: --capacity"),
        (["estimate", "--capacity", "10"], "one of the arguments --field --env is required"),
        (["estimate", "--capacity", "0", "--field", "a=int64"], "capacity must be at least 1"),
        (["estimate", "--capacity", "1", "--field", "a"], "'a' is not NAME=SHAPE:DTYPE"),
        (["estimate", "--capacity", "1", "--field", "a=3:int65"], "unknown dtype 'int65'"),
        (["estimate", "--capacity", "1", "--field", "a=0x3:int64"], "sides of at least 1"),
        (["estimate", "--capacity", "1", "--field", "key=int64"], "'key' is reserved"),
        (["estimate", "--capacity", "1", "--field", "a=int64", "--field", "a=int8"], "--field a is given twice"),
        (["estimate", "--capacity", "9", "--env", "catch", "--stack", "0"], "argument --stack: must be at least 1"),
        (
            ["estimate", "--capacity", "9", "--field", "a=int8", "--frame-size", "42"],
            "--frame-size is of Atari's frames",
        ),
        (
            ["estimate", "--capacity", "9", "--env", "catch", "--num-envs", "0"],
            "argument --num-envs: must be at least 1",
        ),
        (["info", "--loud"], "unrecognized arguments: --loud"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], message: str, capsys: Capture, tmp_path: Path) -> None:
    if arguments[:1] == ["train"] and len(arguments) > 2:
        for name in ("tqdm", "matplotlib", "safetensors"):
            pytest.importorskip(name)
        arguments = [*arguments, "--output", str(tmp_path)]
    code, line = one_line_of(capsys, arguments)
    assert code == 2
    assert line.startswith("gpu-replay")
    assert message in line


@pytest.fixture
def training_extras() -> None:
    for name in ("tqdm", "matplotlib", "safetensors", "gymnasium", "ale_py"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("training_extras")
@pytest.mark.parametrize(
    "arguments, parts",
    [
        ("CartPoel-v1", ["unknown environment 'CartPoel-v1'. Did you mean CartPole-v1"]),
        ("Pendulum-v1", ["this agent needs Discrete ones"]),
        ("catch --device cuda", ["--device: device 'cuda': torch finds no CUDA device here"]),
        ("catch --output {there}/file/run", ["cannot be written: Not a directory"]),
        ("catch --device cpu --capacity 2e9", ["the buffer needs", "Lower --capacity"]),
    ],
    ids=["unknown environment", "unusable environment", "no GPU", "output", "buffer"],
)
def test_training_that_cannot_begin_is_one_line(
    arguments: str, parts: list[str], capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    if "cuda" in arguments:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("in the way")
    words = arguments.format(there=tmp_path).split()
    code, line = one_line_of(capsys, ["train", "--output", str(tmp_path / "run"), *words])
    assert code == 2
    assert [part for part in parts if part not in line] == []
    assert "CartPoel-v1" not in arguments or not (tmp_path / "run").exists()


@pytest.mark.usefixtures("training_extras")
def test_a_run_is_not_written_over_another_unless_asked(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["train", "catch", "--device", "cpu", "--steps", "64", "--eval-episodes", "4"]
    arguments += ["--output", str(tmp_path)]
    assert main(arguments) == 0
    capsys.readouterr()
    before = (tmp_path / "summary.json").read_bytes()
    code, line = one_line_of(capsys, arguments)
    assert code == 2
    assert "already holds a run" in line
    assert "--overwrite" in line
    assert (tmp_path / "summary.json").read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    assert main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "summary.json").read_bytes() != before
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
def test_ctrl_c_while_torch_loads_is_one_line() -> None:
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


def test_estimate_agrees_with_the_buffer_it_describes(capsys: Capture) -> None:
    arguments = ["estimate", "--device", "cpu", "--capacity", "1000", "--field", "obs=4x3:uint8"]
    arguments += ["--field", "action=int64", "--field", "reward=:float32"]
    fields = {"obs": Field((4, 3), torch.uint8), "action": Field((), torch.int64), "reward": Field((), torch.float32)}
    for name, sampler in (("uniform", Uniform()), ("proportional", Proportional())):
        assert main([*arguments, "--sampler", name]) == 0
        table = {}
        for line in capsys.readouterr().out.splitlines():
            words = line.split()
            if "bytes" in words and words[0].isidentifier():
                table[words[0]] = int(words[1].replace(",", ""))
        assert (table["obs"], table["action"], table["reward"]) == (12_000, 8_000, 4_000)
        parts = sum(size for part, size in table.items() if part != "total")
        assert table["total"] == parts
        # the buffer also counts a few bytes that do not grow with the capacity
        held = ReplayBuffer(1_000, fields, sampler=sampler, device="cpu").nbytes
        assert table["total"] == pytest.approx(held, rel=0.1)


def test_estimate_of_environments(capsys: Capture) -> None:
    pytest.importorskip("gymnasium")
    assert main(["estimate", "--device", "cpu", "--capacity", "1_000", "--env", "CartPole-v1"]) == 0
    out = capsys.readouterr().out
    for name, size in (("obs", "16,000"), ("action", "8,000"), ("next_obs", "16,000"), ("terminated", "1,000")):
        assert any(line.split()[:2] == [name, size] for line in out.splitlines()), out
    assert main(["estimate", "--device", "cpu", "--capacity", "10", "--env", "catch"]) == 0
    assert any(line.split()[:2] == ["obs", "1,440"] for line in capsys.readouterr().out.splitlines())


def table_of(capsys: Capture, *arguments: str) -> tuple[dict[str, int], str]:
    """The sizes that `estimate` prints on a CPU, by name, and all of its output."""
    assert main(["estimate", "--device", "cpu", *arguments]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if " bytes " in line and line.startswith("  ")]
    return {words[0]: int(words[1].replace(",", "")) for words in lines}, out


def test_estimate_asks_nothing_of_an_agent(capsys: Capture) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    spaces = [gymnasium.spaces.Box(-1, 1, shape, np.float64) for shape in ((3,), (1,))]
    sizes, out = table_of(capsys, "--capacity", "1000", "--env", "Pendulum-v1")
    made = ReplayBuffer.from_spaces(1000, *spaces, sampler=Proportional(), device="cpu")
    assert sizes["total"] == pytest.approx(made.nbytes, rel=0.1)
    assert (sizes["obs"], sizes["action"]) == (12_000, 4_000)
    assert "`gpu-replay train` cannot learn here: Pendulum-v1 has actions Box" in out
    sizes, _ = table_of(capsys, "--capacity", "1000", "--env", "Pendulum-v1", "--num-envs", "8")
    stream = TrajectoryReplayBuffer.from_spaces(1000, 8, *spaces, sampler=Proportional(), device="cpu")
    assert sizes["total"] == pytest.approx(stream.nbytes, rel=0.1)


@pytest.mark.parametrize(("name", "frame"), [("catch", 144), ("device-pong", 84 * 84), ("pong", 84 * 84)])
def test_estimate_counts_the_frames_of_that_game(name: str, frame: int, capsys: Capture) -> None:
    if name == "pong":
        pytest.importorskip("ale_py")
    sizes, _ = table_of(capsys, "--capacity", "20_000", "--env", name)
    assert sizes["obs"] == sizes["next_obs"] == 20_000 * frame


def test_estimate_says_what_stacks_frames_and_the_trainer_take(capsys: Capture) -> None:
    for name in ("gymnasium", "ale_py"):
        pytest.importorskip(name)
    many = ["--capacity", "20_000", "--env", "pong"]
    single, _ = table_of(capsys, *many)
    stacked, out = table_of(capsys, *many, "--stack", "4", "--frame-size", "84")
    small, _ = table_of(capsys, *many, "--frame-size", "42")
    once, _ = table_of(capsys, *many, "--stack", "4", "--num-envs", "8")
    assert (single["obs"], stacked["obs"], small["obs"], once["obs"]) == (
        141_120_000,
        564_480_000,
        35_280_000,
        141_120_000,
    )
    assert stacked["next_obs"] == stacked["obs"]
    assert "next_obs" not in once
    assert f"the buffer alone takes {stacked['total']:,} bytes" in out
    found = re.search(
        r"`gpu-replay train pong --capacity 20000` would take ([\d,]+) bytes: ([\d,]+) for its buffer", out
    )
    assert found is not None
    whole, buffer = (int(text.replace(",", "")) for text in found.groups())
    # each frame once, whatever the stack, and networks
    assert 141_120_000 < buffer < 150_000_000
    assert 1_000_000 < whole - buffer < 100_000_000


def test_the_command_alone_prints_its_help(capsys: Capture) -> None:
    assert main([]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert found.out.startswith("usage: gpu-replay")
    assert "estimate" in found.out


def test_the_soak_is_offered_in_a_checkout_alone(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    assert main([]) == 0
    assert "    soak " in capsys.readouterr().out
    monkeypatch.setattr("gpu_replay.cli.TESTS", tmp_path)
    assert main([]) == 0
    assert "    soak " not in capsys.readouterr().out
    code, line = one_line_of(capsys, ["soak", "--minutes", "1"])
    assert (code, "needs the tests/ of a checkout" in line) == (2, True)


def test_inspect_shows_its_own_failures_as_such(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    ReplayBuffer(9, {"a": Field((), torch.int64)}, device="cpu").save(tmp_path / "saved")
    code, line = one_line_of(capsys, ["inspect", str(tmp_path / "saved"), "--output", str(tmp_path / "a.jpeg2")])
    assert (code, ".png, .pdf, .svg" in line) == (2, True)

    def fail(*_: object) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("gpu_replay.console.inspect.draw", fail)
    with pytest.raises(ValueError, match="a mistake of ours"):
        main(["inspect", str(tmp_path / "saved")])


def test_info_names_versions_devices_and_code(capsys: Capture) -> None:
    assert main(["info", "--compile"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["gpu_replay"], lines["torch"]) == (__version__, torch.__version__)
    assert "triton" in lines
    assert re.search(r"code: (host, loops compiled by Numba|host, loops as Python, .*|triton)$", lines["cpu"])
    assert re.search(r"\d+ loops in [\d.]+ s|nothing: Numba", lines["compiled"])
    assert lines["default"] == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_bench_hands_over_to_the_benchmarks(monkeypatch: Patch) -> None:
    import gpu_replay.bench.main as bench

    seen: list[list[str]] = []
    monkeypatch.setattr(bench, "main", lambda argv: seen.append(list(argv)) or 7)
    assert (main(["bench", "cpu", "--help", "-x"]), seen) == (7, [["cpu", "--help", "-x"]])


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "gpu_replay", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"gpu_replay {__version__}\n")
