"""The way of a frame from the emulator to the agent: once over, stacked there as ALE itself would have stacked it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.training.environments import Actors, Environment, EnvironmentSpec, Step
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import beta_schedule

CPU = torch.device("cpu")
IMAGE = Field((3, 2), torch.uint8, torch.float32, 1 / 255)


def numbered(t: int) -> Tensor:
    """Frames of three environments, whose every pixel says at which step it was seen and where."""
    return (torch.arange(3, dtype=torch.uint8) + 10 * t)[:, None, None].expand(3, 3, 2).contiguous()


class Scripted(Environment):
    """Three environments in host memory whose frames say when they were; two end at each fifth and third step."""

    num_envs = 3

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.spec = EnvironmentSpec("scripted", IMAGE, 2, None, None, stack=depth)

    def reset(self, seed: int) -> Tensor:
        self.t = 0
        return numbered(0)

    def send(self, actions: Tensor) -> None:
        self.t += 1

    def recv(self) -> Step:
        over, cut = torch.tensor([self.t % 5 == 0, False, False]), torch.tensor([False, self.t % 3 == 0, False])
        final = numbered(self.t + 100) if bool((over | cut).any()) else None
        return Step(numbered(self.t), torch.full((3,), float(self.t)), over, cut, final)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_actors_hand_over_steps_and_stacks_of_the_newest_frames(depth: int, device: str) -> None:
    actors = Actors(Scripted(depth), torch.device(device))
    actors.reset(0)
    histories = [[each] for each in numbered(0)]
    for t in range(1, 20):
        obs = actors.stack.obs
        assert obs.device.type == device
        for env, history in enumerate(histories):
            # zeros before the first frame of an episode; a single frame has no stack axis
            newest = [*[torch.zeros(3, 2, dtype=torch.uint8)] * depth, *history][-depth:]
            assert torch.equal(obs[env].cpu(), torch.stack(newest) if depth > 1 else newest[0])
        if t == 11:
            # others continue from the state of these
            saved = actors.state_dict()
            actors = Actors(actors.environment, torch.device(device))
            actors.load_state_dict(saved)
        actors.environment.send(torch.zeros(3, dtype=torch.int64))
        step, frame = actors.recv(), numbered(t)
        flags = [step.terminated.tolist(), step.truncated.tolist()]
        assert (step.reward.tolist(), flags) == ([t] * 3, [[t % 5 == 0, False, False], [False, t % 3 == 0, False]])
        ended = step.ended.tolist()
        assert not any(ended) or torch.equal(step.final_frame.cpu(), numbered(t + 100))
        actors.push(step)
        assert torch.equal(actors.stack.frame.cpu(), frame)
        histories = [[frame[env]] if ended[env] else [*histories[env], frame[env]] for env in range(3)]


@pytest.mark.slow
def test_stacks_of_the_agent_and_of_the_buffer_are_those_of_ale() -> None:
    pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    from gpu_replay.training.host_envs import make_atari

    envs, steps = 4, 1_400
    settings = Settings.for_family("atari", num_envs=envs, capacity=8_000, warmup=100, n_step=3, batch_size=16)
    environment = make_atari("pong", envs, settings)
    reference = AtariVectorEnv(
        "pong", envs, autoreset_mode=AutoresetMode.SAME_STEP, img_height=42, img_width=42, reward_clipping=False
    )
    actors = Actors(environment, CPU)
    buffer = make_buffer(environment.spec, settings, beta_schedule(settings), CPU, 0, envs)
    actors.reset(7)
    seeds = np.random.SeedSequence(7).generate_state(envs, np.uint32).astype(np.int64) >> 1
    stacks = [reference.reset(seed=seeds)[0]]
    generator = torch.Generator().manual_seed(0)
    endings = 0
    for _ in range(steps):
        assert np.array_equal(actors.stack.obs.numpy(), stacks[-1])
        actions = torch.randint(0, 3, (envs,), generator=generator)
        environment.send(actions)
        arrival = actors.recv()
        shown, _, terminated, truncated, _ = reference.step(np.array([0, 2, 3])[actions.numpy()])
        assert arrival.terminated.tolist() == terminated.tolist()
        buffer.add(
            obs=actors.stack.frame,
            action=actions,
            reward=arrival.reward,
            terminated=arrival.terminated,
            truncated=arrival.truncated,
            final_obs=arrival.final_frame,
        )
        endings += int((terminated | truncated).sum())
        actors.push(arrival)
        stacks.append(shown)
    assert endings >= 4
    for _ in range(40):
        batch = buffer.sample(16)
        for row, key in enumerate(batch.key.tolist()):
            t, env = divmod(key, envs)
            assert np.array_equal(batch.obs[row].numpy(), stacks[t][env])
            if batch.discount[row] > 0:
                assert np.array_equal(batch.next_obs[row].numpy(), stacks[t + 3][env])
    reference.close()
    environment.close()
