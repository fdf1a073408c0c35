"""The soak itself: what fails or dies in it is found, with the lines that repeat it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
def test_what_fails_is_named(part: Any, monkeypatch: Any, capfd: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(soak, "CYCLE", [part.__name__])
    monkeypatch.setattr(soak, "PARTS", {part.__name__: part})
    assert soak.main(["--minutes", "0.01", "--record", str(tmp_path / "page.md")]) == 1
    again = f"{soak.REPEAT} 'import soak; soak.PARTS[\"{part.__name__}\"](0)'"
    assert again in capfd.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "- failures: 1" in page
    assert "soak --minutes 0.01" in page


@pytest.mark.slow
def test_a_short_soak_finds_nothing() -> None:
    # apart, since ranks that this process has started before are no children of its forks
    command = [sys.executable, "-m", "gpu_replay", "soak", "--minutes", "0.3", "--seed", "5"]
    done = subprocess.run(command, cwd=Path(soak.__file__).parents[1], capture_output=True, text=True)
    assert (done.returncode, "- failures: 0" in done.stdout) == (0, True), done.stdout
    with pytest.raises(SystemExit):
        main(["soak", "--minutes", "none"])
