"""Resolves a sampler's settings once into a plan; no code below depends on the class of the sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from gpu_replay.ops._backend import Backend
from gpu_replay.ops.mass import MassRule, OrderRule, Rule
from gpu_replay.ops.mass_tree import MassTree, tree_bytes
from gpu_replay.ops.rank_draw import ranks_bytes
from gpu_replay.ops.ranks import host_ranks_bytes
from gpu_replay.samplers import Combined, Latest, LinearSchedule, Proportional, RankBased, Uniform


@dataclass(frozen=True)
class SamplerPlan:
    """The resolved settings by which one buffer samples.

    kind:          how rows are drawn: uniformly, by mass, by rank, or always the newest.
    newest:        rows at the end of every batch that are the newest instead.
    lowest_of_all: whether weights are divided by the largest that any stored transition could get, or in the batch.

    The others are the settings of the sampler; those that it lacks have values without effect.
    """

    kind: Literal["uniform", "mass", "rank", "newest"]
    newest: int = 0
    replacement: bool = False
    alpha: float = 0.0
    beta: float | LinearSchedule = 0.0
    eps: float = 0.0
    clip: float | None = None
    initial: Literal["running", "stored"] | float = 0.0
    stratified: bool = False
    lowest_of_all: bool = False

    @cached_property
    def prioritized(self) -> bool:
        """Whether each transition has a priority."""
        return self.kind in ("mass", "rank")

    @property
    def counts_starts(self) -> bool:
        """Whether the eligible starts of a trajectory buffer must be counted in slot order, beside any masses."""
        return self.newest > 0 or not self.prioritized

    def newest_of(self, batch: int) -> int:
        """Rows of a batch that are the newest."""
        return batch if self.kind == "newest" else self.newest

    def distinct(self, batch: int) -> int:
        """The least number of transitions that a batch needs; at least one is always needed."""
        if self.kind == "newest":
            return batch
        return self.newest if self.prioritized or self.replacement else max(self.newest, batch - self.newest)

    def rule(self, slots: int) -> Rule:
        """The rule that turns priorities into the values of the tree."""
        return OrderRule() if self.kind == "rank" else MassRule.for_slots(slots, self.alpha, self.eps, self.clip)

    @property
    def _tree_options(self) -> dict[str, bool]:
        by_mass = self.kind == "mass"
        return {"low": by_mass and self.lowest_of_all, "high": self.initial == "stored", "summed": by_mass}

    def tree(self, slots: int, device: torch.device, backend: Backend) -> MassTree | None:
        """The tree of masses, or of order codes for draws by rank; None without priorities."""
        return MassTree(slots, device, backend, **self._tree_options) if self.prioritized else None

    def priority_bytes(self, slots: int, backend: Backend) -> dict[str, int]:
        """Bytes that priorities and ranks take, by name."""
        if not self.prioritized:
            return {}
        on_device = backend == "triton"
        # on the device each slot has a stamp besides, to settle repeated keys by
        stamps = slots * torch.int32.itemsize if on_device else 0
        sizes = {"priorities": tree_bytes(slots, backend, **self._tree_options) + stamps}
        if self.kind == "rank":
            sizes["ranks"] = ranks_bytes(slots) if on_device else host_ranks_bytes(slots)
        return sizes


def plan_of(sampler: object) -> SamplerPlan:
    """The plan of a sampler; TypeError for anything else."""
    base, newest = (sampler.base, sampler.newest) if isinstance(sampler, Combined) else (sampler, 0)
    if isinstance(base, Uniform):
        return SamplerPlan("uniform", newest, base.replacement)
    if isinstance(base, Latest):
        return SamplerPlan("newest")
    if not isinstance(base, (Proportional, RankBased)):
        raise TypeError(
            f"sampler must be Uniform(), Proportional(), RankBased(), Latest() or Combined(); found {sampler!r}."
        )
    plan = SamplerPlan(
        "rank",
        newest,
        alpha=base.alpha,
        beta=base.beta,
        initial=base.initial,
        stratified=base.stratified,
        lowest_of_all=base.normalize == "buffer",
    )
    return plan if isinstance(base, RankBased) else replace(plan, kind="mass", eps=base.eps, clip=base.clip)
