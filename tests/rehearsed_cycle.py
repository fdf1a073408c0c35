"""`python -m gpu_replay.bench.rehearsal rehearsed_cycle`: steps replayed as whole graphs are the steps of a plain loop.

There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted or put
elsewhere meanwhile would be repeated as it was, and differ.
"""

from __future__ import annotations

import torch
from test_training_cycle import GAMES, advance, all_tensors, played

CUDA = torch.device("cuda")


def main() -> None:
    """Compare; prints what was replayed."""
    for name, changes in GAMES:
        plain, whole = (played(name, 0, device=CUDA, graph=graph, **changes) for graph in (False, True))
        for _ in range(22):
            advance(plain, 1)
            advance(whole, 1)
            mine, theirs = all_tensors(whole), all_tensors(plain)
            differing = [path for path in theirs if not torch.equal(mine[path], theirs[path])]
            if differing or mine.keys() != theirs.keys():
                raise SystemExit(f"{name}: after {whole.step} steps {differing} differ")
        step = whole._cycle.whole_step
        # as many steps go untimed
        whole.watch.seconds["learn"] = 1.0
        shares = whole.shares()
        print(f"{name}: {step.replays if step else 0} replays, {whole.agent.updates} updates, {shares}")
        if step is None or not step.captured:
            raise SystemExit(f"{name}: nothing was captured")
        # how much each takes here means nothing
        if min(shares["env"], shares["act"], shares["replay"]) <= 0:
            raise SystemExit(f"{name}: {shares} leave a part out")


if __name__ == "__main__":
    main()
