"""The newest frames of each environment as one observation: what is acted upon while each frame is stored once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class FrameStack:
    """The newest `depth` frames of each of `E` environments, oldest first; zeros before an episode's first frame.

    That is how ALE's own stacks begin, and how the buffer's do with `padding="zero"`. With a depth of 1 an observation
    is the frame itself, without a stack axis. Works on any device and never waits for one.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._frames: Tensor | None = None

    def begin(self, frame: Tensor) -> Tensor:
        """All environments were reset. frame: (E, *shape); returns (E, depth, *shape), or the frame at a depth of 1."""
        if self.depth == 1:
            return frame
        before = torch.zeros((len(frame), self.depth - 1, *frame.shape[1:]), dtype=frame.dtype, device=frame.device)
        self._frames = torch.cat((before, frame[:, None]), 1)
        return self._frames

    def push(self, frame: Tensor, ended: Tensor) -> Tensor:
        """The next frame of all environments, the first of a new episode where `ended`, (E,) bool, says so."""
        if self.depth == 1:
            return frame
        if self._frames is None:
            raise RuntimeError("push needs the frames before; call begin first.")
        gone = ended.reshape(-1, *[1] * frame.dim())
        self._frames = torch.cat((self._frames[:, 1:].masked_fill(gone, 0), frame[:, None]), 1)
        return self._frames

    def state(self) -> dict[str, Tensor]:
        """The frames; nothing at a depth of 1."""
        return {} if self._frames is None else {"frames": self._frames}

    def restore(self, frame: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Go on with these frames, of which `frame` is the newest."""
        if self.depth == 1:
            return frame
        self._frames = state["frames"].to(frame.device)
        return self._frames
