"""`python -m rehearsal rehearsed_captures [--full]`: captures with the fewest warm-ups, of some samplers or of all.


There a capture refuses what the driver refuses, a kernel that is launched for the first time while a graph is recorded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gpu_twins import SAMPLERS, OnGpu, graph_of, powers

from gpu_replay import Batch


def main() -> None:
    """Capture, replay, and compare what was drawn with the host."""
    some = ("uniform", "everything", "combined-rank")
    of_steps = ("latest", "combined-proportional", "combined-rank")
    cases = (("transitions", SAMPLERS), ("same_step", of_steps))
    for kind, names in cases if "--full" in sys.argv else (("transitions", some), ("same_step", of_steps[1:2])):
        for name in names:
            sampler = SAMPLERS[name]
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
