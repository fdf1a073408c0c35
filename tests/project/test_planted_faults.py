"""The table of planted faults names texts that are there, in every part of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import Fault, faults

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
