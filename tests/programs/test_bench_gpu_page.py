"""The page of one GPU: made of whatever records a folder holds, each figure from one of them, links that lead on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bench_records import ENVIRONMENT, GPU, cells, record

from gpu_replay.bench import gpu_page, main, report
from gpu_replay.bench.kernels import kernel_cases
from gpu_replay.bench.main import ATARI_BATCH, ATARI_ENVS, ATARI_STEPS
from gpu_replay.bench.operations import frame_cases
from gpu_replay.bench.records import Record, read, recorded_files, write
from gpu_replay.bench.report import NOT_MEASURED, TARGETS, targets_first, targets_table
from gpu_replay.console.errors import UserError

STEP = {"gpu": "NVIDIA Test 9000", "commit": "0123456789ab", "date": "2026-01-02", "seconds": 9}
OUTCOMES = [("good", "passed"), ("skipped", "skipped"), ("bad", "passed"), ("bad", "failed")]
ROWS = "step,seconds,return_mean\n100,60,nan\n250000,120,14.5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "results" / "test-9000"
    made.mkdir(parents=True)
    return made


def write_lines(file: Path, *lines: dict[str, object]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, env: str, rows: str = ROWS, *, finished: bool = True, ending: str = "solved") -> None:
    """What a training run leaves, with these rows of step, seconds and mean return."""
    folder.mkdir(parents=True)
    (folder / "curve.png").write_bytes(b"an image")
    (folder / "progress.csv").write_text(rows)
    (folder / "settings.json").write_text('{"return_window": 30}')
    if finished:
        summary = {"env": env, "device_name": GPU.device, "stopped_by": ending, "wall_seconds": 1530.0}
        summary |= {"steps": 950_000, "steps_per_second": 1234.5, "updates_per_second": 99.4, "replay_share": 0.0456}
        summary |= {"eval_return_mean": 17.25, "eval_return_std": 2.0}
        (folder / "summary.json").write_text(json.dumps(summary))


def gpu_record(
    median: float = 70.0, case: str = "cycle/N=1M/B=256", name: str = "gpu_replay", **more: object
) -> Record:
    return record(case, median, name, **{"suite": "gpu", "environment": GPU, "timing": "graph", **more})


def test_runs_are_shown_with_the_first_time_that_each_threshold_is_exceeded(tmp_path: Path) -> None:
    assert report.runs_section(report.run_folders(tmp_path)).startswith("Not measured yet")
    rows = "step,seconds,return_mean\n5000,60,nan\n700000,1200,0\n720000,1230,0.5\n800000,1300,-1\n"
    run(tmp_path / "pong-cpu" / "seed-7", "pong", f"{rows}900000,1500,15.5\n")
    run(tmp_path / "pong-cpu" / "seed-8", "pong", rows, ending="max_seconds")
    text = report.runs_section(report.run_folders(tmp_path))
    first, second = (cells(line) for line in text.splitlines()[2:4])
    # exactly 0 is not above 0
    reached = ["pong-cpu/seed-7", "20.5 min, 0.72M", "25.0 min, 0.90M", "25.5 min, 0.95M, solved"]
    assert first == [*reached, "17.2 ± 2.0", "1,234", "99", "4.6%"]
    assert second[1:4] == ["20.5 min, 0.72M", "not reached", "25.5 min, 0.95M, time was up"]
    assert "last 30 finished training episodes" in text
    assert GPU.device in text


def test_a_page_of_everything(folder: Path) -> None:
    for part, step, status in (("tests", "tests", 0), ("contact", "contact", 0), ("pong", "pong", 124)):
        write_lines(folder / f"{part}.steps.jsonl", {"part": part, "step": step, "status": status, **STEP})
    tests = [{"test": f"tests/kernels/test_gpu.py::test_{name}", "outcome": outcome} for name, outcome in OUTCOMES]
    write_lines(folder / "tests.outcomes.jsonl", *tests, {"test": "tests/test_other.py", "outcome": "failed"})
    write_lines(folder / "gpu.errors.jsonl", {"case": "cycle/N=1M/B=32", "error": "an address"})
    contact = {"feature": "scan", "verdict": "HANG", "seconds": 25.0, "message": "still running"}
    write_lines(folder / "contact.jsonl", contact)
    write(folder / "kernels.jsonl", [gpu_record(8.0, "draw-update/N=1M/B=256", suite="kernels")])
    write(folder / "gpu.jsonl", [gpu_record()])
    (folder / "kernels").mkdir()
    (folder / "kernels" / "roofline.png").write_bytes(b"a picture")
    run(folder / "catch", "catch")
    run(folder / "pong", "pong")
    assert main.main(["page", "--results", str(folder)]) == 0
    output = folder.parent / "test-9000.md"
    text = output.read_text()
    assert text.startswith("# NVIDIA Test 9000\n")
    for pattern in (
        r"\| tests +\| +tests \|.* done \|",
        r"pong \|.* \*\*out of time\*\* \|",
        r"bench-gpu \|.* not run: `bench/on_gpu.py records`",
        r"\| scan +\| +HANG \| +25.0 \| still running \|",
        r"- `cycle/N=1M/B=32` failed: an address",
        r"\| tests +\| +1 \| +2 \| +1 \|",
        r"- `tests/kernels/test_gpu.py::test_bad`\n- `tests/test_other.py`",
        r"\| draw-update",
        "Not measured yet: `gpu-replay bench frames`",
        "torch 2.13.0",
        # Pong's row has its minute and step; catch has no marks of Pong
        r"test-9000/pong +\| +2.0 min, 0.25M \| +ended before \| 25.5 min, 0.95M, solved \|",
        r"test-9000/catch +\| +\| +\| 25.5 min, 0.95M, solved \|",
    ):
        assert re.search(pattern, text), pattern
    assert "test_good" not in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert (len(links), all((output.parent / link).exists() for link in links)) == (4, True)


def test_what_was_not_run_did_not_end_or_is_a_trial_is_said(folder: Path) -> None:
    run(folder / "pong", "pong", finished=False)
    write(folder / "gpu.jsonl", [gpu_record(quick=True)])
    text = gpu_page.page(folder, folder / "page.md")
    for part, names in gpu_page.PARTS.items():
        for name in names:
            assert re.search(rf"\| {part} +\| +{name} \|.* not run: `bench/on_gpu.py {part}` \|", text)
    for told in ("No tests were recorded.", "bench kernels`", "it did not finish", "QUICK RUN, not to be quoted"):
        assert told in text
    assert text.count(NOT_MEASURED) == len(TARGETS)
    # tables of a CPU are not missed on a page of a GPU
    assert "bench cpu" not in text
    # once there is a measurement, trials are not shown beside it
    write(folder / "more.jsonl", [gpu_record(50.0)])
    text = gpu_page.page(folder, folder / "page.md")
    assert not {"QUICK", "70.0"} & set(text.split())


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("nothing.txt", "", "holds no records"),
        ("gpu.jsonl", "{}\n", "line 1: not a benchmark record"),
        ("tests.steps.jsonl", '{"part": "tests"}\n', "line 1: part, step, status"),
        ("tests.outcomes.jsonl", "[]\n", "line 1: test, outcome are not in it"),
    ],
)
def test_a_folder_that_says_nothing_is_refused(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        gpu_page.page(folder, folder / "page.md")


# targets


def test_records_of_a_gpu_fill_the_last_column_and_others_do_not() -> None:
    case, gather = "draw-update/N=1M/B=256", "row-gather/N=1M/B=4096"
    records = [gpu_record(8.0, case), gpu_record(40.0, case, "cumsum + searchsorted + scatter")]
    records += [gpu_record(2.0, "empty"), gpu_record(9.0, "tree-build/N=100M", copy_share=0.5)]
    records += [gpu_record(5.0, gather), gpu_record(4.0, gather, "index_select of packed rows alone")]
    records += [gpu_record(64.0, "frame-cycle/N=1024k/B=512")]
    measured = {(line[0], line[1]): line[2] for line in map(cells, targets_table(records).splitlines())}
    assert (measured[case, "≥ 3x torch"], measured[case, "≤ 4x empty kernel"]) == ("5.00x (8.0 µs)", "4.00x (8.0 µs)")
    assert measured["tree-build/N=100M", "≥ 70% of copy bandwidth"] == "50.0% (9.0 µs)"
    assert measured[gather, "≤ 1.3x index_select"] == "1.25x (5.0 µs)"
    assert measured["frame-cycle/N=1024k/B=512", "< 100 µs"] == "64.0 µs"
    assert measured["draw-update/N=10M/B=256", "≥ 10x torch"] == NOT_MEASURED
    on_cpu = [replace(each, environment=ENVIRONMENT) for each in records]
    assert targets_table(on_cpu).count(NOT_MEASURED) == len(TARGETS)


def test_cases_with_a_target_come_first() -> None:
    cases = [*kernel_cases("cuda"), *frame_cases(ATARI_ENVS * ATARI_STEPS, (ATARI_BATCH,), ATARI_ENVS)[1]]
    ordered = [case.name for case in targets_first(cases)]
    assert sorted(ordered) == sorted(case.name for case in cases)
    named = {name for each in TARGETS for name in (each.case, *(each.other or ())[:1])}
    assert {*ordered[: len(named)]} == named


def test_the_table_in_the_document_is_the_one_that_is_made() -> None:
    records = [each for file in recorded_files() for each in read(file)]
    document = Path(__file__).parents[2] / "bench" / "RESULTS.md"
    assert report.section("targets", records) in document.read_text()
