"""Plain rings of tensors with draws by index tensors: what a learner has that uses no library.

`TorchRing` draws uniformly, as FastTD3 and programs like it do. `PrioritizedTorchRing` draws from running sums of the
priorities (`cumsum`, `searchsorted`) and gives new ones by a scatter. A transition holds its own `next_obs`. All of it
stays on one device, and no call waits for that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# name of a field to its shape and type
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class TorchRing:
    """A tensor for each field; the oldest transitions are overwritten."""

    def __init__(self, capacity: int, fields: Fields, device: torch.device | str = "cpu") -> None:
        self.capacity, self.added, self.device = capacity, 0, torch.device(device)
        self.stores = {
            name: torch.zeros((capacity, *shape), dtype=dtype, device=device) for name, (shape, dtype) in fields.items()
        }
        self.random = torch.Generator(device).manual_seed(0)

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Store (n, ...) values of each field, at most `capacity`, on any device; returns their (n,) slots."""
        count = len(next(iter(rows.values())))
        slots = torch.arange(self.added, self.added + count, device=self.device) % self.capacity
        for name, store in self.stores.items():
            store.index_copy_(0, slots, rows[name].to(store))
        self.added += count
        return slots

    def rows(self, slots: Tensor) -> dict[str, Tensor]:
        """The fields of (B,) slots."""
        return {name: store.index_select(0, slots) for name, store in self.stores.items()}

    def sample(self, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,) slots drawn uniformly with replacement, and their fields."""
        slots = torch.randint(len(self), (batch,), device=self.device, generator=self.random)
        return slots, self.rows(slots)


class PrioritizedTorchRing(TorchRing):
    """Draws in proportion to (|priority| + eps) ** alpha; a new transition has the largest of those so far.

    Sums are float64, since those of float32 cannot tell slots apart beyond 2**24 of them.
    """

    def __init__(
        self,
        capacity: int,
        fields: Fields,
        device: torch.device | str = "cpu",
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(capacity, fields, device)
        self.alpha, self.beta, self.eps = alpha, beta, eps
        # 0 where nothing is stored
        self.powers = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.highest = torch.ones((), dtype=torch.float64, device=device)

    def add(self, rows: Mapping[str, Tensor]) -> Tensor:
        """See TorchRing."""
        slots = super().add(rows)
        self.powers.index_copy_(0, slots, self.highest.expand(len(slots)))
        return slots

    def sample(self, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,) slots, one for each of B equal parts of the sum; their fields and importance weights, at most 1."""
        sums = self.powers.cumsum(0)
        part = torch.arange(batch, dtype=torch.float64, device=self.device)
        part += torch.rand(batch, dtype=torch.float64, device=self.device, generator=self.random)
        slots = torch.searchsorted(sums, part * (sums[-1] / batch), right=True).clamp_(max=len(self) - 1)
        weight = self.powers.index_select(0, slots) ** -self.beta
        return slots, {**self.rows(slots), "weight": (weight / weight.max()).float()}

    def update(self, slots: Tensor, priorities: Tensor) -> None:
        """New priorities for (B,) slots; of a repeated slot any one of them counts."""
        powers = (priorities.abs().double() + self.eps) ** self.alpha
        self.powers.index_copy_(0, slots, powers)
        self.highest = torch.maximum(self.highest, powers.max())
