"""The soak itself: what fails or dies in it is found, with the lines that repeat it."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import soak

from gpu_replay.cli import main


def fails(argument: int) -> int:
    """A part that raises for one argument."""
    assert argument != 0
    return 2


def dies(argument: int) -> int:
    """A part that takes the process with it."""
    if argument == 0:
        # nothing that looks like a crash of the tests is printed
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1


@pytest.mark.parametrize("part", [fails, dies])
def test_what_fails_is_named(
    part: soak.Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(soak, "CYCLE", [part.__name__])
    monkeypatch.setattr(soak, "PARTS", {part.__name__: part})
    assert soak.main(["--minutes", "0.01", "--record", str(tmp_path / "page.md")]) == 1
    again = f"{soak.REPEAT} 'import soak; soak.PARTS[\"{part.__name__}\"](0)'"
    assert again in capfd.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "- failures: 1" in page
    assert "soak --minutes 0.01" in page


@pytest.mark.slow
def test_a_short_soak_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "0.3", "--seed", "5"]) == 0
    assert "- failures: 0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["soak", "--minutes", "none"])
