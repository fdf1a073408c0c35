"""`ReplayMixture`: batches from several buffers in fixed shares, such as demonstrations and a buffer that fills."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpu_replay import validation
from gpu_replay.base.buffer import Buffer
from gpu_replay.batch import Batch

_SOURCE = "source"


class ReplayMixture:
    """Sample a share of each batch from each of several buffers.

    buffers: at least one, of one class, on one device, with the same fields, `stack` and `sequences`; their samplers,
             capacities and windows may differ. A ShardedReplay is refused.
    shares:  of a batch, one for each buffer, each above 0; they sum to 1.

    Batches also have `source` (B,) int64, the index of each row's buffer in `buffers`; a field of that name is refused.
    Keys, probabilities and weights come from the row's own buffer. Add transitions to the buffers themselves, which you
    may also sample alone.

        mixture = ReplayMixture([demonstrations, replay], [0.25, 0.75])
        batch = mixture.sample(256)
        mixture.update_priorities(batch.key, td_error, batch.source)

    The attributes `buffers` and `shares` are tuples of them. Raises TypeError or ValueError for buffers that do not fit
    together and for other shares.

    Paine et al. 2019, "Making Efficient Use of Demonstrations to Solve Hard Exploration Problems" (R2D3).
    """

    def __init__(self, buffers: Sequence[Buffer], shares: Sequence[float]) -> None:
        if not (isinstance(buffers, Iterable) and isinstance(shares, Iterable)):
            found = f"{type(buffers).__name__} and {type(shares).__name__}"
            raise TypeError(f"ReplayMixture needs a list of buffers and a list of their shares; found {found}.")
        self.buffers = tuple(buffers)
        for place, buffer in enumerate(self.buffers):
            if not isinstance(buffer, Buffer):
                raise TypeError(
                    f"ReplayMixture needs a ReplayBuffer or TrajectoryReplayBuffer each; number {place} is a "
                    f"{type(buffer).__name__}."
                )
            first = self.buffers[0]
            for what, one, other in (
                ("class", type(buffer).__name__, type(first).__name__),
                ("device", buffer.device, first.device),
                ("fields", buffer.fields, first.fields),
                ("stack", getattr(buffer, "stack", 1), getattr(first, "stack", 1)),
                ("kind of row (sequences=)", getattr(buffer, "sequences", None), getattr(first, "sequences", None)),
            ):
                if one != other:
                    raise ValueError(
                        f"ReplayMixture needs buffers of one {what}; number {place} has {one}, the first one {other}. "
                        "Make them alike."
                    )
            if _SOURCE in buffer.fields:
                raise ValueError(f"field name {_SOURCE!r} is reserved in a ReplayMixture: it makes this itself.")
        if not self.buffers or len(self.buffers) != len(shares):
            raise ValueError(f"ReplayMixture needs a share for each of its buffers; found {len(shares)} shares.")
        self.shares = tuple(validation.check_float("ReplayMixture share", share, above=True) for share in shares)
        if not math.isclose(sum(self.shares), 1.0, abs_tol=1e-6):
            raise ValueError(f"ReplayMixture shares must sum to 1; {self.shares} sum to {sum(self.shares):g}.")

    def __len__(self) -> int:
        """Transitions stored in all buffers; on CUDA this waits for the device."""
        return sum(map(len, self.buffers))

    def __repr__(self) -> str:
        """Shares and buffers; on CUDA this waits for the device."""
        parts = (f"{share:g} of {buffer!r}" for share, buffer in zip(self.shares, self.buffers, strict=True))
        return f"ReplayMixture({'; '.join(parts)})"

    def _counts(self, batch_size: int) -> list[int]:
        # sums of decimal shares are off in their last bits
        parts = [round(share / sum(self.shares) * batch_size, 9) for share in self.shares]
        counts = [math.floor(part) for part in parts]
        order = sorted(range(len(parts)), key=lambda place: counts[place] - parts[place])
        for place in order[: batch_size - sum(counts)]:
            counts[place] += 1
        return counts

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` rows, `share * B` of each buffer, in the order of the buffers, with their `source`.

        batch_size, beta: as for the buffers' own `sample`.

        Shares are rounded down, and those with the largest remainders, among equal ones the first, get a row more. A
        buffer without a row is not sampled: it may be empty, and its beta schedule stays. Raises as the buffers' own
        `sample`, before any of them has sampled.
        """
        counts = self._counts(validation.check_batch_size(batch_size))
        drawn = [(place, self.buffers[place], rows) for place, rows in enumerate(counts) if rows]
        for _, buffer, rows in drawn:
            # a buffer that has too little is found before another one has sampled
            with buffer._lock:
                buffer._check_enough(rows)
        parts = [(place, buffer.sample(rows, beta=beta).to_dict()) for place, buffer, rows in drawn]
        return Batch.cat(Batch({**part, _SOURCE: torch.full_like(part["key"], place)}) for place, part in parts)

    # raises, and says what to write
    sample_sequences = Buffer.sample_sequences

    def update_priorities(self, keys: Any, priorities: Any, source: Any) -> None:
        """Give each row's buffer the new priority of its key; nothing waits for a device.

        keys, priorities: as for the buffers' own `update_priorities`, which also says what it raises.
        source: (m,) int64 as `batch.source`. A row of another number is ignored on CUDA, and a ValueError on the CPU.
        """
        device = self.buffers[0].device
        checked = validation.as_keys(keys, device).to(device)
        number = validation.as_keys(source, device, "source").to(device)
        if number.shape != checked.shape:
            raise ValueError(f"source must have shape {list(checked.shape)}, as keys; found {list(number.shape)}.")
        last = len(self.buffers) - 1
        if device.type == "cpu" and bool(((number < 0) | (number > last)).any()):
            raise ValueError(f"source must be from 0 to {last}, as sample returns it; found {number.tolist()}.")
        for place, buffer in enumerate(self.buffers):
            # what is another's is no key here
            buffer.update_priorities(torch.where(number == place, checked, -1), priorities)
