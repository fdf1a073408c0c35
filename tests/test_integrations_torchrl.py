"""TensorDicts in and out as TorchRL's own buffer takes and gives them, and its DQN on a buffer of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tensordict", reason="needs tensordict, in the extra `integrations`")

from tensordict import TensorDict

from gpu_replay import CheckpointError, Proportional
from gpu_replay.integrations.torchrl import TensorDictReplayBuffer


def rows(first: int, *batch: int) -> TensorDict:
    number = torch.arange(first, first + torch.Size(batch).numel()).reshape(batch)
    following = {"observation": number[..., None] + torch.tensor([0.5, 1.0]), "reward": number[..., None].float()}
    return TensorDict({"observation": number[..., None].float(), "action": number, "next": following}, batch)


def test_rows_come_back_as_they_went_in() -> None:
    buffer = TensorDictReplayBuffer(20, batch_size=6, device="cpu")
    assert (len(buffer), buffer.buffer) == (0, None)
    assert buffer.extend(rows(0, 3, 4)).tolist() == list(range(12))
    assert int(buffer.add(rows(12, 1)[0])) == 12
    batch, info = buffer.sample(return_info=True)
    assert batch.batch_size == (6,)
    assert torch.equal(batch["index"], info["index"])
    wanted = torch.stack([rows(0, 13)[key] for key in batch["index"].tolist()])
    for name in ("observation", "action", ("next", "observation"), ("next", "reward")):
        assert torch.equal(batch[name], wanted[name])
    assert batch["priority_weight"].tolist() == [1.0] * 6
    # a sample can be stored again: what was put beside the fields is left out
    buffer.extend(batch)
    assert len(buffer) == 19
    buffer.empty()
    assert len(buffer) == 0


def test_priorities_are_taken_from_the_tensordict() -> None:
    buffer = TensorDictReplayBuffer(
        50, sampler=Proportional(1.0, beta=1.0, eps=0.0), priority_key="error", device="cpu"
    )
    given = rows(0, 4)
    given["error"] = torch.tensor([1.0, 2.0, 0.0, 5.0])
    buffer.extend(given)
    assert buffer.buffer is not None
    assert buffer.buffer.priorities([0, 1, 2, 3]).tolist() == pytest.approx([1.0, 2.0, 0.0, 5.0], abs=1e-6)
    batch = buffer.sample(8)
    # of several numbers a row the largest magnitude counts
    batch["error"] = torch.stack([batch["action"].float(), -2.0 * batch["action"]], 1)
    buffer.update_tensordict_priority(batch)
    drawn = batch["index"].unique()
    assert buffer.buffer.priorities(drawn).tolist() == pytest.approx((2.0 * drawn).tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensors", "arrays", "lists"])
def test_priorities_are_given_by_key(kind: Any) -> None:
    buffer = TensorDictReplayBuffer(9, sampler=Proportional(1.0, eps=0.0), device="cpu")
    buffer.extend(rows(0, 4))
    buffer.update_priority(kind([0, 2]), kind([3.0, -2.0]))
    buffer.update_priority(1, 5.0)
    buffer.update_priority(kind([]) if kind is list else torch.zeros(0, dtype=torch.int64), kind([]))
    assert buffer.buffer is not None
    assert buffer.buffer.priorities([0, 1, 2, 3]).tolist() == [3.0, 5.0, 2.0, 1.0]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer, other = (TensorDictReplayBuffer(30, sampler=Proportional(), device="cpu") for _ in range(2))
    buffer.extend(rows(0, 9))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert torch.equal(buffer.sample(5)["action"], other.sample(5)["action"])
    with pytest.raises(CheckpointError, match=r"30.*31"):
        TensorDictReplayBuffer(31, device="cpu").loads(tmp_path / "saved")


def test_bad_calls_say_what_to_do(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(30, device="cpu")
    with pytest.raises(ValueError, match=r"sample\(256\)"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="no rows"):
        buffer.sample(3)
    with pytest.raises(RuntimeError, match="no rows"):
        buffer.dumps(tmp_path)
    with pytest.raises(TypeError, match="TensorDict; found dict"):
        buffer.extend({"a": torch.zeros(3)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\('next', 'name'\) is not a tensor.*exclude"):
        buffer.extend(rows(0, 3).set(("next", "name"), "a text"))
    with pytest.raises(ValueError, match="at least one row"):
        buffer.extend(rows(0, 3)[:0])
    # what was refused has not said what the fields are
    with pytest.raises(ValueError, match="finite"):
        buffer.extend(TensorDict({"other": torch.zeros(1), "td_error": torch.tensor([float("nan")])}, [1]))
    assert buffer.buffer is None
    buffer.extend(rows(0, 3))
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample(2))
    with pytest.raises(KeyError, match="missing"):
        buffer.extend(rows(0, 3).exclude("action"))
    assert len(buffer) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torchrl")
def test_its_collector_and_its_dqn_learn_from_it() -> None:
    pytest.importorskip("torchrl", reason="needs torchrl, in the extra `integrations`")
    from tensordict.nn import TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    torch.manual_seed(0)
    env = GymEnv("CartPole-v1")
    network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    greedy = EGreedyModule(spec=env.action_spec, annealing_num_steps=1500, eps_end=0.05)
    buffer = TensorDictReplayBuffer(5000, sampler=Proportional(0.6, beta=0.4), batch_size=64, device="cpu")
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    target = SoftUpdate(loss, eps=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    collector = Collector(
        env,
        TensorDictSequential(actor, greedy),
        frames_per_batch=50,
        total_frames=3000,
        auto_register_policy_transforms=True,
    )
    for data in collector:
        greedy.step(50)
        buffer.extend(data)
        for _ in range(25):
            batch = buffer.sample()
            loss(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            buffer.update_tensordict_priority(batch)
    collector.shutdown()
    played = env.rollout(500, actor)
    assert buffer.buffer is not None
    assert buffer.buffer.stats().max_priority != 1.0
    # random actions last 22 steps on average
    assert played.shape[0] > 60
