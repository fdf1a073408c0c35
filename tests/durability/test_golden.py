"""Checkpoints of earlier versions load and give what their buffers would have given, or are refused in a sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit
from golden import EXPECTED, FOLDER, MADE, Buffer, drawn, main

from gpu_replay import CheckpointError, Combined, Field, RankBased, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.samplers import BaseSampler

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


@dataclass(frozen=True)
class Tasks(BaseSampler):
    """Has what version 0.3.0 wrote in another way."""

    parts: tuple[Any, ...] = (1, (2,))
    shares: dict[str, float] = field(default_factory=lambda: {"push": 0.5})
    half: int = field(init=False, default=3)

    def places(self, total: int, rows: int, random: Any) -> Any:
        return (random.doubles(rows) * total).long()


@pytest.mark.parametrize("combined", [False, True])
def test_fields_of_own_samplers_as_version_0_3_0_wrote_them(combined: bool, tmp_path: Path) -> None:
    sampler: Any = Combined(Tasks()) if combined else Tasks()
    buffer, other = (ReplayBuffer(3, {"x": Field((), torch.int64)}, sampler=sampler, device="cpu") for _ in "ab")
    buffer.add(x=torch.arange(5))
    old: dict[str, Any] = {"kind": "Tasks", "parts": (1, (2,)), "shares": {"push": 0.5}, "half": 3}
    if combined:
        old = {"kind": "Combined", "base": old, "newest": 1}
    state = buffer.state_dict()
    state["settings"]["sampler"] = old
    other.load_state_dict(state)
    buffer.save(tmp_path / "saved")
    edit(tmp_path / "saved", lambda body: body["manifest"]["settings"].update(sampler=old))
    loaded = ReplayBuffer.load(tmp_path / "saved", device="cpu")
    # a file had no tuples
    assert loaded.sampler.base == Tasks(parts=[1, [2]])  # type: ignore[arg-type]
    keys = buffer.sample(9).key.tolist()
    assert other.sample(9).key.tolist() == loaded.sample(9).key.tolist() == keys


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
