"""What Stable-Baselines3's algorithms reach on our buffers: the returns that gpu_replay/integrations/README.md records.

`python -m pytest --full -rP tests/programs/test_integrations_returns.py` prints them.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("gymnasium")
sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, in the extra `integrations`")

from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402

from gpu_replay import Proportional  # noqa: E402
from gpu_replay.integrations.sb3 import (  # noqa: E402
    PrioritizedDQN,
    PrioritizedSAC,
    PrioritizedTD3,
    SB3ReplayBuffer,
)

pytestmark = pytest.mark.slow

PRIORITIZED = {"replay_buffer_kwargs": {"sampler": Proportional(alpha=0.6, beta=0.4)}}
# the settings that Stable-Baselines3's own zoo has for CartPole
CARTPOLE: dict[str, Any] = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
PENDULUM = {"learning_rate": 1e-3, "learning_starts": 500}
RUNS: dict[str, tuple[Any, str, int, dict[str, Any], float]] = {
    "PrioritizedDQN": (PrioritizedDQN, "CartPole-v1", 50_000, CARTPOLE | PRIORITIZED, 475),
    "PrioritizedSAC": (PrioritizedSAC, "Pendulum-v1", 6_000, PENDULUM | PRIORITIZED, -200),
    "PrioritizedTD3": (PrioritizedTD3, "Pendulum-v1", 8_000, PENDULUM | PRIORITIZED, -200),
    "SAC": (sb3.SAC, "Pendulum-v1", 6_000, PENDULUM | {"replay_buffer_class": SB3ReplayBuffer}, -200),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_learns(name: str) -> None:
    kind, env, steps, settings, bar = RUNS[name]
    began = time.perf_counter()
    model = kind("MlpPolicy", env, seed=0, device="cpu", buffer_size=50_000, **settings)
    model.learn(steps)
    seconds = time.perf_counter() - began
    mean, deviation = evaluate_policy(model, make_vec_env(env, 4, seed=1_000), n_eval_episodes=100)
    print(f"{name}, {env}: {mean:.1f} ± {deviation:.1f} over 100 episodes after {steps:,} steps, {seconds:.0f} s")
    assert mean >= bar
