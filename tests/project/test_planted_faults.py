"""The table of planted faults names texts that are there, in every part of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import Fault, Outcome, faults, page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in faults()])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    assert all(len([*(ROOT / "tests").rglob(test.split("::")[0])]) == 1 for test in fault.tests)


def test_there_are_faults_of_all_parts() -> None:
    core = {"host", "engines", "kernels", "checkpoints", "sharded", "graphs", "inputs"}
    assert {fault.area for fault in faults()} == core | {"training", "study", "integrations", "programs"}
    assert len({(fault.area, fault.what) for fault in faults()}) == len(faults()) >= 150


def test_a_run_of_some_faults_keeps_the_lines_of_the_others() -> None:
    first, second, third = faults()[:3]
    older = page([Outcome(first, "tests/a.py::one", 1.0), Outcome(second, None, 2.0)], "1234567", "")
    assert "1 of 2 are caught" in older
    newer = page([Outcome(second, "tests/b.py::two", 3.0), Outcome(third, "a timeout", 4.0)], "89abcde", older)
    assert "3 of 3 are caught" in newer
    lines = [line for line in newer.splitlines() if line.startswith(f"| {first.area} |")]
    assert [line.split(" | ")[-3:] for line in lines] == [
        ["`a.py::one`", "1", "1234567 |"],
        ["`b.py::two`", "3", "89abcde |"],
        ["`a timeout`", "4", "89abcde |"],
    ]
