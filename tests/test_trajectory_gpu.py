"""What only a GPU shows of a trajectory buffer: nothing waits, graphs replay, many environments at once leave exact
integers.

The kernels' arithmetic is tested without one, interpreted (test_trajectory_kernels_add.py and
test_trajectory_kernels_sample.py); the same tests run here too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu import EVERYTHING, EXACT, SAMPLERS, graph_of, look_while_another_adds, powers, waiting_is_an_error
from tolerances import close
from torch import Tensor
from trees import check_sums

from gpu_replay import Field, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

pytestmark = pytest.mark.gpu

FIELDS = {"obs": Field((12, 12), torch.uint8), "action": Field((), torch.int64), "note": Field((3,), torch.float32)}
MODES: dict[str, dict[str, Any]] = {
    "next_step": {"autoreset": "next_step", "stack": 4, "n_step": 3},
    "same_step": {"autoreset": "same_step", "stack": 3, "n_step": 5, "padding": "zero"},
    "few finals": {"autoreset": "disabled", "stack": 1, "n_step": 2, "final_capacity": 9},
}


class Streams:
    """A buffer on the GPU and one of the host code with the same seed, and numbered steps for both."""

    def __init__(self, capacity: int, num_envs: int, sampler: Any, mode: str, *, every: int = 13, **more: Any) -> None:
        settings = {**MODES[mode], **more}
        self.gpu, self.host = (
            TrajectoryReplayBuffer(capacity, num_envs, FIELDS, sampler=sampler, device=device, seed=5, **settings)
            for device in ("cuda", "cpu")
        )
        self.num_envs, self.every = num_envs, every
        self.finals = settings["autoreset"] != "next_step"

    def step(self, number: int | Tensor, device: torch.device | str, *, own: bool = True) -> dict[str, Tensor]:
        """A step that says in every value when and where it was; its number may be on the device."""
        key = torch.arange(self.num_envs, device=device) + number * self.num_envs
        hashed = key * 7919 % 1009 % self.every
        place = torch.arange(144, device=device)
        step = {
            "obs": ((key[:, None] * 31 + place) % 251).to(torch.uint8).view(-1, 12, 12),
            "action": key,
            "note": key[:, None].float() + torch.arange(3, device=device) / 4,
            "reward": (key % 17).float() / 3,
            "terminated": hashed == 1,
            "truncated": (hashed == 2) | (key * 104729 % 211 == 5),
        }
        if self.finals:
            step["final_obs"] = 255 - step["obs"]
        return step | ({"priority": powers(key)} if own else {})

    def add(self, steps: int, *, own: bool = True) -> None:
        """So many further steps to both."""
        for _ in range(steps):
            number = self.host.added // self.num_envs
            for buffer in (self.gpu, self.host):
                buffer.add(**self.step(number, buffer.device, own=own))

    def check(self) -> None:
        """Fail unless both hold the same bits."""
        gpu, host = self.gpu, self.host
        assert gpu._counters.tolist() == host._counters.tolist()
        mine, other = (buffer._state_tensors(host.added) for buffer in (gpu, host))
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            # nothing is said of what comes after the end of the list of ranks
            said = host._counters[Counter.RANKED] if name == "ranked" else len(tensor)
            assert torch.equal(tensor[:said].cpu(), other[name][:said]), name
        for tree in (gpu._state.tree, gpu._state.eligible_tree):
            if tree is not None:
                check_sums(tree)


def check_drawn(found: Any, expected: Any) -> None:
    """Fail unless both batches are the same, but for frames that mean nothing."""
    assert list(found) == list(expected)
    assert found.key.tolist() == expected.key.tolist()
    for name, value in expected.items():
        mine = found[name].cpu()
        if name in ("probability", "weight"):
            assert close(mine, value, name), name
        elif name == "next_obs":
            counts = expected.discount > 0
            assert torch.equal(mine[counts], value[counts])
        else:
            assert torch.equal(mine, value), name


@pytest.mark.parametrize("mode", MODES)
def test_shifted_pictures_are_those_of_the_host(mode: str) -> None:
    streams = Streams(500, 5, EXACT, mode, random_shift=3)
    streams.add(120)
    for _ in range(5):
        check_drawn(streams.gpu.sample(130), streams.host.sample(130))
        check_drawn(streams.gpu.sample_sequences(7, 4), streams.host.sample_sequences(7, 4))
    streams.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_call_waits_for_the_device(name: str, mode: str) -> None:
    streams = Streams(4096, 16, SAMPLERS[name], mode, random_shift=2)
    buffer = streams.gpu
    number = torch.zeros((), dtype=torch.int64, device="cuda")
    some = torch.arange(16, device="cuda") == 3
    late = torch.tensor([-1, 5, 5, 10**12], device="cuda")
    given = torch.tensor([1.0, 2.0, float("nan"), 1.0], device="cuda")

    def add(own: bool) -> None:
        buffer.add(**streams.step(number, "cuda", own=own))
        number.add_(1)

    def cycle() -> None:
        add(False)
        add(True)
        batch = buffer.sample(64)
        buffer.sample(200, beta=0.5)
        buffer.sample_sequences(16, 6, 2)
        buffer.update_priorities(batch.key, powers(batch.key))
        buffer.update_priorities(late, given)
        buffer.begin_episodes(some)

    for _ in range(260):
        add(True)
    for _ in range(3):
        cycle()
    # the host asks once more, now that the ring is full
    assert buffer._engine.count_at_least(10**9, 0) > 1500
    with waiting_is_an_error():
        for _ in range(8):
            cycle()
    assert buffer.added == (260 + 2 * 11) * 16
    assert buffer.stats().stale_updates >= 8


def test_memory_does_not_grow() -> None:
    streams = Streams(1000, 8, EVERYTHING, "same_step")
    buffer, number = streams.gpu, torch.zeros((), dtype=torch.int64, device="cuda")

    def cycle() -> None:
        buffer.add(**streams.step(number, "cuda"))
        number.add_(1)
        keys = buffer.sample(128).key
        buffer.update_priorities(keys, powers(keys))

    streams.add(9)
    number.fill_(9)
    cycle()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        cycle()
    assert torch.cuda.memory_allocated() == before


# graphs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replayed_cycle_of_add_sample_and_update(name: str, mode: str) -> None:
    streams = Streams(1000, 8, SAMPLERS[name], mode, random_shift=1)
    gpu, host = streams.gpu, streams.host
    streams.add(40)
    number = torch.full((), 40, dtype=torch.int64, device="cuda")

    def cycle() -> Any:
        gpu.add(**streams.step(number, "cuda"))
        number.add_(1)
        batch = gpu.sample(96)
        gpu.update_priorities(batch.key, powers(batch.key))
        return batch

    graph, batch = graph_of(cycle)
    for time in range(150):
        if time:
            graph.replay()
        host.add(**streams.step(40 + time, "cpu"))
        expected = host.sample(96)
        host.update_priorities(expected.key, powers(expected.key))
        if time:
            check_drawn(batch, expected)
    streams.check()
    # the host does not know how often the add was replayed, and asks
    check_drawn(gpu.sample(50), host.sample(50))
    check_drawn(gpu.sample_sequences(9, 3), host.sample_sequences(9, 3))
    streams.add(3)
    streams.check()


@pytest.mark.parametrize("name", ["uniform", "everything", "combined-everything", "rank", "combined-rank"])
def test_a_replayed_draw_of_sequences(name: str) -> None:
    streams = Streams(600, 4, SAMPLERS[name], "next_step")
    streams.add(190)
    graph, batch = graph_of(lambda: streams.gpu.sample_sequences(20, 6, 3))
    streams.host.sample_sequences(20, 6, 3)
    for _ in range(20):
        graph.replay()
        check_drawn(batch, streams.host.sample_sequences(20, 6, 3))
    streams.check()


def test_a_replayed_add_takes_what_lies_in_its_tensors() -> None:
    streams = Streams(60, 6, EVERYTHING, "few finals", every=3)
    given = streams.step(0, "cuda")
    graph, keys = graph_of(lambda: streams.gpu.add(**given))
    streams.host.add(**streams.step(0, "cpu"))
    for number in range(1, 40):
        for name, value in streams.step(number, "cuda").items():
            given[name].copy_(value)
        graph.replay()
        expected = streams.host.add(**streams.step(number, "cpu"))
        assert keys.tolist() == expected.tolist()
        streams.check()
    assert int(streams.gpu._counters[Counter.FINALS]) > 9


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_graph_replayed_after_clear_harms_nothing(name: str) -> None:
    """There is nothing right to draw then; it must end, stay inside, and leave a buffer that works."""
    streams = Streams(300, 5, SAMPLERS[name], "next_step")
    streams.add(80)
    graph, batch = graph_of(lambda: streams.gpu.sample(33))
    streams.host.sample(33)
    streams.gpu.clear()
    streams.host.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert batch.obs.shape == (33, 4, 12, 12)
    streams.add(60)
    assert streams.gpu.stats().eligible == streams.host.stats().eligible
    assert bool((streams.gpu.sample(33).discount >= 0).all())
    for tree in (streams.gpu._state.tree, streams.gpu._state.eligible_tree):
        if tree is not None:
            check_sums(tree)


# many environments at once


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "exact", "combined-everything", "rank", "rank-outdated"])
def test_thousands_of_environments_at_once(name: str, mode: str) -> None:
    """Every sum is right though thousands of threads change it, and rows of final observations go by environment."""
    streams = Streams(5003 * 20, 5003, SAMPLERS[name], mode, every=5)
    for turn in range(9):
        streams.add(5, own=turn % 2 > 0)
        streams.check()
        check_drawn(streams.gpu.sample(4096), streams.host.sample(4096))


def test_threads_on_streams_of_their_own_never_tear_a_step() -> None:
    streams = Streams(4_000, 400, EXACT, "next_step")
    streams.add(20)
    buffer = streams.gpu
    torch.cuda.synchronize()

    def look() -> Tensor:
        batch = buffer.sample(1_024)
        buffer.update_priorities(batch.key, powers(batch.key))
        newest = (batch.key[:, None] * 31 + torch.arange(144, device="cuda")) % 251
        return (batch.action == batch.key).all() & (batch.obs[:, -1].flatten(1) == newest).all()

    look_while_another_adds(lambda turn: buffer.add(**streams.step(20 + turn, "cuda")), look)
    check_sums(buffer._state.masses)


def test_pinned_memory_may_be_filled_anew_at_once() -> None:
    fields = {"obs": Field((84, 84), torch.uint8), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(64 * 6, 64, fields, device="cuda")
    pinned = torch.empty((64, 84, 84), dtype=torch.uint8).pin_memory()
    flags = torch.zeros(64, dtype=torch.bool)
    # keeps the device busy, so that a copy that is not waited for comes late
    busy = torch.randn(4096, 4096, device="cuda")
    for time in range(6):
        for _ in range(20):
            busy = busy @ busy / 4096
        pinned.fill_(time)
        zeros = torch.zeros(64, dtype=torch.int64)
        buffer.add(obs=pinned, action=zeros, reward=zeros, terminated=flags, truncated=flags)
        pinned.fill_(99)
    for time in range(6):
        assert bool((buffer._storage.tensors["obs"][64 * time : 64 * (time + 1)] == time).all())
