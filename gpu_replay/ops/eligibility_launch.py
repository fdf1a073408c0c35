"""Launchers that follow the steps of a trajectory buffer; what is kept, and the host's way, are in `eligibility.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops.admission import DeviceMasses
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag, Streams
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ring import layout_of

# values of a tile on a GPU: a few for each thread
_TILE = 256


def steps_at_once(count: int) -> int:
    """Steps of one environment that a program looks at: a power of two, or 0 for none."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def envs_per_program(num_envs: int, ages: int, interpreted: bool) -> int:
    """Environments of one program, a power of two; as many as there are where a program is dear."""
    return min(1024, 1 << (num_envs - 1).bit_length()) if interpreted else max(1, _TILE // ages)


def _reciprocal(divisor: int) -> int:
    """What a kernel takes instead of dividing by it."""
    return (2**63 - 1) // divisor


def launch_follow(
    streams: Streams,
    masses: DeviceMasses | None,
    marks: MassTree | None,
    counters: Tensor,
    times_sampled: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    priorities: Tensor | None,
    source: int | None,
    *,
    with_final: bool,
) -> Tensor:
    """Device: count in the step that was just written and return its (num_envs,) keys; one launch.

    masses, marks: the trees to keep, either or both.
    terminated, truncated: (num_envs,) bool.
    source:        where the initial mass is found if it is there; else it is the one given to `masses`.
    with_final:    whether final observations came with the step, for `launch_keep_finals` to copy.
    """
    from gpu_replay.kernels.eligibility import follow_kernel

    shape, device = streams.shape, counters.device
    tree = masses.tree if masses is not None else marks
    if tree is None:
        raise RuntimeError("a trajectory buffer keeps masses, marks or both; found neither.")
    both = marks is not None and masses is not None
    # what lies further back than the ring is long does not count
    ages, frames = steps_at_once(min(shape.n_step + 1, shape.steps)), steps_at_once(min(shape.stack, shape.steps) - 1)
    envs = envs_per_program(shape.num_envs, max(ages, frames), device.type == "cpu")
    keys = torch.empty(shape.num_envs, dtype=torch.int64, device=device)
    follow_kernel[(-(-shape.num_envs // envs),)](
        tree.levels,
        () if masses is None else masses.edges,
        marks.levels if marks is not None and both else (),
        counters,
        streams.flags,
        streams.depth,
        streams.pending,
        streams.final,
        streams.owner,
        streams.spans,
        streams.parted,
        times_sampled,
        keys,
        terminated.view(torch.uint8),
        truncated.view(torch.uint8),
        counters if priorities is None else priorities,
        counters if masses is None else masses.numbers,
        counters if masses is None else masses.masses,
        shape.num_envs,
        shape.slots,
        shape.stack,
        shape.n_step,
        shape.finals,
        _reciprocal(shape.slots),
        _reciprocal(shape.num_envs * (shape.n_step + 1)),
        _reciprocal(max(1, shape.finals)),
        LEVELS=len(tree.levels),
        EDGES=0 if masses is None else len(masses.edges),
        MARKS=len(tree.levels) if both else 0,
        SHIFT=tree.fanout.bit_length() - 1,
        ENVS=envs,
        AGES=ages,
        FRAMES=frames,
        MASSES=masses is not None,
        GIVEN=masses is not None and priorities is not None,
        ORDERED=masses is not None and masses.ordered,
        SOURCE=-1 if source is None else int(source),
        NEXT_STEP=shape.next_step,
        FINALS=with_final and shape.finals > 0,
        HINDSIGHT=shape.hindsight,
        TERMINATED=Flag.TERMINATED,
        TRUNCATED=Flag.TRUNCATED,
        DEAD=Flag.DEAD,
        FINAL=Flag.FINAL,
        CUT=Flag.CUT,
        ADDED=int(Counter.ADDED),
        FIRST=int(Counter.FIRST),
        TOP=int(Counter.TOP),
        PENDING_TOP=int(Counter.PENDING_TOP),
        REJECTED=int(Counter.REJECTED),
        SATURATED=int(Counter.SATURATED),
        TICKET=int(Counter.TICKET),
        EDGE_HIGH=int(Counter.EDGE_HIGH),
        ELIGIBLE=int(Counter.ELIGIBLE),
        KEPT=int(Counter.FINALS),
    )
    return keys


def launch_keep_finals(
    streams: Streams,
    pools: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    given: Mapping[str, Tensor],
    counters: Tensor,
) -> None:
    """Device: copy the final observations that `launch_follow` kept to their rows; one launch.

    pools: (finals, *shape) of each observation field. given: the same names, (num_envs, *shape).
    """
    from gpu_replay.kernels.eligibility import keep_finals_kernel

    envs = streams.shape.num_envs
    layout = layout_of([fields[name] for name in pools], envs, counters.device.type == "cpu")
    keep_finals_kernel[(layout.programs(envs),)](
        tuple(given[name] for name in pools),
        tuple(pools.values()),
        streams.flags,
        streams.final,
        counters,
        envs,
        streams.shape.slots,
        FINAL=Flag.FINAL,
        ADDED=int(Counter.ADDED),
        **layout.constants(),
    )
