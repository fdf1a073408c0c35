"""What an actor in a process of its own sends: every row can be learned from, and is what the environment did."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_runs import CPU

pytest.importorskip("zstandard", reason="needs zstandard, in the extra `ray`")

from gpu_replay.training.actors import CHUNK, Collector, unpack
from gpu_replay.training.device_games import Catch
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import identify
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import beta_schedule

ENVS = 3
SETTINGS = Settings.for_family("catch", n_step=1, capacity=50 * ENVS, num_envs=ENVS, warmup=64)


def test_every_row_of_every_chunk_is_a_step_of_the_game() -> None:
    collectors = [Collector(identify("catch"), SETTINGS, ENVS, seed) for seed in (1, 2)]
    network = QNetwork(Catch.spec.stacked, 3, SETTINGS)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    buffer = make_buffer(Catch.spec, SETTINGS, beta_schedule(SETTINGS), CPU, 0, ENVS)
    lengths: list[float] = []
    # of two actors by turns, and more than the ring holds
    for turn in range(6):
        chunk = collectors[turn % 2].collect(weights, 0.5)
        steps = {name: unpack(value) for name, value in chunk.steps.items()}
        assert steps["action"].shape == (CHUNK, ENVS)
        # sent compressed
        assert len(chunk.steps["obs"][1]) < steps["obs"].nbytes / 5
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


def test_new_weights_act_from_the_next_chunk_on_which_is_longer_where_frames_are_stacked() -> None:
    pong, settings = identify("device-pong"), Settings.for_family("device-pong", frame_size=36, hidden=(8,))
    collector, spec = Collector(pong, settings, ENVS, 0), pong.make(1, settings, CPU).spec
    network = QNetwork(spec.stacked, spec.num_actions, settings)
    weights = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    for best in (0, 2):
        # the value, then an advantage for each action
        weights |= {"last.weight": weights["last.weight"] * 0, "last.bias": np.eye(4, dtype=np.float32)[1 + best]}
        actions = collector.collect(weights, 0.0).steps["action"]
        assert (actions.shape, (actions == best).all()) == ((128, ENVS), True)
