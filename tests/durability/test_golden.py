"""Checkpoints of earlier versions load and give what their buffers would have given, or are refused in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit
from golden import EXPECTED, FOLDER, MADE, Buffer, drawn, main

from gpu_replay import CheckpointError, Field, RankBased, ReplayBuffer, TrajectoryReplayBuffer

KEPT = sorted(FOLDER.glob("*/*"))
# of buffers that sorted at every fourth sample only
REFUSED = [FOLDER / day / "rank" for day in ("2026-11-21", "2026-11-22")]


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(FOLDER)) for path in paths])


def opened(path: Path) -> Buffer:
    """The buffer of a kept checkpoint."""
    kind = json.loads((path / "manifest.json").read_text())["body"]["manifest"]["settings"]["kind"]
    return {each.__name__: each for each in (ReplayBuffer, TrajectoryReplayBuffer)}[kind].load(path, device="cpu")


@named([path for path in KEPT if path not in REFUSED])
def test_a_checkpoint_of_any_version_goes_on_as_its_buffer_did(path: Path) -> None:
    assert drawn(opened(path)) == json.loads((path / EXPECTED).read_text())


@named(REFUSED)
def test_a_buffer_that_did_not_rank_at_every_sample_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"RankBased\(resort_every=4\), and this version ranks .* every sample"):
        opened(path)


def test_a_state_of_an_earlier_version_that_ranked_at_every_sample_is_taken() -> None:
    buffer, other = (ReplayBuffer(3, {"x": Field((), torch.int64)}, sampler=RankBased(), device="cpu") for _ in "ab")
    buffer.add(x=torch.arange(5))
    state = buffer.state_dict()
    state["counters"] |= {"RANKED": 0, "SORTED": 0}
    state["settings"]["sampler"]["resort_every"] = 1
    other.load_state_dict(state)
    assert other.sample(9).key.tolist() == buffer.sample(9).key.tolist()
    state["settings"]["sampler"]["resort_every"] = 2
    with pytest.raises(ValueError, match=r"RankBased\(resort_every=2\)"):
        other.load_state_dict(state)


def test_a_buffer_that_shifted_images_loads_with_a_warning(tmp_path: Path) -> None:
    path, expected = tmp_path / "steps", FOLDER / max(each.parent.name for each in KEPT) / "steps"
    shutil.copytree(expected, path)
    edit(path, lambda body: body["manifest"]["settings"].update(random_shift=4))
    with pytest.warns(UserWarning, match=r"random_shift=4; .*eight lines"):
        buffer = opened(path)
    assert drawn(buffer) == json.loads((path / EXPECTED).read_text())
    state = buffer.state_dict()
    state["settings"]["random_shift"] = 1
    with pytest.warns(UserWarning, match="random_shift=1"):
        buffer.load_state_dict(state)


def test_all_kinds_are_kept_and_made_as_ever(tmp_path: Path) -> None:
    versions = {path.parent.name for path in KEPT}
    assert len(versions) >= 2
    assert {(path.parent.name, path.name) for path in KEPT} == {(each, name) for each in versions for name in MADE}
    assert sum(file.stat().st_size for path in KEPT for file in path.iterdir()) < 32_000 * len(versions)
    main(tmp_path)
    newest = FOLDER / max(versions)
    for name in MADE:
        assert (tmp_path / name / EXPECTED).read_text() == (newest / name / EXPECTED).read_text()
