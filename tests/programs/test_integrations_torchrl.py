"""TensorDicts in and out as TorchRL's own buffer takes and gives them, and its DQN on a buffer of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tensordict", reason="needs tensordict, in the extra `integrations`")

from tensordict import TensorDict
from test_own_sampler import Kept

from gpu_replay import CheckpointError, Proportional
from gpu_replay.integrations.torchrl import TensorDictReplayBuffer


def rows(first: int, *batch: int) -> TensorDict:
    number = torch.arange(first, first + torch.Size(batch).numel()).reshape(batch)
    following = {"observation": number[..., None] + torch.tensor([0.5, 1.0]), "reward": number[..., None].float()}
    return TensorDict({"observation": number[..., None].float(), "action": number, "next": following}, batch)


def filled(capacity: int = 9, count: int = 4, **settings: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(capacity, device="cpu", **settings)
    buffer.extend(rows(0, count))
    return buffer


def priorities(buffer: TensorDictReplayBuffer, keys: Any) -> Any:
    assert buffer.buffer is not None
    return pytest.approx(buffer.buffer.priorities(keys).tolist(), abs=1e-6)


def test_rows_come_back_as_they_went_in() -> None:
    buffer = TensorDictReplayBuffer(20, batch_size=6, device="cpu")
    assert (len(buffer), buffer.buffer) == (0, None)
    assert "0 of 20 rows; Uniform" in repr(buffer)
    assert buffer.extend(rows(0, 3, 4).reshape(-1)).tolist() == list(range(12))
    assert int(buffer.add(rows(12, 1)[0])) == 12
    assert "13 of 20 transitions" in repr(buffer)
    batch, info = buffer.sample(return_info=True)
    assert batch.batch_size == (6,)
    assert torch.equal(batch["index"], info["index"])
    wanted = torch.stack([rows(0, 13)[key] for key in batch["index"].tolist()])
    for name in ("observation", "action", ("next", "observation"), ("next", "reward")):
        assert torch.equal(batch[name], wanted[name])
    assert batch["priority_weight"].tolist() == [1.0] * 6
    # iteration gives samples without an end
    for _, each in zip(range(4), buffer, strict=False):
        assert torch.equal(each["action"], each["index"])
    # a sample can be stored again: what was put beside the fields is left out
    buffer.extend(batch)
    assert len(buffer) == 19
    buffer.empty()
    assert len(buffer) == 0


def test_priorities_are_taken_from_the_tensordict() -> None:
    exact, key = Proportional(1.0, beta=1.0, eps=0.0), ("agents", "error")
    buffer = TensorDictReplayBuffer(50, sampler=exact, priority_key=key, device="cpu")
    buffer.extend(rows(0, 4).set(key, torch.tensor([1.0, 2.0, 0.0, 5.0])))
    assert priorities(buffer, [0, 1, 2, 3]) == [1.0, 2.0, 0.0, 5.0]
    batch = buffer.sample(8)
    # of several numbers a row the largest magnitude counts
    batch[key] = torch.stack([batch["action"].float(), -2.0 * batch["action"]], 1)
    buffer.update_tensordict_priority(batch)
    drawn = batch["index"].unique()
    assert priorities(buffer, drawn) == (2.0 * drawn).tolist()


def test_priorities_are_given_by_key() -> None:
    buffer = filled(sampler=Proportional(1.0, eps=0.0))
    buffer.update_priority(np.array([0, 2]), [3.0, -2.0])
    buffer.update_priority(1, 5.0)
    buffer.update_priority([], [])
    assert priorities(buffer, [0, 1, 2, 3]) == [3.0, 5.0, 2.0, 1.0]


def test_names_with_dots_come_back_as_they_went_in(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer, other = (TensorDictReplayBuffer(9, batch_size=4, device="cpu") for _ in range(2))
    given = {"images.top": torch.rand(3, 2), "next": {"images.top": torch.rand(3, 2)}, "50%2E": torch.arange(3)}
    buffer.extend(TensorDict(given, [3]))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for each in (buffer, other):
        batch = each.sample()
        assert torch.equal(batch["images.top"], given["images.top"][batch["index"]])
        assert torch.equal(batch["next", "images.top"], given["next"]["images.top"][batch["index"]])
        assert torch.equal(batch["50%2E"], batch["index"])
        assert set(batch.keys()) == {"images.top", "next", "50%2E", "index", "priority_weight"}


def test_rows_are_read_by_key_by_slice_and_by_name() -> None:
    buffer = filled(5, 7)
    assert buffer[:]["index"].tolist() == [2, 3, 4, 5, 6]
    assert buffer[-2:]["action"].tolist() == [5, 6]
    assert buffer["action"].tolist() == buffer["next", "reward"][:, 0].tolist() == [2, 3, 4, 5, 6]
    assert buffer[[4, 2]]["action"].tolist() == [4, 2]
    one = buffer[3]
    assert (one.batch_size, one["observation"].tolist(), int(one["index"])) == ((), [3.0], 3)
    with pytest.raises(KeyError, match="0"):
        buffer[0]


def test_a_state_goes_on_in_memory_and_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    buffer, fresh, other, read = (TensorDictReplayBuffer(30, sampler=Proportional(), device="cpu") for _ in range(4))
    fresh.load_state_dict(buffer.state_dict())
    assert len(fresh) == 0
    buffer.extend(rows(0, 9).set("td_error", torch.arange(9.0)))
    other.extend(rows(100, 4))
    buffer.dumps(tmp_path / "saved")
    for each in (fresh, other):
        each.load_state_dict(buffer.state_dict())
    read.loads(tmp_path / "saved")
    wanted = buffer.sample(5)
    assert all(torch.equal(each.sample(5)["action"], wanted["action"]) for each in (fresh, other, read))
    # neither capacity nor sampler is replaced by what is loaded
    capacity, sampler = TensorDictReplayBuffer(31, sampler=Proportional(), device="cpu"), TensorDictReplayBuffer(30)
    for unlike, message in ((capacity, "30.*31"), (sampler, "sampler Proportional.*Uniform")):
        with pytest.raises(ValueError, match="another buffer"):
            unlike.load_state_dict(buffer.state_dict())
        with pytest.raises(CheckpointError, match=message):
            unlike.loads(tmp_path / "saved")
        assert unlike.buffer is None
    # arrays that a sampler computes are no settings
    own, again = (TensorDictReplayBuffer(30, sampler=Kept(7), device="cpu") for _ in range(2))
    own.extend(rows(0, 9))
    own.dumps(tmp_path / "own")
    again.loads(tmp_path / "own")
    assert torch.equal(again.sample(5)["action"], own.sample(5)["action"])


def test_bad_calls_say_what_to_do_and_store_nothing() -> None:
    buffer = TensorDictReplayBuffer(30, device="cpu")
    dotted = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, [2])
    unreal = TensorDict({"other": torch.zeros(1), "td_error": torch.tensor([float("nan")])}, [1])
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (buffer.sample, ValueError, r"sample\(256\)"),
        (lambda: buffer.sample(3), RuntimeError, "no rows"),
        (lambda: buffer.dumps("nowhere"), RuntimeError, "no rows"),
        (lambda: TensorDictReplayBuffer(9, priority_key="a.b"), ValueError, r"'a\.b' has a dot.*\('a', 'b'\)"),
        (lambda: buffer.extend({"a": torch.zeros(3)}), TypeError, "extend needs a TensorDict; found dict"),
        (lambda: buffer.add({"a": torch.zeros(3)}), TypeError, "add needs a TensorDict; found dict"),
        # rows of sequences, which TorchRL stores whole
        (lambda: buffer.extend(rows(0, 4, 5)), ValueError, r"found batch size \[4, 5\].*data\.reshape\(-1\)"),
        (lambda: buffer.add(rows(0, 4)), ValueError, r"found batch size \[4\].*extend\(data\)"),
        (lambda: buffer.add(rows(0, 4, 5)), ValueError, r"found batch size \[4, 5\].*extend\(data\.reshape\(-1\)\)"),
        (lambda: buffer.extend(rows(0, 1)[0]), ValueError, r"found batch size \[\].*add\(data\)"),
        (lambda: buffer.extend(rows(0, 0)), ValueError, r"at least one row; found .* \[0\]"),
        (lambda: buffer.extend(rows(0, 3).set(("next", "name"), "a text")), TypeError, "'name'.*exclude"),
        (lambda: buffer.extend(dotted), KeyError, r"'a\.b' is given twice.*Rename"),
        (lambda: buffer.extend(unreal), ValueError, "finite"),
        # what was refused has not said what the fields are
        (lambda: (buffer.extend(rows(0, 3)), buffer.extend(rows(0, 3).exclude("action"))), KeyError, "missing"),
        (lambda: buffer.update_tensordict_priority(buffer.sample(2)), KeyError, "td_error"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
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
    target, optimizer = SoftUpdate(loss, eps=0.99), torch.optim.Adam(loss.parameters(), 1e-3)
    given = {"frames_per_batch": 50, "total_frames": 3000, "auto_register_policy_transforms": True}
    collector = Collector(env, TensorDictSequential(actor, greedy), **given)
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
    assert buffer.buffer is not None
    assert buffer.buffer.stats().max_priority != 1.0
    # random actions last 22 steps on average
    assert env.rollout(500, actor).shape[0] > 60
