"""What only a GPU shows of hindsight: a sample waits for nothing, and a replayed graph chooses new rows and goals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_twins import graph_of, waiting_is_an_error
from hindsight_oracle import DESIRED, GOALS, goal_step, hindsight, reward_of
from trajectory_pair import columns

from gpu_replay import Proportional, TrajectoryReplayBuffer

pytestmark = pytest.mark.gpu


def made(device: str, **settings: Any) -> TrajectoryReplayBuffer:
    """A buffer that has passed its seam, with running episodes and such that ended."""
    weights = torch.tensor([1.0, 7.0], device=device)

    def reward_fn(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return achieved.float() @ weights + 1000 * (desired.float() @ weights)

    def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return (achieved == desired).all(dim=1)

    relabel = hindsight(reward_fn=reward_fn, terminated_fn=reached, ratio=0.75)
    buffer = TrajectoryReplayBuffer(
        200, 5, GOALS, sampler=Proportional(alpha=1.0), device=device, seed=3, relabel=relabel, **settings
    )
    for number in range(61):
        ends = ["T" if (number + 3 * env) % 11 == 0 else "U" if (number + env) % 17 == 0 else "" for env in range(5)]
        steps = [goal_step(number, env, end=end, final=True) for env, end in enumerate(ends)]
        buffer.add(**columns(steps, GOALS))
    return buffer


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_no_sample_with_hindsight_waits(autoreset: str) -> None:
    buffer = made("cuda", autoreset=autoreset)
    buffer.sample(64)
    step = {
        name: torch.from_numpy(value).cuda()
        for name, value in columns([goal_step(61, env, final=True) for env in range(5)], GOALS).items()
    }
    buffer.add(**step)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        for _ in range(3):
            buffer.add(**step)
            buffer.sample(64)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_replayed_graph_draws_what_the_host_draws(autoreset: str) -> None:
    gpu, host = made("cuda", autoreset=autoreset), made("cpu", autoreset=autoreset)
    graph, batch = graph_of(lambda: gpu.sample(64))
    # the call before the capture; capturing draws nothing
    host.sample(64)
    seen = set()
    for _ in range(4):
        graph.replay()
        expected = host.sample(64)
        for name in ("key", DESIRED, f"next_{DESIRED}", "reward", "terminated", "discount"):
            assert torch.equal(batch[name].cpu(), expected[name]), name
        seen.add(tuple(map(tuple, batch[DESIRED].tolist())))
        changed = batch[DESIRED][:, 0] < 2000
        assert 0 < int(changed.sum()) <= 48
        rewards = reward_of(batch["next_obs.achieved_goal"][changed], batch[DESIRED][changed])
        assert torch.equal(batch.reward[changed], rewards)
    assert len(seen) == 4
