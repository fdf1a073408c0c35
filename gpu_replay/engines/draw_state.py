"""Trees and counters of one buffer, in the memory of its device, on which draws and updates work."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gpu_replay.engines.sampler_plan import SamplerPlan
from gpu_replay.loops.ring import FIXED, LARGEST_EVER, LARGEST_STORED
from gpu_replay.ops._backend import Backend
from gpu_replay.ops.counters import Counter, new_counters
from gpu_replay.ops.mass_tree import MassTree

_SOURCES = {"running": LARGEST_EVER, "stored": LARGEST_STORED}


class DrawState:
    """The priorities of all slots, which of them can be drawn, and the counters.

    tracks_eligibility: whether stored slots exist that cannot be drawn, and that no update may make eligible; they have
                   mass 0. So it is in trajectory buffers.
    rule:          how priorities become masses, or order codes for draws by rank.
    tree:          of these; None for samplers without priorities.
    total_slots:   slots of all shards of the buffer, which share the limit of masses.
    eligible_tree: of ones for eligible starts; None where all stored slots can be drawn, or `tree` alone will do.
    """

    def __init__(
        self,
        plan: SamplerPlan,
        slots: int,
        device: torch.device,
        backend: Backend,
        seed: int,
        *,
        tracks_eligibility: bool,
        total_slots: int | None = None,
    ) -> None:
        self.plan = plan
        self.slots = slots
        self.tracks_eligibility = tracks_eligibility
        self.rule = plan.rule(slots if total_slots is None else total_slots)
        self.tree = plan.tree(slots, device, backend)
        self.eligible_tree = MassTree(slots, device, backend) if tracks_eligibility and plan.counts_starts else None
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
        setting = self.plan.initial
        if self.tree is None:
            # every start counts one
            return FIXED, 1
        return _SOURCES.get(str(setting), FIXED), self.rule.mass(1.0 if isinstance(setting, str) else float(setting))

    @property
    def masses(self) -> MassTree:
        """The tree of masses or codes, for plans with priorities."""
        return self._required(self.tree, "priorities")

    @property
    def eligible(self) -> MassTree:
        """A tree of a trajectory buffer that holds 0 where a start is not eligible: that of ones if there is one."""
        return self._required(self.eligible_tree or self.tree, "eligible starts")

    def _required(self, tree: MassTree | None, what: str) -> MassTree:
        if tree is None:
            raise RuntimeError(f"a buffer that draws by {self.plan.kind!r} keeps no tree of {what}.")
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

    def narrowed(self, allowed: Tensor) -> DrawState:
        """A state for one draw, in which no other slots than the allowed, (slots,) bool, can be drawn.

        The counters are these, the trees its own.
        """
        state = copy.copy(self)
        if self.tree is not None:
            state.tree = self.plan.tree(self.slots, allowed.device, self.tree.backend)
        if self.eligible_tree is not None:
            state.eligible_tree = MassTree(self.slots, allowed.device, self.eligible_tree.backend)
        for tree, full in zip(state.trees, self.trees, strict=True):
            tree.masses.copy_(torch.where(allowed, full.masses, 0))
            tree.build()
        return state
