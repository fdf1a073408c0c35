"""`gpu-replay inspect` and `buffer.plot`: the numbers that they show, and a picture of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only
from programs import SAMPLERS

from gpu_replay import Combined, Field, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.checkpoint import format as checkpoint_format
from gpu_replay.cli import main
from gpu_replay.console.inspection import of_buffer, of_checkpoint
from gpu_replay.stats import chance_distribution

pytestmark = host_only
PICTURES = {"obs": Field((8, 9), torch.uint8), "action": Field((), torch.int64)}


def filled(sampler: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(60, 2, PICTURES, sampler=sampler, stack=2, device="cpu")
    for step in range(45):
        obs = np.full((2, 8, 9), step, np.uint8)
        ended = [step % 9 == 8, step == 20]
        buffer.add(obs=obs, action=[0, 1], reward=[0.0, 1.0], terminated=ended, truncated=[False] * 2)
    for _ in range(4):
        keys = buffer.sample(8).key
        buffer.update_priorities(keys, keys % 7 + 0.5)
    buffer.update_priorities([0], [1.0])
    return buffer


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_the_numbers_are_those_of_the_buffer(sampler: Any, tmp_path: Path) -> None:
    buffer = filled(sampler)
    buffer.save(tmp_path / "saved")
    stats, base = buffer.stats(), sampler.base if isinstance(sampler, Combined) else sampler
    for found in (of_buffer(buffer.state_dict()), of_checkpoint(tmp_path / "saved")):
        assert found.keys.tolist() == buffer.keys().flip(0).tolist()
        assert int((found.probability > 0).sum()) == stats.eligible
        text, spread = "\n".join(found.lines()), chance_distribution(found.probability)
        assert spread.entropy == pytest.approx(stats.entropy, rel=1e-9)
        assert spread.effective_sample_size == pytest.approx(stats.effective_sample_size, rel=1e-9)
        assert f"entropy {stats.entropy:.2f} nats" in text
        assert f"effective sample size {stats.effective_sample_size:,.0f}" in text
        assert found.sampled.sum() == round(stats.mean_times_sampled * stats.size)
        assert found.counters["STALE"] == stats.stale_updates == 1
        if isinstance(base, (Proportional, RankBased)):
            assert found.priority is not None
            assert found.priority.tolist() == buffer.priorities(found.keys).tolist()
        rows = found.rows("obs", found.keys[[0, 3]])
        assert rows[:, 0, 0].tolist() == [44, 43]
        assert "stale updates 1, rejected priorities 0, saturated priorities 0" in text
        assert "\nnum_envs=2, stack=2, n_step=1, gamma=0.99, autoreset=next_step\n" in text


def test_priorities_that_all_count_alike_are_not_shown() -> None:
    assert of_buffer(filled(Proportional(alpha=0.0)).state_dict()).priority is None


def test_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    buffer = filled(Proportional())
    buffer.plot(tmp_path / "buffer.png")
    buffer.save(tmp_path / "run" / "checkpoint" / "000000000045" / "replay")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "TrajectoryReplayBuffer: 60 of 60 steps, 90 added" in out
    # of a checkpoint beside it, and again over the first
    buffer.save(tmp_path / "saved")
    assert main(["inspect", str(tmp_path / "saved")]) == main(["inspect", str(tmp_path / "saved")]) == 0
    for name in ("buffer.png", "run/buffer.png", "saved.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    ReplayBuffer(5, {"x": Field((), torch.float32)}, device="cpu").plot(tmp_path / "empty.svg")
    assert b"<svg" in (tmp_path / "empty.svg").read_bytes()


def test_of_a_large_checkpoint_only_some_shards_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(Proportional()).state_dict()
    tensors, read, whole = state.pop("tensors"), [], checkpoint_format.read_shard
    checkpoint_format.write_checkpoint(tmp_path / "saved", state, tensors, shard_bytes=1000)
    kept = lambda file, part, *more: (read.append(part.nbytes), whole(file, part, *more))[1]  # noqa: E731
    monkeypatch.setattr(checkpoint_format, "read_shard", kept)
    found = of_checkpoint(tmp_path / "saved")
    assert sum(read) < tensors["fields.obs"].nbytes
    read.clear()
    found.rows("obs", found.keys[:2])
    assert 0 < sum(read) <= 2 * 1500
