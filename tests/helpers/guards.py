"""Memory that shows what was written where it should not have been.

Every tensor made within `guarded` lies in the middle of a larger one full of sentinels, and what is not filled at once
is poisoned: a kernel that writes past an end, or takes fresh memory for zeros, is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

SENTINEL = 0xA5
# on each side, in bytes; a multiple of 16, so that the middle stays as well aligned as any tensor
MARGIN = 1024


class Guards:
    """The tensors with sentinels around them."""

    def __init__(self) -> None:
        self._held: list[tuple[str, Tensor, int]] = []
        # the allocator itself, which tests replace
        self._full = torch.full

    def allocate(self, shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        """A poisoned tensor of that shape between two margins."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._full((MARGIN + size + MARGIN,), SENTINEL, dtype=torch.uint8, device=device)
        self._held.append((f"{str(dtype).removeprefix('torch.')}{list(shape)}", memory, size))
        return memory[MARGIN : MARGIN + size].view(dtype).view(shape)

    def check(self) -> None:
        """Fail if anything outside of a tensor was written."""
        touched = [
            name
            for name, memory, size in self._held
            if not bool(((memory[:MARGIN] == SENTINEL).all() & (memory[MARGIN + size :] == SENTINEL).all()).item())
        ]
        assert touched == [], f"written outside of {touched}"

    def __len__(self) -> int:
        return len(self._held)


@contextmanager
def guarded() -> Iterator[Guards]:
    """Within it `torch.empty`, `zeros`, `full`, `tensor` and `empty_like` allocate between sentinels."""
    guards = Guards()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "full", "tensor"):
            fills = not name.startswith("empty")
            patch.setattr(torch, name, _between_sentinels(getattr(torch, name), guards, fills=fills))
        yield guards
    guards.check()


@pytest.fixture(name="guards")
def guards_fixture() -> Iterator[Guards]:
    """The sentinels around all that the test allocates, checked when it is over."""
    with guarded() as guards:
        yield guards


def _between_sentinels(made: Callable[..., Tensor], guards: Guards, *, fills: bool) -> Callable[..., Tensor]:
    def allocate(*arguments: Any, **named: Any) -> Tensor:
        plain = made(*arguments, **named)
        # what has no memory cannot be written past
        if plain.device.type == "meta" or plain.layout != torch.strided or not plain.is_contiguous():
            return plain
        result = guards.allocate(plain.shape, plain.dtype, plain.device)
        return result.copy_(plain) if fills else result

    return allocate
