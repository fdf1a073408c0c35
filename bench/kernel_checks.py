"""Whether an implementation gives right answers: one that does not is not measured.

Each function checks one answer and returns a list of faults in words, empty for a right answer. They are written in
torch and run on the device of the answer, so that a million sampled slots need no copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernel_inputs import N_STEP, Inputs
from .subjects import ALPHA, EPS, STACK, Call

# transitions of a batch whose frames are compared
_COMPARED = 64


class Implementation(NamedTuple):
    """One implementation of one case.

    call:    what is measured; it does the whole work each time.
    wrong:   says what is wrong with an answer of `call`; where that returns none, it does the work once more.
    prepare: runs before each call, outside the measured time.
    """

    call: Callable[[], Any]
    wrong: Callable[[Any], list[str]]
    prepare: Call = lambda: None

    def faults(self) -> list[str]:
        """What is wrong with the answer of one call."""
        self.prepare()
        return self.wrong(self.call())


def draws(inputs: Inputs, make: Callable[[Inputs], Any]) -> Implementation:
    """Stratified draws from an index.

    make: makes the priorities of N slots, with the methods `draw`, `update(slots, errors)`, `weights` (N,) in units of
          1 / `unit`, and `total`; sums may be off by a share `slack`.
    """
    index = make(inputs)
    return Implementation(index.draw, lambda slots: wrong_draws(index.weights(), slots, index.slack))


def updates(inputs: Inputs, make: Callable[[Inputs], Any]) -> Implementation:
    """New weights of an index at given slots."""
    index, pool = make(inputs), cycle(zip(inputs.keys, inputs.errors, strict=True))
    return Implementation(lambda: index.update(*next(pool)), lambda _: wrong_update(index, inputs))


def draw_updates(inputs: Inputs, make: Callable[[Inputs], Any]) -> Implementation:
    """Draws from an index, and new weights for what was drawn."""
    index, pool = make(inputs), cycle(inputs.errors)

    def step() -> Tensor:
        slots: Tensor = index.draw()
        index.update(slots, next(pool))
        return slots

    def wrong(_: object) -> list[str]:
        before = index.weights().clone()
        return wrong_draws(before, step(), index.slack) + wrong_totals(index.weights(), index.total(), index.slack)

    return Implementation(step, wrong)


def gathers(
    gather: Callable[[Tensor], Any], slots: Sequence[Tensor], wrong: Callable[[Any], list[str]]
) -> Implementation:
    """What is stored at given slots, each time others; `wrong` checks what is found at the first."""
    pool = cycle(slots)
    return Implementation(lambda: gather(next(pool)), lambda _: wrong(gather(slots[0])))


def wrong_scan(values: Tensor, sums: Tensor) -> list[str]:
    """Inclusive prefix sums (N,) of (N,) values, both int64: exact."""
    if sums.shape != values.shape:
        return [f"there are {sums.numel()} sums of {values.numel()} values"]
    right = torch.equal(sums[:1], values[:1]) and torch.equal(sums[1:] - sums[:-1], values[1:])
    return [] if right else ["a prefix sum is not the one before it and its value"]


def wrong_totals(weights: Tensor, total: Tensor | int, slack: float = 0.0) -> list[str]:
    """Check that the total is the sum of (N,) weights, up to a share `slack` of it."""
    exact = weights.sum(dtype=torch.int64 if weights.dtype == torch.int64 else torch.float64).item()
    found = total.item() if isinstance(total, Tensor) else total
    right = found == exact if slack == 0 else abs(found - exact) <= slack * exact
    return [] if right else [f"the total is {found}, the sum of all is {exact}"]


def wrong_draws(weights: Tensor, slots: Tensor, slack: float = 0.0) -> list[str]:
    """(B,) slots drawn one in each of B equal parts of the total of (N,) weights.

    Each slot's interval of the prefix sums must overlap its stratum, up to a share `slack` of the total.
    """
    if wrong := _outside(weights, slots):
        return wrong
    sums = torch.cumsum(weights if weights.dtype == torch.int64 else weights.double(), 0)
    batch, total = slots.numel(), sums[-1].item()
    stratum = torch.arange(batch + 1, dtype=sums.dtype, device=sums.device)
    if isinstance(total, int):
        bounds = stratum * (total // batch) + stratum * (total % batch) // batch
    else:
        bounds = stratum * (total / batch)
    margin, end, width = type(total)(slack * total), sums[slots], weights[slots]
    missed = (end <= bounds[:-1] - margin) | (end - width >= bounds[1:] + margin) | (width <= 0)
    count = int(missed.sum())
    return [f"{count} of {batch} draws are on slots whose prefix interval does not hold their target"] if count else []


def wrong_shares(weights: Tensor, slots: Tensor) -> list[str]:
    """Check (B,) independent draws by (N,) weights: their positions in the total are uniform, with a mean of a half.

    A right answer is refused once in 500 million checks.
    """
    if wrong := _outside(weights, slots):
        return wrong
    sums = torch.cumsum(weights.double(), 0)
    place = (sums[slots] - weights[slots].double() / 2) / sums[-1]
    mean = float(place.mean())
    # the deviation of one uniform number is the root of a twelfth
    allowed = 6 / (12 * slots.numel()) ** 0.5
    return [] if abs(mean - 0.5) <= allowed else [f"draws lie at {mean:.3f} of the total on average, not at a half"]


def wrong_ranks(priorities: Tensor, masses: Tensor, slots: Tensor, slack: float = 0.0) -> list[str]:
    """(B,) slots drawn by rank, one in each of B equal parts of the total of the (N,) running `masses` of ranks.

    Equal priorities may be in any order.
    """
    if wrong := _outside(priorities, slots):
        return wrong
    batch, total = slots.numel(), int(masses[-1])
    stratum = torch.arange(batch + 1, device=slots.device)
    bounds = stratum * (total // batch) + stratum * (total % batch) // batch
    margin = int(slack * total)
    first = torch.searchsorted(masses, (bounds[:-1] - margin).clamp(min=0), right=True)
    last = torch.searchsorted(masses, (bounds[1:] - 1 + margin).clamp(max=total - 1), right=True)
    ordered, found = torch.sort(priorities, descending=True).values, priorities[slots]
    count = int(((found > ordered[first]) | (found < ordered[last])).sum())
    return [f"{count} of {batch} draws are not of a rank in their part of the total"] if count else []


def wrong_update(index: Any, inputs: Inputs) -> list[str]:
    """Whether an index gives distinct slots the powers of their errors, leaves others, and keeps the total exact."""
    slots, errors = inputs.keys[0], inputs.errors[0]
    before = index.weights().clone()
    index.update(slots, errors)
    after = index.weights()
    expected = errors.double().add(EPS).pow(ALPHA)
    # masses are whole numbers
    near = torch.allclose(after[slots].double() / index.unit, expected, rtol=1e-4, atol=2.0**-20)
    wrong = [] if near else ["new weights are not as given"]
    before[slots] = after[slots]
    if not torch.equal(before, after):
        wrong.append("slots that were not updated have changed")
    return wrong + wrong_totals(after, index.total(), index.slack)


def wrong_rows(found: Mapping[str, Tensor], inputs: Inputs) -> list[str]:
    """Rows of every field at the (B,) slots `inputs.slots[0]`, compared with plain indexing."""
    slots = inputs.slots[0]
    return [
        f"rows of {name!r} are not those of their slots"
        for name, values in inputs.rows.items()
        if name not in found or not torch.equal(found[name], values[slots])
    ]


def wrong_frames(before: Tensor, after: Tensor, inputs: Inputs) -> list[str]:
    """(B, 4, 84, 84) stacks before and after those of `inputs.starts[0]`; some of them compared with plain indexing."""
    slots = inputs.starts[0][:_COMPARED]
    frames = inputs.frames
    wrong = []
    for name, stacks, later in (("obs", before, 0), ("next_obs", after, N_STEP)):
        back = (torch.arange(1 - STACK, 1, device=slots.device) + later) * inputs.envs
        expected = frames[slots[:, None] + back].to(inputs.dtype)
        right = stacks.shape[0] == inputs.batch and stacks.dtype == inputs.dtype
        if not right or not torch.equal(stacks[:_COMPARED], expected):
            wrong.append(f"stacks of {name} are not those of their slots")
    return wrong


def _outside(weights: Tensor, slots: Tensor) -> list[str]:
    if slots.numel() == 0:
        return ["nothing was drawn"]
    first, last = (int(each) for each in slots.aminmax())
    return [] if 0 <= first <= last < len(weights) else [f"slots from {first} to {last} of {len(weights)} were drawn"]
