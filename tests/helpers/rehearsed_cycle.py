"""`PYTHONPATH=tests python -m rehearsal rehearsed_cycle`: replayed steps and evaluations are those of a plain loop.

There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted or put
elsewhere meanwhile would be repeated as it was, and differ.
"""

from __future__ import annotations

from typing import Any

import torch
from test_training_cycle import GAMES, IDS, advance, all_tensors, played

from gpu_replay.training.train import Trainer

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
        if plain.environment.on_device:
            compare_evaluations(plain, graphed, title)


def compare_evaluations(plain: Trainer, graphed: Trainer, title: str) -> None:
    """The networks differ from evaluation to evaluation; the games of Catch end long before the graph is asked."""
    for turn in range(4):
        mine, theirs = (each.evaluator.evaluate(each.agent.judged, turn)[0] for each in (graphed, plain))
        if mine != theirs:
            raise SystemExit(f"{title}: evaluation {turn} found {mine} instead of {theirs}")
        for each in (plain, graphed):
            advance(each, 5)
    graph: Any = graphed.evaluator._graph
    if not graph.replays:
        raise SystemExit(f"{title}: no evaluation was captured")
    print(f"{title}, evaluation: {graph.replays} replays, {mine.return_mean} in {mine.length_mean} steps")


if __name__ == "__main__":
    main()
