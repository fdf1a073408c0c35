"""Kernels that put batches of a trajectory buffer together, against the host code: the same bits, none outside.

The newest of all starts that can be drawn are all of them, so that a batch has every window. On CPU tensors the kernels
are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from guards import SENTINEL
from hindsight_oracle import ACHIEVED, DESIRED, GOALS, hindsight, reward_of
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from programs import SAMPLERS
from torch import Tensor
from twins import FIELDS, Twins, check_batches, values_of

from gpu_replay import Batch, Field, Latest, Proportional, Sequences, TrajectoryReplayBuffer
from gpu_replay.ops import windows
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.hindsight import goal_sums, make_choose_goals
from gpu_replay.ops.ring import Tile
from gpu_replay.ops.steps import Flag

# nothing is written outside
pytestmark = pytest.mark.usefixtures("guards")
ACTION = {"action": Field((), torch.int64)}
SMALL = {"obs": Field((2,), torch.int16), **ACTION}
# environments, steps of each in the ring, and steps that are added
Sizes = tuple[int, int, int]


class Streams(Twins):
    """A buffer of the host code that has seen random steps, and one of the kernels with the same state."""

    def __init__(
        self, device: str, fields: Mapping[str, Field], sizes: Sizes = (3, 12, 40), end: float = 0.2, **settings: Any
    ) -> None:
        envs, steps, played = sizes
        known = {"autoreset": "next_step", "sampler": Latest(), "seed": 3, **settings}
        super().__init__(
            lambda place: TrajectoryReplayBuffer(envs * steps, envs, fields, device=place, **known), device
        )
        self.fields, self.end, self.generator = fields, end, np.random.default_rng(played)
        for number in range(played):
            self.host.add(**self.step(number))
        self.tested.load_state_dict(self.host.state_dict())

    def step(self, number: int) -> dict[str, Tensor]:
        """The next step of all environments, most with final observations."""
        envs, draw = self.host.num_envs, self.generator
        given = {name: values_of(field, envs, draw) for name, field in self.fields.items()}
        given["reward"] = torch.from_numpy(draw.standard_normal(envs).astype(np.float32))
        given |= {name: torch.from_numpy(draw.random(envs) < self.end / 2) for name in ("terminated", "truncated")}
        if number % 7 and self.host.autoreset == "same_step":
            names = self.host._streams.observations
            given |= {f"final_{name}": values_of(self.fields[name], envs, draw) for name in names}
        return given

    def compare(self) -> Batch:
        """Compare what is read at every start; returns the host's."""
        count = self.host._engine.count_at_least(10**9)
        assert count > 0
        expected, found = self.call("sample", count)
        check_batches(found, expected)
        assert self.tested._counters.tolist() == self.host._counters.tolist()
        return expected


MODES: dict[str, dict[str, Any]] = {
    "next_step": {},
    "next_step, zeros": {"padding": "zero"},
    "same_step": {"autoreset": "same_step"},
    "same_step, zeros": {"autoreset": "same_step", "padding": "zero"},
    "same_step, few finals": {"autoreset": "same_step", "final_capacity": 3},
    "same_step, no finals": {"autoreset": "same_step", "final_capacity": 0},
    "disabled": {"autoreset": "disabled"},
}


# sizes of the ring, the share of steps that end, stack, steps of a window
SHAPES: dict[str, tuple[Sizes, float, int, int]] = {
    # every length of a window, each with some stack
    **{f"{n_step} steps": ((3, 20, 55), 0.25, (1, 2, 4, 8)[n_step % 4], n_step) for n_step in range(1, 9)},
    # more steps than are loaded at once
    "9 steps": ((3, 60, 130), 0.12, 1, 9),
    "20 steps": ((3, 60, 130), 0.12, 1, 20),
    # as long as the ring, or nearly
    "two in all": ((1, 2, 9), 0.6, 2, 2),
    "three of four": ((5, 4, 4), 0.6, 3, 2),
    "seven in all": ((2, 7, 5), 0.6, 5, 7),
    "wide": ((129, 4, 11), 0.6, 2, 3),
}


@thinned("mode, shape", MODES, SHAPES)
def test_windows_and_stacks(mode: str, shape: str, device: str) -> None:
    sizes, end, stack, n_step = SHAPES[shape]
    streams = Streams(device, SMALL, sizes, end, stack=stack, n_step=n_step, **MODES[mode])
    if not streams.host.stats().eligible:
        assert sizes[0] * sizes[1] < 20
        return
    expected = streams.compare()
    if end < 0.6:
        assert bool((expected["discount"] > 0).any())
        assert bool(expected["terminated"].any())
        if n_step > 1 and "finals" not in mode and mode != "disabled":
            # windows that are full, and such that end early
            assert bool(expected["truncated"].any())
            assert len(expected["discount"].unique()) > 2


# in the interpreter seconds each
LARGE = ("84 x 84", "42 x 42", "to half", "to bfloat16")


@thinned(
    "name, mode, rows",
    [name for name in FIELDS if name not in LARGE],
    ["next_step", "same_step, zeros"],
    [None, Sequences(3)],
)
def test_observations(name: str, mode: str, rows: Sequences | None, device: str) -> None:
    fields, settings = {"obs": FIELDS[name], **ACTION}, MODES[mode]
    Streams(device, fields, (2, 9, 24), 0.3, stack=3, n_step=2, sequences=rows, **settings).compare()


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_observations_of_all_sizes(name: str, on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    for mode in ("next_step", "same_step, zeros"):
        for rows in (None, Sequences(3)):
            test_observations(name, mode, rows, device)


def test_pieces_that_a_program_moves_one_after_the_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pieces of a frame, so that the last program has fewer."""
    field = Field((19,), torch.uint8, torch.float32, 0.25)
    monkeypatch.setattr(windows, "frame_tile", lambda *arguments: Tile(2, 4, 5))
    monkeypatch.setattr(windows, "pieces_together", lambda *arguments: 3)
    Streams(device, {"obs": field, **ACTION}, (2, 6, 14), 0.5, stack=3, **MODES["same_step, zeros"]).compare()


@pytest.mark.parametrize("mode", ["next_step", "same_step, zeros"])
def test_several_observations_and_other_fields(mode: str, device: str) -> None:
    fields = {
        "action": Field((3,), torch.float32),
        "obs.picture": Field((9, 10), torch.uint8, torch.float16, 1 / 255),
        "note": Field((129,), torch.int16, torch.float32),
        "obs.speed": Field((3,), torch.float32),
        "done": Field((), torch.bool),
        "obs.number": Field((), torch.int64),
    }
    streams = Streams(device, fields, stack=2, n_step=3, **MODES[mode])
    streams.compare()


@thinned("mode, stack, length", MODES, [1, 4], [1, 7, 20])
def test_sequences(mode: str, stack: int, length: int, device: str) -> None:
    # as long as the ring allows
    rows = Sequences(min(length, 20 - stack))
    streams = Streams(device, SMALL, (3, 20, 55), 0.1, stack=stack, sequences=rows, **MODES[mode])
    streams.call("begin_episodes")
    expected = streams.compare()
    assert length == 1 or not bool(expected["mask"].all())


STRIDES = (Sequences(4, strict=True), Sequences(2, strict=True, stride=3), Sequences(3, stride=2))


@thinned("name, rows", SAMPLERS, STRIDES)
def test_sequences_of_every_sampler(name: str, rows: Sequences, device: str) -> None:
    settings = {"sampler": SAMPLERS[name], "stack": 2, "n_step": 2, "sequences": rows, **MODES["same_step"]}
    streams = Streams(device, SMALL, (3, 20, 55), 0.1, **settings)
    for count in (3, 5):
        streams.draw(count)
    streams.check()


# mode, stack, steps of a window, rows: every way in which steps are settled, of one step and of more than a window has
SETTLED: dict[str, tuple[str, int, int, Sequences]] = {
    "reset steps": ("next_step", 2, 3, Sequences(4)),
    "reset steps, strict": ("next_step", 1, 2, Sequences(3, strict=True)),
    "reset steps, of one step": ("next_step", 3, 2, Sequences(1, strict=True, stride=2)),
    "some finals": ("same_step", 2, 3, Sequences(2, stride=3)),
    "few finals, strict": ("same_step, few finals", 3, 4, Sequences(2, strict=True)),
    "no finals, of one step": ("same_step, no finals", 1, 3, Sequences(1)),
    "no finals": ("disabled", 2, 1, Sequences(5, strict=True, stride=2)),
}


@thinned("case, on_gpu", SETTLED, [False, True])
def test_sequences_of_steps_that_kernels_add(
    case: str, on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, starts and masses are those of the host after every step, with streams that break off."""
    mode, stack, n_step, rows = SETTLED[case]
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    ring = rows.length + n_step + stack + 2
    settings = {"stack": stack, "n_step": n_step, "sequences": rows, **MODES[mode]}
    sampler = Proportional(alpha=1.0, eps=0.0)
    streams = Streams(device, SMALL, (5, ring, 0), 0.24, sampler=sampler, **settings)
    generator = np.random.default_rng(len(case))
    for step in range(9 * ring // 4):
        given = streams.step(step)
        if step % 4 == 1:
            given["priority"] = torch.from_numpy(2.0 ** generator.integers(-6, 9, 5))
        if step % 5 == 2:
            streams.call("begin_episodes", torch.from_numpy(generator.random(5) < 0.5))
        # the ring has gone round by then
        if step == 5 * ring // 4:
            streams.call("clear")
        streams.insert(**given)
        streams.check()
    assert streams.host.stats().eligible > 0
    streams.compare()


def test_what_means_nothing_is_still_read_inside(device: str) -> None:
    """A graph replayed after a `clear` draws starts that are not eligible, of depths that the ring cannot hold."""
    fields = {"obs": Field((3,), torch.uint8), **ACTION}
    buffer = Streams(device, fields, (2, 8, 24), stack=8, n_step=7, autoreset="same_step").tested
    streams = buffer._streams.streams
    streams.depth.fill_(1000)
    for flags in (0, Flag.TRUNCATED, Flag.TERMINATED):
        streams.flags.fill_(flags)
        found = buffer._engine.sample(6, None)
        assert all(int(found[name].max()) < SENTINEL for name in ("obs", "next_obs"))
        assert bool(found["reward"].isfinite().all())


# goals


def test_goals_are_cast_and_scaled_alike(device: str) -> None:
    goal = Field((2,), torch.int16, torch.float16, 0.25)

    def reward_fn(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        assert achieved.dtype == desired.dtype == torch.float16
        return reward_of(achieved, desired)

    settings = {"stack": 2, "relabel": hindsight(reward_fn=reward_fn)}
    for mode in ("next_step", "same_step"):
        fields = {**GOALS, ACHIEVED: goal, DESIRED: goal}
        Streams(device, fields, (6, 5, 7), 0.25, **settings, **MODES[mode]).draw(9, loose=())


def test_a_replayed_draw_of_what_is_gone_stays_inside(device: str) -> None:
    """A graph replayed after a `clear` chooses goals for starts that are not eligible, whatever is known of them."""
    generator = np.random.default_rng(0)
    buffer = Streams(device, GOALS, (3, 6, 8), 0.25, relabel=hindsight(), **MODES["same_step"]).tested
    streams, slots = buffer._streams.streams, buffer.capacity
    limits = dict.fromkeys(("episode_length", "clipped_length"), (-1, 2**31 - 1))
    limits |= {"depth": (0, 2**31 - 1), "final": (0, 2**31 - 1), "flags": (0, 32)}
    for added, strategy in ((0, "future"), (18, "final"), (33, "episode"), (7, "geometric")):
        buffer._counters[Counter.ADDED] = buffer._counters[Counter.FIRST] = added
        for name, (low, high) in limits.items():
            tensor = getattr(streams, name)
            tensor.copy_(torch.from_numpy(generator.integers(low, high, tensor.shape)).to(tensor.dtype))
        drawn = torch.arange(2 * slots, device=device) % slots
        sums = torch.from_numpy(goal_sums(0.9 if strategy == "geometric" else None, slots // 3)).to(device)
        chosen = make_choose_goals(streams, 2 * slots, buffer._counters, 36, strategy, sums, 0)(drawn)
        assert sorted(chosen.rows.tolist()) == list(range(36))
        assert 0 <= int(chosen.slots.min()) <= int(chosen.slots.max()) < slots
        assert int(chosen.places.min()) >= -1
        assert int(chosen.places.max()) < streams.shape.finals
