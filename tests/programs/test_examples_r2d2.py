"""The example of R2D2: what it adds and learns from, and with --full the return that it reaches."""

from __future__ import annotations

import pytest
import torch
from devices import host_only

from gpu_replay.examples import r2d2_memory as example

pytestmark = host_only


def test_an_episode_asks_for_what_it_showed() -> None:
    envs, asked = example.Recall(seed=3), 0
    cue = torch.full((example.ENVS,), -1)
    for _ in range(3 * example.EPISODE):
        obs = envs.observe()
        shown = obs[:, :-1].sum(dim=1) > 0
        cue = torch.where(shown, obs[:, :-1].argmax(dim=1), cue)
        reward, terminated = envs.step(cue)
        assert torch.equal(terminated, obs[:, -1] > 0)
        known = terminated & (cue >= 0)
        asked += int(known.sum())
        assert torch.equal(reward[known], torch.ones(int(known.sum())))
        assert not reward[~terminated].any()
    assert asked >= 2 * example.ENVS


def test_it_learns_from_stored_states_and_gives_priorities(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    learn = example.Agent.learn

    def watched(agent: example.Agent, batch: example.Batch) -> torch.Tensor:
        priorities = learn(agent, batch)
        assert batch.hidden.shape == (example.BATCH, example.BURN_IN + example.LENGTH, example.HIDDEN)
        assert bool(priorities.isfinite().all())
        seen.append(float(priorities.mean()))
        return priorities

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.Agent, "learn", watched)
        assert -1 <= example.train(80) <= 1
    assert len(seen) == (80 - example.WARM_UP) // example.STEPS_PER_UPDATE
    assert max(seen) > 0


@pytest.mark.slow
def test_it_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--device", "cpu"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.rpartition(" ")[2]) >= 0.95
