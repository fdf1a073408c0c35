"""Returns and lengths of training episodes, accumulated on the device of the rewards without synchronising."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class EpisodeStatistics:
    """The last `window` finished episodes of `E` environments. `read` synchronises with the device, `push` does not."""

    def __init__(self, num_envs: int, window: int, device: torch.device) -> None:
        self._window = window
        self._return = torch.zeros(num_envs, device=device)
        self._length = torch.zeros(num_envs, device=device)
        # the extra row receives the writes of episodes that have not ended
        self._finished = torch.zeros((window + 1, 2), device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def push(self, reward: Tensor, ended: Tensor) -> None:
        """reward: (E,) float32; ended: (E,) bool."""
        self._return += reward
        self._length += 1
        place = self._count + torch.cumsum(ended, 0) - 1
        # if more episodes end than the window holds only the last ones write: one row has one writer
        total = self._count + ended.sum()
        kept = ended & (place >= total - self._window)
        row = torch.where(kept, place % self._window, self._window)
        self._finished[row] = torch.stack((self._return, self._length), 1)
        self._count.copy_(total)
        self._return *= ~ended
        self._length *= ~ended

    def read(self) -> tuple[int, float, float]:
        """Number of finished episodes, and mean return and length of the last ones (NaN before the first)."""
        count = int(self._count)
        rows = self._finished[: min(count, self._window)]
        if not len(rows):
            return 0, float("nan"), float("nan")
        mean_return, mean_length = rows.mean(0).tolist()
        return count, mean_return, mean_length

    def state(self) -> dict[str, Tensor]:
        """Finished and running episodes."""
        return {"return": self._return, "length": self._length, "finished": self._finished, "count": self._count}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        for name, mine in self.state().items():
            mine.copy_(state[name])

    def abandon(self) -> None:
        """Discard the running episodes, whose environments were reset before they ended."""
        self._return.zero_()
        self._length.zero_()
