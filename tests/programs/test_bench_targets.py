"""Targets for a GPU: what its records say, and that the cases they are about are measured first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench_records import ENVIRONMENT, GPU, cells, record

from gpu_replay.bench import report
from gpu_replay.bench.kernels import kernel_cases
from gpu_replay.bench.main import ATARI_BATCH, ATARI_ENVS, ATARI_STEPS
from gpu_replay.bench.operations import stream_cases
from gpu_replay.bench.records import Record, read, recorded_files
from gpu_replay.bench.report import NOT_MEASURED, TARGETS, targets_first, targets_table

DOCUMENT = Path(__file__).parents[2] / "bench" / "RESULTS.md"


def made(case: str, median: float, implementation: str = "gpu_replay") -> Record:
    return record(case, median, implementation, suite="kernels", environment=GPU, timing="graph", copy_share=0.5)


def test_records_of_a_gpu_fill_the_last_column_and_others_do_not() -> None:
    case, other = "draw-update/N=1M/B=256", "cumsum + searchsorted + scatter"
    gather, packed = "row-gather/N=1M/B=4096", "index_select of packed rows alone"
    records = [made(case, 8.0), made(case, 40.0, other), made("empty", 2.0), made("tree-build/N=100M", 9.0)]
    records += [made(gather, 5.0), made(gather, 4.0, packed), made("frame-cycle/N=1024k/B=512", 64.0)]
    measured = {line[1]: line[2] for line in map(cells, targets_table(records).splitlines())}
    assert (measured["≥ 3x torch"], measured["≤ 4x empty kernel"]) == ("5.00x (8.0 µs)", "4.00x (8.0 µs)")
    assert measured["≥ 70% of copy bandwidth"] == "50.0% (9.0 µs)"
    assert (measured["≤ 1.3x index_select"], measured["< 100 µs"]) == (NOT_MEASURED, "64.0 µs")
    assert measured["≥ 10x torch"] == NOT_MEASURED
    assert "1.25x (5.0 µs)" in targets_table(records)
    on_cpu = [replace(each, environment=ENVIRONMENT) for each in records]
    assert targets_table(on_cpu).count(NOT_MEASURED) == len(TARGETS)


def test_cases_with_a_target_come_first() -> None:
    cases = kernel_cases("cuda")
    ordered = [case.name for case in targets_first(cases)]
    assert sorted(ordered) == sorted(case.name for case in cases)
    steps = stream_cases(ATARI_ENVS * ATARI_STEPS, (ATARI_BATCH,), ATARI_ENVS)
    there = {*ordered, *(case.name for case in steps)}
    named = {name for each in TARGETS for name in (each.case, *(each.other or ())[:1])}
    assert named <= there
    assert {*ordered[: len(named) - 1]} == named - {"frame-cycle/N=1024k/B=512"}
    assert next(case.name for case in targets_first(steps)) == "frame-cycle/N=1024k/B=512"


def test_the_table_in_the_document_is_the_one_that_is_made() -> None:
    records, text = [each for file in recorded_files() for each in read(file)], DOCUMENT.read_text()
    assert report.section("targets", records) in text
