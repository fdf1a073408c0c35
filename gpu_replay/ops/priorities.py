"""Launchers that give transitions their masses: new ones as they enter, old ones when their priority is updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_replay.fields import Field
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.launch import Launch, aligned, per_program, reciprocal
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree, fanout_for
from gpu_replay.ops.ring import moved_rows

if TYPE_CHECKING:
    from gpu_replay.ops.eligibility import Streams

TreeArguments = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
NO_TREE: TreeArguments = (), ()
# takes values, priorities, keys to be filled, and whether all values are aligned
Add = Callable[[Mapping[str, Tensor], Tensor | None, Tensor, bool], None]


class DeviceMasses:
    """Arguments of the mass kernels: a tree, the numbers of its rule and, for updates, one stamp per slot."""

    def __init__(self, tree: MassTree, rule: Rule, initial: int) -> None:
        device = tree.levels[0].device
        self.tree = tree
        masses = torch.tensor([initial, rule.limit], dtype=torch.int64, device=device)
        numbers = torch.tensor([rule.alpha, rule.eps, rule.clip], dtype=torch.float64, device=device)
        # order codes are made without numbers
        self.rule = (masses,) if rule.ordered else (masses, numbers)
        self.stamps = torch.full((tree.slots,), -1, dtype=torch.int32, device=device)

    @property
    def arguments(self) -> TreeArguments:
        """Levels and rule, as kernels take them."""
        return self.tree.levels, self.rule

    def find_highest(self, counters: Tensor) -> None:
        """Bring the largest stored mass to where kernels take it from."""
        counters[Counter.HIGHEST] = self.tree.masses.max()

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the tree's."""
        return sum(part.nbytes for part in self.rule) + self.stamps.nbytes


def blocks_per_program(rows: int, fanout: int, interpreted: bool) -> int:
    """Blocks of `fanout` slots of one program that inserts, four slots a thread; when interpreted, of all the rows."""
    return min(1024, 1 << (-(-rows // fanout)).bit_length()) if interpreted else 512 // fanout


def keys_together(batch: int, interpreted: bool) -> int:
    """Keys of the one program that updates a whole batch; 0 of a batch that takes several, and a launch before them.

    On a GPU few keys and many are different code to compile: 256, 512 or 1024. One that holds many more than there are
    would make masses for nothing, and one of thousands of keys would leave the rest of the GPU idle.
    """
    if batch > 1024:
        return 0
    if interpreted:
        return 1 << (batch - 1).bit_length()
    return next(keys for keys in (256, 512, 1024) if batch <= keys)


def update_warps(together: int) -> int:
    """Warps of a program that updates `together` keys: a thread for each, within what AMD's GPUs allow.

    0 stands for an update by several programs. A thread with several keys exchanges them through shared memory.
    """
    return min(16, max(4, together // 32))


def make_add(
    stores: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    masses: DeviceMasses | None,
    counters: Tensor,
    times_sampled: Tensor,
    rows: int,
    initial_counter: int | None,
    *,
    given: bool,
) -> Add:
    """Device: store `rows` transitions with their masses, and put their keys into a (rows,) int64. One launch changes
    all that changes, so that nothing comes between.

    initial_counter: where the initial mass is found if it is there; else it is the one given to `masses`.
    given:  whether they come with priorities, all of one dtype.
    """
    from gpu_replay.kernels.priorities import add_kernel

    capacity, interpreted = times_sampled.numel(), counters.device.type == "cpu"
    names, fanout, skipped = tuple(fields), fanout_for("triton"), max(0, rows - capacity)
    layout, moving = moved_rows(tuple(fields.values()), rows - skipped, interpreted)
    blocks = blocks_per_program(rows - skipped, fanout, interpreted)
    segment = -(-(-(-(rows - skipped) // fanout) + 1) // blocks)
    inserting = max(2 * segment, -(-skipped // (blocks * fanout)))
    launch = Launch(
        add_kernel,
        inserting + moving,
        stores=tuple(stores[name] for name in names),
        tree=NO_TREE if masses is None else masses.arguments,
        counters_ptr=counters,
        times_sampled_ptr=times_sampled,
        rows=rows,
        skipped=skipped,
        capacity=capacity,
        segment=segment,
        inserting=inserting,
        LAYOUT=layout,
        BLOCKS=blocks,
        GIVEN=given,
        SOURCE=-1 if initial_counter is None else initial_counter,
    )
    looks_up = masses if initial_counter == Counter.HIGHEST else None

    def add(values: Mapping[str, Tensor], priorities: Tensor | None, keys: Tensor, ready: bool) -> None:
        if looks_up is not None:
            looks_up.find_highest(counters)
        inputs, numbers = tuple(map(values.__getitem__, names)), keys if priorities is None else priorities
        launch(inputs, keys, numbers, aligned=(ready or aligned(*inputs)) and (numbers is keys or aligned(numbers)))

    return add


def _waiting(streams: Streams | None) -> dict[str, Any]:
    """Arguments of `update_kernel` by which masses wait for their steps."""
    if streams is None:
        return {"streams": (), "envs": 1, "per_envs": 0, "stack": 1, "n_step": 0, "per_lines": 0, "NEXT_STEP": False}
    shape = streams.shape
    return {
        "streams": (streams.flags, streams.depth, streams.open_masses),
        "envs": shape.num_envs,
        "per_envs": reciprocal(shape.num_envs),
        "stack": shape.stack,
        "n_step": shape.n_step,
        "per_lines": reciprocal(streams.open_masses.numel()),
        "NEXT_STEP": shape.next_step,
    }


def make_update(
    masses: DeviceMasses | None, counters: Tensor, capacity: int, batch: int, streams: Streams | None
) -> Callable[[Tensor, Tensor, bool], None]:
    """Device: new masses for live keys, the last of a repeated key; one launch a call, two for more keys than a program
    takes. All priorities must be of one dtype; the last argument says that both are aligned.

    streams: of a trajectory buffer, whose stored slots without mass stay so; a mass for one that may get it when its
             window is complete waits there.
    """
    from gpu_replay.kernels.priorities import last_wins_kernel, update_kernel

    interpreted = counters.device.type == "cpu"
    together = keys_together(batch, interpreted) if masses is not None else 0
    draws = together or per_program(128, batch, interpreted)
    programs, stamps = -(-batch // draws), counters if masses is None else masses.stamps
    shared: dict[str, Any] = {"counters_ptr": counters, "stamp_ptr": stamps, "batch": batch, "capacity": capacity}
    shared |= {"per_capacity": reciprocal(capacity), "DRAWS": draws}
    finds_apart = masses is not None and not together
    stamp = Launch(last_wins_kernel, programs, **shared) if finds_apart else None
    change = Launch(
        update_kernel,
        programs,
        **shared,
        tree=NO_TREE if masses is None else masses.arguments,
        **_waiting(None if masses is None else streams),
        FINDS_WINNERS=together > 0,
        num_warps=update_warps(together),
    )

    def update(keys: Tensor, priorities: Tensor, ready: bool) -> None:
        is_aligned = ready or aligned(keys, priorities)
        if stamp is None:
            change(keys, priorities, aligned=is_aligned)
            return
        try:
            stamp(keys, aligned=is_aligned)
            change(keys, priorities, aligned=is_aligned)
        except BaseException:
            # reset the stamps if the second launch failed, since they would win over those of later updates
            stamps.fill_(-1)
            raise

    return update
