"""Buffers on a GPU beside those of the host code, of transitions and of steps; graphs, waits and threads."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import programs
import torch
from torch import Tensor
from twins import Twins

from gpu_replay import Field, Hindsight, LinearSchedule, Proportional, ReplayBuffer, Sequences, TrajectoryReplayBuffer
from gpu_replay.graphs.capture import capture_into

FIELDS = {"x": Field((4,), torch.float32), "n": Field((), torch.int64)}
NUMBER = {"n": FIELDS["n"]}
STEP_FIELDS = {
    "obs": Field((12, 12), torch.uint8),
    "action": Field((), torch.int64),
    "note": Field((3,), torch.float32),
}
EXACT = programs.SAMPLERS["combined-proportional"].base
EVERYTHING = Proportional(1.0, LinearSchedule(0.4, 1.0, 30), 0.0, 2.0**12, initial="stored", normalize="buffer")
SAMPLERS: dict[str, Any] = {**programs.SAMPLERS, "everything": EVERYTHING}
GOAL_FIELDS = {f"obs.{name}": Field((2,), torch.float32) for name in ("achieved_goal", "desired_goal")} | {
    "action": STEP_FIELDS["action"]
}


def distance(achieved: Tensor, desired: Tensor) -> Tensor:
    """A reward of whole numbers, which no device rounds."""
    return (achieved - desired).abs().sum(-1)


# of buffers of steps
MODES: dict[str, dict[str, Any]] = {
    "next_step": {"autoreset": "next_step", "stack": 4, "n_step": 3},
    "same_step": {"autoreset": "same_step", "stack": 3, "n_step": 5, "padding": "zero"},
    "few finals": {"autoreset": "disabled", "stack": 1, "n_step": 2, "final_capacity": 9},
    "sequences": {"autoreset": "same_step", "stack": 2, "n_step": 2, "sequences": Sequences(3)},
    "strict": {"autoreset": "disabled", "n_step": 2, "sequences": Sequences(2, strict=True)},
    "goals": {"autoreset": "same_step", "relabel": Hindsight(reward_fn=distance, ratio=0.5)},
}
# fields of the last ones lie in pinned memory of the host
KINDS = ("transitions", *MODES, "pinned", "pinned steps")
# every sampler, every kind, few of their pairs
CASES = [
    (kind, name)
    for kind in KINDS
    for name in (SAMPLERS if kind in ("transitions", "next_step") else ("uniform", "everything", "combined-rank"))
]


def amount(on_a_gpu: int, rehearsed: int) -> int:
    """How much to do; where kernels are interpreted, see rehearsal.py, less."""
    return rehearsed if "rehearsal" in torch.cuda.get_device_name() else on_a_gpu


def powers(keys: Tensor) -> Tensor:
    """A priority for each key, a power of two from 2**-4 to 2**11, without waiting."""
    return torch.bitwise_left_shift(torch.ones_like(keys), (keys * 7919) % 16).double() / 16


class OnGpu(Twins):
    """`gpu` and `host`, of transitions or of steps of `rows` environments; each row has its key in every value."""

    def __init__(
        self, capacity: int, rows: int, sampler: Any, kind: str = "transitions", *, every: int = 13, **more: Any
    ) -> None:
        self.kind, self.rows, self.every = kind, rows, every
        self.steps = kind not in ("transitions", "pinned")
        settings = {"autoreset": "next_step", **MODES.get(kind.replace("pinned steps", "same_step"), {}), **more}

        def make(place: str) -> ReplayBuffer | TrajectoryReplayBuffer:
            named: dict[str, Any] = {"sampler": sampler, "device": place, "seed": 5}
            if kind.startswith("pinned") and place == "cuda":
                named["storage_device"] = "cpu"
            if not self.steps:
                return ReplayBuffer(capacity, FIELDS, **named)
            of_steps = GOAL_FIELDS if kind == "goals" else STEP_FIELDS
            return TrajectoryReplayBuffer(capacity, rows, of_steps, **named, **settings)

        super().__init__(make, "cuda")
        self.gpu = self.tested

    def given(
        self, first: int | Tensor, device: torch.device | str = "cuda", *, own: bool = True, rows: int = 0
    ) -> dict[str, Tensor]:
        """Rows from this key on, which may be on the device; `own` gives each a priority."""
        key = torch.arange(rows or self.rows, device=device) + first
        priority = {"priority": powers(key)} if own else {}
        if not self.steps:
            return {"x": key[:, None].float() + torch.arange(4, device=device) / 4, "n": key, **priority}
        hashed = key * 7919 % 1009 % self.every
        if self.kind == "goals":
            goal = (key[:, None] * 31 + torch.arange(2, device=device)) % 251
            seen = {"obs.achieved_goal": goal.float(), "obs.desired_goal": goal.float() * 2}
            values: dict[str, Tensor] = {"action": key, **seen}
        else:
            place = torch.arange(144, device=device)
            seen = {"obs": ((key[:, None] * 31 + place) % 251).to(torch.uint8).view(-1, 12, 12)}
            values = {"action": key, **seen, "note": key[:, None].float() + torch.arange(3, device=device) / 4}
        # by a tensor: a GPU multiplies by the reciprocal of a number
        values["reward"] = (key % 17).float() / torch.full((), 3.0, device=device)
        values |= {"terminated": hashed == 1, "truncated": (hashed == 2) | (key * 104729 % 211 == 5)}
        if self.kind != "next_step":
            values |= {f"final_{name}": 255 - value for name, value in seen.items()}
        return values | priority

    def add(self, times: int = 1, *, own: bool = True, rows: int = 0) -> None:
        """The next rows to both, so many times."""
        for _ in range(times):
            for buffer in self.both:
                buffer.add(**self.given(buffer.added, buffer.device, own=own, rows=rows))

    def fill(self, times: int) -> Tensor:
        """The same of the host alone, whose state the GPU then takes over; the next key, on the GPU."""
        for _ in range(times):
            self.host.add(**self.given(self.host.added, "cpu"))
        self.gpu.load_state_dict(self.host.state_dict())
        return torch.full((), self.host.added, dtype=torch.int64, device="cuda")

    def write(self, buffer: Any, keys: Tensor) -> None:
        """New values of rows with these keys and, once more, with the first of them."""
        keys = torch.cat((keys, keys[:1]))
        values = torch.arange(len(keys), device=keys.device) + keys * 8
        buffer.write(keys, **{"action" if self.steps else "n": values})


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch says once that this mode does not see everything
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_of(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Make the call once on a stream of its own, so that all is compiled, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capture_into(graph, stream, torch.device("cuda", torch.cuda.current_device())):
        result = call()
    return graph, result


def busy() -> None:
    """Some ten milliseconds of work on the current stream, so that what does not wait for it comes too early."""
    square = torch.randn(4096, 4096, device="cuda")
    for _ in range(40):
        square = square @ square / 4096


def look_while_another_adds(add: Callable[[int], Any], look: Callable[[], Any], enough: Callable[[], bool]) -> None:
    """Add 200 times, or until there was enough, in a thread and a stream; fail if a look in another one is not true."""
    looked = threading.Event()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for time in itertools.count():
                if looked.is_set() or (time >= 200 and enough()):
                    return
                add(time)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
        adds = pool.submit(run)
        try:
            while not adds.done():
                assert bool(look()), "torn"
        finally:
            looked.set()
        adds.result()
    torch.cuda.synchronize()
