"""Trees and counters of one buffer, in the memory of its device, on which draws and updates work."""

from __future__ import annotations

import torch

from gpu_replay.engines.storage import Storage
from gpu_replay.loops.ring import FIXED, LARGEST_EVER, LARGEST_STORED
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import Counter, new_counters
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.priorities import DeviceMasses
from gpu_replay.ops.rank_draw import DeviceRanks
from gpu_replay.ops.ranks import host_ranks_bytes
from gpu_replay.samplers import Sampler

# where tensors have sizes and no memory
META = torch.device("meta")
_SOURCES = {"running": LARGEST_EVER, "stored": LARGEST_STORED}


class SamplerState:
    """The priorities of all slots, which of them can be drawn, and the counters.

    tracks_eligibility: whether stored slots exist that cannot be drawn, and that no update may make eligible; they have
                   mass 0. So it is in trajectory buffers.
    rule:          how priorities become masses, or order codes for draws by rank.
    tree:          of these, without sums for draws by rank; None for samplers without priorities.
    eligible_tree: of ones for eligible starts; None where all stored slots can be drawn, or `tree` alone will do.
    """

    def __init__(
        self,
        sampler: Sampler,
        slots: int,
        device: torch.device,
        backend: Backend,
        seed: int,
        *,
        tracks_eligibility: bool,
    ) -> None:
        self.sampler, self.base = sampler, sampler.base
        self.slots = slots
        self.tracks_eligibility = tracks_eligibility
        self.rule = self.base.rule(slots)
        self.tree = MassTree(slots, device, backend, summed=self.base.summed) if self.base.prioritized else None
        self.eligible_tree = (
            MassTree(slots, device, backend) if tracks_eligibility and sampler.needs_start_tree else None
        )
        self.counters = new_counters(device, seed)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.counters.nbytes + sum(tree.nbytes for tree in self.trees)

    @property
    def trees(self) -> list[MassTree]:
        """The trees that exist."""
        return [tree for tree in (self.tree, self.eligible_tree) if tree is not None]

    @property
    def initial(self) -> tuple[int, int]:
        """The source from which loops take the mass of new transitions, and its fixed or first value."""
        setting = self.base.initial
        if self.tree is None:
            # every start counts one
            return FIXED, 1
        return _SOURCES.get(str(setting), FIXED), self.rule.mass(1.0 if isinstance(setting, str) else float(setting))

    def initial_mass(self) -> int:
        """The mass that a start without a priority of its own gets now; on CUDA this waits for the device."""
        source, mass = self.initial
        if source == LARGEST_EVER:
            return int(self.counters[Counter.MAX_MASS]) or mass
        return (int(self.masses.masses.max()) or mass) if source == LARGEST_STORED else mass

    @property
    def masses(self) -> MassTree:
        """The tree of masses or codes, for samplers with priorities."""
        return self._required(self.tree, "priorities")

    @property
    def eligible(self) -> MassTree:
        """A trajectory buffer's tree with 0 for steps that are not eligible: of ones if it has that, else of masses."""
        return self._required(self.eligible_tree or self.tree, "eligible starts")

    @property
    def summed(self) -> MassTree | None:
        """The tree of masses; None for draws that know no masses."""
        return self.tree if self.base.summed else None

    def _required(self, tree: MassTree | None, what: str) -> MassTree:
        if tree is None:
            raise RuntimeError(f"a buffer that draws by {self.sampler} keeps no tree of {what}.")
        return tree

    def clear(self) -> None:
        """Make nothing eligible; keys and statistics go on."""
        self.counters[Counter.FIRST] = self.counters[Counter.ADDED]
        self.counters[Counter.ELIGIBLE] = 0
        for tree in self.trees:
            tree.clear()

    def rebuild(self, written: int) -> None:
        """Recompute everything that is derived from the restored leaves of the first `written` slots."""
        for tree in self.trees:
            tree.masses[written:].zero_()
        if self.tree is not None:
            self.tree.build()
        if self.eligible_tree is not None:
            if self.tree is not None:
                self.eligible_tree.masses.copy_(self.tree.masses > 0)
            self.eligible_tree.build()
        if self.tracks_eligibility:
            self.counters[Counter.ELIGIBLE] = int((self.eligible.masses > 0).sum())


def sizes_of(storage: Storage, sampler: Sampler, backend: Backend) -> dict[str, int]:
    """Bytes that a buffer will take, by name, but for a few constants: those of its storage, "priorities", "ranks" and
    "marks".

    storage: on the meta device, where all the rest is made too.
    """
    slots, base = storage.capacity, sampler.base
    state = SamplerState(sampler, slots, META, backend, 0, tracks_eligibility=storage.streams is not None)
    sizes = storage.sizes
    if state.tree is not None:
        # on a device each slot also has a stamp, which finds the last of repeated keys
        stamps = 0 if backend == "host" else DeviceMasses(state.tree, state.rule, 1).stamps.nbytes
        sizes["priorities"] = state.tree.nbytes + stamps
        if not base.summed and backend == "host":
            sizes["ranks"] = host_ranks_bytes(slots)
        elif not base.summed:
            sums = torch.empty(slots, dtype=torch.int64, device=META)
            sizes["ranks"] = DeviceRanks(slots, base.alpha, state.counters, sums).nbytes
    return sizes if state.eligible_tree is None else sizes | {"marks": state.eligible_tree.nbytes}
