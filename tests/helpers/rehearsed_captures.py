"""`python -m rehearsal rehearsed_captures [--full]`: no call waits, and captures with the fewest warm-ups, of some
samplers or of all.

There a capture refuses what the driver refuses, a kernel that is launched for the first time while a graph is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_twins import SAMPLERS, OnGpu, graph_of, powers, waiting_is_an_error

from gpu_replay import Batch

WAITING: list[Callable[[torch.Tensor], object]] = [
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool, torch.nonzero, torch.unique),
    *(lambda x: x[x > 0], lambda x: x.to("cpu", non_blocking=True), lambda x: torch.equal(x, x)),
    lambda x: torch.cuda.synchronize(),
]


def check_waits(both: OnGpu) -> None:
    """No call waits, while all that would is refused."""
    buffer, keys = both.gpu, torch.tensor([0, 5, 5, 10**12], device="cuda")
    given, more = both.given(500, own=False), both.given(504)
    doubles, mask = powers(keys), torch.ones(4, device="cuda") > 0
    # the host asks once for each size of the buffer
    buffer.sample(9)
    with waiting_is_an_error():
        for wait in WAITING:
            with pytest.raises(RuntimeError, match="synchroniz"):
                wait(torch.ones(1, device="cuda"))
        buffer.add(**given)
        buffer.add(**more)
        batch = buffer.sample(9)
        buffer.sample(9, beta=0.5)
        buffer.update_priorities(batch.key, batch.weight)
        buffer.update_priorities(keys, doubles)
        if both.steps:
            buffer.begin_episodes(mask)
        if both.draws_sequences:
            buffer.sample_sequences(5, 3, 1)


def main() -> None:
    """Capture, replay, and compare what was drawn with the host."""
    some = ("uniform", "everything", "combined-rank")
    of_steps = ("latest", "combined-proportional", "combined-rank")
    cases = (("transitions", SAMPLERS), ("same_step", of_steps), ("goals", some))
    fewer = (("transitions", some), ("same_step", of_steps[1:2]), ("goals", some[:1]))
    for kind, names in cases if "--full" in sys.argv else fewer:
        for name in names:
            sampler = SAMPLERS[name]
            waits = OnGpu(60, 4, sampler, kind)
            waits.add(10)
            check_waits(waits)
            both = OnGpu(60, 4, sampler, kind)
            both.add(12)
            buffer = both.gpu

            def learn(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
                return powers(batch.key), batch.key.clone()

            step = buffer.capture(9, learn, warm_ups=1)
            for _ in range(3):
                keys = step()
                expected = both.host.sample(9).key
                both.update_drawn(expected)
                if keys.tolist() != expected.tolist():
                    raise SystemExit(f"{kind}, {name}: drew {keys.tolist()}, and the host {expected.tolist()}")
            given: dict[str, Any] = both.given(1000)
            add = buffer.capture(None, lambda buffer=buffer, given=given: buffer.add(**given), warm_ups=1)
            for _ in range(3):
                add()
            keys, priorities = buffer.keys()[:5], torch.ones(5, device="cuda")
            graph_of(lambda buffer=buffer: buffer.sample(8))
            graph_of(lambda b=buffer, given=(keys, priorities): b.update_priorities(*given))
            if not step.captured or not add.captured:
                raise SystemExit(f"{kind}, {name}: nothing was captured")
            print(f"{kind}, {name}: {step.replays} and {add.replays} replays")


if __name__ == "__main__":
    main()
