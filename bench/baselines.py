"""The torch operations that a user would write instead of this package's kernels.

Sums over all slots go into preallocated tensors, batches into fresh ones, as in a training loop. Priorities are held as
powers in float64, since float32 sums cannot tell slots apart beyond 2**24 of them.

A baseline whose name ends in `alone` does only part of the work: it is measured with the others but never counts as
the best baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import kernel_checks as checks
from .kernel_checks import Implementation
from .kernel_inputs import Inputs
from .subjects import ALPHA, EPS

Maker = Callable[[Inputs], Implementation]
Work = Callable[..., Implementation]
# slots up to which float32 sums tell neighbours apart, and categories that torch.multinomial takes
FLOAT32_SLOTS = 2**24
ALONE = " alone"
# shares of the total by which a sum of floats may differ from the exact one
SLACK = {torch.float32: 2.0**-18, torch.float64: 2.0**-40}


class CumulativeSums:
    """Powers of priorities and their running sums: `searchsorted` samples from them, `index_copy_` updates them.

    build: when all powers are summed up anew: in each "draw", each "update", or never.
    """

    unit = 1.0

    def __init__(self, inputs: Inputs, dtype: torch.dtype = torch.float64, build: str = "") -> None:
        batch, device = inputs.batch, inputs.device
        self.slack, self._build = SLACK[dtype], build
        self._powers = inputs.priorities.to(dtype, copy=True).add_(EPS).pow_(ALPHA)
        self._sums = torch.empty_like(self._powers)
        self._stratum = torch.arange(batch, dtype=dtype, device=device)
        self._targets = torch.empty(batch, dtype=dtype, device=device)
        self._slots = torch.empty(batch, dtype=torch.int64, device=device)
        self.build()

    def build(self) -> None:
        """Sum up all powers."""
        torch.cumsum(self._powers, 0, out=self._sums)

    def draw(self) -> Tensor:
        """(B,) int64 slots, one for each stratum of the total."""
        if self._build == "draw":
            self.build()
        targets = self._targets.uniform_()
        targets.add_(self._stratum).mul_(self._sums[-1:]).div_(targets.numel())
        torch.searchsorted(self._sums, targets, right=True, out=self._slots)
        return self._slots.clamp_(max=len(self._sums) - 1)

    def update(self, slots: Tensor, errors: Tensor) -> None:
        """Give the slots new powers."""
        self._powers.index_copy_(0, slots, errors.add(EPS).pow_(ALPHA).to(self._powers.dtype))
        if self._build == "update":
            self.build()

    def weights(self) -> Tensor:
        """(N,) powers."""
        return self._powers

    def total(self) -> Tensor:
        """The sum of all, as the last running sum says where those are current."""
        return self._sums[-1] if self._build == "update" else self._powers.sum()


def running_sums(work: Work, build: str, *names: str) -> dict[str, Maker]:
    """Implementations of an operation on running sums, by name.

    work:  makes one from an index: `draws`, `updates` or `draw_updates` of kernel_checks.
    build: in which call all is summed up anew, for the names with a "cumsum"; those with "float32" sum in that.
    """
    dtypes = {name: torch.float32 if "float32" in name else torch.float64 for name in names}
    made = {name: partial(CumulativeSums, dtype=dtypes[name], build=build * ("cumsum" in name)) for name in names}
    return {name: partial(work, make=make) for name, make in made.items()}


def cumsum_of_integers(inputs: Inputs) -> Implementation:
    """Running sums of int64."""
    out = torch.empty_like(inputs.masses)
    return Implementation(partial(torch.cumsum, inputs.masses, 0, out=out), partial(checks.wrong_scan, inputs.masses))


def cumsum(inputs: Inputs) -> Implementation:
    """Compute from the powers the running sums that `searchsorted` needs."""
    sums = CumulativeSums(inputs)
    return Implementation(sums.build, lambda _: checks.wrong_totals(sums.weights(), sums.total(), sums.slack))


def multinomial(inputs: Inputs) -> Implementation:
    """A draw by torch.multinomial, not stratified."""
    powers = inputs.priorities.add(EPS).pow_(ALPHA)
    draw = partial(torch.multinomial, powers, inputs.batch, replacement=True)
    return Implementation(draw, partial(checks.wrong_shares, powers))


def sort_searchsorted(inputs: Inputs) -> Implementation:
    """Sort all priorities, and sample ranks from the running sums of their masses, which are made once."""
    masses, batch = inputs.rank_masses, inputs.batch
    sorted_out = torch.empty_like(inputs.priorities)
    order = torch.empty(inputs.capacity, dtype=torch.int64, device=inputs.device)
    stratum = torch.arange(batch, dtype=torch.float64, device=inputs.device)
    uniform = torch.empty_like(stratum)
    width = masses[-1:].double() / batch

    def draw() -> Tensor:
        torch.sort(inputs.priorities, descending=True, out=(sorted_out, order))
        targets = uniform.uniform_().add_(stratum).mul_(width).long()
        ranks = torch.searchsorted(masses, targets, right=True).clamp_(max=inputs.capacity - 1)
        return order[ranks]

    return Implementation(draw, partial(checks.wrong_ranks, inputs.priorities, masses, slack=SLACK[torch.float64]))


def index_select_fields(inputs: Inputs) -> Implementation:
    """One `index_select` for each field."""

    def gather(slots: Tensor) -> dict[str, Tensor]:
        return {name: values.index_select(0, slots) for name, values in inputs.rows.items()}

    return checks.gathers(gather, inputs.slots, lambda found: checks.wrong_rows(found, inputs))


def index_select_packed(inputs: Inputs) -> Implementation:
    """One `index_select` of as many bytes, not yet split into fields."""
    size = sum(values[0].nbytes for values in inputs.rows.values())
    packed = torch.cat(
        [values.view(torch.uint8).reshape(inputs.capacity, -1) for values in inputs.rows.values()], dim=1
    )

    def wrong(found: Tensor) -> list[str]:
        right = found.shape == (inputs.batch, size) and torch.equal(found[-1], packed[inputs.slots[0][-1]])
        return [] if right else ["packed rows are not those of their slots"]

    return checks.gathers(lambda slots: packed.index_select(0, slots), inputs.slots, wrong)


def index_select_frames(inputs: Inputs, dtype: torch.dtype = torch.uint8) -> Implementation:
    """Stacks of obs and next_obs, from slots computed beforehand, with a cast if the case asks for one.

    dtype: the bytes of a frame are copied as values of this dtype.
    """
    frames = inputs.frames
    words = frames.reshape(inputs.capacity, -1).view(dtype)

    def gather(slots: Tensor) -> Tensor:
        found = words.index_select(0, slots).view(torch.uint8)
        return found if inputs.dtype == torch.uint8 else found.to(inputs.dtype)

    def wrong(found: Tensor) -> list[str]:
        before, after = found.reshape(2, inputs.batch, -1, *frames.shape[1:])
        return checks.wrong_frames(before, after, inputs)

    return checks.gathers(gather, inputs.stacked, wrong)


def smallest(inputs: Inputs) -> Implementation:
    """The smallest operation of torch: one number becomes zero."""
    number = torch.ones(1, device=inputs.device)
    return Implementation(number.zero_, lambda zero: [] if zero.item() == 0 else ["the number is not zero"])


# what stands beside this package's operations, by the name in records
EMPTY: dict[str, Maker] = {"zero_ of one number": smallest}
SCANS: dict[str, Maker] = {"cumsum": cumsum_of_integers}
TREES: dict[str, Maker] = {"cumsum": cumsum}
_SEARCHED, _SCATTERED = "cumsum + searchsorted", "scatter + cumsum"
DRAWS = running_sums(checks.draws, "draw", "searchsorted alone", _SEARCHED, f"{_SEARCHED}, float32")
DRAWS |= {"multinomial": multinomial}
UPDATES = running_sums(checks.updates, "update", "scatter alone", _SCATTERED, f"{_SCATTERED}, float32")
DRAW_UPDATES = running_sums(checks.draw_updates, "draw", f"{_SEARCHED} + scatter", f"{_SEARCHED} + scatter, float32")
RANKS: dict[str, Maker] = {"sort + searchsorted": sort_searchsorted}
ROWS: dict[str, Maker] = {"index_select per field": index_select_fields}
ROWS |= {"index_select of packed rows alone": index_select_packed}
