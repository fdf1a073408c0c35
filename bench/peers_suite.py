"""The measurements of `bench peers`: what is compared, at which sizes, and which libraries take part in each.

One part after the other is filled, checked and measured, so that at most one buffer of each library is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal

import torch

from gpu_replay import Uniform
from gpu_replay.console.progress import Progress

from . import frames, variants
from .cases import ADDED, OURS, Case, cycle_cases, index_cases
from .record import Record
from .runner import Maker, Run
from .subjects import PEERS, IndexSubject, MissingPeer, ReplaySubject, Subject, Task, make_peer

BATCHES = (32, 64, 256, 4096)
STEP_BATCH = 64
# a batch of 4,096 stacks with their successors is 231 MB
FRAME_REPETITIONS = 25


@dataclass(frozen=True)
class Part:
    """Cases of one kind of contents.

    contents: "steps" come from a loop over one environment, "exact" in the dtypes of the fields, "uniform" without
              priorities; "variants" are settings of this package, and no libraries.
    added:    rows of every `add`, which some libraries must know when a buffer is made.
    """

    contents: Literal["vectors", "stacks", "index", "steps", "exact", "uniform", "variants"]
    added: int
    cases: Sequence[Case]


@dataclass(frozen=True)
class Sizes:
    """How large the buffers are.

    many:     rows of an add by itself, for which buffers are made anew.
    stepped:  transitions of the loop over one environment. variants: of the settings compared with each other.
    """

    vectors: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    stacks: int = frames.CAPACITY
    index: tuple[int, ...] = (1_000_000, 10_000_000)
    batches: tuple[int, ...] = BATCHES
    index_batches: tuple[int, ...] = (32, 4096)
    many: tuple[int, ...] = (64,)
    stepped: int = 100_000
    variants: int = 1_000_000


# most of what a trial takes is compiling, for every size anew
QUICK = Sizes(
    vectors=(4_000,),
    stepped=4_000,
    variants=4_000,
    stacks=1_000,
    index=(10_000,),
    batches=(32,),
    index_batches=(32,),
    many=(),
)


def parts(sizes: Sizes, device: torch.device) -> list[Part]:
    """All that is compared on a device."""
    largest, steps = sizes.vectors[-1], sizes.stacks
    found = [
        Part("vectors", ADDED, cycle_cases(sizes.vectors, sizes.batches)),
        Part("stacks", ADDED, [Case("frame-cycle", steps, batch, ADDED) for batch in sizes.batches]),
    ]
    for many in sizes.many:
        found.append(Part("vectors", many, [Case("add", largest, many, many)]))
        found.append(Part("stacks", many, [Case("frame-add", steps, many, many)]))
    if device.type == "cpu":
        found += [
            Part("steps", 1, [Case("step-add", sizes.stepped, 1, 1), Case("step-cycle", sizes.stepped, STEP_BATCH, 1)]),
            Part("exact", 1, [Case("step-exact", sizes.stepped, 1, 1)]),
            Part("uniform", 1, [Case("step-uniform", sizes.stepped, STEP_BATCH, 1)]),
        ]
        found += [Part("variants", ADDED, [case]) for case in variants.cases(sizes.variants, steps, sizes.batches)]
        found.append(Part("index", 0, index_cases(sizes.index, sizes.index_batches)))
    else:
        # trees on a GPU differ most in how they take new priorities
        found.append(Part("vectors", ADDED, [Case("update", largest, batch) for batch in sizes.batches]))
    return found


def available(names: Sequence[str], device: torch.device, progress: Progress) -> list[str]:
    """Those of the libraries that make a buffer here; the others are reported once, with the reason."""
    found = []
    for name in names:
        progress.show(f"loading {name}")
        try:
            make_peer(name, Task(1_000, ADDED, device=device))
        except MissingPeer as reason:
            progress.say(str(reason))
        else:
            found.append(name)
    return found


def records(run: Run, chosen: Sequence[Part], names: Sequence[str], progress: Progress) -> Iterator[Record]:
    """Measure this package and the libraries on all chosen parts; yields each record as soon as it is known."""
    names = available(names, run.device, progress)
    for part in chosen:
        here = run
        if part.contents == "stacks":
            here = replace(run, plan=replace(run.plan, fewest=min(run.plan.fewest, FRAME_REPETITIONS)))
        for capacity, cases in groupby(part.cases, lambda case: case.capacity):
            group = list(cases)
            if part.contents == "variants":
                made = variants.makers(group[0].operation)
            else:
                made = makers(part, capacity, names, run.device)
            yield from here.records(group, made, progress)


def makers(part: Part, capacity: int, names: Sequence[str], device: torch.device) -> Mapping[str, Maker]:
    """What makes the subjects of a part: this package's first, then those of the libraries that take part."""
    ours: dict[str, Maker] = {
        "index": IndexSubject,
        "stacks": partial(frames.FrameSubject, device=device, n_step=1, envs=part.added),
        "vectors": partial(ReplaySubject, device=device),
        "exact": partial(ReplaySubject, device=device),
        "steps": partial(variants.SteppedSubject, device=device),
        "uniform": partial(variants.SteppedSubject, device=device, sampler=Uniform()),
    }
    found = {OURS: ours[part.contents]}
    for name in names:
        peer = PEERS[name]
        if part.contents == "uniform" and not peer.uniform:
            continue
        too_slow = (
            part.contents != "stacks" and part.contents != "index" and peer.most is not None and capacity > peer.most
        )
        if not too_slow and (peer.index or part.contents != "index"):
            found[name] = partial(_made, name, part, device)
    return found


def _made(name: str, part: Part, device: torch.device, capacity: int) -> Subject:
    task = Task(capacity, part.added, stacks=part.contents == "stacks", device=device)
    peer = make_peer(name, task, index=part.contents == "index")
    return variants.Stepped(peer) if part.contents in ("steps", "uniform") else peer
