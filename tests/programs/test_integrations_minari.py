"""Datasets of Minari through a buffer and back: Minari itself writes the first and opens the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

pytest.importorskip("gymnasium")
minari = pytest.importorskip("minari", reason="needs minari, in the extra `integrations`")

from gymnasium import spaces  # noqa: E402
from minari.data_collector import EpisodeBuffer  # noqa: E402

from gpu_replay import Field, TrajectoryReplayBuffer  # noqa: E402
from gpu_replay.integrations.minari import from_minari, to_minari  # noqa: E402

# Minari recommends names and links for datasets that are published
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")

BOX = spaces.Box(-1e3, 1e3, (2,), np.float32)
SPACES = {"observation_space": spaces.Dict({"place": BOX, "speed": BOX}), "action_space": spaces.Discrete(5)}


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def recorded(observations: Any, actions: Any, rewards: list[float], ending: str) -> EpisodeBuffer:
    flags = {name: [False] * (len(rewards) - 1) + [ending == name] for name in ("terminations", "truncations")}
    return EpisodeBuffer(observations=observations, actions=actions, rewards=rewards, infos={}, **flags)


def episode(first: int, steps: int, ending: str) -> EpisodeBuffer:
    rows = np.arange(first, first + steps + 1, dtype=np.float32)
    place = np.stack([rows, -rows], 1)
    return recorded({"place": place, "speed": 10 * place}, np.arange(steps) % 5, rows[:-1].tolist(), ending)


def lists(found: Any) -> list[Any]:
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    return [tree_map(np.ndarray.tolist, [getattr(each, name) for name in names]) for each in found.iterate_episodes()]


def small_dataset() -> Any:
    """A dataset of three episodes, on the disk."""
    episodes = [episode(0, 4, "terminations"), episode(10, 1, "truncations"), episode(20, 7, "terminations")]
    return minari.create_dataset_from_buffers("test/first-v0", episodes, **SPACES)


def test_a_dataset_comes_back_as_it_was() -> None:
    dataset = small_dataset()
    # by its name, and itself
    assert len(from_minari("test/first-v0", device="cpu")) == 12 + 3
    with pytest.raises(ValueError, match="capacity must be at least 1; found 0"):
        from_minari(dataset, 0, device="cpu")
    with pytest.raises(FileNotFoundError, match="test/other-v0"):
        from_minari("test/other-v0")
    buffer = from_minari(dataset, n_step=2, gamma=0.5, device="cpu")
    assert (len(buffer), buffer.stats().eligible) == (12 + 3, 12)
    batch = buffer.sample(12)
    place = batch.obs.place[:, 0]
    # of the last steps of the episodes one was truncated, after which the discount is that of a single step
    last = (place == 3) | (place == 10) | (place == 26)
    assert batch.reward.tolist() == torch.where(last, place, place + 0.5 * (place + 1)).tolist()
    assert batch.discount[last].tolist() == (0.5 * (place[last] == 10)).tolist()
    live = batch.discount > 0
    following = 10 * (place + 2 - last.float())
    assert batch.next_obs.speed[live].tolist() == torch.stack([following, -following], 1)[live].tolist()
    to_minari(buffer, "test/second-v0", **SPACES)
    assert lists(minari.load_dataset("test/second-v0")) == lists(dataset)


def test_episodes_are_written_as_far_as_they_are_stored() -> None:
    """One begins before what is stored, one was broken from outside, one goes on; of two environments."""
    fields = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(20, 2, fields, device="cpu")
    for step in range(13):
        if step == 8:
            buffer.begin_episodes(np.array([True, False]))
        number = np.float32([step, 100 + step])
        ends = {"terminated": np.array([False, step == 5]), "truncated": np.zeros(2, bool)}
        buffer.add(obs=np.stack([number, number], 1), action=np.array([step % 5, 0]), reward=number, **ends)
    to_minari(buffer, "test/parts-v0", observation_space=BOX, action_space=SPACES["action_space"])
    found = list(minari.load_dataset("test/parts-v0").iterate_episodes())
    observed = [each.observations[:, 0].tolist() for each in found]
    # the step after an ending carries the last observation of the episode
    wanted = ((3, 8), (8, 13), (103, 107), (107, 113))
    assert observed == [[float(number) for number in range(*ends)] for ends in wanted]
    assert [each.terminations[-1] for each in found] == [False, False, True, False]
    assert [each.truncations[-1] for each in found] == [True, True, False, True]
    assert [len(each.rewards) for each in found] == [4, 4, 3, 5]


def test_tuples_come_back_as_tuples() -> None:
    observed, acted = spaces.Tuple((BOX, spaces.Dict({"speed": BOX}))), spaces.Tuple((spaces.Discrete(5), BOX))
    both = {"observation_space": observed, "action_space": acted}
    place = np.arange(10, dtype=np.float32).reshape(5, 2)
    given = (place, {"speed": 10 * place}), (np.arange(4), -place[:4]), [0.0, 1.0, 2.0, 3.0], "terminations"
    dataset = minari.create_dataset_from_buffers("test/tuple-v0", [recorded(*given)], **both)
    buffer = from_minari(dataset, device="cpu")
    (found,) = to_minari(buffer, "test/tuple-v1", **both).iterate_episodes()
    assert np.array_equal(found.observations[0], place)
    assert np.array_equal(found.observations[1]["speed"], 10 * place)
    assert found.actions[0].tolist() == [0, 1, 2, 3]
    assert np.array_equal(found.actions[1], -place[:4])
    assert found.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_spaces_of_something_else_are_refused_before_anything_is_written() -> None:
    buffer = from_minari(small_dataset(), device="cpu")
    for wrong in ({"observation_space": BOX}, {"action_space": BOX}):
        with pytest.raises(ValueError, match=r"the buffer holds obs\.place \[2\], obs\.speed \[2\], action \[\]"):
            to_minari(buffer, "test/second-v0", **SPACES | wrong)
    with pytest.raises(ValueError, match="the spaces have obs"):
        to_minari(buffer, "test/second-v0", env="CartPole-v1")
    # the name is still free
    assert to_minari(buffer, "test/second-v0", **SPACES).total_episodes == 3
    fields = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
    with pytest.raises(ValueError, match="next_step"):
        to_minari(TrajectoryReplayBuffer(20, 2, fields, device="cpu", autoreset="same_step"), "test/x-v0", **SPACES)
