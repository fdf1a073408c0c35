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
from guards import SENTINEL, Guards, guarded
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from programs import SAMPLERS
from twins import FIELDS, Twins, check_batches, values_of

from gpu_replay import Batch, Field, Latest, TrajectoryReplayBuffer
from gpu_replay.ops import frame_tiles
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag
from gpu_replay.ops.ring import Tile

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
        generator = np.random.default_rng(played)
        finals = [name for name in self.host._streams.observations if settings.get("autoreset") == "same_step"]
        for step in range(played):
            given = {name: values_of(field, envs, generator) for name, field in fields.items()}
            given["reward"] = generator.standard_normal(envs).astype(np.float32)
            given |= {name: generator.random(envs) < end / 2 for name in ("terminated", "truncated")}
            if step % 7:
                given |= {f"final_{name}": values_of(fields[name], envs, generator) for name in finals}
            self.host.add(**given)
        self.tested.load_state_dict(self.host.state_dict())

    def compare(self, length: int | None = None) -> Batch:
        """Compare what is read at every start that has enough steps after it; returns the host's."""
        count = self.host._engine.count_at_least(10**9, ((length or 1) - 1) * self.host.num_envs)
        assert count
        given = ("sample", count) if length is None else ("sample_sequences", count, length)
        expected, found = self.call(*given)
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
def test_windows_and_stacks(mode: str, shape: str, device: str, guards: Guards) -> None:
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in FIELDS]
)
@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_observations(name: str, on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    with guarded():
        for mode in ("next_step", "same_step, zeros"):
            fields = {"obs": FIELDS[name], **ACTION}
            streams = Streams(device, fields, (2, 6, 14), 0.5, stack=3, n_step=2, **MODES[mode])
            streams.compare()
            streams.compare(3)


def test_pieces_that_a_program_moves_one_after_the_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pieces of a frame, so that the last program has fewer."""
    field = Field((19,), torch.uint8, torch.float32, 0.25)
    monkeypatch.setattr(frame_tiles, "frame_tile", lambda *arguments: Tile(2, 4, 5))
    monkeypatch.setattr(frame_tiles, "pieces_together", lambda *arguments: 3)
    with guarded():
        Streams(device, {"obs": field, **ACTION}, (2, 6, 14), 0.5, stack=3, **MODES["same_step, zeros"]).compare()


@pytest.mark.parametrize("mode", ["next_step", "same_step, zeros"])
def test_several_observations_and_other_fields(mode: str, device: str, guards: Guards) -> None:
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
    streams.compare(4)


@thinned("mode, stack, length", MODES, [1, 4], [1, 7, 20])
def test_sequences(mode: str, stack: int, length: int, device: str, guards: Guards) -> None:
    # as long as the ring allows
    length = min(length, 21 - stack)
    streams = Streams(device, SMALL, (3, 20, 55), 0.1, stack=stack, **MODES[mode])
    streams.call("begin_episodes")
    expected = streams.compare(length)
    assert length == 1 or not bool(expected["mask"].all())


# one that walks, and one each by mass and by rank
REDRAWN = ("uniform", "annealed", "rank")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in REDRAWN else pytest.mark.slow) for name in SAMPLERS]
)
def test_sequences_that_fit_are_those_of_the_host(name: str, device: str, guards: Guards) -> None:
    """Kernels and host draw again the same, and mark nothing outside where they find none."""
    for length, strict, stride, end in ((4, True, 1, 0.1), (2, True, 3, 0.3), (3, False, 2, 0.1)):
        settings = {"sampler": SAMPLERS[name], "stack": 2, "n_step": 2, **MODES["same_step"]}
        streams = Streams(device, SMALL, (3, 20, 55), end, **settings)
        for count in (3, 5):
            expected, found = streams.call("sample_sequences", count, length, 0, strict=strict, stride=stride)
            check_batches(found, expected)
            counts = [buffer._counters[[Counter.RANDOM, Counter.STEP]].tolist() for buffer in streams.both]
            assert counts[0] == counts[1]
    tested = streams.tested
    tested._streams.streams.depth.zero_()
    found = tested.sample_sequences(3, 4, strict=True)
    assert found.key.tolist() == [-1] * 3
    assert found.weight.tolist() == found.probability.tolist() == [0.0] * 3
    assert not found.mask.any()
    assert tested._counters[Counter.STEP] == streams.host._counters[Counter.STEP] + 1


def test_the_newest_sequences_that_fit_may_begin_many_rows_back(device: str, guards: Guards) -> None:
    """All environments began an episode that is shorter than a sequence."""
    streams = Streams(device, SMALL, (70, 12, 8), 0.0)
    streams.call("begin_episodes")
    for _ in range(3):
        step = {"obs": torch.zeros(70, 2, dtype=torch.int16), "action": torch.zeros(70, dtype=torch.int64)}
        streams.insert(**step, reward=torch.zeros(70), terminated=torch.zeros(70) > 0, truncated=torch.zeros(70) > 0)
    expected, found = streams.call("sample_sequences", 3, 4, strict=True)
    check_batches(found, expected)
    assert found.key.tolist() == [5 * 70 - 3, 5 * 70 - 2, 5 * 70 - 1]


def test_what_means_nothing_is_still_read_inside(device: str, guards: Guards) -> None:
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
