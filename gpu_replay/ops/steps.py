"""Which starts of a trajectory buffer can be drawn, kept up to date with every step of all environments.

A start is eligible while its stack, its whole n-step window and, unless the episode terminated inside the window, the
observation after it are stored. So each new step settles at most one start more per environment, or all that an ending
closes, and takes away those that were overwritten or lost a frame of their stack at the ring's seam.

Where rows are sequences of L steps, `Flag.TARGET` says of a step that all of this is stored but for its stack: it is
set when its window closes, and stays. A step is *settled* when it has its target, or when it is known that it never
will: the steps of an environment are settled in their order.

| a step `t` that is added | settles, of the steps that are not | with their targets |
|---|---|---|
| goes on with its episode | `t - n` | yes: its observation closes the full window |
| terminates, or is truncated with a final observation that finds a place | all, itself too | all |
| is truncated, "same_step" or "disabled", and its final observation has no place | all, itself too | `t - n` alone |
| is truncated, "next_step" | `t - n`: the next step brings the observation after it | yes |
| is a reset step ("next_step") | all, itself too | all but itself |
| comes after `begin_episodes` | all before it, and itself as above | none of those before it |

Each step that is settled decides about one start, L - 1 steps before it and so settled too: it is eligible from then on
if it has its own target, its stack is stored, its number is a multiple of the stride and, if strict, the settled step
is of the same episode (a reset step is of none). A start ends when its slot, or the first frame of its stack, is
overwritten, as that of a single step does; `clear` ends all. A start is decided n + L - 1 steps after it at the latest,
which with S - 1 frames before it must fit in the ring.

On the host all that a step changes except the fields is changed by one loop; on a device by one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.loops.constants import Flag as Flag
from gpu_replay.ops.advice import warn_caller
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.launch import Launch, aligned, reciprocal
from gpu_replay.ops.masses import DeviceMasses, MassTree
from gpu_replay.ops.ring import StreamShape, moved_rows


def endings(flags: Tensor) -> dict[str, Tensor]:
    """How single steps ended, as bool of the shape of their flags."""
    return {"terminated": flags & Flag.TERMINATED != 0, "truncated": flags & Flag.TRUNCATED != 0}


def warn_of_flaw(shape: StreamShape) -> None:
    """Warn that an ending is not as the autoreset mode says, or loses a window."""
    if shape.next_step:
        warn_caller(
            "the step after an episode's end has a reward or a flag. With autoreset='next_step' it is Gymnasium's "
            "reset step, which has neither: its action and reward are ignored. Does the loop call env.reset() itself, "
            "or does the environment (SAME_STEP)? Then make the buffer with autoreset='disabled' or 'same_step', as "
            "TrajectoryReplayBuffer.from_env does, and give final_obs= to add where an episode was truncated. If "
            "rewards are changed after the environment, give 0 for this step. stats().unexpected_resets counts them; "
            "this warning comes once."
        )
    else:
        warn_caller(
            "an episode was truncated, and its final observation is not stored: windows that end there are never "
            f"sampled. Give final_obs= to add. The buffer keeps {shape.finals:,} final observations; if all are in "
            "use, raise final_capacity. stats().lost_truncations counts them; this warning comes once."
        )


class Streams:
    """The metadata stored per step in addition to the user's fields.

    flags:   (slots,) uint8 of `Flag`.
    depth:   (slots,) int32 steps since the first of the episode, 2**31 - 1 - n_step where they are more.
    open_masses: (lines, num_envs) int64 masses given with the last steps, 0 where none was given; step `t` is in row
             `t % lines`.
    final:   (slots,) int32 rows of final observations, meaningful where `Flag.FINAL` is set; empty with `next_step`.
    owner:   (finals,) int64 keys of the steps whose final observations are kept, -1 before any.
    episode_length: (slots,) int32, with hindsight: at the first step of an episode that another one follows, how many
             of its steps, from the first on, have the observation after them; -1 while it is the newest. Nothing
             elsewhere.
    clipped_length: (num_envs,) int32, the same of the episode whose first step was overwritten last.
    """

    def __init__(self, shape: StreamShape, device: torch.device) -> None:
        self.shape = shape
        slots = shape.slots
        self.flags = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.depth = torch.zeros(slots, dtype=torch.int32, device=device)
        self.open_masses = torch.zeros((shape.lines, shape.num_envs), dtype=torch.int64, device=device)
        self.final = torch.zeros(slots if shape.finals else 0, dtype=torch.int32, device=device)
        self.owner = torch.full((shape.finals,), -1, dtype=torch.int64, device=device)
        episodes, clipped = (slots, shape.num_envs) if shape.hindsight else (0, 0)
        self.episode_length = torch.full((episodes,), -1, dtype=torch.int32, device=device)
        self.clipped_length = torch.full((clipped,), -1, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, in the order in which `add_step_kernel` takes it."""
        return (
            self.flags,
            self.depth,
            self.open_masses,
            self.final,
            self.owner,
            self.episode_length,
            self.clipped_length,
        )

    def views(self, written: int) -> dict[str, Tensor]:
        """The parts in use while the first `written` slots are written, by name in a saved state."""
        views = {
            "streams.flags": self.flags[:written],
            "streams.depth": self.depth[:written],
            "streams.pending": self.open_masses,
        }
        if self.shape.hindsight:
            views |= {"streams.spans": self.episode_length[:written], "streams.parted": self.clipped_length}
        if self.shape.finals:
            views |= {"streams.final": self.final[:written], "streams.owner": self.owner}
        return views

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def waiting_arrays(self) -> tuple[np.ndarray, ...]:
        """Host: what tells `loops/masses.py` where masses wait until their step can be drawn."""
        shape = self.shape
        rows = shape.n_step, shape.ahead, shape.strict, shape.stride
        settings = np.array([shape.num_envs, shape.stack, shape.next_step, *rows], dtype=np.int64)
        return settings, self.flags.numpy(), self.depth.numpy(), self.open_masses.numpy().reshape(-1)

    def waiting_masses(self, keys: Tensor, first: int, added: int) -> Tensor:
        """(m,) int64 masses that wait until these live keys can be drawn, 0 where none does or they never will be.

        The rule is that of `loops.masses.waiting_place`.
        """
        shape, slots, envs = self.shape, keys % self.shape.slots, self.shape.num_envs
        newest, number = (added - envs + keys % envs) % shape.slots, keys // envs
        age, flags, behind = (added - 1) // envs - number, self.flags[newest], self.depth[newest]
        ended = flags & (Flag.TERMINATED | Flag.TRUNCATED) != 0
        settles = flags & (Flag.TERMINATED | (Flag.DEAD if shape.next_step else Flag.TRUNCATED)) != 0
        unsettled = torch.where(settles, 0, (behind + 1).clamp(max=shape.n_step))
        to_come = (age < unsettled) & (flags & Flag.CUT == 0)
        has_target = (age >= unsettled) & (self.flags[slots] & Flag.TARGET != 0)
        is_open = (age < shape.ahead + unsettled) & (number % shape.stride == 0) & (to_come | has_target)
        if shape.strict:
            last = (slots + shape.ahead * envs) % shape.slots
            whole = (self.flags[last] & Flag.DEAD == 0) & (self.depth[last] >= shape.ahead)
            goes_on = ~ended & (flags & (Flag.DEAD | Flag.CUT) == 0) & (behind >= age)
            is_open &= torch.where(age < shape.ahead, goes_on, whole)
        is_open &= self.flags[slots] & Flag.EXCLUDED == 0
        is_open &= keys - self.depth[slots].clamp(max=shape.stack - 1) * envs >= first
        masses = self.open_masses.view(-1)[keys % self.open_masses.numel()]
        return torch.where(is_open, masses, 0)

    def cut(self, envs: Tensor, counters: Tensor) -> None:
        """Mark the last step of some environments, a bool (num_envs,): the next one is the first of an episode."""
        added, count = counters[Counter.ADDED], self.shape.num_envs
        # before the first step there is none to mark
        marks = envs.to(torch.uint8) * Flag.CUT * (added > 0)
        slots = (added - count + torch.arange(count, device=envs.device)) % self.shape.slots
        self.flags.index_copy_(0, slots, self.flags[slots] | marks)

    def note_followed(self, added: int) -> None:
        """Set `Flag.FINAL` of the endings that a reset step follows, which versions before 0.4 set for hindsight alone;
        `added`: the next key.
        """
        shape = self.shape
        written = min(added // shape.num_envs, shape.steps)
        if shape.next_step and written > 1:
            # from the oldest step on
            rows = torch.arange(added // shape.num_envs - written, added // shape.num_envs, device=self.flags.device)
            flags = self.flags.view(shape.steps, shape.num_envs)
            by_age = flags[rows % shape.steps]
            by_age[:-1] |= (by_age[1:] & Flag.DEAD != 0).to(torch.uint8) * Flag.FINAL
            flags[rows % shape.steps] = by_age


class GivenFinals(NamedTuple):
    """Final observations that come with T steps of E environments.

    rows:  by observation field `(k * E, *shape)`, those of k of the steps; rows that are not read may hold anything.
    place: (T,) int64, which of the k each step is, -1 where none came with it.
    """

    rows: Mapping[str, Tensor | np.ndarray]
    place: np.ndarray


def powers_of(gamma: float, n_step: int) -> np.ndarray:
    """(n_step + 1,) float64: gamma ** 0 to gamma ** n_step, each the product of the one before and gamma."""
    powers = np.full(n_step + 1, gamma)
    powers[0] = 1.0
    return np.multiply.accumulate(powers)


# values of a tile on a GPU: a few for each thread
_TILE = 256


def steps_at_once(count: int) -> int:
    """Steps of one environment that a program looks at: a power of two, or 0 for none."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def envs_per_program(num_envs: int, ages: int, interpreted: bool) -> int:
    """Environments of one program, a power of two; under the interpreter as many as there are."""
    return min(1024, 1 << (num_envs - 1).bit_length()) if interpreted else max(1, _TILE // ages)


def make_add_step(
    stores: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    streams: Streams,
    masses: DeviceMasses | None,
    trees: Sequence[MassTree],
    counters: Tensor,
    times_sampled: Tensor,
    pools: Mapping[str, Tensor],
) -> Callable[..., None]:
    """Device: store a step; one launch a call. It takes the values, among them the flags `terminated` and `truncated`,
    (num_envs,) bool, final observations or None, priorities or None, the keys to be filled, (num_envs,) int64, and
    whether all values are aligned.

    trees:         over the starts of windows: that of `masses`, if there are any, and of ones, one or both.
    pools:         (finals, *shape) of each observation field, where final observations come with the steps; else none.

    Priorities are of one dtype, or missing, in all calls.
    """
    from gpu_replay.kernels.steps import add_step_kernel

    shape = streams.shape
    # steps further back than the length of the ring do not count
    ages = steps_at_once(min(shape.n_step + 1, shape.steps))
    # the slot of the step itself may be among the starts that it completes, but not of a longer sequence
    frames = steps_at_once(min(shape.stack, shape.steps) - (shape.ahead == 0))
    envs = envs_per_program(shape.num_envs, max(ages, frames), counters.device.type == "cpu")
    names, interpreted = tuple(fields), counters.device.type == "cpu"
    layout, moving = moved_rows(tuple(fields.values()), shape.num_envs, interpreted)
    final_names = tuple(pools)
    final_layout, keeping = moved_rows(tuple(fields[name] for name in final_names), shape.num_envs, interpreted)
    stepping = -(-shape.num_envs // envs)
    looks_up = masses if masses is not None and masses.source == Counter.HIGHEST else None
    launch = Launch(
        add_step_kernel,
        stepping + moving + keeping,
        stores=tuple(stores[name] for name in names),
        pools=tuple(pools.values()),
        tree=(trees[0].levels, ()) if masses is None else masses.arguments,
        eligible=trees[1].levels if len(trees) > 1 else (),
        streams=streams.tensors,
        counters_ptr=counters,
        times_sampled_ptr=times_sampled,
        envs=shape.num_envs,
        capacity=shape.slots,
        stack=shape.stack,
        n_step=shape.n_step,
        ahead=shape.ahead,
        turn=shape.num_envs * shape.stride,
        finals=shape.finals,
        per_capacity=reciprocal(shape.slots),
        per_lines=reciprocal(shape.num_envs * shape.lines),
        per_finals=reciprocal(max(1, shape.finals)),
        per_turn=reciprocal(shape.num_envs * shape.stride),
        stepping=stepping,
        LAYOUT=layout,
        ENVS=envs,
        AGES=ages,
        FRAMES=frames,
        SOURCE=-1 if masses is None else masses.source,
        NEXT_STEP=shape.next_step,
        FINAL_LAYOUT=final_layout,
        TERMINAL=shape.terminal,
        HINDSIGHT=shape.hindsight,
        SEQUENCES=shape.length > 0,
        LONG=shape.ahead > 0,
        STRICT=shape.strict,
        STRIDED=shape.stride > 1,
    )

    def add_step(
        values: Mapping[str, Tensor],
        finals: Mapping[str, Tensor] | None,
        priorities: Tensor | None,
        keys: Tensor,
        ready: bool,
    ) -> None:
        if looks_up is not None:
            looks_up.find_highest(counters)
        inputs, kept = tuple(map(values.__getitem__, names)), tuple(map((finals or {}).__getitem__, final_names))
        ends = values["terminated"].view(torch.uint8), values["truncated"].view(torch.uint8)
        numbers = () if masses is None or priorities is None else (priorities,)
        # values that are ready are aligned
        others = (*kept, *numbers) if ready else (*inputs, *ends, *kept, *numbers)
        fits = not others or aligned(*others)
        launch(inputs, kept, ends, numbers, keys, aligned=fits)

    return add_step
