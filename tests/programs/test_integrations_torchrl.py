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
    # the sampler of a buffer is not replaced by what it loads
    with pytest.raises(CheckpointError, match=r"sampler Proportional.*this buffer has Uniform"):
        TensorDictReplayBuffer(30, device="cpu").loads(tmp_path / "saved")


def test_names_with_dots_come_back_as_they_went_in(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer = TensorDictReplayBuffer(9, batch_size=4, device="cpu")
    given = {"images.top": torch.rand(3, 2), "next": {"images.top": torch.rand(3, 2)}, "50%2E": torch.arange(3)}
    buffer.extend(TensorDict(given, [3]))
    buffer.dumps(tmp_path / "saved")
    other = TensorDictReplayBuffer(9, batch_size=4, device="cpu")
    other.loads(tmp_path / "saved")
    for each in (buffer, other):
        batch = each.sample()
        assert torch.equal(batch["images.top"], given["images.top"][batch["index"]])
        assert torch.equal(batch["next", "images.top"], given["next"]["images.top"][batch["index"]])
        assert torch.equal(batch["50%2E"], batch["index"])
        assert set(batch.keys()) == {"images.top", "next", "50%2E", "index", "priority_weight"}


def test_two_names_that_differ_in_a_dot_are_refused() -> None:
    buffer = TensorDictReplayBuffer(9, device="cpu")
    with pytest.raises(KeyError, match=r"'a\.b' is given twice.*Rename"):
        buffer.extend(TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, [2]))
    assert buffer.buffer is None


def test_a_priority_key_with_a_dot_is_refused_and_a_nested_one_is_a_tuple() -> None:
    with pytest.raises(ValueError, match=r"'agents\.td_error' has a dot.*\('agents', 'td_error'\)"):
        TensorDictReplayBuffer(9, priority_key="agents.td_error")
    key = ("agents", "td_error")
    buffer = TensorDictReplayBuffer(9, sampler=Proportional(1.0, eps=0.0), priority_key=key, device="cpu")
    buffer.extend(rows(0, 3).set(key, torch.tensor([2.0, 3.0, 4.0])))
    assert buffer.buffer is not None
    assert buffer.buffer.priorities([0, 1, 2]).tolist() == [2.0, 3.0, 4.0]


def test_rows_are_read_by_key_by_slice_and_by_name() -> None:
    buffer = TensorDictReplayBuffer(5, device="cpu")
    with pytest.raises(RuntimeError, match="no rows"):
        buffer[:]
    buffer.extend(rows(0, 7))
    assert buffer[:]["index"].tolist() == [2, 3, 4, 5, 6]
    assert buffer[-2:]["action"].tolist() == [5, 6]
    assert buffer["action"].tolist() == buffer["next", "reward"][:, 0].tolist() == [2, 3, 4, 5, 6]
    assert buffer[[4, 2]]["action"].tolist() == [4, 2]
    one = buffer[3]
    assert (one.batch_size, one["observation"].tolist(), int(one["index"])) == ((), [3.0], 3)
    with pytest.raises(KeyError, match="0"):
        buffer[0]


def test_iteration_gives_samples() -> None:
    buffer = TensorDictReplayBuffer(5, batch_size=3, device="cpu")
    buffer.extend(rows(0, 5))
    for _, batch in zip(range(4), buffer, strict=False):
        assert batch.batch_size == (3,)
        assert torch.equal(batch["action"], batch["index"])
    with pytest.raises(ValueError, match=r"sample\(256\)"):
        next(iter(TensorDictReplayBuffer(5, device="cpu")))


def test_its_repr_says_what_it_holds() -> None:
    buffer = TensorDictReplayBuffer(5_000, batch_size=3, device="cpu")
    empty = "TensorDictReplayBuffer(0 of 5,000 rows; Uniform(replacement=True), batch_size=3, priority_key='td_error')"
    assert repr(buffer) == empty
    buffer.extend(rows(0, 5))
    assert "5 of 5,000 transitions" in repr(buffer)
    assert "next.reward" in repr(buffer)


def test_a_state_in_memory_goes_on() -> None:
    buffer, fresh, other = (TensorDictReplayBuffer(30, sampler=Proportional(), device="cpu") for _ in range(3))
    fresh.load_state_dict(buffer.state_dict())
    assert len(fresh) == 0
    buffer.extend(rows(0, 9).set("td_error", torch.arange(9.0)))
    other.extend(rows(100, 4))
    for each in (fresh, other):
        each.load_state_dict(buffer.state_dict())
    wanted = buffer.sample(5)
    assert all(torch.equal(each.sample(5)["action"], wanted["action"]) for each in (fresh, other))
    for unlike in (TensorDictReplayBuffer(31, sampler=Proportional(), device="cpu"), TensorDictReplayBuffer(30)):
        with pytest.raises(ValueError, match="another buffer"):
            unlike.load_state_dict(buffer.state_dict())
        assert unlike.buffer is None
    with pytest.raises(TypeError, match="state_dict"):
        fresh.load_state_dict({"_storage": {}})


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
    env.set_seed(0)
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
