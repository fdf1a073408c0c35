"""The page of one GPU: made of whatever records a folder holds, each figure from one of them, links that lead on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench_records import GPU, cells, record

from gpu_replay.bench import gpu_page, main, report
from gpu_replay.bench.records import write
from gpu_replay.console.errors import UserError

STEP = {"gpu": "NVIDIA Test 9000", "torch": "2.11.0", "triton": "3.6.0", "commit": "0123456789ab", "date": "2026-01-02"}
OUTCOMES = [("good", "passed", 12.25), ("skipped", "skipped", 0.25), ("bad", "passed", 1.0), ("bad", "failed", 0.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "results" / "test-9000"
    made.mkdir(parents=True)
    return made


def steps(folder: Path, part: str, **ended: int) -> None:
    kept = {"part": part, "seconds": 9, **STEP}
    lines = [json.dumps({"step": step, "status": each, **kept}) for step, each in ended.items()]
    (folder / f"{part}.steps.jsonl").write_text("\n".join(lines) + "\n")


ROWS = ("100,60,nan", "250000,120,14.5")


def run(folder: Path, env: str, rows: tuple[str, ...] = ROWS, *, finished: bool = True) -> None:
    """What a training run leaves, with these rows of step, seconds and mean return."""
    folder.mkdir(parents=True)
    (folder / "curve.png").write_bytes(b"an image")
    (folder / "progress.csv").write_text("\n".join(["step,seconds,return_mean", *rows]) + "\n")
    (folder / "settings.json").write_text('{"return_window": 30}')
    if finished:
        summary = {"env": env, "device_name": GPU.device, "stopped_by": "solved"}
        ended = {"wall_seconds": 1530.0, "steps": 950_000}
        speeds = {"steps_per_second": 1234.5, "updates_per_second": 99.4, "replay_share": 0.0456}
        evaluation = {"eval_return_mean": 17.25, "eval_return_std": 2.0}
        (folder / "summary.json").write_text(json.dumps(summary | ended | speeds | evaluation))


def test_runs_are_shown_with_the_first_time_that_each_threshold_is_exceeded(tmp_path: Path) -> None:
    assert report.runs_section(report.run_folders(tmp_path)).startswith("Not measured yet")
    rows = ("5000,60,nan", "700000,1200,0", "720000,1230,0.5", "800000,1300,-1", "900000,1500,15.5")
    run(tmp_path / "pong-somewhere" / "seed-7", "pong", rows)
    assert report.run_folders(tmp_path) == [tmp_path / "pong-somewhere" / "seed-7"]
    text = report.runs_section(report.run_folders(tmp_path))
    (line,) = [cells(line) for line in text.splitlines() if "pong-somewhere/seed-7" in line]
    # exactly 0 is not above 0
    reached = ["20.5 min, 0.72M", "25.0 min, 0.90M", "25.5 min, 0.95M, solved"]
    assert line[1:] == [*reached, "17.2 ± 2.0", "1,234", "99", "4.6%"]
    assert "last 30 finished training episodes" in text
    assert GPU.device in text
    interrupted = tmp_path / "pong-somewhere" / "seed-8"
    run(interrupted, "pong", rows[:3])
    summary = json.loads((interrupted / "summary.json").read_text())
    (interrupted / "summary.json").write_text(json.dumps(summary | {"stopped_by": "max_seconds"}))
    last = cells(report.runs_section([interrupted]).splitlines()[2])
    assert last[1:4] == ["20.5 min, 0.72M", "not reached", "25.5 min, 0.95M, time was up"]


def test_a_page_of_everything(folder: Path) -> None:
    steps(folder, "tests", tests=0)
    steps(folder, "contact", contact=0)
    steps(folder, "pong", pong=124)
    lines = [
        json.dumps({"test": f"tests/kernels/test_gpu.py::test_{name}", "outcome": outcome, "seconds": seconds})
        for name, outcome, seconds in OUTCOMES
    ]
    lines.append(json.dumps({"test": "tests/test_other.py", "outcome": "failed", "seconds": 0}))
    (folder / "tests.outcomes.jsonl").write_text("\n".join(lines) + "\n")
    kernel = record("draw-update/N=1M/B=256", 8.0, suite="kernels", environment=GPU, timing="graph", tests="passed")
    write(folder / "kernels.jsonl", [kernel])
    write(folder / "gpu.jsonl", [record(median=70.0, suite="gpu", environment=GPU, timing="graph")])
    (folder / "kernels").mkdir()
    (folder / "kernels" / "roofline.png").write_bytes(b"a picture")
    run(folder / "catch", "catch")
    run(folder / "pong", "pong")
    output = folder.parent / "test-9000.md"
    text = gpu_page.page(folder, output)
    assert text.startswith("# NVIDIA Test 9000\n")
    assert "| tests " in text
    assert re.search(r"\| tests +\| +tests \|.* done \|", text)
    assert re.search(r"pong \|.* \*\*out of time\*\* \|", text)
    assert re.search(r"bench-gpu \|.* not run: `bench/on_gpu.py records`", text)
    assert re.search(r"\| tests +\| +1 \| +2 \| +1 \|", text)
    assert "- `tests/kernels/test_gpu.py::test_bad`\n- `tests/test_other.py`" in text
    assert "test_good" not in text
    for part in ("| draw-update", "Not measured yet: `gpu-replay bench frames`", "torch 2.13.0"):
        assert part in text
    # Pong's row has its minute and step; catch has no marks of Pong
    assert re.search(r"test-9000/pong +\| +2.0 min, 0.25M \| +ended before \| 25.5 min, 0.95M, solved \|", text)
    assert re.search(r"test-9000/catch +\| +\| +\| 25.5 min, 0.95M, solved \|", text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 4
    assert all((output.parent / link).exists() for link in links)


def test_parts_that_were_not_run_are_named_with_their_command(folder: Path) -> None:
    write(folder / "gpu.jsonl", [record(median=70.0, suite="gpu", environment=GPU)])
    text = gpu_page.page(folder, folder / "page.md")
    for part, names in gpu_page.PARTS.items():
        for name in names:
            assert re.search(rf"\| {part} +\| +{name} \|.* not run: `bench/on_gpu.py {part}` \|", text)
    assert "No tests were recorded." in text
    assert "Not measured yet: `gpu-replay bench kernels`" in text
    assert "Not measured yet: `bench/on_gpu.py pong`" in text
    assert text.count(report.NOT_MEASURED) == len(report.TARGETS)
    # tables of a CPU are not missed on a page of a GPU
    assert "bench cpu" not in text


def test_a_run_that_did_not_end_and_trials_are_what_they_are(folder: Path) -> None:
    run(folder / "pong", "pong", finished=False)
    write(folder / "gpu.jsonl", [record(median=70.0, suite="gpu", environment=GPU, quick=True)])
    text = gpu_page.page(folder, folder / "page.md")
    assert "it did not finish" in text
    assert "QUICK RUN, not to be quoted" in text
    # once there is a measurement, trials are not shown beside it
    write(folder / "more.jsonl", [record(median=50.0, suite="gpu", environment=GPU)])
    text = gpu_page.page(folder, folder / "page.md")
    assert "QUICK" not in text
    assert "70.0" not in text


def test_the_command_writes_the_page_beside_the_folder(folder: Path, tmp_path: Path) -> None:
    write(folder / "gpu.jsonl", [record(median=70.0, suite="gpu", environment=GPU)])
    assert main.main(["page", "--results", str(folder)]) == 0
    assert (folder.parent / "test-9000.md").read_text() == gpu_page.page(folder, folder.parent / "test-9000.md")
    assert main.main(["page", "--results", str(folder), "--output", str(tmp_path / "new" / "page.md")]) == 0
    assert "(../results/test-9000)" in (tmp_path / "new" / "page.md").read_text()


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("nothing.txt", "", "holds no records"),
        ("gpu.jsonl", "{}\n", "line 1: not a benchmark record"),
        ("tests.steps.jsonl", '{"part": "tests"}\n', "line 1: part, step, status"),
        ("tests.steps.jsonl", "broken\n", "line 1: part, step, status"),
        ("tests.outcomes.jsonl", "[]\n", "line 1: test, outcome are not in it"),
    ],
)
def test_a_folder_that_says_nothing_is_refused(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        gpu_page.page(folder, folder / "page.md")
