"""What an actor in a process of its own sends: every row can be learned from, and is what the environment did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from training_runs import CPU

zstandard = pytest.importorskip("zstandard", reason="needs zstandard, in the extra `ray`")

from gpu_replay.training.actors import CHUNK, Chunk, Collector, pack, unpack  # noqa: E402
from gpu_replay.training.device_games import Catch  # noqa: E402
from gpu_replay.training.networks import QNetwork  # noqa: E402
from gpu_replay.training.registry import identify  # noqa: E402
from gpu_replay.training.run import make_buffer  # noqa: E402
from gpu_replay.training.settings import Settings  # noqa: E402
from gpu_replay.training.train import beta_schedule  # noqa: E402

ENVS = 3
SETTINGS = Settings.for_family("catch", n_step=1, capacity=50 * ENVS, num_envs=ENVS, warmup=64)


def opened(chunk: Chunk) -> dict[str, Any]:
    steps = {name: unpack(value) for name, value in chunk.steps.items() if name != "final_obs"}
    return steps | {"final_obs": [unpack(each) for each in chunk.steps["final_obs"]]}


def test_every_row_of_every_chunk_is_a_step_of_the_game() -> None:
    collectors = [Collector(identify("catch"), SETTINGS, ENVS, seed) for seed in (1, 2)]
    network = QNetwork(Catch.spec.stacked, 3, SETTINGS)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    buffer = make_buffer(Catch.spec, SETTINGS, beta_schedule(SETTINGS), CPU, 0, ENVS)
    lengths: list[float] = []
    # of two actors by turns, and more than the ring holds
    for turn in range(6):
        chunk = collectors[turn % 2].collect(weights, 0.5)
        steps = opened(chunk)
        assert steps["action"].shape == (CHUNK, ENVS)
        buffer.extend(**steps)
        lengths += chunk.lengths
        assert len(chunk.returns) == len(chunk.lengths) == int(steps["terminated"].sum())
        assert not (steps["truncated"][:-1]).any()
        assert (steps["truncated"] | steps["terminated"])[-1].all()
    assert set(lengths) == {11}
    assert buffer.stats().eligible == 50 * ENVS
    batch = buffer.sample(50 * ENVS)
    going = ~batch.terminated
    before, after = batch.obs[going].float(), batch.next_obs[going].float()
    # the ball falls by one row in its column
    assert torch.equal(before[:, :10], after[:, 1:11])
    # the mean place of its cells
    was, became = ((board[:, 11] * torch.arange(12)).sum(1) / board[:, 11].sum(1) for board in (before, after))
    moved, wanted = became - was, batch.action[going] - 1
    # the walls stop it
    assert bool(((moved == 0) | (moved == wanted)).all())
    assert (moved == wanted).float().mean() > 0.7


def test_new_weights_act_from_the_next_chunk_on() -> None:
    collector = Collector(identify("catch"), SETTINGS, ENVS, 0)
    network = QNetwork(Catch.spec.stacked, 3, SETTINGS)
    weights = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    for best in (0, 2):
        last = "last.bias"
        weights["last.weight"], weights[last] = (np.zeros_like(weights[name]) for name in ("last.weight", last))
        # the value, then an advantage for each action
        weights[last][1 + best] = 100.0
        chunk = collector.collect(weights, 0.0)
        assert (chunk.steps["action"] == best).all()


def test_frames_are_compressed_and_come_back() -> None:
    frames = np.zeros((8, 2, 42, 42), np.uint8)
    frames[:, :, 5, 3:9] = 200
    assert np.array_equal(unpack(pack(frames)), frames)
    _, sent = pack(frames)
    assert len(sent) < frames.nbytes / 50
    for unchanged in (np.arange(5000, dtype=np.float32), np.zeros(10, np.uint8), None):
        assert unpack(pack(unchanged)) is unchanged
