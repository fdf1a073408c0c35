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
CPU = torch.device("cpu")


def test_every_operation_names_tests_that_are_there() -> None:
    for operation in OPERATIONS:
        for device in (CPU, torch.device("cuda")):
            for test in test_gate.selection(ROOT, [operation], device):
                file, _, name = test.partition("::")
                tree = ast.walk(ast.parse((ROOT / file).read_text()))
                functions = {node.name for node in tree if hasattr(node, "name")}
                assert any(each.startswith("test_") for each in functions)
                assert not name or name in functions
                assert device.type == "cpu" or "mark.gpu" in (ROOT / file).read_text()
    both = ["tests/contract/test_distributions.py", "tests/contract/test_priorities.py"]
    assert test_gate.selection(ROOT, ["draw", "update", "draw"], CPU) == both


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A checkout whose operations are held by one file of tests each; a cache of its own."""
    for folder in ("gpu_replay", "kernels", "bench", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "gpu_replay" / "buffer.py").write_text("x = 1\n")
    (tmp_path / "tests" / "test_it.py").write_text("def test_it():\n    assert True\n")
    monkeypatch.setattr(test_gate, "checkout", lambda: tmp_path)
    for name, tests in (("draw", "it"), ("update", "it more")):
        monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS[name], tests=tests))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_failing_tests_are_named_and_remembered(checkout: Path, monkeypatch: Patch) -> None:
    (checkout / "tests" / "test_it.py").write_text("def test_it():\n    assert False\ndef test_good():\n    pass\n")
    # a file that cannot be collected does not stop the others
    (checkout / "tests" / "test_more.py").write_text("import no_such_module\n")
    expected = ["tests/test_it.py::test_it", "tests/test_more.py"]
    assert test_gate.failed_tests(["draw", "update"], CPU) == expected
    monkeypatch.setattr(test_gate, "run", lambda *_: pytest.fail("these tests have been run"))
    assert test_gate.failed_tests(["update"], CPU) == expected
    assert test_gate.failed_tests(["draw"], CPU) == expected[:1]


def test_tests_that_cannot_be_run_refuse(checkout: Path) -> None:
    (checkout / "tests" / "test_it.py").write_text("def helper():\n    pass\n")
    with pytest.raises(CannotMeasure, match="could not be run; pytest ended with 5"):
        test_gate.failed_tests(["draw"], CPU)
    assert not (checkout / "cache").exists()


def test_on_a_gpu_tests_that_cannot_be_run_fail(checkout: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(test_gate, "device_slug", lambda device: "a GPU")
    monkeypatch.setattr(test_gate, "GPU_TESTS", "it")
    (name,) = test_gate.failed_tests(["draw"], torch.device("cuda")) or ()
    assert name.startswith("gate: the tests could not be run; pytest ended with 5")
    with pytest.raises(CannotMeasure, match="did not end within 0 s"):
        test_gate.run(checkout, ["tests/test_it.py"], "gpu", 0.01)


def test_tests_are_run_once_for_each_state(checkout: Path, monkeypatch: Patch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(test_gate, "run", lambda root, tests, marks, seconds: ran.append(tests) or [])
    for changed in (None, "gpu_replay/buffer.py", "tests/test_it.py", "tests/helper.py", "bench/new.py"):
        if changed:
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


def test_without_tests_nothing_is_claimed(monkeypatch: Patch, tmp_path: Path) -> None:
    for root in (None, tmp_path):
        monkeypatch.setattr(test_gate, "checkout", lambda root=root: root)
        assert test_gate.failed_tests(["draw"], CPU) is None


@pytest.mark.parametrize("suite", ["cpu", "frames", "peers", "storage", "kernels"])
def test_every_suite_asks_for_its_tests(suite: str, monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    asked: list[str] = []

    def refuses(operations: list[str], device: torch.device) -> None:
        asked.extend(operations)
        raise CannotMeasure("pytest is missing, so nothing can be recorded.")

    monkeypatch.setattr(commands, "failed_tests", refuses)
    file = tmp_path / "records.jsonl"
    assert commands.main([suite, "--output", str(file)]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == "gpu-replay bench: pytest is missing, so nothing can be recorded."
    )
    assert not file.exists()
    assert asked
    assert set(asked) <= set(OPERATIONS)


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
