"""Buffers of programs that learn off-policy from thousands of environments, beside this one: `peers --only "field/*"`.

FastTD3, holosoma and programs like them have no packages; `RuleOfFastTD3` states the rule of their buffers: a ring for
each environment, observations and those after them both stored, windows of n steps made by gathers at sampling. skrl's
memory is its own. The task has the sizes of a humanoid: observations of 99 numbers for the actor and of 120 for the
critic, actions of 29.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform
from gpu_replay.console.markdown import number, table
from gpu_replay.console.progress import Progress

from .measure import Part, Run
from .operations import OURS, Case
from .records import CannotMeasure, Record

ACTOR, CRITIC, ACTION, GAMMA = 99, 120, 29, 0.99
# environments, steps of each in the ring, rows of a batch
SIZES, QUICK = (4096, 64, (4096, 32_768)), (16, 12, (64,))
STEPS = (1, 3, 8)
# what a step of examples/fast_td3.py samples at once, of the rows of an update; it stores so many steps
LOOP, LOOP_STEPS, LOOP_N = (8, 4), 1024, 3
# of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SIXTEEN = f"{OURS} (bfloat16)"


class RuleOfFastTD3:
    """A tensor for each value, (environments, steps, ...), sampled by `gather`; every flag takes eight bytes."""

    def __init__(self, envs: int, steps: int, n: int, device: torch.device) -> None:
        self.n, self.steps, self.added = n, steps, 0
        sizes = {"actor": ACTOR, "critic": CRITIC, "action": ACTION, "next_actor": ACTOR, "next_critic": CRITIC}
        self.rings = {name: torch.zeros(envs, steps, size, device=device) for name, size in sizes.items()}
        self.rings["reward"] = torch.zeros(envs, steps, device=device)
        self.rings |= {name: torch.zeros(envs, steps, dtype=torch.int64, device=device) for name in ("done", "cut")}

    def add(self, step: Mapping[str, Tensor]) -> None:
        place = self.added % self.steps
        for name, ring in self.rings.items():
            ring[:, place] = step[name]
        self.added += 1

    def sample(self, batch: int) -> dict[str, Tensor]:
        envs = self.rings["reward"].shape[0]
        last = min(self.added, self.steps)
        # windows of a full ring may begin anywhere, those of another one where they are complete
        starts = last if self.added >= self.steps else max(1, last - self.n + 1)
        index = torch.randint(starts, (envs, batch // envs), device=self.rings["reward"].device)
        found = {name: self._rows(name, index) for name in ("actor", "critic", "action")}
        if self.n == 1:
            found |= {name: self.rings[name].gather(1, index).flatten() for name in ("reward", "done", "cut")}
            found["steps"] = torch.ones_like(found["reward"])
            return found | {name: self._rows(name, index) for name in ("next_actor", "next_critic")}
        window = (index[..., None] + torch.arange(self.n, device=index.device)) % self.steps
        done, cut, reward = (self._windows(name, window) for name in ("done", "cut", "reward"))
        going = torch.cat([torch.ones_like(reward[..., :1]), (1 - done[..., :-1]).cumprod(-1).to(reward)], -1)
        powers = GAMMA ** torch.arange(self.n, device=index.device)
        ends = [torch.where(flag.sum(-1) > 0, (flag > 0).float().argmax(-1), self.n - 1) for flag in (done, cut)]
        end = window.gather(2, torch.minimum(*ends)[..., None])[..., 0]
        found |= {"reward": (reward * going * powers).sum(-1).flatten(), "steps": going.sum(-1).flatten()}
        found |= {name: self.rings[name].gather(1, end).flatten() for name in ("done", "cut")}
        return found | {name: self._rows(name, end) for name in ("next_actor", "next_critic")}

    def _rows(self, name: str, index: Tensor) -> Tensor:
        ring = self.rings[name]
        return ring.gather(1, index[..., None].expand(-1, -1, ring.shape[2])).flatten(0, 1)

    def _windows(self, name: str, window: Tensor) -> Tensor:
        return self.rings[name][..., None].expand(-1, -1, self.n).gather(1, window)

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())


def steps_of(envs: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Steps as these programs have them: the first number of an observation is that of the step, and rewards are 1.

    Of each 128 environments one ends with every step, by turns in either way; what follows an ending is one more too.
    """
    number = 0
    env = torch.arange(envs, device=device)
    noise = {name: torch.rand(envs, size, device=device) for name, size in (("actor", ACTOR), ("critic", CRITIC))}
    action, one = torch.rand(envs, ACTION, device=device), torch.ones(envs, device=device)
    while True:
        done, odd = (env + number) % 128 == 0, env % 2 == 1
        step = {"action": action, "reward": one, "done": done.long(), "cut": (done & odd).long()}
        step |= {"terminated": done & ~odd, "truncated": done & odd}
        for name, values in noise.items():
            for key, seen in ((name, number), (f"next_{name}", number + 1)):
                step[key] = values.clone()
                step[key][:, 0] = seen
        yield step
        number += 1


class _Subject:
    """A full buffer.

    add:    stores a step.
    sample: draws a batch, and gives the first numbers of the observations before and after, and rewards.
    nbytes: of the buffer.
    """

    def __init__(self, add: Callable[[Any], object], sample: Callable[[int], Any], nbytes: Callable[[], int]) -> None:
        self.add, self.sample, self.nbytes = add, sample, nbytes


def ours(envs: int, steps: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> _Subject:
    """This package's TrajectoryReplayBuffer, observations in this dtype."""
    fields = {"obs.actor": Field((ACTOR,), dtype, torch.float32), "obs.critic": Field((CRITIC,), dtype, torch.float32)}
    fields["action"] = Field((ACTION,), torch.float32)
    settings: dict[str, Any] = {"n_step": n, "gamma": GAMMA, "sampler": Uniform(replacement=True), "device": device}
    buffer = TrajectoryReplayBuffer(envs * steps, envs, fields, autoreset="same_step", **settings)

    def add(step: Mapping[str, Tensor]) -> object:
        obs, final = ({name: step[f"{prefix}{name}"] for name in ("actor", "critic")} for prefix in ("", "next_"))
        flags = {"terminated": step["terminated"], "truncated": step["truncated"]}
        return buffer.add(obs=obs, final_obs=final, action=step["action"], reward=step["reward"], **flags)

    def sample(batch: int) -> Any:
        found = buffer.sample(batch)
        return found.obs.critic[:, 0], found.next_obs.critic[:, 0], found.reward, found.discount > 0

    return _Subject(add, sample, lambda: buffer.nbytes)


def rule_of_fasttd3(envs: int, steps: int, n: int, device: torch.device) -> _Subject:
    ring = RuleOfFastTD3(envs, steps, n, device)

    def sample(batch: int) -> Any:
        found = ring.sample(batch)
        return found["critic"][:, 0], found["next_critic"][:, 0], found["reward"], found["done"] <= found["cut"]

    return _Subject(ring.add, sample, lambda: ring.nbytes)


def skrl(envs: int, steps: int, n: int, device: torch.device) -> _Subject:
    """skrl's RandomMemory with the tensors of its SAC, of single steps."""
    if n > 1:
        raise CannotMeasure(f"skrl's memory has no windows of {n} steps.")
    try:
        library = importlib.import_module("skrl.memories.torch")
    except ImportError as error:
        raise CannotMeasure(f"skrl skipped: {error}; it needs `pip install skrl`.") from error
    memory = library.RandomMemory(memory_size=steps, num_envs=envs, device=device, replacement=True)
    sizes = {"observations": ACTOR, "states": CRITIC, "actions": ACTION, "rewards": 1}
    sizes |= {"next_observations": ACTOR, "next_states": CRITIC, "terminated": 1}
    for name, size in sizes.items():
        memory.create_tensor(name, size=size, dtype=torch.bool if name == "terminated" else torch.float32)
    of = dict(
        zip(sizes, ("actor", "critic", "action", "reward", "next_actor", "next_critic", "terminated"), strict=True)
    )

    def add(step: Mapping[str, Tensor]) -> object:
        return memory.add_samples(**{name: step[mine].view(envs, sizes[name]) for name, mine in of.items()})

    def sample(batch: int) -> Any:
        (found,) = memory.sample(list(sizes), batch_size=batch)
        _, states, _, reward, _, after, terminated = found
        return states[:, 0], after[:, 0], reward[:, 0], ~terminated[:, 0]

    return _Subject(add, sample, lambda: sum(tensor.nbytes for tensor in memory.tensors.values()))


# environments, steps of each, steps of a window, device
Maker = Callable[[int, int, int, torch.device], _Subject]
MAKERS: dict[str, Maker] = {
    OURS: ours,
    SIXTEEN: partial(ours, dtype=torch.bfloat16),
    "rule of FastTD3": rule_of_fasttd3,
    "skrl": skrl,
}


def checked(name: str, subject: _Subject, batch: int, steps: int, n: int) -> None:
    """Raise CannotMeasure where sampled values do not belong together, the seam of a full ring aside.

    In a ring of bfloat16 numbers of steps above 256 are not exact.
    """
    first, after, reward, known = subject.sample(batch)
    count = after - first
    right = (count >= 1) & (count <= n) & torch.isclose(reward, (1 - GAMMA**count) / (1 - GAMMA), atol=1e-3)
    if float((right | ~known).float().mean()) < 1 - 1.5 * n / steps:
        raise CannotMeasure(f"{name} is not measured: sampled rewards do not belong to the sampled observations.")


def keep_memory() -> None:
    """Let the C library keep the memory of large tensors, as torch does on a GPU: not page faults are measured.

    This package's buffers keep that of their batches anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        if mallopt is not None:
            mallopt(option, 2**31 - 1)


def parts(quick: bool, device: torch.device) -> list[Part]:
    """Adds, samples of each number of steps, and bytes."""
    envs, steps, batches = QUICK if quick else SIZES
    slots = envs * steps
    found: list[Part] = []
    for n in STEPS:
        cases = [Case(f"field/sample, n = {n}", slots, batch) for batch in batches]
        if n == 1:
            cases = [Case("field/bytes", slots, 0), Case("field/add", slots, 0, envs), *cases]
        found.append((cases, partial(records, envs=envs, steps=steps, n=n, device=device, makers=MAKERS)))
    return found


def loop_part(quick: bool, device: torch.device) -> Part:
    """What the loop of examples/fast_td3.py asks of this package's buffer in a step, with a humanoid's fields."""
    envs, steps, batches = QUICK if quick else (SIZES[0], LOOP_STEPS, SIZES[2])
    of: dict[str, Any] = {"envs": envs, "steps": steps, "n": LOOP_N, "device": device, "makers": {OURS: ours}}
    return [Case("field/loop", envs * steps, batches[-1], envs)], partial(records, **of)


def records(
    run: Run,
    cases: Sequence[Case],
    progress: Progress,
    *,
    envs: int,
    steps: int,
    n: int,
    device: torch.device,
    makers: Mapping[str, Maker],
) -> Iterator[Record]:
    """Of all that can be made, interleaved; captured calls are those of this package alone."""
    keep_memory()
    captured = run.way == "graph"
    full: dict[str, _Subject] = {}

    def filled() -> dict[str, _Subject]:
        for name, make in makers.items():
            if captured and not name.startswith(OURS):
                continue
            try:
                progress.show(f"filling {name}")
                subject, stream = make(envs, steps, n, device), steps_of(envs, device)
                for _ in range(steps + 5):
                    subject.add(next(stream))
                checked(name, subject, max(case.batch for case in cases), steps, n)
                full[name] = subject
            except CannotMeasure as reason:
                progress.say(str(reason))
        return full

    def measured(case: Case) -> Iterator[Record]:
        subjects = full or filled()
        if case.operation == "field/bytes":
            for name, subject in subjects.items():
                held = subject.nbytes() / case.capacity
                yield run.record(case, name, dict.fromkeys(("p10", "p50", "p90"), held), 1, unit="bytes")
            return
        stream = cycle([step for step, _ in zip(steps_of(envs, device), range(4), strict=False)])

        def bound(subject: _Subject) -> Any:
            given: list[Any] = [None]

            def prepare() -> None:
                given[0] = next(stream)

            def loop() -> None:
                subject.add(given[0])
                for updates in LOOP:
                    subject.sample(updates * case.batch)

            if case.operation in ("field/add", "field/loop"):
                return (loop if case.operation == "field/loop" else lambda: subject.add(given[0])), prepare
            return (lambda: subject.sample(case.batch)), (lambda: None)

        yield from run.timed(case, {name: bound(subject) for name, subject in subjects.items()}, progress)

    # bytes are the same in both ways
    yield from run.each([case for case in cases if case.operation != "field/bytes" or not captured], progress, measured)


def column(record: Record) -> str:
    """The name of an implementation's column; replayed calls have one of their own."""
    return record.implementation + (", captured" if record.timing == "graph" else "")


def field_table(records: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """Bytes of a transition, and milliseconds of every buffer."""
    names = sorted(dict.fromkeys(map(column, records)), key=lambda name: not name.startswith(OURS))
    cases: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        cases.setdefault((record.operation, record.batch), {})[column(record)] = record
    rows = []
    for (operation, batch), here in sorted(cases.items()):
        held = operation == "field/bytes"
        what = operation.removeprefix("field/") + (f", B = {batch:,}" if batch else "")
        unit = "a transition" if held else "ms"
        cells = [number(here[name].median / (1 if held else 1000)) if name in here else "" for name in names]
        rows.append([f"{what}, {unit}", *cells])
    return table(["", *names], rows)
