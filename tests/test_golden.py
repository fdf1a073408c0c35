"""Checkpoints of earlier versions, and of this one, load and give what their buffers would have given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden import EXPECTED, FOLDER, MADE, Buffer, drawn, main

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer

KEPT = sorted(FOLDER.glob("*/*"))


def opened(path: Path) -> Buffer:
    """The buffer of a kept checkpoint."""
    kind = json.loads((path / "manifest.json").read_text())["body"]["manifest"]["settings"]["kind"]
    return {each.__name__: each for each in (ReplayBuffer, TrajectoryReplayBuffer)}[kind].load(path, device="cpu")


@pytest.mark.parametrize("path", KEPT, ids=[str(path.relative_to(FOLDER)) for path in KEPT])
def test_a_checkpoint_of_any_version_goes_on_as_its_buffer_did(path: Path) -> None:
    assert drawn(opened(path)) == json.loads((path / EXPECTED).read_text())


def test_all_kinds_are_kept_and_made_as_ever(tmp_path: Path) -> None:
    versions = {path.parent.name for path in KEPT}
    assert len(versions) >= 2
    assert {(path.parent.name, path.name) for path in KEPT} == {(each, name) for each in versions for name in MADE}
    assert sum(file.stat().st_size for path in KEPT for file in path.iterdir()) < 32_000 * len(versions)
    main(tmp_path)
    newest = FOLDER / max(versions)
    for name in MADE:
        assert (tmp_path / name / EXPECTED).read_text() == (newest / name / EXPECTED).read_text()
