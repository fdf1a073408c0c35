"""Kernels that follow episodes and choose goals in hindsight, against the host code: the same bits, none outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from guards import guarded
from hindsight_oracle import ACHIEVED, DESIRED, GOALS, MODES, goal_step, hindsight, reward_of
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from trajectory_pair import columns
from twins import Twins

from gpu_replay import Combined, Field, Latest, Proportional, TrajectoryReplayBuffer, Uniform
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Streams
from gpu_replay.ops.hindsight import plan_choose_goals

SAMPLERS: dict[str, Any] = {
    "uniform": Uniform(replacement=True),
    "proportional": Proportional(alpha=0.5, eps=0.0),
    "latest": Latest(),
    "combined": Combined(Proportional(alpha=0.5, eps=0.0, normalize="buffer"), newest=2),
}
STRATEGIES = ("future", "final", "episode")
STREAMS = ("flags", "depth", "final", "owner", "spans", "parted")


class Steps(Twins):
    """Both live through the same."""

    def __init__(
        self, device: str, num_envs: int, steps: int, seed: object, fields: dict[str, Field] = GOALS, **settings: Any
    ) -> None:
        self.random, self.num_envs, self.fields = random.Random(str(seed)), num_envs, fields
        super().__init__(
            lambda place: TrajectoryReplayBuffer(num_envs * steps, num_envs, fields, device=place, seed=5, **settings),
            device,
        )

    def live(self, calls: int, end: float) -> None:
        """Steps of all environments; now and then a `clear` or streams that are broken off."""
        for _ in range(calls):
            chance = self.random.random()
            mask = torch.tensor([self.random.random() < 0.4 for _ in range(self.num_envs)])
            number = self.host.added // self.num_envs
            final = self.random.random() < 0.7
            ends = [self.random.choice(("T", "U", "TU")) if self.random.random() < end else "" for _ in mask]
            steps = [goal_step(number, env, end=each, final=final, fields=self.fields) for env, each in enumerate(ends)]
            if chance < 0.04:
                self.call("clear")
            elif chance < 0.12:
                self.call("begin_episodes", mask)
            given = {name: torch.from_numpy(value) for name, value in columns(steps, self.fields).items()}
            if self.host._shape.next_step:
                # such buffers take none
                given = {name: value for name, value in given.items() if not name.startswith("final_")}
            self.insert(**given)


def sizes(full: bool) -> list[tuple[int, int, float, int]]:
    """Environments, steps of the ring, share of endings, and steps to play."""
    return [(1, 1, 0.5, 5), (1, 7, 0.2, 40), (3, 13, 0.1, 60), (130, 4, 0.3, 30)] if full else [(3, 5, 0.3, 14)]


@thinned("mode, on_gpu", MODES, [False, True])
def test_streams_are_followed_as_on_the_host(
    mode: str, on_gpu: bool, full: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    with guarded() as guards:
        for num_envs, steps, end, played in [(300, 2, 0.3, 4)] if on_gpu else [*sizes(full), (1, 1, 0.5, 3)]:
            settings = {"relabel": hindsight(), "sampler": SAMPLERS["uniform"], **MODES[mode]}
            twins = Steps(device, num_envs, steps, (mode, num_envs), **settings)
            for _ in range(played):
                twins.live(1, end)
                twins.check()
        guards.check()


@pytest.mark.parametrize(
    ("mode", "strategy", "on_gpu"),
    [
        *((mode, strategy, False) for mode, strategy in zip(MODES, cycle(STRATEGIES), strict=False)),
        ("same_step", "episode", True),
    ],
)
def test_goals_are_those_of_the_host(
    mode: str, strategy: Any, on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    with guarded() as guards:
        for num_envs, steps, end in (
            [(3, 12, 0.12)] if on_gpu else [(1, 1, 0.5), (1, 7, 0.2), (3, 13, 0.1), (40, 4, 0.3)]
        ):
            settings = {"relabel": hindsight(strategy), "sampler": SAMPLERS["uniform"], **MODES[mode]}
            host = Steps("", num_envs, steps, (mode, strategy), **settings)
            shape = host.host._shape
            for batch in (400 if on_gpu else 150, 1, 9):
                host.live(host.random.randint(1, 2 * steps + 2), end)
                marks = host.host._state.eligible_tree
                slots = np.flatnonzero(marks.masses[: shape.slots].numpy())
                if not slots.size:
                    continue
                first = host.host.added - shape.slots
                keys = torch.from_numpy(first + (np.resize(slots, batch) - first) % shape.slots)
                streams = Streams(shape, torch.device(device))
                for name in STREAMS:
                    getattr(streams, name).copy_(getattr(host.host._streams.streams, name))
                counters = host.host._counters.clone().to(device)
                count = -(-batch * 2 // 3)
                found = plan_choose_goals(streams, batch, counters, count, strategy)(keys.to(device))
                expected = host.host._engine.choose_goals(keys, count, strategy)
                assert torch.equal(found.rows.cpu(), expected.rows)
                assert torch.equal(found.known.cpu(), expected.known)
                # where a goal is not known, any place inside will do
                assert 0 <= int(found.slots.min()) <= int(found.slots.max()) < shape.slots
                assert torch.equal(found.slots.cpu()[expected.known], expected.slots[expected.known])
                assert (found.places is None) == (expected.places is None)
                if found.places is not None and expected.places is not None:
                    assert torch.equal(found.places.cpu()[expected.known], expected.places[expected.known])
                assert counters.tolist() == host.host._counters.tolist()
        guards.check()


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_goes_on_alike(name: str, device: str) -> None:
    """The words of a draw, of shifts and of goals follow each other."""
    strategy = "final" if name == "latest" else "future"
    fields = {**GOALS, "obs.picture": Field((4, 5), torch.int16)}
    settings = {"sampler": SAMPLERS[name], "relabel": hindsight(strategy, 0.5), "random_shift": 2}
    twins = Steps(device, 4, 5, name, fields, **settings)
    twins.live(6, 0.1)
    twins.draw(9, loose=())
    twins.draw(4, loose=())
    twins.check()


def test_goals_are_cast_and_scaled_alike(device: str) -> None:
    goal = Field((2,), torch.int16, torch.float16, 0.25)
    fields = {**GOALS, ACHIEVED: goal, DESIRED: goal}

    def reward_fn(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        assert achieved.dtype == desired.dtype == torch.float16
        return reward_of(achieved, desired)

    for mode in ("next_step", "same_step"):
        twins = Steps(device, 6, 5, mode, fields, stack=2, relabel=hindsight(reward_fn=reward_fn), **MODES[mode])
        twins.live(5, 0.3)
        twins.draw(9, loose=())


def test_a_replayed_draw_of_what_is_gone_stays_inside(device: str) -> None:
    """A graph replayed after a `clear` chooses goals for starts that are not eligible, whatever is known of them."""
    generator = np.random.default_rng(0)
    for mode in ("next_step", "same_step"):
        twins = Steps(device, 3, 6, mode, relabel=hindsight(), **MODES[mode])
        buffer = twins.tested
        streams, slots = buffer._streams.streams, buffer.capacity
        for added in (0, 18, 33):
            buffer._counters[Counter.ADDED] = added
            buffer._counters[Counter.FIRST] = added
            for strategy in STRATEGIES:
                for tensor, low, high in (
                    (streams.depth, 0, 2**31 - 1),
                    (streams.spans, -1, 2**31 - 1),
                    (streams.parted, -1, 2**31 - 1),
                    (streams.flags, 0, 32),
                    (streams.final, 0, 2**31 - 1),
                ):
                    values = generator.integers(low, high, tensor.shape)
                    tensor.copy_(torch.from_numpy(values).to(tensor.dtype))
                keys = torch.arange(-slots, slots, device=device)
                chosen = plan_choose_goals(streams, 2 * slots, buffer._counters, 36, strategy)(keys)
                assert sorted(chosen.rows.tolist()) == list(range(36))
                assert 0 <= int(chosen.slots.min()) <= int(chosen.slots.max()) < slots
                if chosen.places is not None:
                    assert int(chosen.places.min()) >= -1
                    assert int(chosen.places.max()) < streams.shape.finals
