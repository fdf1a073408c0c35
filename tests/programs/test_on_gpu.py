"""bench/on_gpu.sh without a GPU: its commands exist, its parts leave records, its failures are seen."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from gpu_replay import cli
from gpu_replay.bench import gpu_page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "on_gpu.sh"
PARTS = ("smoke", "records", "pong", "tests", "memcheck", "page")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell script")

# stands in for Python on a machine with a GPU: describes it, has every library, and fails or sleeps where told to
PYTHON = """#!/usr/bin/env bash
case "$*" in
    -) cat >/dev/null; printf 'NVIDIA Test 9000\\t2.11.0\\t3.6.0\\n' ;;
    -c*) exit 0 ;;
    *"$FAILING"*) echo "failing on purpose"; exit 3 ;;
    *"$SLOW"*) sleep 30 ;;
    *) echo "ran $* with $PYTHONPATH" ;;
esac
"""


def on_gpu(*arguments: str, script: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FAILING": "no such thing", "SLOW": "no such thing", **variables}
    return subprocess.run(["bash", str(script), *arguments], env=environment, capture_output=True, text=True)


def dry_run(*arguments: str) -> list[list[str]]:
    done = on_gpu("--dry-run", "--python", sys.executable, *arguments)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.fixture
def python(tmp_path: Path) -> str:
    file = tmp_path / "python"
    file.write_text(PYTHON)
    file.chmod(0o755)
    return str(file)


def test_a_dry_run_prints_every_command_of_25_minutes_in_parts_of_nine() -> None:
    lines = {part: dry_run(part) for part in PARTS}
    assert [line for part in PARTS for line in lines[part]] == dry_run()
    assert sum(len(each) for each in lines.values()) >= 9
    longest = {}
    for part, each in lines.items():
        for line in each:
            # interrupted, so that what was measured is still written
            assert line[:5] == ["timeout", "-s", "INT", "-k", "10"]
            assert line[line.index(sys.executable) + 1] == "-m"
        longest[part] = max(int(line[5]) for line in each)
        # no step takes the time that those after it need
        assert [int(line[5]) for line in each] == sorted(int(line[5]) for line in each)
    assert max(longest.values()) <= 540
    assert sum(longest.values()) <= 1500
    assert all(int(line[5]) <= 100 for line in dry_run("--seconds", "100"))


def test_the_page_goes_beside_the_records(tmp_path: Path) -> None:
    def output(*arguments: str) -> str:
        *_, line = dry_run("page", *arguments)
        return line[-1]

    assert output() == f"{ROOT}/bench/results/no-gpu.md"
    # a folder that is brought back from elsewhere has its page in it
    assert output("--output", str(tmp_path)) == f"{tmp_path}/page.md"
    assert output("--output", str(tmp_path), "--page", "/there/page.md") == "/there/page.md"


def test_the_programs_know_the_options_that_are_given_to_them(full: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pytests, seen = set(), set()
    for line in dry_run("--workers", "1"):
        module, *arguments = line[line.index(sys.executable) + 2 :]
        if module == "pytest":
            # a file with tests of a GPU stands for all of them
            end = arguments.index("gpu") + 1
            assert arguments[end].startswith("--outcomes=")
            pytests.add(tuple(arguments[:end]))
            continue
        assert module == "gpu_replay"
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert [word for word in arguments if word.startswith("--") and word not in text] == []
        seen.add(" ".join(arguments[:2]))
    suites = [f"bench {suite}" for suite in ("kernels", "gpu", "frames", "peers", "plot", "page")]
    assert seen == {*suites, "info", "train catch", "train device-pong", "train pong"}
    (options,) = pytests
    if not full:
        return
    command = [sys.executable, "-m", "pytest", *options, "--collect-only", "-q", "tests/kernels/test_prefix_sum.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    # without a GPU all are deselected, which pytest answers with 5; options that it does not know with 4
    assert done.returncode == (0 if torch.cuda.is_available() else 5), done.stdout + done.stderr


def test_every_step_leaves_its_record(tmp_path: Path, python: str) -> None:
    out = tmp_path / "out"
    done = on_gpu("--python", python, "--output", str(out))
    assert done.returncode == 0, done.stderr
    ran = {}
    for part in PARTS:
        if part == "memcheck" and not (out / "memcheck.steps.jsonl").exists():
            continue
        steps = [json.loads(line) for line in (out / f"{part}.steps.jsonl").read_text().splitlines()]
        assert steps
        ran[part] = tuple(step["step"] for step in steps)
        for step in steps:
            assert step["part"] == part
            assert (step["status"], step["gpu"], step["torch"]) == (0, "NVIDIA Test 9000", "2.11.0")
            log = (out / f"{step['step']}.log").read_text()
            assert log.startswith("ran -m ")
            # the package is found without being installed
            assert f"with {ROOT}:" in log
    # the page names the steps that are missing; there is nothing to plot, and no compute-sanitizer in most places
    expected = {**gpu_page.PARTS, "page": ("page",)}
    assert ran == {part: expected[part] for part in PARTS if part != "memcheck" or part in ran}


def test_records_go_to_a_folder_named_after_the_gpu(tmp_path: Path, python: str) -> None:
    lines = on_gpu("--python", python, "--dry-run").stdout
    assert f"{ROOT}/bench/results/no-gpu/" in lines
    script = tmp_path / "checkout" / "bench" / "on_gpu.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.read_text())
    done = on_gpu("tests", "--python", python, script=script)
    assert done.returncode == 0, done.stderr
    assert (script.parent / "results" / "nvidia-test-9000" / "tests.log").is_file()


def test_a_failing_step_is_recorded_and_the_rest_still_runs(tmp_path: Path, python: str) -> None:
    done = on_gpu("--python", python, "--output", str(tmp_path / "out"), FAILING="bench gpu")
    assert done.returncode == 1
    assert "bench-gpu ended with status 3" in done.stdout
    assert (tmp_path / "out" / "bench-gpu.log").read_text() == "failing on purpose\n"
    lines = (tmp_path / "out" / "records.steps.jsonl").read_text().splitlines()
    statuses = {each["step"]: each["status"] for each in map(json.loads, lines)}
    assert statuses == {**dict.fromkeys(gpu_page.PARTS["records"], 0), "bench-gpu": 3}
    assert (tmp_path / "out" / "pong.steps.jsonl").is_file()


def test_a_part_ends_when_its_time_is_over(tmp_path: Path, python: str) -> None:
    out = tmp_path / "out"
    done = on_gpu("records", "--python", python, "--output", str(out), "--seconds", "2", SLOW="bench")
    assert done.returncode == 1
    kernels, *_, peers = (json.loads(line) for line in (out / "records.steps.jsonl").read_text().splitlines())
    assert kernels["status"] == 124
    assert kernels["seconds"] < 10
    assert (peers["status"], (out / "bench-peers.log").read_text()) == (124, "no time was left for it\n")


@pytest.mark.slow
def test_a_part_that_is_killed_leaves_an_archive_of_what_there_is(tmp_path: Path, python: str) -> None:
    out, archives = tmp_path / "out", tmp_path / "archives"
    command = ["bash", str(SCRIPT), "smoke", "--python", python, "--output", str(out), "--archives", str(archives)]
    environment = {**os.environ, "FAILING": "no such thing", "SLOW": "train catch"}
    (out / "catch" / "checkpoint").mkdir(parents=True)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while not (out / "catch.log").exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode != 0
    with tarfile.open(archives / "smoke.tar.gz") as archive:
        names = archive.getnames()
    assert {"./info.log", "./smoke-tests.log", "./smoke.steps.jsonl", "./catch"} <= set(names)
    # what a training run continues from takes gigabytes
    assert not any("checkpoint" in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bogus",), "unknown part or option 'bogus'"),
        (("--output",), "--output needs a value"),
        (("--seconds", "soon"), "--seconds must be a whole number; found 'soon'"),
        (("--workers", "0"), "--workers must be a whole number; found '0'"),
        (("--wheels", "/no/such/folder"), "--wheels /no/such/folder is not a folder"),
        (("--python", "/no/such/python"), "there is no /no/such/python"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = on_gpu(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    done = on_gpu("--python", sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "PyTorch finds no GPU" in done.stderr
