"""`ReplayBuffer.from_spaces`: the five classic fields from the spaces of a Gymnasium environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import device_fixture as device_fixture

from gpu_replay import Field, Proportional, ReplayBuffer

spaces = pytest.importorskip("gymnasium.spaces")

pytestmark = pytest.mark.contract

ENDS = {"reward": Field((), torch.float32), "terminated": Field((), torch.bool)}


def test_settings_are_those_of_a_buffer(device: str) -> None:
    box = spaces.Box(-1, 1, (4,), np.float32)
    buffer = ReplayBuffer.from_spaces(10, box, spaces.Discrete(3), sampler=Proportional(), device=device, seed=7)
    assert (buffer.capacity, buffer.device.type, buffer.sampler, buffer.seed) == (10, device, Proportional(), 7)


@pytest.mark.parametrize(
    "space, field",
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), Field((8, 8, 3), torch.uint8)),
        (spaces.Box(-1, 1, (2,), np.float64), Field((2,), torch.float64)),
        (spaces.Box(-1, 1, (), np.float32), Field((), torch.float32)),
        (spaces.Box(-5, 5, (3,), np.int16), Field((3,), torch.int16)),
        (spaces.Discrete(5), Field((), torch.int64)),
        (spaces.MultiDiscrete([3, 4]), Field((2,), torch.int64)),
        (spaces.MultiBinary(6), Field((6,), torch.int8)),
    ],
    ids=str,
)
def test_every_array_space_keeps_its_shape_and_dtype(space: object, field: Field, device: str) -> None:
    buffer = ReplayBuffer.from_spaces(3, space, space, device=device)
    assert dict(buffer.fields) == {"obs": field, "action": field, "next_obs": field, **ENDS}


def test_dict_space_gives_dotted_fields(device: str) -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4), np.uint8), "speed": spaces.Box(-1, 1, (), np.float32)})
    buffer = ReplayBuffer.from_spaces(5, space, spaces.Box(-1, 1, (2,), np.float32), device=device)
    named = {"camera": Field((4, 4), torch.uint8), "speed": Field((), torch.float32)}
    dotted = {f"{lead}.{name}": field for lead in ("obs", "next_obs") for name, field in named.items()}
    assert dict(buffer.fields) == {**dotted, "action": Field((2,), torch.float32), **ENDS}


def test_samples_of_the_spaces_can_be_stored(device: str) -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4), np.uint8), "mode": spaces.Discrete(4, start=-2)})
    action_space = spaces.Discrete(6)
    space.seed(1)
    action_space.seed(1)
    buffer = ReplayBuffer.from_spaces(5, space, action_space, device=device)
    steps = [(space.sample(), action_space.sample(), space.sample()) for _ in range(8)]
    for first, last in ((0, 3), (3, 8)):
        part = steps[first:last]
        fields = {"action": np.array([action for _, action, _ in part])}
        for name in space.spaces:
            fields[f"obs.{name}"] = np.stack([obs[name] for obs, _, _ in part])
            fields[f"next_obs.{name}"] = np.stack([next_obs[name] for _, _, next_obs in part])
        buffer.add(**fields, reward=np.arange(first, last, dtype=np.float64), terminated=np.zeros(last - first, bool))
    batch = buffer.sample(5)
    for row, key in enumerate(batch.key.tolist()):
        obs, action, next_obs = steps[key]
        assert batch.obs.camera[row].tolist() == obs["camera"].tolist()
        assert batch["next_obs"]["mode"][row].item() == next_obs["mode"]
        assert (batch.action[row].item(), batch.reward[row].item()) == (action, key)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(3)), "Box", None], ids=str)
@pytest.mark.parametrize("place", [0, 1])
def test_spaces_without_a_fixed_shape_are_refused(place: int, space: object, device: str) -> None:
    given = [spaces.Discrete(2), spaces.Discrete(2)]
    given[place] = space
    with pytest.raises((TypeError, ValueError), match=r"(?i)space"):
        ReplayBuffer.from_spaces(3, *given, device=device)
