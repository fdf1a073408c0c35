"""Returns and lengths of training episodes, counted where the rewards are, without looking at them every step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class EpisodeStatistics:
    """The last `window` finished episodes of `E` environments.

    `push` makes no synchronisation with the device; `read` makes one.
    """

    def __init__(self, num_envs: int, window: int, device: torch.device) -> None:
        self._window = window
        self._return = torch.zeros(num_envs, device=device)
        self._length = torch.zeros(num_envs, device=device)
        # one row beyond the window takes what does not end
        self._finished = torch.zeros((window + 1, 2), device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def push(self, reward: Tensor, ended: Tensor) -> None:
        """reward: (E,) float32; ended: (E,) bool."""
        self._return += reward
        self._length += 1
        place = self._count + torch.cumsum(ended, 0) - 1
        # of more endings than the window holds only the last ones may write, or the winner would be left to chance
        total = self._count + ended.sum()
        kept = ended & (place >= total - self._window)
        row = torch.where(kept, place % self._window, self._window)
        self._finished[row] = torch.stack((self._return, self._length), 1)
        self._count.copy_(total)
        going = ~ended
        self._return *= going
        self._length *= going

    def read(self) -> tuple[int, float, float]:
        """Finished episodes, and the mean return and length of the last ones (not-a-number before the first)."""
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
        """Go on counting from this state."""
        for name, mine in self.state().items():
            mine.copy_(state[name])

    def abandon(self) -> None:
        """Forget the running episodes: the environments were reset before they ended."""
        self._return.zero_()
        self._length.zero_()
