"""Real Atari: stacks rebuilt from single frames equal, byte for byte, those that the ALE vector environment returned.

The buffer sees only the newest plane of each stack. Games are cut short, so that truncations and resets come often, and
Breakout ends by itself within the time that a test has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import scale

from gpu_replay import Field, Latest, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract

ENVS, SIDE = 3, 42
FIELDS = {"obs": Field((SIDE, SIDE), torch.uint8), "action": Field((), torch.int64)}


@pytest.mark.parametrize("autoreset", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
def test_stacks_of_games_that_end_equal_those_of_the_environment(autoreset: str, device: str) -> None:
    vector = pytest.importorskip("ale_py.vector_env", reason="needs ale-py, in the extra `training`")
    settings: dict[str, Any] = {"stack_num": 4, "img_height": SIDE, "img_width": SIDE, "noop_max": 12}
    settings["autoreset_mode"] = vector.AutoresetMode[autoreset.upper()]
    frames, steps, kept = 4 * scale(150, 15), scale(240, 60), scale(134, 40)
    game = vector.AtariVectorEnv("breakout", ENVS, num_threads=1, max_num_frames_per_episode=frames, **settings)
    buffer = TrajectoryReplayBuffer(
        kept * ENVS, ENVS, FIELDS, stack=4, padding="zero", autoreset=autoreset, sampler=Latest(), device=device
    )
    random, played = np.random.default_rng(0), []
    obs, _ = game.reset(seed=3)
    for _ in range(steps):
        action = random.integers(0, game.single_action_space.n, ENVS)
        after, reward, terminated, truncated, info = game.step(action)
        final = info.get("final_obs") if autoreset == "same_step" else None
        ends = {"terminated": terminated, "truncated": truncated}
        newest = None if final is None else final[:, -1]
        buffer.add(obs=obs[:, -1], action=action, reward=reward, **ends, final_obs=newest)
        # what comes after an ending is the final observation, or, a step later, the observation itself
        played.append((obs, after if final is None else np.where(truncated[:, None, None, None], final, after), ends))
        obs = after
    game.close()
    ended = {name: np.stack([ends[name] for _, _, ends in played]) for name in ("terminated", "truncated")}
    assert scale(ended["terminated"].any(), True)
    assert ended["truncated"].any()
    batch = buffer.sample(buffer.stats().eligible)
    # all but what carries a final observation, the frames before the oldest stack, and the newest
    assert len(batch) > kept * ENVS * 0.8
    for row, key in enumerate(batch.key.tolist()):
        number, env = divmod(key, ENVS)
        stack, after, ends = played[number]
        assert np.array_equal(batch.obs[row].cpu().numpy(), stack[env])
        assert ends["terminated"][env] or np.array_equal(batch.next_obs[row].cpu().numpy(), after[env])
