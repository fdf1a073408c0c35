"""Kernels that follow the steps of a trajectory buffer, against the host code: equal bits, nothing written outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import thinned
from guards import guarded
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from torch import Tensor
from trees import check_sums
from twins import Twins

from gpu_replay import Combined, Field, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops import eligibility
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag

FIELDS = {"obs": Field((3,), torch.float32), "action": Field((), torch.int64)}
EVERYTHING = Proportional(0.5, 0.4, clip=1000.0, initial="stored", normalize="buffer")
SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(),
    "latest": Latest(),
    "running": Proportional(alpha=0.5, eps=0.0),
    "everything": EVERYTHING,
    "number": Proportional(alpha=0.5, initial=3.0, stratified=False),
    "combined-uniform": Combined(Uniform(replacement=True), newest=2),
    "combined-everything": Combined(EVERYTHING, newest=3),
}
MODES: dict[str, dict[str, Any]] = {
    "next_step": {"autoreset": "next_step"},
    "same_step": {"autoreset": "same_step"},
    "few finals": {"autoreset": "disabled", "final_capacity": 2},
    "no finals": {"autoreset": "same_step", "final_capacity": 0},
}


class Steps(Twins):
    """Both get the same steps."""

    def __init__(self, device: str, capacity: int, num_envs: int, sampler: Any, seed: object, **settings: Any) -> None:
        self.random, self.num_envs = random.Random(str(seed)), num_envs
        self.exact = device != "cpu"
        super().__init__(
            lambda place: TrajectoryReplayBuffer(
                capacity, num_envs, FIELDS, sampler=sampler, device=place, seed=7, **settings
            ),
            device,
        )

    def priorities(self, count: int) -> Tensor:
        """Over ten orders of magnitude; on a GPU powers of 4, of which no library rounds a root differently."""
        if self.exact:
            return torch.tensor([4.0 ** self.random.randint(-8, 8) for _ in range(count)], dtype=torch.float64)
        return torch.tensor([10 ** self.random.uniform(-5, 5) for _ in range(count)], dtype=torch.float64)

    def add(self, end: float = 0.2, *, final: bool = False, own: bool = False) -> None:
        """One step of all environments, a share `end` of which ends: terminated, truncated or, more rarely, both."""
        envs, step = self.num_envs, self.host.added // self.num_envs
        place = torch.stack((torch.full((envs,), step + 1), torch.arange(envs), torch.full((envs,), 5)), 1).float()
        ends = [self.random.choice("TTUUB") if self.random.random() < end else "" for _ in range(envs)]
        given: dict[str, Any] = {
            "obs": place,
            "action": torch.arange(envs) + step * envs,
            "reward": torch.tensor([self.random.gauss(0, 1) for _ in range(envs)]),
            "terminated": torch.tensor([kind in ("T", "B") for kind in ends]),
            "truncated": torch.tensor([kind in ("U", "B") for kind in ends]),
        }
        if own:
            given["priority"] = self.priorities(envs)
        if final and self.host.autoreset != "next_step":
            # garbage in the rows of environments that go on
            given["final_obs"] = torch.where(given["truncated"][:, None], -place, float("nan"))
        self.insert(**given)

    def any_keys(self) -> Tensor:
        """Keys, repeated ones, ineligible ones and some that are not live."""
        added = self.host.added
        keys = [self.random.randint(max(-2, added - self.host.capacity - 3), added + 2) for _ in range(20)]
        return torch.tensor(keys + keys[:5])

    def check_batch(self, batch: int) -> None:
        """Fail unless both draw the same starts, if there are enough."""
        newest, eligible = getattr(self.host.sampler, "newest", 0), self.host.stats().eligible
        assert self.tested.stats().eligible == eligible
        if eligible >= max(newest, 1):
            self.draw(max(min(batch, eligible), newest))


def live(twins: Steps, steps: int, end: float = 0.2, *, restless: float = 0.08) -> None:
    """Random steps, with everything else that can happen between them, compared one by one."""
    draw = twins.random
    for _ in range(steps):
        twins.add(end, final=draw.random() < 0.6, own=draw.random() < 0.4)
        twins.check()
        if draw.random() < 0.3:
            keys = twins.any_keys()
            twins.update(keys, twins.priorities(len(keys)))
            twins.check()
        if draw.random() < restless:
            twins.call("begin_episodes", torch.tensor([draw.random() < 0.5 for _ in range(twins.num_envs)]))
        if draw.random() < restless / 2:
            twins.call("clear")
        if draw.random() < 0.15:
            twins.check_batch(9)
    twins.check_batch(33)
    twins.check()


@thinned("name, mode", SAMPLERS, MODES)
def test_random_streams_leave_the_same_integers(name: str, mode: str, device: str) -> None:
    draw = random.Random(f"{name} {mode}")
    num_envs, turn = draw.randint(1, 7), draw.choice((2, 3, 5, 9))
    settings = {"stack": draw.randint(1, min(5, turn)), "n_step": draw.randint(1, min(5, turn)), **MODES[mode]}
    with guarded() as guards:
        twins = Steps(device, turn * num_envs + num_envs - 1, num_envs, SAMPLERS[name], settings, **settings)
        assert len(guards) >= 10
        live(twins, turn + 9)


@pytest.mark.parametrize("num_envs", [1, 2, 5, 130])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_ring_of_one_step(autoreset: str, num_envs: int, device: str) -> None:
    """What the step before left lies in the very slots that are written."""
    with guarded():
        twins = Steps(device, num_envs, num_envs, EVERYTHING, num_envs, autoreset=autoreset)
        live(twins, 6, 0.4)


@pytest.mark.parametrize(
    "mode, name",
    [
        pytest.param(mode, ("running", "combined-everything")[place % 2], marks=() if place < 2 else pytest.mark.slow)
        for place, mode in enumerate(MODES)
    ],
)
def test_programs_as_small_as_on_a_gpu(mode: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes_of_a_gpu(monkeypatch)
    assert eligibility.envs_per_program(130, 4, True) == 64
    with guarded():
        twins = Steps(device, 600, 130, SAMPLERS[name], mode, stack=4, n_step=3, **MODES[mode])
        live(twins, 11, restless=0.2)


@thinned("autoreset, sizes", ["next_step", "same_step"], [(1, 40, 44), (40, 1, 44)])
def test_windows_and_stacks_longer_than_a_program_sees_at_once(
    autoreset: str, sizes: tuple[int, int, int], device: str
) -> None:
    stack, n_step, turn = sizes
    with guarded():
        settings = {"stack": stack, "n_step": n_step, "autoreset": autoreset}
        twins = Steps(device, 2 * turn, 2, SAMPLERS["combined-everything"], settings, **settings)
        for step in range(turn + 8):
            twins.add(0.02, final=True, own=twins.random.random() < 0.5)
            if step % 6 == 0 or step > turn:
                twins.check()
        assert twins.host.stats().eligible > 0
        twins.check_batch(20)


@pytest.mark.parametrize("num_envs, finals", [(5, 1), (130, 3), pytest.param(130, 40, marks=pytest.mark.slow)])
def test_final_observations_beyond_the_room_for_them(
    num_envs: int, finals: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go by the order of the environments, however many programs there are."""
    use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        settings = {"autoreset": "same_step", "final_capacity": finals}
        twins = Steps(device, 3 * num_envs, num_envs, Latest(), settings, **settings)
        kept = []
        for step in range(14):
            twins.add((0.0, 0.3, 1.0)[step % 3], final=step % 5 != 3)
            twins.check()
            kept.append(int((twins.tested._streams.streams.flags & Flag.FINAL != 0).sum()))
        assert 0 < max(kept) <= finals
        assert twins.tested._counters[Counter.FINALS] > finals
        twins.check_batch(num_envs)


def test_a_priority_that_is_not_finite_counts_as_none(device: str) -> None:
    """On the device nobody can raise; what comes with a dead step is not even looked at."""
    with guarded():
        twins = Steps(device, 20, 4, SAMPLERS["running"], 0)
        engine, mass = twins.tested._engine, twins.tested._state.rule.mass
        numbers = [4.0, float("nan"), float("inf"), 16.0]
        ends = [[False, False, False, True], [False] * 4]
        for terminated, given in zip(ends, (numbers, [1.0, 1.0, 1.0, float("nan")]), strict=True):
            values = {"obs": torch.zeros(4, 3), "action": torch.zeros(4, dtype=torch.int64), "reward": torch.zeros(4)}
            engine.add_step(
                {name: value.to(device) for name, value in values.items()},
                torch.tensor(terminated, device=device),
                torch.zeros(4, dtype=torch.bool, device=device),
                torch.tensor(given, dtype=torch.float64, device=device),
                None,
            )
        # the fourth ended at once, so its priority was the largest given before the others came to count
        assert twins.tested.masses()[:8].tolist() == [mass(p) for p in (4.0, 16.0, 16.0, 16.0)] + [0] * 4
        assert twins.tested.stats().rejected_priorities == 2
        check_sums(twins.tested._state.tree)


def test_an_update_never_wakes_a_start(device: str) -> None:
    with guarded():
        twins = Steps(device, 40, 4, EVERYTHING, 1, n_step=3)
        for _ in range(13):
            twins.add(0.2)
        before = twins.tested.masses()
        barred = [key for key in range(12, 52) if before[key % 40] == 0]
        top = int(twins.tested._counters[Counter.MAX_MASS])
        assert len(barred) >= 8
        twins.update(torch.tensor(barred * 2), torch.full((2 * len(barred),), 1e6))
        assert torch.equal(twins.tested.masses(), before)
        assert int(twins.tested._counters[Counter.MAX_MASS]) == top
        assert twins.tested.stats().stale_updates == 0
        twins.check()
