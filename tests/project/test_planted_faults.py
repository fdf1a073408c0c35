"""The table of planted faults names texts that are there, in every part of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import Fault, faults

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in faults()])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new not in ("", fault.old) or fault.old.strip()
    assert all(len([*(ROOT / "tests").rglob(test.split("::")[0])]) == 1 for test in fault.tests)


def test_there_are_forty_of_all_parts() -> None:
    assert len(faults()) >= 40
    assert {fault.area for fault in faults()} == {"host", "engines", "kernels", "checkpoints", "training", "sharded"}
