"""The buffers of FastTD3, holosoma and FlashSAC on ours: their samples are those of their own rule, written as loops.

Their programs are no packages, so that their classes cannot be installed beside these.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_own_sampler import Kept
from torch import Tensor

tensordict = pytest.importorskip("tensordict", reason="needs tensordict, in the extra `integrations`")
gymnasium = pytest.importorskip("gymnasium")

from gpu_replay import CheckpointError, Latest, Proportional  # noqa: E402
from gpu_replay.integrations.fasttd3 import SimpleReplayBuffer  # noqa: E402
from gpu_replay.integrations.flashsac import TorchUniformBuffer  # noqa: E402

ENVS, ACTOR, CRITIC, ACTIONS, GAMMA = 4, 3, 5, 2, 0.97
LAYOUTS: dict[str, dict[str, Any]] = {
    "symmetric": {"asymmetric_obs": False},
    "asymmetric": {"asymmetric_obs": True},
    "playground": {"asymmetric_obs": True, "playground_mode": True},
    "holosoma": {},
}


class Stream:
    """Steps of episodes that end in either way; the observations after an ending are not those of the next step.

    Each value is (steps, ENVS, ...); critic observations begin with those of the actor.
    """

    def __init__(self, steps: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def floats(*shape: int) -> Tensor:
            return torch.rand(steps, ENVS, *shape, generator=random)

        self.obs, self.action, self.reward = floats(CRITIC), floats(ACTIONS), floats()
        kind = floats()
        self.terminated, self.truncated = kind < 0.1, kind > 0.9
        self.done = self.terminated | self.truncated
        self.next_obs = torch.where(self.done[..., None], floats(CRITIC), self.obs.roll(-1, 0))

    def fasttd3(self, step: int, critic: bool) -> Any:
        """A step as its training loop gives it."""
        after: dict[str, Any] = {"observations": self.next_obs[step, :, :ACTOR], "rewards": self.reward[step]}
        after |= {"truncations": self.truncated[step].long(), "dones": self.done[step].long()}
        found = {"observations": self.obs[step, :, :ACTOR], "actions": self.action[step], "next": after}
        if critic:
            found["critic_observations"], after["critic_observations"] = self.obs[step], self.next_obs[step]
        return tensordict.TensorDict(found, batch_size=(ENVS,))

    def flashsac(self, step: int) -> dict[str, Any]:
        """A step as its training loop gives it: arrays, flags as bools."""
        names = {"observation": self.obs, "action": self.action, "reward": self.reward, "terminated": self.terminated}
        names |= {"truncated": self.truncated, "next_observation": self.next_obs}
        return {name: value[step].numpy() for name, value in names.items()}

    def windows(self, t: Tensor, e: Tensor, n: int) -> tuple[Tensor, ...]:
        """Of windows from these steps: the sums of their rewards, how many steps they have, and their last ones."""
        found = []
        for step, env in zip(t.tolist(), e.tolist(), strict=True):
            ends = self.done[step : step + n, env].nonzero()
            m = int(ends[0]) + 1 if len(ends) else n
            found.append((sum(GAMMA**k * float(self.reward[step + k, env]) for k in range(m)), m, step + m - 1))
        return tuple(torch.tensor(column) for column in zip(*found, strict=True))


def fasttd3_filled(
    stream: Stream, steps: int, ring: int, layout: str = "asymmetric", **more: Any
) -> SimpleReplayBuffer:
    given = {"n_env": ENVS, "buffer_size": ring, "n_obs": ACTOR, "n_act": ACTIONS, "gamma": GAMMA, "device": "cpu"}
    critic = layout != "symmetric"
    rb = SimpleReplayBuffer(**given, n_critic_obs=CRITIC if critic else ACTOR, **LAYOUTS[layout], **more)
    for step in range(steps):
        rb.extend(stream.fasttd3(step, critic))
    return rb


@pytest.mark.parametrize("steps", [40, 130], ids=["not full", "full"])
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_of_fasttd3(layout: str, n: int, steps: int) -> None:
    stream, critic = Stream(steps), layout != "symmetric"
    rb = fasttd3_filled(stream, steps, 64, layout, n_steps=n)
    data = rb.sample(200)
    assert data.batch_size == (ENVS * 200,)
    after, (t, e) = data["next"], (data["key"] // ENVS, data["key"] % ENVS)
    torch.testing.assert_close(data["observations"], stream.obs[t, e, :ACTOR])
    torch.testing.assert_close(data["actions"], stream.action[t, e])
    reward, count, end = stream.windows(t, e, n)
    torch.testing.assert_close(after["rewards"], reward)
    over = stream.terminated[end, e]
    assert after["dones"].tolist() == stream.done[end, e].long().tolist()
    assert after["truncations"].tolist() == stream.truncated[end, e].long().tolist()
    assert (after["dones"].dtype, after["truncations"].dtype) == (torch.int64, torch.int64)
    # what a terminated window bootstraps from counts for nothing
    assert after["effective_n_steps"][~over].tolist() == count[~over].float().tolist()
    torch.testing.assert_close(after["observations"], stream.next_obs[end, e, :ACTOR])
    assert ("critic_observations" in data, "critic_observations" in after) == (critic, critic)
    if critic:
        torch.testing.assert_close(data["critic_observations"], stream.obs[t, e])
        torch.testing.assert_close(after["critic_observations"], stream.next_obs[end, e])
    # every complete window of what is stored, and no other
    stored = itertools.product(range(max(0, steps - 64), steps), range(ENVS))
    whole = {(step, env) for step, env in stored if step + n < steps or stream.done[step : step + n, env].any()}
    assert set(zip(t.tolist(), e.tolist(), strict=True)) <= whole
    assert len(data["key"].unique()) > 0.8 * len(whole)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_steps_of_a_window_give_its_discount_with_any_gamma(gamma: float) -> None:
    rb = SimpleReplayBuffer(ENVS, 64, ACTOR, ACTIONS, CRITIC, n_steps=3, gamma=gamma, device="cpu", sampler=Latest())
    for step in range(60):
        rb.extend(Stream(60).fasttd3(step, True))
    batch, data = rb.buffer.sample(200), rb.sample(50)
    after, discount = data["next"], dict(zip(batch.key.tolist(), batch.discount, strict=True))
    goes_on = (after["dones"] == 0) | (after["truncations"] == 1)
    wanted = torch.stack([discount[key] for key in data["key"].tolist()])
    torch.testing.assert_close(gamma ** after["effective_n_steps"][goes_on], wanted[goes_on])


def test_slices_of_a_prioritized_batch_are_as_old_as_the_whole() -> None:
    rb = fasttd3_filled(Stream(500), 500, 500, sampler=Proportional())
    data = rb.sample(8 * 64)
    age = [float(part["key"].double().mean()) / (ENVS * 500) for part in data.split(ENVS * 64)]
    assert max(age) - min(age) < 0.02
    rb.buffer.update_priorities(data["key"], torch.where(data["key"] == 77, 1e6, 1e-6))
    again = rb.sample(64)
    assert (again["key"] == 77).float().mean() > 0.8
    assert again["weight"][again["key"] == 77].max() < 0.1


def test_observations_are_stored_once_and_in_half_the_bytes() -> None:
    sizes = {"n_obs": 99, "n_act": 29, "n_critic_obs": 120, "asymmetric_obs": True, "n_steps": 8}
    # stored twice: two observations of each kind, an action, a reward and two flags of 8 bytes
    theirs = 4 * (2 * 99 + 2 * 120 + 29 + 1) + 16
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        buffer = SimpleReplayBuffer(64, 256, **sizes, device="cpu", dtype=dtype).buffer
        found[dtype] = buffer.nbytes / buffer.capacity
    assert theirs == 1888
    assert found[torch.float32] < 0.72 * theirs
    assert found[torch.bfloat16] < 0.45 * theirs
    rb = fasttd3_filled(Stream(30), 30, 64, dtype=torch.bfloat16)
    data = rb.sample(20)
    assert data["observations"].dtype == data["next", "critic_observations"].dtype == torch.float32
    step, env = data["key"] // ENVS, data["key"] % ENVS
    torch.testing.assert_close(data["critic_observations"], Stream(30).obs[step, env].bfloat16().float())


def test_windows_do_not_cross_a_reset_outside_of_the_loop() -> None:
    stream = Stream(12)
    stream.done[:] = stream.terminated[:] = stream.truncated[:] = False
    rb = fasttd3_filled(stream, 6, 64, n_steps=3)
    rb.begin_episodes()
    for step in range(6, 12):
        rb.extend(stream.fasttd3(step, True))
    assert sorted((rb.sample(100)["key"] // ENVS).unique().tolist()) == [0, 1, 2, 6, 7, 8]


def flashsac_filled(stream: Stream, steps: int, n: int, **more: Any) -> TorchUniformBuffer:
    box, actions = (gymnasium.spaces.Box(-1, 1, (ENVS, size), np.float64) for size in (CRITIC, ACTIONS))
    buffer = TorchUniformBuffer(box, actions, n, GAMMA, 64 * ENVS, 10 * ENVS, 800, "cpu", **more)
    for step in range(steps):
        buffer.add(stream.flashsac(step))
    return buffer


@pytest.mark.parametrize("steps", [40, 130], ids=["not full", "full"])
@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_those_of_flashsac(n: int, steps: int) -> None:
    stream = Stream(steps)
    buffer = flashsac_filled(stream, steps, n)
    assert (len(buffer), buffer.can_sample()) == (min(steps, 64) * ENVS, True)
    batch = buffer.sample()
    t, e = batch["key"] // ENVS, batch["key"] % ENVS
    reward, count, end = stream.windows(t, e, n)
    over = stream.terminated[end, e]
    torch.testing.assert_close(batch["observation"], stream.obs[t, e])
    torch.testing.assert_close(batch["action"], stream.action[t, e])
    torch.testing.assert_close(batch["reward"], reward)
    assert batch["terminated"].tolist() == over.float().tolist()
    assert batch["truncated"].tolist() == stream.truncated[end, e].float().tolist()
    torch.testing.assert_close(batch["next_observation"], stream.next_obs[end, e])
    # the original bootstraps a window that was cut short with gamma ** n
    torch.testing.assert_close(batch["discount"], torch.where(over, 0.0, GAMMA**count))
    assert n == 1 or bool((stream.truncated[end, e] & (count < n)).any())
    torch.testing.assert_close(buffer.get_observations(), stream.obs[max(0, steps - 64) : steps].flatten(0, 1))


def test_a_saved_buffer_of_flashsac_continues_with_new_episodes(tmp_path: Path) -> None:
    stream = Stream(40)
    stream.done[:] = stream.terminated[:] = stream.truncated[:] = False
    first, second = flashsac_filled(stream, 20, 3), flashsac_filled(stream, 0, 3)
    first.save(tmp_path / "replay_buffer.pt")
    second.load(tmp_path / "replay_buffer.pt")
    for step in range(20, 30):
        second.add(stream.flashsac(step))
    found = (second.sample()["key"] // ENVS).unique().tolist()
    # the windows that were open while it was saved are those of no episode
    assert found == [*range(17), *range(20, 27)]
    with pytest.raises(CheckpointError, match="has the n_step 3; this buffer has 1"):
        flashsac_filled(stream, 0, 1).load(tmp_path / "replay_buffer.pt")
    second.reset()
    assert (len(second), second.can_sample()) == (0, False)
    # arrays that a sampler computes are no settings
    made = [flashsac_filled(stream, 20, 3, sampler=Kept(window)) for window in (7, 7, 8)]
    made[0].save(tmp_path / "own")
    made[1].load(tmp_path / "own")
    assert torch.equal(made[1].get_observations(), made[0].get_observations())
    with pytest.raises(CheckpointError, match=r"has the sampler Kept\(window=7.*this buffer has Kept\(window=8"):
        made[2].load(tmp_path / "own")


def test_flashsac_samples_while_it_can() -> None:
    space = gymnasium.spaces.Box(-1, 1, (1, 3))
    buffer = TorchUniformBuffer(space, space, 3, GAMMA, 12, 12, 4, "cpu")
    with pytest.raises(RuntimeError, match="holds no observations"):
        buffer.get_observations()
    row = np.zeros((1, 3), np.float32)
    given: dict[str, Any] = dict.fromkeys(("observation", "action", "next_observation"), row)
    given |= dict.fromkeys(("reward", "terminated", "truncated"), np.zeros(1))
    ready = []
    for step in range(24):
        if step == 2:
            # the first two steps begin no window
            buffer.begin_episodes()
        buffer.add(given)
        ready.append(buffer.can_sample())
        if ready[-1]:
            assert len(buffer.sample()["reward"]) == 4
        else:
            with pytest.raises(RuntimeError, match=f"{max(0, step - 4)} windows.*min_length=9.*Add more"):
                buffer.sample()
    # a full ring of 12 steps has 9 windows of 3
    assert ready == [False] * 13 + [True] * 11
    assert buffer.get_observations().shape == (12, 3)
