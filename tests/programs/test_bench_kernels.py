"""The kernel microbenchmarks: their checks, what is recorded of cases that fail, files and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bench_records import ENVIRONMENT, Capture, Patch, quicker, record
from torch import Tensor

from gpu_replay.bench import kernel_checks, kernels, records
from gpu_replay.bench import main as commands
from gpu_replay.bench.kernel_checks import Implementation
from gpu_replay.bench.kernel_inputs import Inputs
from gpu_replay.bench.kernels import inputs, makers
from gpu_replay.bench.main import Work
from gpu_replay.bench.measure import Plan, Run
from gpu_replay.bench.operations import KERNELS, OPERATIONS, OURS, Case
from gpu_replay.bench.peers import PEERS
from gpu_replay.bench.records import DeviceLost, Record
from gpu_replay.bench.subjects import EPS
from gpu_replay.console.progress import Progress

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_GPU = pytest.param("cuda", 100_003, 256, marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: Patch) -> None:
    quicker(monkeypatch)
    monkeypatch.setattr(kernels, "flush_bytes", lambda device: 4096)


@pytest.mark.parametrize("operation", list(KERNELS))
@pytest.mark.parametrize(
    "kind, slots, batch", [("cpu", 3001, 64), pytest.param("cuda", 100_003, 256, marks=pytest.mark.gpu)]
)
def test_every_implementation_gives_right_answers(kind: str, slots: int, batch: int, operation: str) -> None:
    of = KERNELS[operation]
    slots = 2000 if of.dtype is not None else slots
    case = Case(operation, slots if of.slot or of.drawn else 0, batch if of.drawn else 0)
    given, wrong = inputs(case, torch.device(kind)), {}
    for name, make in makers(case).items():
        work = make(given)
        wrong[name] = work.faults()
        # as often as there are inputs, and once more
        for _ in range(9):
            work.prepare()
            work.call()
        wrong[name] += work.faults()
    assert wrong == {name: [] for name in wrong}
    assert len(wrong) > 1


# checks


def test_draws_outside_of_their_strata_are_noticed() -> None:
    weights = torch.tensor([1, 0, 5, 2, 4, 0, 4], dtype=torch.int64)
    # strata of 4: the slots 0 and 2, 2 and 3, 4, 6
    assert kernel_checks.wrong_draws(weights, torch.tensor([2, 2, 4, 6])) == []
    for wrong, count in (([1, 2, 4, 6], 1), ([0, 2, 4, 5], 1), ([6, 4, 2, 0], 4), ([3, 3, 4, 6], 1)):
        (reason,) = kernel_checks.wrong_draws(weights, torch.tensor(wrong))
        assert reason.startswith(f"{count} of 4 draws")
    weights = torch.arange(1, 1001, dtype=torch.float32)
    torch.manual_seed(0)
    assert kernel_checks.wrong_shares(weights, torch.multinomial(weights, 4096, replacement=True)) == []
    assert kernel_checks.wrong_shares(weights, torch.randint(1000, (4096,)))


def test_other_wrong_answers_are_noticed() -> None:
    values, given = torch.arange(10), Inputs(1000, 32, CPU)
    assert all(kernel_checks.wrong_scan(values, sums) for sums in (values.cumsum(0) + 1, values))
    assert kernel_checks.wrong_totals(values, 46)
    order = torch.sort(given.priorities, descending=True).indices
    ranks = torch.searchsorted(given.rank_masses, given.rank_masses[-1] * torch.arange(32) // 32, right=True)
    assert kernel_checks.wrong_ranks(given.priorities, given.rank_masses, order[ranks.flip(0)])
    rows = {name: values[given.slots[0]] for name, values in given.rows.items()}
    mixed = kernel_checks.wrong_rows({**rows, "reward": rows["reward"].roll(1)}, given)
    assert mixed == ["rows of 'reward' are not those of their slots"]


@pytest.mark.parametrize("fault, message", [("scale", "as given"), ("other", "have changed")])
def test_wrong_updates_are_noticed(fault: str, message: str) -> None:
    given = Inputs(1000, 32, CPU)
    powers = given.priorities.double() + 1

    def update(slots: Tensor, errors: Tensor) -> None:
        powers[slots] = (errors.double() + EPS) ** 0.6 * (1.01 if fault == "scale" else 1)
        if fault == "other":
            powers[(slots[0] + 1) % 1000] += 1

    index = SimpleNamespace(update=update, weights=lambda: powers, total=powers.sum, slack=1e-9, unit=1.0)
    assert message in kernel_checks.wrong_update(index, given)[0]


# runs


def run() -> Run:
    plan = Plan(warmup=0, seconds=0, fewest=2, most=3)
    return Run("kernels", CPU, plan, ENVIRONMENT, 1e9, False, versions={})


def replaced(monkeypatch: Patch, **changes: Any) -> None:
    monkeypatch.setitem(OPERATIONS, "prefix-sum", replace(OPERATIONS["prefix-sum"], **changes))


def wrong_work(inputs: Inputs) -> Implementation:
    return Implementation(lambda: None, lambda _: ["it is all wrong"])


def measured(*cases: Case) -> list[Record]:
    with Progress(1, "test") as progress:
        return list(kernels.records(run(), cases, progress))


def test_a_record_says_how_it_was_made(monkeypatch: Patch, capsys: Capture) -> None:
    ours, theirs = measured(Case("prefix-sum", 1000, 0))
    assert ((ours.implementation, theirs.implementation), ours.flush) == ((OURS, "cumsum"), 4096)
    assert (ours.timing, ours.suite, ours.bytes) == ("host", "kernels", 16_000)
    assert measured(Case("draw", 1000, 32))[0].flush == 0
    # a baseline with wrong answers is left out, with a word
    replaced(monkeypatch, baselines={"cumsum": wrong_work})
    assert [each.implementation for each in measured(Case("prefix-sum", 1000, 0))] == [OURS]
    assert "cumsum is not measured in prefix-sum/N=1k: it is all wrong." in capsys.readouterr().err
    # and so is what does not fit
    monkeypatch.setattr(kernels, "free_bytes", lambda device: 4_000_000_000)
    assert measured(Case("rank-draw", 10**8, 32)) == []
    assert "rank-draw/N=100M/B=32 is skipped: it takes 20.0 GB and 4.0 GB are free." in capsys.readouterr().err


def test_a_case_that_fails_leaves_a_line_and_stops_nothing(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    replaced(monkeypatch, ours=wrong_work)
    file, errors = tmp_path / "kernels.jsonl", tmp_path / "kernels.errors.jsonl"
    command = ["kernels", "--device", "cpu", "--quick", "--only", "N=10k", "--skip", "*draw*", "--skip", "update*"]
    assert commands.main([*command, "--output", str(file)]) == 1
    (line,) = map(json.loads, errors.read_text().splitlines())
    assert (line["case"], line["timing"]) == ("prefix-sum/N=10k", "host")
    assert "gpu_replay is not measured in prefix-sum/N=10k: it is all wrong" in line["error"]
    gathers = {f"row-gather/N=10k/B={batch}" for batch in (32, 256)}
    assert {each.case for each in records.read(file)} == {"tree-build/N=10k", *gathers}
    assert all(each.quick for each in records.read(file))
    capsys.readouterr()
    # what was recorded or failed is not missing
    assert commands.main([*command, "--output", str(file), "--missing"]) == 1
    assert "records written" not in capsys.readouterr().err


def test_a_device_that_is_lost_ends_the_suite(monkeypatch: Patch) -> None:
    lost = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    fails = mock.Mock(side_effect=ValueError("a kernel ended badly"))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    cases, on_gpu = [Case("draw", 1000, 32)] * 2, replace(run(), device=CUDA)
    with Progress(2, "test") as progress, pytest.raises(DeviceLost, match="lost since draw/N=1k/B=32: a kernel ended"):
        list(on_gpu.each(cases, progress, fails))

    def work(options: object) -> Work:
        return Work(list(on_gpu.each(cases, progress, fails)))  # type: ignore[arg-type]

    monkeypatch.setitem(commands.SUITES, "gpu", (work, "nothing"))
    assert commands.main(["gpu"]) == commands.LOST


# files and plots


def test_kernel_records_are_found_and_trials_are_not(monkeypatch: Patch, tmp_path: Path) -> None:
    for root in (tmp_path, None):
        monkeypatch.setattr(records, "checkout", lambda root=root: root)
        monkeypatch.chdir(tmp_path)
        for name in ("cpu", "kernels", "kernels-quick"):
            records.write(records.default_file(name), [record()])
        assert [file.stem.split("bench-")[-1] for file in records.recorded_files()] == ["cpu", "kernels"]


def test_plots_are_made_of_records_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = [f"N={capacity}/B={batch}" for capacity in ("10k", "1M") for batch in (32, 4096)]
    found = [record(f"draw/{size}", 9.0, name, suite="kernels") for size in sizes for name in (OURS, "other")]
    # of one size each
    found += [record("empty", suite="kernels", bytes=0), record("add/N=10k/B=8"), record("add/N=1M/B=8")]
    # over N at several B, and once more at one B
    cycles = ["N=10k/B=256", "N=1M/B=256", "N=1M/B=32"]
    found += [record(f"cycle/{size}", 9.0, name, suite="peers") for size in cycles for name in (OURS, *PEERS)]
    file = tmp_path / "made.jsonl"
    records.write(file, found)
    assert commands.main(["plot", str(file)]) == 0
    pictures = sorted((tmp_path / "made").iterdir())
    assert [picture.name for picture in pictures] == ["cycle-256.png", "cycle.png", "draw.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
