"""The way of a frame from the emulator to the agent: once over, stacked there as ALE itself would have stacked it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_replay import Field
from gpu_replay.training.environments import Actors, Environment, EnvironmentSpec, FrameStack, Step
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import beta_schedule

CPU = torch.device("cpu")
IMAGE = Field((3, 2), torch.uint8, torch.float32, 1 / 255)


def numbered(t: int, envs: int) -> Tensor:
    """A frame whose every pixel says at which step it was seen and where."""
    return (torch.arange(envs, dtype=torch.uint8) + 10 * t)[:, None, None].expand(envs, 3, 2).contiguous()


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_stacks_hold_the_newest_frames_and_zeros_before_the_first(depth: int) -> None:
    stack = FrameStack(depth, 3, IMAGE, CPU)
    frame = numbered(0, 3)
    histories = [[frame[env]] for env in range(3)]
    stack.begin(frame)
    for t in range(1, 20):
        obs = stack.obs
        assert torch.equal(stack.frame, frame)
        for env, history in enumerate(histories):
            newest = history[-depth:]
            zeros = [torch.zeros(3, 2, dtype=torch.uint8)] * (depth - len(newest))
            assert torch.equal(obs[env], torch.stack([*zeros, *newest]))
        if t == 11:
            # another stack continues from the state of this one
            saved, stack = stack.state_dict(), FrameStack(depth, 3, IMAGE, CPU)
            stack.load_state_dict(saved)
            assert torch.equal(stack.obs, obs)
        ended = torch.tensor([t % 5 == 0, t % 7 == 0, False])
        frame = numbered(t, 3)
        for env in range(3):
            histories[env] = [frame[env]] if ended[env] else [*histories[env], frame[env]]
        stack.push(frame, ended)


def test_a_single_frame_has_no_stack_axis() -> None:
    stack = FrameStack(1, 3, IMAGE, CPU)
    stack.begin(numbered(0, 3))
    assert stack.obs.shape == (3, 3, 2)
    stack.push(numbered(1, 3), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(stack.obs, numbered(1, 3))


class Scripted(Environment):
    """Two environments in host memory whose frames say when they were; the second ends at each third step."""

    spec = EnvironmentSpec("scripted", IMAGE, 2, None, None, stack=3)
    num_envs = 2
    resumable = False

    def reset(self, seed: int) -> Tensor:
        self.t = 0
        return numbered(0, 2)

    def send(self, actions: Tensor) -> None:
        self.t += 1

    def recv(self) -> Step:
        ended = torch.tensor([False, self.t % 3 == 0])
        final = numbered(self.t + 100, 2) if self.t % 3 == 0 else None
        return Step(numbered(self.t, 2), torch.full((2,), float(self.t)), ended & False, ended, final)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_actors_hand_over_frames_and_stacks(device: str) -> None:
    actors = Actors(Scripted(), torch.device(device))
    actors.reset(0)
    stack = actors.stack
    assert (stack.obs.shape, stack.obs.device.type) == ((2, 3, 3, 2), device)
    for t in range(1, 12):
        actors.environment.send(torch.zeros(2, dtype=torch.int64))
        step = actors.recv()
        actors.push(step)
        assert torch.equal(step.frame.cpu(), numbered(t, 2))
        assert torch.equal(stack.frame, step.frame)
        assert step.reward.tolist() == [t, t]
        assert step.truncated.tolist() == [False, t % 3 == 0]
        assert not step.terminated.any()
        assert bool((stack.obs[1, :-1] == 0).all()) == (t % 3 == 0)
        if t % 3 == 0:
            assert torch.equal(step.final_frame.cpu(), numbered(t + 100, 2))
        elif device == "cpu":
            assert step.final_frame is None


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
