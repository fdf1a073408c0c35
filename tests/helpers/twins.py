"""A buffer of the host code beside one of the kernels: they get the same calls, and must hold the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guards import SENTINEL
from interpreted import INTERPRETED
from tolerances import close
from torch import Tensor
from trees import check_sums

from gpu_replay import Batch, Field, RankBased
from gpu_replay.ops.counters import Counter

# of all kinds of rows that kernels move, and of all ways in which they leave
FIELDS = {
    **{f"bytes {width}": Field((width,), torch.uint8) for width in (1, 2, 127, 128, 129)},
    "42 x 42": Field((42, 42), torch.uint8),
    "84 x 84": Field((84, 84), torch.uint8),
    "to half": Field((84, 84), torch.uint8, torch.float16, 1 / 255),
    "to bfloat16": Field((42, 42), torch.uint8, torch.bfloat16, 1 / 255),
    "to float": Field((3, 7, 5), torch.uint8, torch.float32, 1 / 255),
    "scalars": Field((), torch.float32),
    "vectors": Field((4,), torch.float32),
    "odd to half": Field((17,), torch.float32, torch.float16),
    "brain": Field((9,), torch.bfloat16, torch.float32),
    "brain scaled": Field((9,), torch.bfloat16, None, 3.0),
    "doubles": Field((3,), torch.float64, torch.float32, -0.1),
    "long": Field((2,), torch.int64, torch.float64, 0.5),
    "flags": Field((6,), torch.bool, torch.float32),
}
LOOSE = ("probability", "weight", "next_")


def values_of(field: Field, rows: int, generator: np.random.Generator) -> Tensor:
    """Rows of a dtype's own random values, none of them a sentinel."""
    shape = (rows, *field.shape)
    if field.dtype.is_floating_point:
        return torch.from_numpy(generator.standard_normal(shape)).to(field.dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (1, SENTINEL)}.get(field.dtype, (-100, 100))
    return torch.from_numpy(generator.integers(low, high, shape)).to(field.dtype)


class Twins:
    """`host` is on the CPU, `tested` on the device under test.

    make: a buffer on the device that it is given.
    backend: of `tested`.
    """

    def __init__(self, make: Callable[[str], Any], device: str, backend: str = "triton") -> None:
        made = []
        for code, place in (("host", "cpu"), (backend, device)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GPU_REPLAY_BACKEND", code)
                made.append(make(place))
        self.both, self.host, self.tested = made, *made

    def call(self, name: str, *given: Any, **named: Any) -> list[Any]:
        """The results of one method of both, whose tensors are moved to the device of each."""
        found = []
        for buffer in self.both:
            values = [value.to(buffer.device) if isinstance(value, Tensor) else value for value in given]
            more = {n: value.to(buffer.device) if isinstance(value, Tensor) else value for n, value in named.items()}
            found.append(getattr(buffer, name)(*values, **more))
        return found

    def insert(self, **rows: Any) -> Tensor:
        """Add the same rows to both; returns their keys."""
        keys = self.call("add", **rows)
        assert keys[-1].tolist() == keys[0].tolist()
        return keys[0]

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        self.call("update_priorities", keys, priorities)

    def draw(self, *given: Any, loose: tuple[str, ...] = LOOSE, **named: Any) -> Batch:
        """Fail unless both draw the same batch; returns that of the host."""
        expected, found = self.call("sample", *given, **named)
        check_batches(found, expected, loose)
        if isinstance(self.host.sampler.base, RankBased):
            # quotients of the same integers
            assert torch.equal(found.probability.cpu(), expected.probability)
        return expected

    def check(self) -> None:
        check_same(self.tested, self.host)


def check_batches(found: Batch, expected: Batch, loose: tuple[str, ...] = LOOSE) -> None:
    """Fail unless two batches have the same names, types and bits.

    loose: beginnings of names that are compared within a tolerance, or only where they mean something.
    """
    assert list(found) == list(expected)
    assert found.key.tolist() == expected.key.tolist()
    for name, value in expected.items():
        mine = found[name].cpu()
        assert mine.dtype == value.dtype, name
        if name.startswith("next_") and "next_" in loose:
            # without meaning where the discount is 0
            mine, value = mine[expected.discount > 0], value[expected.discount > 0]
        elif name.startswith(loose):
            assert close(mine, value, name), name
            continue
        # the interpreter cuts what a GPU rounds
        cut = INTERPRETED and value.dtype == torch.bfloat16
        assert torch.equal(mine, value) or (cut and close(mine, value, "cut")), name


def check_same(tested: Any, host: Any) -> None:
    """Fail unless both hold the same integers and rows, all sums are right and no stamp of an update is left behind."""
    # only the calls that looked for an extreme read it
    tested._counters[[Counter.LOWEST, Counter.HIGHEST]] = host._counters[[Counter.LOWEST, Counter.HIGHEST]].to(
        tested._counters.device
    )
    assert tested._counters.tolist() == host._counters.tolist()
    mine, other = (buffer._state_tensors(host.capacity) for buffer in (tested, host))
    assert mine.keys() == other.keys()
    stored = min(host.added, host.capacity)
    for name, tensor in mine.items():
        # nothing is said of rows that were never written
        said = stored if name[:7] == "fields." else len(tensor)
        mine_said, other_said = tensor[:said].cpu(), other[name][:said]
        # the reward of a dead step may be no number
        same = (mine_said == other_said) | (mine_said != mine_said) & (other_said != other_said)
        assert bool(same.all()), name
    for name in ("tree", "eligible_tree"):
        tree, expected = (getattr(buffer._state, name, None) for buffer in (tested, host))
        if tree is not None:
            assert torch.equal(tree.masses.cpu(), expected.masses)
            check_sums(tree)
    if tested.sampler.base.summed:
        assert torch.equal(tested.masses(), tested._state.tree.masses)
        assert tested.total_mass() == host.total_mass()
    if tested._engine.sampling.masses is not None:
        assert (tested._engine.sampling.masses.stamps == -1).all()
