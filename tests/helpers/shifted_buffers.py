"""Buffers whose keys are large, or whose rings are, beside small ones: the same calls leave the same behind.

What comes back is compared relative to the first key, of which all slots, windows and lines are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tolerances import close
from torch import Tensor
from twins import Twins, values_of

from gpu_replay import Field, Hindsight, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.ops.counters import Counter

ACTION = {"action": Field((), torch.int64)}
GOALS = {f"obs.{name}": Field((4,), torch.int16) for name in ("achieved_goal", "desired_goal")}
# steps of the small ring, which lies in the same way to the lines of pending masses
SMALL_STEPS = 255
FINALS, SMALL_FINALS = 2**30 + 2**29, 32
RELABEL = {"relabel": Hindsight(reward_fn=lambda achieved, desired: (achieved - desired).sum(-1).float())}


class Shifted(NamedTuple):
    """A small buffer of the host, and a large one of the kernels or one that is as small and has had many more keys.

    head: slots from the end of the ring to the first one that is written.
    late: the first key of the second one, which is as small as the first then; 0 for a large one.
    """

    fields: dict[str, Field]
    sampler: Any
    large: int
    head: int
    small: int = SMALL_STEPS
    envs: int = 0
    settings: dict[str, Any] = {}  # noqa: RUF012
    late: int = 0
    backend: str = "triton"

    def made(self) -> tuple[Twins, tuple[int, int]]:
        """Both, each before the first step of an episode, and their next keys."""
        sizes, finals = [self.small, self.large], [SMALL_FINALS, SMALL_FINALS if self.late else FINALS]

        def make(place: str) -> Any:
            known = {"sampler": self.sampler, "device": place, "seed": 5}
            if not self.envs:
                return ReplayBuffer(sizes.pop(0), self.fields, **known)
            more = {"autoreset": "same_step", "final_capacity": finals.pop(0), **self.settings}
            return TrajectoryReplayBuffer(sizes.pop(0), self.envs, self.fields, **known, **more)

        twins = Twins(make, "cpu", self.backend)
        firsts = []
        for buffer in twins.both:
            if self.late:
                first = self.late if firsts else self.late % (8 * self.small) + 8 * self.small
            else:
                # in the middle of a large ring neither of them comes to its end
                head = self.head if self.head < 100 or firsts else 256 + self.head % 16
                first = 8 * buffer.capacity - head
            firsts.append(first)
            buffer._counters[Counter.ADDED] = buffer._counters[Counter.FIRST] = first
            if self.envs and buffer._shape.finals:
                # the next final observation goes to the last row
                buffer._counters[Counter.FINALS] = 5 * buffer._shape.finals - 1
        self.moved(twins)
        if self.envs:
            twins.call("begin_episodes")
        return twins, (firsts[0], firsts[1])

    def moved(self, twins: Twins) -> None:
        """Tell the hosts that their counters were changed."""
        for buffer in twins.both[: 1 + (self.late > 0)]:
            buffer._rebuild(5)
        if not self.late:
            twins.tested._engine.sampling.look()
            twins.tested._engine._count_newest = lambda added, slots: 0


def check_alike(twins: Twins, firsts: tuple[int, int], call: str, *given: Any, **named: Any) -> list[Tensor]:
    """Fail unless both find the same, in places relative to that of the first key; returns the keys of both."""
    small, large = (getattr(buffer, call)(*given, **named) for buffer in twins.both)
    places = [
        ((batch.key - first) % buffer.capacity).tolist()
        for batch, first, buffer in zip((small, large), firsts, twins.both, strict=True)
    ]
    assert places[0] == places[1]
    # steps after an episode are not always there
    counts = small.mask if "mask" in small else slice(None)
    for name, value in small.items():
        if name in ("probability", "weight"):
            assert close(large[name], value, name)
        elif name.startswith("next_"):
            bootstraps = (small.discount > 0)[counts]
            assert torch.equal(large[name][counts][bootstraps], value[counts][bootstraps]), name
        elif name != "key":
            assert torch.equal(large[name][counts], value[counts]), name
    return [small.key, large.key]


def check_masses(twins: Twins, firsts: tuple[int, int], count: int) -> None:
    """Fail unless the slots of these keys hold the same, and every node above them the sum of those below it."""
    for trees in zip(*(buffer._state.trees for buffer in twins.both), strict=True):
        found = []
        for tree, first in zip(trees, firsts, strict=True):
            slots = (torch.arange(-count, count) + first) % tree.slots
            found.append(tree.masses[slots].tolist())
            expected = dict(zip(slots.tolist(), found[-1], strict=True))
            for level in tree.levels:
                assert {node: int(level[node]) for node in expected} == expected
                above: dict[int, int] = {}
                for node, mass in expected.items():
                    above[node // tree.fanout] = above.get(node // tree.fanout, 0) + mass
                expected = above
        assert found[0] == found[1]
        # order codes have no sums
        assert len(trees[0].levels) == 1 or trees[0].total() == trees[1].total() == sum(found[0])


def check_stored(twins: Twins, firsts: tuple[int, int], count: int) -> None:
    """Fail unless so many rows from the first key on are the same, read past the kernels."""
    found = []
    for buffer, first in zip(twins.both, firsts, strict=True):
        streams = getattr(buffer, "_streams", None)
        slots = (torch.arange(count) + first) % buffer.capacity
        tensors = [*buffer._storage.tensors.values(), buffer._storage.times_sampled]
        tensors += [] if streams is None else [streams.streams.flags, streams.streams.depth]
        found.append([tensor[slots].tolist() for tensor in tensors])
    assert found[0] == found[1]


def play_rows(buffers: Shifted) -> Twins:
    """Adds, draws and updates of a buffer of rows, some of them of keys that are gone or to come."""
    twins, firsts = buffers.made()
    random = np.random.default_rng(1)
    for turn, count in enumerate((3, 4, 1)):
        given: dict[str, Any] = {name: values_of(field, count, random) for name, field in buffers.fields.items()}
        keys = twins.call("add", **given, priority=torch.arange(1.0, count + 1) if turn else None)
        assert (keys[0] - firsts[0]).tolist() == (keys[1] - firsts[1]).tolist()
        drawn = check_alike(twins, firsts, "sample", min(4, 3 + turn))
        name, field = next(iter(buffers.fields.items()))
        value = given[name]
        # the last of a repeated key wins; of keys that were overwritten, or are yet to come, nothing is kept
        for buffer, keys, first in zip(twins.both, drawn, firsts, strict=True):
            chosen = torch.cat((keys, keys[:1], torch.tensor([first - 1, buffer.added])))
            buffer.update_priorities(chosen, torch.arange(1.0, len(chosen) + 1) / 2**10)
            buffer.write(chosen[1:], **{name: value[:1].expand(len(chosen) - 1, *field.shape) + turn})
    check_stored(twins, firsts, 8)
    check_masses(twins, firsts, 24)
    return twins


def play_steps(buffers: Shifted) -> Twins:
    """Adds, draws and updates of a buffer of steps, whose ring goes round but for goals."""
    twins, firsts = buffers.made()
    envs, random = buffers.envs, np.random.default_rng(2)

    def add(times: int) -> None:
        for _ in range(times):
            step: dict[str, Any] = {name: values_of(field, envs, random) for name, field in buffers.fields.items()}
            if buffers.settings.get("autoreset") != "next_step":
                step |= {f"final_{name}": value + 100 for name, value in step.items() if name.startswith("obs")}
            step |= {"reward": random.random(envs).astype(np.float32), "priority": torch.arange(1.0, envs + 1)}
            step |= {name: random.random(envs) < 0.15 for name in ("terminated", "truncated")}
            twins.call("add", **step)

    def look() -> None:
        drawn = check_alike(twins, firsts, "sample", 6 if envs > 1 else 60)
        for buffer, keys in zip(twins.both, drawn, strict=True):
            buffer.update_priorities(keys, torch.arange(1.0, len(keys) + 1) / 4)

    add(12)
    look()
    if not buffers.settings.get("relabel"):
        # the ring has gone round but for the last six steps, so that the next ones push others out
        for buffer, first in zip(twins.both, firsts, strict=True):
            buffer._counters[Counter.ADDED] += buffer.capacity - 6 * envs
            owner = buffer._streams.streams.owner
            places = torch.arange(-1, 30)[: len(owner)]
            held = owner[places]
            owner[places] = torch.where((held >= first) & (held < first + 6 * envs), held + buffer.capacity, held)
        buffers.moved(twins)
    add(3)
    look()
    add(6)
    look()
    check_stored(twins, firsts, 12 * envs)
    check_masses(twins, firsts, 48)
    return twins
