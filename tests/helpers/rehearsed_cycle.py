"""`PYTHONPATH=tests python -m rehearsal rehearsed_cycle`: steps replayed as graphs are the steps of a plain loop.

There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted or put
elsewhere meanwhile would be repeated as it was, and differ.
"""

from __future__ import annotations

import torch
from test_training_cycle import GAMES, IDS, advance, all_tensors, played

CUDA = torch.device("cuda")


def main() -> None:
    """Compare; prints what was replayed."""
    for (name, changes), title in zip(GAMES, IDS, strict=True):
        plain, graphed = (played(name, 0, device=CUDA, graph=graph, **changes) for graph in (False, True))
        for _ in range(28):
            advance(plain, 1)
            advance(graphed, 1)
            found, expected = all_tensors(graphed), all_tensors(plain)
            differing = [path for path in expected if not torch.equal(found[path], expected[path])]
            if differing or found.keys() != expected.keys():
                raise SystemExit(f"{title}: after {graphed.step} steps {differing} differ")
        if not int(plain.statistics.count):
            raise SystemExit(f"{title}: no episode ended")
        steps = graphed._graphs
        replays = {each: step.replays for each, step in steps.items()}  # type: ignore[attr-defined]
        print(f"{title}: {replays} replays, {graphed.agent.updates} updates")
        if not steps or not all(replays.values()):
            raise SystemExit(f"{title}: nothing was captured")


if __name__ == "__main__":
    main()
