"""Kernels that put batches of a trajectory buffer together, against the host code: the same bits, none outside.

On CPU tensors the kernels are interpreted; on a GPU the same tests run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from devices import thinned
from guards import SENTINEL, Guards, guarded
from interpreted import INTERPRETED
from interpreted import kernel_device as kernel_device
from launches import use_sizes_of_a_gpu
from tolerances import close
from torch import Tensor

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops import frame_tiles
from gpu_replay.ops.counters import NO_MASS, Counter, HostWords, new_counters
from gpu_replay.ops.eligibility import Flag, powers_of
from gpu_replay.ops.frames import plan_gather_sequences, plan_gather_windows, shifts_from
from gpu_replay.ops.ring import Tile
from gpu_replay.ops.weights import PendingWeights, pending_weights

ACTION = {"action": Field((), torch.int64)}
SMALL = {"obs": Field((2,), torch.int16), **ACTION}
# of the random stream, where the words of shifts begin
BLOCK = 1000
# environments, steps of each in the ring, and steps that are added
Sizes = tuple[int, int, int]


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless both hold the same names, dtypes and bits, in the same order."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        if INTERPRETED and value.dtype == torch.bfloat16:
            assert close(found[name], value, "cut"), name
        else:
            assert torch.equal(found[name].cpu(), value), name


def values_of(field: Field, rows: int, generator: np.random.Generator) -> Tensor:
    """Rows of a dtype's own random values, none of them a sentinel."""
    shape = (rows, *field.shape)
    if field.dtype.is_floating_point:
        return torch.from_numpy(generator.standard_normal(shape)).to(field.dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (1, SENTINEL)}.get(field.dtype, (-100, 100))
    return torch.from_numpy(generator.integers(low, high, shape)).to(field.dtype)


class Streams:
    """A buffer of the host code that has seen random steps, and the same storage for the kernels."""

    def __init__(
        self, device: str, fields: Mapping[str, Field], sizes: Sizes = (3, 12, 40), end: float = 0.2, **settings: Any
    ) -> None:
        num_envs, steps, played = sizes
        self.buffer = TrajectoryReplayBuffer(
            num_envs * steps, num_envs, fields, sampler=Uniform(), device="cpu", seed=3, **settings
        )
        generator = np.random.default_rng(played)
        finals = [name for name in self.buffer._streams.observations if settings.get("autoreset") == "same_step"]
        for step in range(played):
            given = {name: values_of(field, num_envs, generator) for name, field in fields.items()}
            given["reward"] = generator.standard_normal(num_envs).astype(np.float32)
            given["terminated"] = generator.random(num_envs) < end / 2
            given["truncated"] = generator.random(num_envs) < end / 2
            if step % 7:
                given |= {f"final_{name}": values_of(fields[name], num_envs, generator) for name in finals}
            self.buffer.add(**given)
        self.host: Any = self.buffer._engine
        self.shape, host = self.buffer._shape, self.buffer._streams
        how = {name: getattr(host, name) for name in ("gamma", "padding", "random_shift")}
        self.storage = storage = TrajectoryStorage(self.shape, dict(fields), torch.device(device), **how)
        for mine, its in (
            *((storage.tensors[name], host.tensors[name]) for name in host.tensors),
            *((storage.finals[name], host.finals[name]) for name in host.finals),
            *((getattr(storage.streams, name), getattr(host.streams, name)) for name in ("flags", "depth", "final")),
        ):
            mine.copy_(its)
        self.powers = torch.from_numpy(powers_of(host.gamma, self.shape.n_step)).to(device)
        self.counters = new_counters(torch.device(device), seed=3)
        self.counters[Counter.ADDED] = self.buffer.added
        self.device = device

    def eligible(self, length: int = 1) -> np.ndarray:
        """Every slot that can be drawn, for windows of so many steps, thrice in random order."""
        slots = np.flatnonzero(self.host.draws.state.eligible.arrays[0][: self.shape.slots])
        oldest_first = (slots - self.buffer.added) % self.shape.slots
        slots = slots[oldest_first < self.shape.slots - (length - 1) * self.shape.num_envs]
        assert slots.size
        return np.random.default_rng(1).permutation(np.tile(slots, 3))

    def gather(
        self, starts: np.ndarray, length: int | None, shifted: bool, weighing: PendingWeights | None = None
    ) -> dict[str, Tensor]:
        """What the kernels read at these starts: transitions, or sequences of `length` steps."""
        given = torch.from_numpy(starts).to(self.device)
        words = torch.tensor([BLOCK], device=self.device) if shifted else None
        how = {"shifted": shifted, "weighed": weighing is not None}
        if length is None:
            gather = plan_gather_windows(self.storage, starts.size, self.powers, self.counters, **how)
        else:
            gather = plan_gather_sequences(self.storage, starts.size, length, self.powers, self.counters, **how)
        return gather(given, words, weighing)

    def check(self, length: int | None = None, *, shifted: bool = False) -> dict[str, Tensor]:
        """Compare what is read at every eligible start that has enough steps after it; returns the host's."""
        starts, before = self.eligible(length or 1), self.counters.tolist()
        shifts = shifts_from(HostWords(3).words(BLOCK, starts.size), self.storage.random_shift) if shifted else None
        host = self.host
        expected = host._transitions(starts, shifts) if length is None else host._sequences(starts, length, shifts)
        same(self.gather(starts, length, shifted), expected)
        # what weighs nothing moves nothing on
        assert self.counters.tolist() == before
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


@thinned("mode, n_step", MODES, range(1, 9))
def test_windows_and_stacks(mode: str, n_step: int, device: str, guards: Guards) -> None:
    # every length with two of the stacks, every stack with half of the lengths
    for stack in (1, 4) if n_step % 2 else (2, 8):
        streams = Streams(device, SMALL, (3, 20, 55), 0.25, stack=stack, n_step=n_step, **MODES[mode])
        expected = streams.check()
        assert bool((expected["discount"] > 0).any())
        assert bool(expected["terminated"].any())
    if n_step > 1 and "finals" not in mode and mode != "disabled":
        assert bool(expected["truncated"].any())
    guards.check()


@pytest.mark.parametrize("n_step", [9, 20])
def test_windows_of_more_steps_than_are_loaded_at_once(n_step: int, device: str, guards: Guards) -> None:
    for mode in ("next_step", "same_step"):
        streams = Streams(device, SMALL, (3, 60, 130), 0.12, n_step=n_step, **MODES[mode])
        expected = streams.check()
        # windows that are full, and such that end early
        assert len(expected["discount"].unique()) > 2


@thinned("mode, sizes", MODES, [(1, 1, 1), (1, 2, 9), (5, 3, 4), (2, 7, 5), (129, 4, 11)])
def test_small_rings(mode: str, sizes: Sizes, device: str, guards: Guards) -> None:
    """Windows and stacks as long as the ring, which end early."""
    for stack, n_step in ((1, 1), (3, 2), (5, 8), (2, 20)):
        stack, n_step = min(stack, sizes[1]), min(n_step, sizes[1])
        streams = Streams(device, SMALL, sizes, 0.6, stack=stack, n_step=n_step, **MODES[mode])
        if streams.buffer.stats().eligible:
            streams.check()


OBSERVATIONS = {
    **{f"bytes {width}": Field((width,), torch.uint8) for width in (1, 2, 127, 128, 129)},
    "42 x 42": Field((42, 42), torch.uint8),
    "84 x 84": Field((84, 84), torch.uint8),
    "to half": Field((84, 84), torch.uint8, torch.float16, 1 / 255),
    "to bfloat16": Field((42, 42), torch.uint8, torch.bfloat16, 1 / 255),
    "to float": Field((3, 7, 5), torch.uint8, torch.float32, 1 / 255),
    "scalars": Field((), torch.float32),
    "vectors": Field((4,), torch.float32),
    "odd to half": Field((17,), torch.float32, torch.float16),
    "brain": Field((9,), torch.bfloat16, torch.float32),
    "brain scaled": Field((9,), torch.bfloat16, None, 3.0),
    "doubles": Field((3,), torch.float64, torch.float32, -0.1),
    "long": Field((2,), torch.int64, torch.float64, 0.5),
    "flags": Field((6,), torch.bool, torch.float32),
}


# large frames, and many programs of few bytes, take the interpreter seconds
QUICK = [(name, False) for name in OBSERVATIONS if name not in ("84 x 84", "42 x 42", "to half", "to bfloat16")]
QUICK += [("to float", True)]


@pytest.mark.parametrize(
    "name, on_gpu",
    [
        pytest.param(name, on_gpu, id=f"{name}{', sizes of a gpu' * on_gpu}", marks=() if quick else pytest.mark.slow)
        for name, on_gpu, quick in ((*each, each in QUICK) for each in product(OBSERVATIONS, (False, True)))
    ],
)
def test_observations(name: str, on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = OBSERVATIONS[name]
    if on_gpu:
        use_sizes_of_a_gpu(monkeypatch)
    small: dict[str, Any] = {"sizes": (2, 6, 14), "end": 0.5} if on_gpu else {}
    with guarded() as guards:
        for mode in ("next_step", "same_step, zeros"):
            streams = Streams(device, {"obs": field, **ACTION}, stack=3, n_step=2, **small, **MODES[mode])
            streams.check()
            streams.check(3)
        guards.check()


@pytest.mark.parametrize("together", [2, 3])
def test_pieces_that_a_program_moves_one_after_the_other(
    together: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four or five pieces of a frame, so that the last program has fewer."""
    field = Field((10 + 3 * together,), torch.uint8, torch.float32, 0.25)
    tile = Tile(2, 4, -(-field.elements // 4))
    monkeypatch.setattr(frame_tiles, "frame_tile", lambda *arguments: tile)
    monkeypatch.setattr(frame_tiles, "pieces_together", lambda *arguments: together)
    with guarded() as guards:
        streams = Streams(device, {"obs": field, **ACTION}, (2, 6, 14), 0.5, stack=3, **MODES["same_step, zeros"])
        streams.check()
        guards.check()


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
    streams = Streams(device, fields, stack=2, n_step=3, random_shift=2, **MODES[mode])
    streams.check()
    streams.check(shifted=True)
    streams.check(4, shifted=True)


@thinned(
    "field, most",
    [Field((5, 6), torch.uint8), Field((3, 9, 4), torch.uint8, torch.float32, 1 / 255), Field((1, 1), torch.int32)],
    [1, 7],
)
def test_random_shifts(field: Field, most: int, device: str, guards: Guards) -> None:
    for stack in (1, 3):
        for mode in ("next_step", "same_step, zeros"):
            streams = Streams(device, {"obs": field, **ACTION}, stack=stack, random_shift=most, **MODES[mode])
            plain, shifted = streams.check(), streams.check(shifted=True)
            if field.elements > 1:
                assert not torch.equal(plain["obs"], shifted["obs"])
            streams.check(2, shifted=True)


@pytest.mark.parametrize("mode", MODES)
def test_sequences(mode: str, device: str, guards: Guards) -> None:
    for stack, length in ((1, 1), (1, 20), (4, 7), (2, 19)):
        streams = Streams(device, SMALL, (3, 20, 55), 0.1, stack=stack, **MODES[mode])
        streams.buffer.begin_episodes()
        expected = streams.check(length)
        assert length == 1 or not bool(expected["mask"].all())


@pytest.mark.parametrize("length", [None, 1, 3], ids=["windows", "steps", "sequences"])
def test_the_launch_that_weighs_shifts_pictures_as_one_that_does_not(
    length: int | None, device: str, guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves the random stream on, by programs that run before those that look up their words."""
    use_sizes_of_a_gpu(monkeypatch)
    streams = Streams(device, {"obs": Field((5, 6), torch.uint8), **ACTION}, stack=2, random_shift=2)
    starts = streams.eligible(length or 1)
    batch, masses = starts.size, torch.arange(starts.size, device=device) % 3 * 4
    expected = streams.gather(starts, length, True)
    streams.counters[Counter.LOWEST], streams.counters[Counter.RANDOM] = 4, BLOCK
    weighing = pending_weights(masses, streams.counters, None, 0.5, batch, batch)
    same(streams.gather(starts, length, True, weighing), expected)
    assert close(weighing.weight, [0.5**0.5 if mass == 8 else 1.0 for mass in masses.tolist()], "weight")
    moved = [int(streams.counters[place]) for place in (Counter.STEP, Counter.TICKET, Counter.LOWEST, Counter.RANDOM)]
    assert moved == [1, 0, NO_MASS, BLOCK + 2 * -(-batch // 4)]


def test_what_means_nothing_is_still_read_inside(device: str, guards: Guards) -> None:
    """A graph replayed after a `clear` draws starts that are not eligible, of depths that the ring cannot hold."""
    fields = {"obs": Field((3,), torch.uint8), **ACTION}
    streams = Streams(device, fields, (2, 8, 24), stack=8, n_step=7, autoreset="same_step")
    streams.storage.streams.depth.fill_(1000)
    for flags in (0, Flag.TRUNCATED, Flag.TERMINATED):
        streams.storage.streams.flags.fill_(flags)
        found = streams.gather(np.arange(6), None, False)
        assert all(int(found[name].max()) < SENTINEL for name in ("obs", "next_obs"))
        assert bool(found["reward"].isfinite().all())
