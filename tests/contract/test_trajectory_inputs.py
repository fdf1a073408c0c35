"""What `add` of the trajectory buffer accepts, and how it leaves again: dtypes, layouts, dictionaries, conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED
from devices import device_fixture as device_fixture
from tolerances import close
from torch import Tensor
from trajectory_pair import FIELDS, Pair, columns, final_of, live_through, numbered
from transitions import same

from gpu_replay import Field, Latest, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract

FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


def given(number: int, envs: int, fields: dict[str, Field] = FIELDS, **changed: Any) -> dict[str, Any]:
    """One step of each environment as NumPy arrays, with a reward that no float type rounds."""
    steps = [numbered(number, env, fields, reward=number + env / 8) for env in range(envs)]
    return columns(steps, fields) | changed


@pytest.mark.parametrize("origin", ["numpy", "cpu", "device", "mixed"])
def test_numpy_cpu_and_device_inputs_store_the_same(origin: str, device: str) -> None:
    pair = Pair(12, 3, device=device, stack=2)
    assert pair.model.by_mass

    def moved(name: str, value: np.ndarray) -> Any:
        if origin == "numpy" or (origin == "mixed" and name in ("obs", "terminated")):
            return value
        return torch.from_numpy(value).to(device if origin == "device" or name == "action" else "cpu")

    for number in range(6):
        steps = [numbered(number, env, FIELDS, terminated=(number + env) % 4 == 3) for env in range(3)]
        keys = pair.buffer.add(**{name: moved(name, value) for name, value in columns(steps, FIELDS).items()})
        assert keys.device.type == device
        assert keys.tolist() == pair.model.add(steps)
    pair.check()


KINDS: list[Any] = [np.int32, np.int64, np.int8, np.uint8, np.float16, np.float32, np.float64, np.bool_]
KINDS += [torch.int32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rewards_of_every_number_type_become_float32(kind: Any, device: str) -> None:
    """ALE gives int32, Gymnasium float64."""
    buffer = TrajectoryReplayBuffer(20, 2, FEW, n_step=2, gamma=0.5, device=device, sampler=Latest())
    for number, values in enumerate([[1, 0], [0, 1], [1, 1], [0, 0]]):
        of_torch = isinstance(kind, torch.dtype)
        reward = torch.tensor(values, dtype=kind, device=device) if of_torch else np.array(values).astype(kind)
        buffer.add(**given(number, 2, FEW, reward=reward))
    found = buffer[[0, 1, 2, 3]].reward
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 0.5, 0.5, 1.5]


@pytest.mark.parametrize(
    "gamma, rewards",
    # in single precision the small rewards would be lost beside the large one
    [(1.0, [2.0**24, 1.0, 1.0, 1.0]), (0.97, [1.0, 2.0, 3.0, 4.0]), (0.5, [0.1, 1 / 3, 0.1, 1 / 3])],
)
def test_sum_of_rewards_is_rounded_once(gamma: float, rewards: list[float], device: str) -> None:
    buffer = TrajectoryReplayBuffer(20, 1, FEW, n_step=4, gamma=gamma, device=device)
    for number in range(5):
        buffer.add(**given(number, 1, FEW, reward=np.array([rewards[number % 4]])))
    exact = sum(gamma**power * float(np.float32(reward)) for power, reward in enumerate(rewards))
    assert buffer[0].reward.item() == np.float32(exact)
    assert buffer[0].discount.item() == np.float32(gamma**4)


def test_what_was_added_can_be_changed_afterwards(device: str) -> None:
    """Vector environments hand out the same array at every step."""
    pair = Pair(12, 2, device=device, stack=2, autoreset="same_step")
    assert pair.model.by_mass
    reused: dict[str, np.ndarray] = {}
    for number in range(7):
        steps = [numbered(number, env, FIELDS, truncated=number == 3) for env in range(2)]
        steps = [step | {"final": final_of(step, number == 3), "priority": 1.0 + number} for step in steps]
        arrays = columns(steps, FIELDS)
        for name, value in arrays.items():
            reused.setdefault(name, np.empty_like(value))[...] = value
        pair.buffer.add(**reused)
        pair.model.add(steps)
        for value in reused.values():
            value[...] = 0
    pair.check()


def test_layouts_that_are_not_contiguous(device: str) -> None:
    """The newest plane of a stack is a view: `obs[:, -1]`."""
    fields = {"obs": Field((3, 5), torch.uint8), "action": Field((), torch.int64)}
    stacks = np.random.default_rng(0).integers(0, 256, (6, 2, 4, 3, 5), dtype=np.uint8)
    planes: list[Any] = [stacks[0][:, -1], np.asfortranarray(stacks[1][:, -1]), stacks[2][:, -1][::-1]]
    planes.append(torch.from_numpy(stacks[3])[:, -1])
    planes.append(torch.from_numpy(stacks[4]).to(device)[:, 2].transpose(1, 2).contiguous().transpose(1, 2))
    planes.append(stacks[5][:, 0].copy())
    planes[5].flags.writeable = False
    buffer = TrajectoryReplayBuffer(14, 2, fields, device=device)
    for number, plane in enumerate([*planes, planes[0]]):
        buffer.add(**given(number, 2, FEW, obs=plane))
    expected = np.concatenate([plane.cpu().numpy() if isinstance(plane, Tensor) else plane for plane in planes])
    assert np.array_equal(buffer[list(range(12))].obs.cpu().numpy(), expected)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, *FLOATS], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (17,), (4, 4, 3)], ids=str)
def test_observations_of_every_dtype_and_shape_come_back_unchanged(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Rows from 1 to 384 bytes, aligned to nothing: stacks, their filling, and the final observations."""
    fields = {"obs": Field(shape, dtype), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(16, 2, fields, stack=3, padding="zero", autoreset="same_step", device=device)
    values = torch.randint(0, 120, (13, 2, *shape), generator=torch.Generator().manual_seed(1)) + 1
    values = values % 2 == 0 if dtype is torch.bool else values.to(dtype)
    values[12] = 0
    none = torch.zeros(2, dtype=torch.bool)
    for number in range(6):
        flags = {"terminated": none, "truncated": torch.tensor([number == 2, False])}
        final = {"final_obs": values[number + 6].to(device)} if number == 2 else {}
        buffer.add(obs=values[number].to(device), action=torch.arange(2), reward=torch.zeros(2), **flags, **final)
    batch = buffer[[0, 4, 6, 5]]
    assert batch.obs.dtype == batch.next_obs.dtype == dtype
    # the steps of each row, whose last is of the other environment; 12 is zero and 8 final
    environment = torch.tensor([0, 0, 0, 1])[:, None]
    for found, steps in (
        (batch.obs, [[12, 12, 0], [0, 1, 2], [12, 12, 3], [0, 1, 2]]),
        (batch.next_obs, [[12, 0, 1], [1, 2, 8], [12, 3, 4], [1, 2, 3]]),
    ):
        assert torch.equal(found.cpu(), values[torch.tensor(steps), environment])


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [None, 1 / 255], ids=["as is", "scaled"])
def test_stacks_are_converted_and_scaled_on_their_way_out(
    scale: float | None, output: torch.dtype, device: str
) -> None:
    """Also what fills them up, final observations, and further fields; what is stored stays bytes."""
    fields = {
        "obs": Field((2, 3), torch.uint8, output, scale),
        "action": Field((), torch.uint8, torch.int64),
        "speed": Field((2,), torch.int16, torch.float32, 0.25),
    }
    buffer = TrajectoryReplayBuffer(30, 1, fields, stack=3, autoreset="same_step", device=device)
    frames = torch.randint(0, 256, (8, 1, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for number in range(6):
        action, speed = np.array([number * 40], dtype=np.uint8), np.array([[number, -number]], dtype=np.int16)
        result = {"reward": [0.0], "terminated": [False], "truncated": [number == 3]}
        final = frames[number + 4] if number == 3 else None
        buffer.add(obs=frames[number], action=action, speed=speed, **result, final_obs=final)
    batch = buffer[[0, 3, 4]]
    order = [[0, 0, 0], [1, 2, 3], [4, 4, 4]]
    after = [[0, 0, 1], [2, 3, 7], [4, 4, 5]]
    for name, places in (("obs", order), ("next_obs", after)):
        stored = frames[:, 0][torch.tensor(places)]
        # multiplied in float32 (float64 for doubles) and rounded once
        wide = stored.to(torch.float64 if output is torch.float64 else torch.float32)
        expected = (wide if scale is None else wide * scale).to(output)
        assert batch[name].dtype == output
        if INTERPRETED and output is torch.bfloat16:
            # the interpreter cuts where a GPU rounds
            assert close(batch[name], expected, "cut"), name
        else:
            assert torch.equal(batch[name].cpu(), expected), name
    assert (batch.action.dtype, batch.action.tolist()) == (torch.int64, [0, 120, 160])
    assert (batch.speed.dtype, batch.speed.tolist()) == (torch.float32, [[0.0, 0.0], [0.75, -0.75], [1.0, -1.0]])


def test_final_obs_in_the_dtypes_of_observations(device: str) -> None:
    fields = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}
    for final in (np.array([2.5]), np.array([2], dtype=np.int32), torch.tensor([2.5], dtype=torch.float64)):
        buffer = TrajectoryReplayBuffer(10, 1, fields, autoreset="same_step", device=device)
        buffer.add(obs=[1.0], action=[0], reward=[0], terminated=[False], truncated=[True], final_obs=final)
        assert buffer[0].next_obs.tolist() == [float(final[0])]


def test_a_batch_is_a_snapshot(device: str) -> None:
    pair = live_through(Pair(12, 3, device=device, stack=2), 4, end=0.0)
    batch = pair.buffer.sample(5)
    before = {name: value.clone() for name, value in batch.items()}
    live_through(pair, 6, seed=1)
    same(batch, before)


@pytest.mark.parametrize("form", [np.array, torch.tensor, list, None], ids=["numpy", "torch", "list", "device"])
def test_begin_episodes_takes_a_mask_in_every_form(form: Any, device: str) -> None:
    pair = live_through(Pair(30, 3, device=device), 3, end=0.0)
    few = [True, False, True]
    pair.buffer.begin_episodes(torch.tensor(few, device=device) if form is None else form(few))
    pair.model.begin_episodes(few)
    view = live_through(pair, 3, end=0.0).check()
    # the step before the break waits for ever in the first and the last environment
    assert {6, 7, 8} & set(view.eligible()) == {7}


def test_fields_and_sizes_can_be_asked_for(device: str) -> None:
    buffer = TrajectoryReplayBuffer(31, 3, FIELDS, stack=4, n_step=3, device=device, seed=5)
    assert (buffer.capacity, buffer.num_envs, len(buffer), buffer.added) == (30, 3, 0, 0)
    assert {name: buffer.fields[name] for name in FIELDS} == FIELDS
    assert buffer.device.type == device
    for number in range(12):
        buffer.add(**given(number, 3))
    assert (len(buffer), buffer.added) == (30, 36)
    assert "TrajectoryReplayBuffer" in repr(buffer)
    assert "num_envs=3, stack=4, n_step=3, gamma=0.99, autoreset='next_step'" in repr(buffer)
