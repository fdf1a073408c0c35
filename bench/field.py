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
from typing import Any

import torch
from torch import Tensor

from gpu_replay import Field, TrajectoryReplayBuffer, Uniform
from gpu_replay.console.progress import Progress

from .measure import Part, Run
from .operations import OURS, Case
from .records import CannotMeasure, Record
from .subjects import Subject

ACTOR, CRITIC, ACTION, GAMMA = 99, 120, 29, 0.99
# environments, steps of each in the ring, rows of a batch
SIZES, QUICK = (4096, 64, (4096, 32_768)), (16, 48, (64,))
STEPS = (1, 3, 8)
# of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# a buffer, and its bytes
Made = tuple[Subject, int]


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
        index = torch.randint(starts, (envs, max(1, batch // envs)), device=self.rings["reward"].device)
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


def made(envs: int, n: int, device: torch.device, add: Any, sample: Callable[[int], Any]) -> Subject:
    """A buffer; `sample` gives the first numbers of observations, of those after them, rewards, and what is known."""

    def stream(added: int, pool: int = 0) -> Iterator[Any]:
        return steps_of(envs, device)

    def drawn(batch: int) -> Any:
        return None, dict(zip(("first", "after", "reward", "known"), sample(batch), strict=True))

    return Subject(add, drawn, lambda *_: None, stream, partial(wrong, n), envs)


def wrong(n: int, found: Mapping[str, Tensor]) -> list[str]:
    """What does not belong together in a batch; at the seam of a full ring, or after a termination, anything goes."""
    count = found["after"] - found["first"]
    sums = (1 - GAMMA**count) / (1 - GAMMA)
    right = (count >= 1) & (count <= n) & torch.isclose(found["reward"], sums, atol=1e-3)
    enough = float((right | ~found["known"]).float().mean()) > 0.7
    return [] if enough else ["sampled rewards do not belong to the sampled observations"]


def ours(envs: int, steps: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Made:
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

    return made(envs, n, device, add, sample), buffer.nbytes


def rule_of_fasttd3(envs: int, steps: int, n: int, device: torch.device) -> Made:
    ring = RuleOfFastTD3(envs, steps, n, device)

    def sample(batch: int) -> Any:
        found = ring.sample(batch)
        return found["critic"][:, 0], found["next_critic"][:, 0], found["reward"], found["done"] <= found["cut"]

    return made(envs, n, device, ring.add, sample), sum(each.nbytes for each in ring.rings.values())


def skrl(envs: int, steps: int, n: int, device: torch.device) -> Made:
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
    mine = ("actor", "critic", "action", "reward", "next_actor", "next_critic", "terminated")

    def add(step: Mapping[str, Tensor]) -> object:
        of = zip(sizes.items(), mine, strict=True)
        return memory.add_samples(**{name: step[field].view(envs, size) for (name, size), field in of})

    def sample(batch: int) -> Any:
        (found,) = memory.sample(list(sizes), batch_size=batch)
        return found[1][:, 0], found[5][:, 0], found[3][:, 0], ~found[6][:, 0]

    return made(envs, n, device, add, sample), sum(each.nbytes for each in memory.tensors.values())


MAKERS: dict[str, Callable[[int, int, int, torch.device], Made]] = {
    OURS: ours,
    f"{OURS} (bfloat16)": partial(ours, dtype=torch.bfloat16),
    "rule of FastTD3": rule_of_fasttd3,
    "skrl": skrl,
}


def keep_memory() -> None:
    """Let the C library keep the memory of large tensors, as torch does on a GPU: not page faults are measured.

    This package's buffers keep that of their batches anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def parts(quick: bool, device: torch.device) -> list[Part]:
    """Bytes, adds, and samples of each number of steps; captured calls are those of this package alone."""
    envs, steps, batches = QUICK if quick else SIZES
    slots = envs * steps

    def measured(run: Run, cases: Sequence[Case], progress: Progress, n: int, makers: Any) -> Iterator[Record]:
        keep_memory()
        of = {name: partial(lambda make, _: make(envs, steps, n, device)[0], make) for name, make in makers.items()}
        return run.records(cases, progress, of)

    def held(run: Run, cases: Sequence[Case], progress: Progress, makers: Any) -> Iterator[Record]:
        # the same in both ways
        for name, make in makers.items() if cases and run.way != "graph" else ():
            each = make(envs, steps, 1, device)[1] / slots
            yield run.record(cases[0], name, dict.fromkeys(("p10", "p50", "p90"), each), 1, unit="bytes")

    found: list[Part] = [([Case("field/bytes", slots, 0)], partial(held, makers=MAKERS))]
    for n in STEPS:
        cases = [Case(f"field/sample, n = {n}", slots, batch) for batch in batches]
        cases = [Case("field/add", slots, 0, envs), *cases] if n == 1 else cases
        found.append((cases, partial(measured, n=n, makers=MAKERS)))
    return found


def loop_part(quick: bool, device: torch.device) -> Part:
    """What the loop of examples/fast_td3.py asks of this package's buffer in a step, with a humanoid's fields."""
    envs, steps, batches = QUICK if quick else (SIZES[0], 1024, SIZES[2])

    def looped(capacity: int) -> Subject:
        subject, _ = ours(envs, steps, 3, device)
        sample = subject.sample
        # eight batches, and four
        subject.sample = lambda batch: (sample(8 * batch), sample(4 * batch))[1]
        return subject

    return [Case("field/loop", envs * steps, batches[-1], envs)], partial(Run.records, makers={OURS: looped})
