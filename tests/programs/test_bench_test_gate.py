"""Tests before measurements: which belong to which operation, when they run, and what records say of them."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import Capture, Patch, quicker

from gpu_replay.bench import main as commands
from gpu_replay.bench import test_gate
from gpu_replay.bench.operations import OPERATIONS
from gpu_replay.bench.records import CannotMeasure, read

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_every_operation_names_tests_that_are_there() -> None:
    for device in (CPU, CUDA):
        for test in test_gate.selection(ROOT, OPERATIONS, device):
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            assert any(each.startswith("test_") for each in functions)
            assert not name or name in functions
            assert device == CPU or "mark.gpu" in text
    both = ["tests/contract/test_distributions.py", "tests/contract/test_priorities.py"]
    assert test_gate.selection(ROOT, ["draw", "update", "draw"], CPU) == both


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A checkout whose operations are held by one file of tests each; a cache of its own."""
    for folder in ("gpu_replay", "kernels", "bench", "tests"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(test_gate, "checkout", lambda: tmp_path)
    for name, tests in (("draw", "it"), ("update", "it more")):
        monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS[name], tests=tests))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_failing_tests_are_named_and_tests_that_cannot_be_run_refuse(checkout: Path, monkeypatch: Patch) -> None:
    file = checkout / "tests" / "test_it.py"
    file.write_text("def helper():\n    pass\n")
    with pytest.raises(CannotMeasure, match="could not be run; pytest ended with 5"):
        test_gate.failed_tests(["draw"], CPU)
    assert not (checkout / "cache").exists()
    # a GPU may not be there again soon
    monkeypatch.setattr(test_gate, "device_slug", lambda device: device.type)
    with monkeypatch.context() as patch:
        patch.setattr(test_gate, "GPU_TESTS", "it")
        (name,) = test_gate.failed_tests(["draw"], CUDA) or ()
    assert name.startswith("gate: the tests could not be run; pytest ended with 5")
    with pytest.raises(CannotMeasure, match="did not end within 0 s"):
        test_gate.run(checkout, ["tests/test_it.py"], "gpu", 0.01)
    file.write_text("def test_it():\n    assert False\ndef test_good():\n    pass\n")
    # a file that cannot be collected does not stop the others
    (checkout / "tests" / "test_more.py").write_text("import no_such_module\n")
    expected = ["tests/test_it.py::test_it", "tests/test_more.py"]
    assert test_gate.failed_tests(["draw", "update"], CPU) == expected
    monkeypatch.setattr(test_gate, "run", lambda *_: pytest.fail("these tests have been run"))
    assert [test_gate.failed_tests([name], CPU) for name in ("update", "draw")] == [expected, expected[:1]]


def test_tests_are_run_once_for_each_state(checkout: Path, monkeypatch: Patch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(test_gate, "run", lambda root, tests, marks, seconds: ran.append(tests) or [])
    for changed in ("kernels/ring.py", "gpu_replay/buffer.py", "tests/test_it.py", "tests/helper.py", "bench/new.py"):
        (checkout / changed).write_text("x = 2\n")
        assert [test_gate.failed_tests(["draw"], CPU) for _ in range(2)] == [[], []]
    assert ran == [["tests/test_it.py"]] * 5
    # of several tests only those are run that are new
    assert (test_gate.failed_tests(["draw", "update"], CPU), ran.pop()) == ([], ["tests/test_more.py"])
    monkeypatch.setattr(torch, "__version__", "99")
    assert (test_gate.failed_tests(["draw"], CPU), len(ran)) == ([], 6)
    # a cache that cannot be written is done without
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "gpu_replay" / "buffer.py"))
    assert ([test_gate.failed_tests(["draw"], CPU) for _ in range(2)], len(ran)) == ([[], []], 8)
    # without tests nothing is claimed
    for root in (None, checkout / "cache"):
        monkeypatch.setattr(test_gate, "checkout", lambda root=root: root)
        assert test_gate.failed_tests(["draw"], CPU) is None


@pytest.mark.parametrize("suite", ["cpu", "frames", "peers", "storage", "kernels", "checkpoint", "scale"])
def test_every_suite_asks_for_its_tests(suite: str, monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    asked: list[str] = []

    def refuses(operations: list[str], device: torch.device) -> None:
        asked.extend(operations)
        raise CannotMeasure("pytest is missing, so nothing can be recorded.")

    monkeypatch.setattr(commands, "failed_tests", refuses)
    monkeypatch.setattr(commands, "available", lambda names, device: [])
    file = tmp_path / "records.jsonl"
    assert commands.main([suite, "--output", str(file)]) == 1
    assert capsys.readouterr().err.endswith("gpu-replay bench: pytest is missing, so nothing can be recorded.\n")
    assert (file.exists(), bool(asked), set(asked) <= set(OPERATIONS)) == (False, True, True)


def test_records_name_the_tests_that_fail(monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    quicker(monkeypatch)
    monkeypatch.setattr(commands, "Plan", lambda: commands.QUICK)
    monkeypatch.setattr(commands, "copy_bandwidth", lambda device: 1e9)
    file = tmp_path / "records.jsonl"
    for names, outcome in ((["tests/test_it.py::test_it"], "failed"), ([], "passed"), (None, None)):
        monkeypatch.setattr(commands, "failed_tests", lambda *_, names=names: names)
        assert commands.main(["cpu", "--only", "add/N=10k/B=8", "--output", str(file)]) == 0
        (found,) = read(file)
        assert (found.tests, found.failed_tests) == (outcome, names or [])
        assert ("TESTS FAILED: tests/test_it.py::test_it" in capsys.readouterr().out) is bool(names)
