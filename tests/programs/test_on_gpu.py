"""bench/on_gpu.py without a GPU: its commands exist, its parts leave records, failures cost no more."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bench_records import ENVIRONMENT, record

from gpu_replay import cli
from gpu_replay.bench import first_contact, host_time, kernels, on_gpu
from gpu_replay.bench import main as commands
from gpu_replay.bench.first_contact import FEATURES, Feature, Wrong
from gpu_replay.bench.on_gpu import PARTS, ROUND, Round, Step
from gpu_replay.bench.operations import OURS, Case, chosen
from gpu_replay.bench.records import Record

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "on_gpu.py"
Run, Capture, Patch = Callable[..., dict[str, int]], pytest.CaptureFixture[str], pytest.MonkeyPatch

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of a process group")


def steps_of(part: str, fallbacks: dict[str, list[str]] | None = None) -> list[Step]:
    options = SimpleNamespace(output=Path("OUT"), rehearsal=False)
    steps = getattr(Round(options, fallbacks or {}), part.replace("-", "_"))  # type: ignore[arg-type]
    return list(steps(PARTS[part]))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs steps that are given as texts of Python; returns how they ended."""

    def run(seconds: float = 240, **steps: str | Step) -> dict[str, int]:
        made = [
            each if isinstance(each, Step) else Step(name, [sys.executable, "-S", "-c", each], seconds)
            for name, each in steps.items()
        ]
        return on_gpu.run("part", iter(made), seconds, tmp_path / "out", dict(os.environ))

    return run


def test_parts_fit_their_time_and_programs_know_their_options(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: object())
    # what a command may take there, and a round with the start of its machine
    assert max(PARTS.values()) <= 590
    assert sum(ROUND.values()) <= 850
    fallbacks = {"timing": ["--timing", "events"], "train": ["--no-graph"], "skip": ["rank*"], "pytest": ["--ignore=a"]}
    seen = set()
    for part, seconds in PARTS.items():
        steps = steps_of(part, fallbacks)
        assert sum(step.seconds for step in steps) <= seconds * 1.001
        # memcheck needs its tool
        assert steps or part == "memcheck"
        for step in steps:
            module, *words = step.command[2:]
            if module == "pytest":
                assert {"-m", "gpu", "--ignore=a"} <= set(words)
                assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
                continue
            with pytest.raises(SystemExit) as ended:
                cli.main([*words, "--help"])
            assert ended.value.code == 0
            # a page may name a flag without its negation
            told = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            assert [word for word in words if word[:2] == "--" and not told & {word, word.replace("--no-", "--")}] == []
            seen.add(" ".join(words[:2]))
            assert ("--no-graph" in words) == (words[0] == "train")
            assert ("--skip" in words) == (words[1] in ("host", "kernels", "gpu", "peers"))
    benches = {f"bench {suite}" for suite in ("contact", "host", "kernels", "gpu", "peers")}
    assert seen >= {*benches, "train device-pong", "train pong"}
    ignored = [word for each in FEATURES.values() for word in each.fallback.get("pytest", [])]
    assert all((ROOT / word.partition("=")[2]).is_file() for word in ignored)


def test_a_step_that_fails_hangs_or_loses_its_device_stops_no_other(
    tmp_path: Path, run: Run, capfd: Capture, heard: None
) -> None:
    # interrupted when its time is over, so that what was measured is still written; Python may take a second to start
    slow = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('written')"
    short = Step("slow", [sys.executable, "-S", "-c", slow], 2)
    # a suite that loses the device goes on with what is missing
    text = "import sys; raise SystemExit(0 if '--missing' in sys.argv else 3)"
    suite = Step("suite", [sys.executable, "-S", "-c", text], 60, again=True)
    ended = run(slow=short, good="print('fine')", bad="raise SystemExit(7)", suite=suite, last="print('still here')")
    assert ended == {"slow": on_gpu.OUT_OF_TIME, "good": 0, "bad": 7, "suite": 0, "last": 0}
    told = capfd.readouterr().out
    # what lost the device is begun again, once here
    assert told.count(f"suite ended with status {on_gpu.LOST}") == told.count("suite ended with status 0") == 1
    logs = {name: (tmp_path / "out" / f"{name}.log").read_text() for name in ("slow", "last")}
    assert logs == {"slow": "written\n", "last": "still here\n"}
    assert run(other=Step("other", [sys.executable, "-S", "-c", "raise SystemExit(3)"], 60, again=True)) == {"other": 3}
    assert capfd.readouterr().out.count("ended with status 3") == 1 + on_gpu.AGAIN
    assert run(seconds=0, late="print('late')") == {"late": on_gpu.OUT_OF_TIME}
    assert (tmp_path / "out" / "late.log").read_text() == "no time was left for it\n"


def test_every_question_is_answered_by_records_that_its_round_makes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(commands, "_device", lambda command, kind: torch.device("cuda"))
    options = SimpleNamespace(device="cuda", quick=False, timing=None)
    steps = {step.name: step.command for part in ("host", "records") for step in steps_of(part)}
    calls = host_time.buffer_calls(Case("host", 100, 8, 8), torch.device("cpu"))
    for each in on_gpu.DECISIONS.values():
        command = steps[f"bench-{each.suite}"]
        skipped = [after for word, after in pairwise(command) if word == "--skip"]
        parts = commands.SUITES[each.suite][0](options).parts  # type: ignore[arg-type]
        measured = {case.name: case for case in chosen([case for cases, _ in parts for case in cases], None, skipped)}
        for name, mine, other in each.compared:
            made = {*kernels.makers(measured[name])} if each.suite == "kernels" else {OURS}
            made |= {*calls, *(f"{call}, Triton's launcher" for call in calls)} if each.suite == "host" else set()
            assert {mine, other} - {""} <= made


def test_records_decide_and_what_is_missing_leaves_a_question_open(tmp_path: Path) -> None:
    def verdicts(suite: str = "none", *records: Record) -> dict[str, str]:
        lines = [replace(each, suite=suite).line() for each in records]
        (tmp_path / f"{suite}.jsonl").write_text("\n".join(lines) + "\n" * bool(lines))
        return dict(line.split(": ", 1) for line in on_gpu.decided(tmp_path))

    def unanswered(found: dict[str, str]) -> bool:
        return found.keys() == on_gpu.DECISIONS.keys() and all(line.startswith("open (") for line in found.values())

    assert unanswered(verdicts())
    scans = [record(f"prefix-sum/N={n}M", us, of) for n in (1, 10, 100) for us, of in ((15.0, OURS), (14.6, "cumsum"))]
    draws = [record("draw/N=1M/B=65536", 14.7), record("draw/N=1M/B=256", 6.0)]
    frames = [record("frame-gather/N=1M/B=256", 9.0, of) for of in (OURS, "index_select")]
    found = verdicts("kernels", *scans, *draws, *frames)
    assert found["the scan"].startswith("stays (prefix-sum/N=1M 15.0 µs, 1.03 of cumsum; ")
    assert found["32 draws a program"] == "try 64 and 128 (draw/N=1M/B=65536 14.7 µs; at most 14.6)"
    assert found["frames"].startswith("open (frame-gather/N=1M/B=256 9.0 µs, 1.00 of index_select; ")
    # one figure that is too large is enough
    found = verdicts("kernels", record("frame-gather/N=1M/B=256", 9.1), frames[1])
    assert found["frames"].startswith("choose the tiles of the slower batches anew")
    # launched calls wait for the host, and count where none was replayed
    wide = {
        timing: record("wide-sample/N=200k/B=32768", us, timing=timing)
        for timing, us in (("graph", 79.0), ("events", 95.0))
    }
    found = verdicts("gpu", *wide.values())
    assert found["32,768 rows of 3.7 kB"] == "stays (wide-sample/N=200k/B=32768 79.0 µs; at most 80)"
    # figures of an older commit say nothing of this one
    newer = replace(ENVIRONMENT, commit="fedcba987654", date="2026-02-03T00:00:00+00:00")
    assert unanswered(verdicts("host", record(on_gpu.HOST, 20.0, "add", environment=newer)))


def crash() -> str:
    faulthandler.disable()  # pytest's would print a traceback in the middle of its dots
    os.kill(os.getpid(), signal.SIGSEGV)
    return "survived"


def test_each_feature_costs_itself_alone(tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> None:
    features = {
        "good": Feature(lambda: "all is well"),
        "wrong": Feature(
            mock.Mock(side_effect=Wrong("not that of the host")), {"train": ["--no-graph"], "skip": ["rank*"]}
        ),
        "wrong too": Feature(mock.Mock(side_effect=Wrong("nor that")), {"train": ["--no-graph"], "skip": ["scan*"]}),
        "crashing": Feature(crash),
        "hanging": Feature(lambda: str(time.sleep(60)), limit=0.3),
        "last": Feature(lambda: "still here"),
    }
    monkeypatch.setattr(first_contact, "FEATURES", features)
    file = tmp_path / "contact.jsonl"
    assert first_contact.run(file) == 1
    found = [json.loads(line) for line in file.read_text().splitlines()]
    verdicts = ["ok", "WRONG", "WRONG", "CRASH", "HANG", "ok"]
    assert [(line["feature"], line["verdict"]) for line in found] == list(zip(features, verdicts, strict=True))
    # what comes after goes around it, each option once
    assert on_gpu.found_fallbacks(tmp_path / "none.jsonl") == {}
    assert on_gpu.found_fallbacks(file) == {"train": ["--no-graph"], "skip": ["rank*", "scan*"]}
    assert "VERDICT crashing CRASH 0" in capfd.readouterr().out
    # without a launch nothing else is worth trying; without time nothing is tried
    monkeypatch.setattr(first_contact, "FEATURES", dict(reversed(features.items())) | {"last": features["wrong"]})
    assert (first_contact.run(file), len(file.read_text().splitlines())) == (on_gpu.NO_LAUNCH, 1)
    monkeypatch.setattr(first_contact, "FEATURES", {"good": features["good"]})
    first_contact.run(file, seconds=0)
    assert json.loads(file.read_text())["verdict"] == "SKIPPED"


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def test_the_script_prints_what_it_would_run_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = script("--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"--output {ROOT}/bench/results/no-gpu/kernels.jsonl" in done.stdout
    (tmp_path / "torch.py").write_text("raise RuntimeError('no GPU is found')\n")
    done = script("tests", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "this needs a GPU, or --dry-run: RuntimeError: no GPU is found" in done.stderr


def test_bad_input_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        on_gpu.main(["bogus"])
    assert "there is no part 'bogus'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_is_killed_leaves_its_results_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "contact", "--rehearsal", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not (tmp_path / "contact.log").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        # it ends when no process has the pipe open any more
        process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
