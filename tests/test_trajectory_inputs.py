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

from gpu_replay import Field, Latest, TrajectoryReplayBuffer, Uniform

pytestmark = pytest.mark.contract

FEW = {"obs": Field((), torch.int64), "action": Field((), torch.int64)}


def given(number: int, envs: int, fields: dict[str, Field] = FIELDS, **flags: Any) -> dict[str, Any]:
    """One step of each environment as NumPy arrays, with a reward that no float type rounds."""
    steps = [numbered(number, env, fields, reward=number + env / 8) for env in range(envs)]
    return columns(steps, fields) | flags


def filled(buffer: TrajectoryReplayBuffer, steps: list[dict[str, Any]]) -> TrajectoryReplayBuffer:
    for step in steps:
        buffer.add(**step)
    return buffer


@pytest.mark.parametrize("origin", ["numpy", "cpu", "device", "mixed"])
def test_numpy_cpu_and_device_inputs_store_the_same(origin: str, device: str) -> None:
    pair = Pair(12, 3, device=device, stack=2)

    def moved(name: str, value: np.ndarray) -> Any:
        if origin == "numpy" or (origin == "mixed" and name in ("obs", "terminated")):
            return value
        return torch.from_numpy(value).to(device if origin == "device" or name == "action" else "cpu")

    for number in range(6):
        steps = [numbered(number, env, FIELDS, terminated=(number + env) % 4 == 3) for env in range(3)]
        keys = pair.buffer.add(**{name: moved(name, value) for name, value in columns(steps, FIELDS).items()})
        assert keys.device.type == device
        assert keys.tolist() == [number * 3 + env for env in range(3)]
        assert pair.priorities is not None
        pair.priorities.add(steps)
    pair.check()


REWARDS = [np.int32, np.int64, np.int8, np.uint8, np.float16, np.float32, np.float64, np.bool_]


@pytest.mark.parametrize("kind", REWARDS, ids=lambda kind: kind.__name__)
def test_rewards_of_every_number_type_become_float32(kind: Any, device: str) -> None:
    """ALE gives int32, Gymnasium float64."""
    values = np.array([[1, 0], [0, 1], [1, 1], [0, 0]]).astype(kind)
    buffer = TrajectoryReplayBuffer(20, 2, FEW, n_step=2, gamma=0.5, device=device, sampler=Latest())
    for number, reward in enumerate(values):
        buffer.add(**(given(number, 2, FEW) | {"reward": reward}))
        if kind is not np.bool_ and number == 0:
            assert torch.from_numpy(reward).dtype != torch.float32 or kind is np.float32
    found = buffer[[0, 1, 2, 3]].reward
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 0.5, 0.5, 1.5]


def test_rewards_of_torch_types(device: str) -> None:
    for dtype in (torch.int32, torch.float64, torch.float16, torch.bfloat16):
        buffer = TrajectoryReplayBuffer(20, 2, FEW, device=device)
        reward = torch.tensor([3, -5], dtype=dtype, device=device)
        for number in range(2):
            buffer.add(**(given(number, 2, FEW) | {"reward": reward}))
        assert buffer[[0, 1]].reward.tolist() == [3.0, -5.0]


def test_wide_rewards_are_rounded_to_float32(device: str) -> None:
    buffer = TrajectoryReplayBuffer(20, 2, FEW, device=device)
    wide = np.array([0.1, 1 / 3])
    for number in range(2):
        buffer.add(**(given(number, 2, FEW) | {"reward": wide}))
    assert buffer[[0, 1]].reward.tolist() == wide.astype(np.float32).tolist()


def test_sum_of_rewards_is_rounded_once(device: str) -> None:
    """In single precision the small rewards would be lost beside the large one."""
    rewards = [2.0**24, 1.0, 1.0, 1.0]
    buffer = TrajectoryReplayBuffer(20, 1, FEW, n_step=4, gamma=1.0, device=device)
    for number in range(5):
        step = given(number, 1, FEW) | {"reward": np.array([rewards[number % 4]])}
        buffer.add(**step)
    assert buffer[0].reward.item() == 2.0**24 + 4.0
    discounted = TrajectoryReplayBuffer(20, 1, FEW, n_step=4, gamma=0.97, device=device)
    for number in range(5):
        discounted.add(**(given(number, 1, FEW) | {"reward": np.array([1.0 + number])}))
    exact = sum(0.97**power * (1.0 + power) for power in range(4))
    assert discounted[0].reward.item() == np.float32(exact)
    assert discounted[0].discount.item() == np.float32(0.97**4)


def test_what_was_added_can_be_changed_afterwards(device: str) -> None:
    """Vector environments hand out the same array at every step."""
    pair = Pair(12, 2, device=device, stack=2, autoreset="same_step")
    reused: dict[str, np.ndarray] = {}
    for number in range(7):
        steps = [numbered(number, env, FIELDS, truncated=number == 3) for env in range(2)]
        steps = [step | {"final": final_of(step, number == 3), "priority": 1.0 + number} for step in steps]
        arrays = columns(steps, FIELDS)
        for name, value in arrays.items():
            reused.setdefault(name, np.empty_like(value))[...] = value
        pair.buffer.add(**reused)
        assert pair.priorities is not None
        pair.priorities.add(steps)
        for value in reused.values():
            value[...] = 0
    pair.check()


def test_layouts_that_are_not_contiguous(device: str) -> None:
    """The newest plane of a stack is a view: `obs[:, -1]`."""
    fields = {"obs": Field((3, 5), torch.uint8), "action": Field((), torch.int64)}
    stacks = np.random.default_rng(0).integers(0, 256, (6, 2, 4, 3, 5), dtype=np.uint8)
    planes: list[Any] = [stacks[0][:, -1], np.asfortranarray(stacks[1][:, -1]), stacks[2][:, -1][::-1]]
    planes += [torch.from_numpy(stacks[3])[:, -1], torch.from_numpy(stacks[4]).to(device)[:, 2].transpose(1, 2)]
    read_only = stacks[5][:, 0].copy()
    read_only.flags.writeable = False
    planes.append(read_only)
    planes[4] = planes[4].contiguous().transpose(1, 2)
    buffer = TrajectoryReplayBuffer(14, 2, fields, device=device)
    for number, plane in enumerate([*planes, planes[0]]):
        buffer.add(**(given(number, 2, FEW) | {"obs": plane}))
    batch = buffer[list(range(12))]
    for number, plane in enumerate(planes):
        expected = plane.cpu() if isinstance(plane, Tensor) else torch.from_numpy(plane.copy())
        assert torch.equal(batch.obs[2 * number : 2 * number + 2].cpu(), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (17,), (4, 4, 3)], ids=str)
def test_observations_of_every_dtype_and_shape_come_back_unchanged(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Rows from 1 to 384 bytes, aligned to nothing: stacks, their filling, and the final observations."""
    fields = {"obs": Field(shape, dtype), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(
        16, 2, fields, stack=3, padding="zero", autoreset="same_step", sampler=Uniform(), device=device
    )
    values = torch.randint(0, 120, (12, 2, *shape), generator=torch.Generator().manual_seed(1)) + 1
    values = values % 2 == 0 if dtype is torch.bool else values.to(dtype)
    none = torch.zeros(2, dtype=torch.bool)
    for number in range(6):
        flags = {"terminated": none, "truncated": torch.tensor([number == 2, False])}
        final = {"final_obs": values[number + 6].to(device)} if number == 2 else {}
        buffer.add(obs=values[number].to(device), action=torch.arange(2), reward=torch.zeros(2), **flags, **final)
    batch = buffer[[0, 4, 6, 5]]
    assert batch.obs.dtype == batch.next_obs.dtype == dtype
    zero = torch.zeros(shape, dtype=dtype)
    frames = values[:, 0]
    expected = [
        [zero, zero, frames[0]],
        [frames[0], frames[1], frames[2]],
        [zero, zero, frames[3]],
        list(values[:3, 1]),
    ]
    after = [[zero, frames[0], frames[1]], [frames[1], frames[2], frames[8]], [zero, frames[3], frames[4]]]
    assert torch.equal(batch.obs.cpu(), torch.stack([torch.stack(row) for row in expected]))
    assert torch.equal(batch.next_obs[:3].cpu(), torch.stack([torch.stack(row) for row in after]))
    assert torch.equal(batch.next_obs[3].cpu(), values[1:4, 1])


@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
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
        buffer.add(
            obs=frames[number],
            action=torch.tensor([number * 40], dtype=torch.uint8),
            speed=torch.tensor([[number, -number]], dtype=torch.int16),
            reward=torch.zeros(1),
            terminated=torch.zeros(1, dtype=torch.bool),
            truncated=torch.tensor([number == 3]),
            final_obs=frames[number + 4] if number == 3 else None,
        )
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


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("stack", [1, 3])
def test_dictionaries_of_observations(stack: int, autoreset: str, device: str) -> None:
    fields = {
        "obs.image": Field((2, 3), torch.int16),
        "obs.vector": Field((2,), torch.float64),
        "obs.clock": Field((), torch.int32),
        "action": Field((2,), torch.float32),
        "mood": Field((), torch.int64),
    }
    pair = Pair(30, 3, fields=fields, device=device, stack=stack, n_step=2, autoreset=autoreset)
    live_through(pair, 17, end=0.2, final=1.0)
    view = pair.check()
    keys = view.eligible()
    batch = pair.buffer[keys]
    lead = [len(keys)] if stack == 1 else [len(keys), stack]
    for prefix in ("obs", "next_obs"):
        assert list(batch[f"{prefix}.image"].shape) == [*lead, 2, 3]
        assert list(batch[f"{prefix}.clock"].shape) == lead
        assert torch.equal(getattr(batch, prefix).vector, batch[f"{prefix}.vector"])
        assert set(batch[prefix]) == {"image", "vector", "clock"}
    assert set(pair.buffer.sample(2)) == set(batch) | {"probability", "weight"}


def test_final_observations_of_a_dictionary_are_each_used(device: str) -> None:
    fields = {"obs.a": Field((), torch.int64), "obs.b": Field((2,), torch.float32), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(10, 1, fields, autoreset="same_step", device=device)
    buffer.add(
        **{"obs.a": [1], "obs.b": [[1.0, 2.0]], "final_obs.a": [7], "final_obs.b": [[8.0, 9.0]]},
        action=[0],
        reward=[0.0],
        terminated=[False],
        truncated=[True],
    )
    batch = buffer[0]
    assert (batch["next_obs.a"].tolist(), batch.next_obs.b.tolist()) == ([7], [[8.0, 9.0]])
    assert (batch["obs.a"].tolist(), batch.obs.b.tolist()) == ([1], [[1.0, 2.0]])


def test_further_fields_are_those_of_the_start(device: str) -> None:
    fields = FEW | {"logits": Field((3,), torch.float32), "flag": Field((), torch.bool)}
    pair = Pair(24, 2, fields=fields, device=device, n_step=3, stack=2)
    live_through(pair, 15)
    pair.check()


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_rows_of_final_obs_where_nothing_ended_are_never_read(autoreset: str, device: str) -> None:
    fields = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}
    pair = Pair(30, 3, fields=fields, device=device, stack=2, n_step=2, autoreset=autoreset)
    # every row of an environment that goes on is nan, as `final_of` leaves it
    live_through(pair, 25, end=0.3, final=1.0)
    view = pair.check()
    batch = pair.buffer[view.eligible()]
    assert bool(batch.next_obs.isfinite().all())
    assert bool((batch.discount[:, None, None] * batch.next_obs).isfinite().all())


def test_final_obs_in_the_dtypes_of_observations(device: str) -> None:
    fields = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}
    for final in (np.array([2.5]), np.array([2], dtype=np.int32), torch.tensor([2.5], dtype=torch.float64)):
        buffer = TrajectoryReplayBuffer(10, 1, fields, autoreset="same_step", device=device)
        buffer.add(obs=[1.0], action=[0], reward=[0], terminated=[False], truncated=[True], final_obs=final)
        assert buffer[0].next_obs.tolist() == [float(final[0])]


def test_one_key_is_a_batch_of_one_and_keys_may_repeat(device: str) -> None:
    pair = live_through(Pair(30, 3, device=device, stack=2), 8, end=0.0)
    assert pair.buffer[4].obs.shape == (1, 2, 2)
    batch = pair.buffer[[4, 4, 3]]
    assert batch.key.tolist() == [4, 4, 3]
    assert torch.equal(batch.obs[0], batch.obs[1])
    assert not torch.equal(batch.obs[0], batch.obs[2])
    assert pair.buffer[torch.tensor([4], device=device)].key.tolist() == [4]
    assert pair.buffer[np.array([4], dtype=np.int32)].key.tolist() == [4]


def test_a_batch_is_a_snapshot(device: str) -> None:
    pair = live_through(Pair(12, 3, device=device, stack=2), 4, end=0.0)
    batch = pair.buffer.sample(5)
    before = {name: value.clone() for name, value in batch.items()}
    live_through(pair, 6, seed=1)
    assert all(torch.equal(batch[name], before[name]) for name in before)


@pytest.mark.parametrize("mask", ["numpy", "torch", "device", "list"])
def test_begin_episodes_takes_a_mask_in_every_form(mask: str, device: str) -> None:
    pair = Pair(30, 3, device=device)
    live_through(pair, 3, end=0.0)
    few = [True, False, True]
    forms = {
        "numpy": np.array(few),
        "torch": torch.tensor(few),
        "device": torch.tensor(few, device=device),
        "list": few,
    }
    pair.buffer.begin_episodes(forms[mask])
    pair.history.begin_episodes(few)
    live_through(pair, 3, end=0.0)
    view = pair.check()
    # the step before the break waits for ever in the first and the last environment
    assert {6, 8} & set(view.eligible()) == set()
    assert 7 in view.eligible()


def test_fields_and_sizes_can_be_asked_for(device: str) -> None:
    buffer = TrajectoryReplayBuffer(31, 3, FIELDS, stack=4, n_step=3, device=device, seed=5)
    assert (buffer.capacity, buffer.num_envs, len(buffer), buffer.added) == (30, 3, 0, 0)
    assert {name: buffer.fields[name] for name in FIELDS} == FIELDS
    assert buffer.device.type == device
    filled(buffer, [given(number, 3) for number in range(12)])
    assert (len(buffer), buffer.added) == (30, 36)
    assert "TrajectoryReplayBuffer" in repr(buffer)
