"""`PYTHONPATH=tests python -m rehearsal rehearsed_cycle`: replayed steps and evaluations are those of a plain loop.

There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted or put
elsewhere meanwhile would be repeated as it was, and differ.
"""

from __future__ import annotations

import torch
from test_training_cycle import GAMES, IDS, advance, check_alike, played

from gpu_replay.training.train import Trainer

CUDA = torch.device("cuda")


def main() -> None:
    """Compare; prints what was replayed."""
    for (name, changes), title in zip(GAMES, IDS, strict=True):
        plain, graphed = (played(name, 0, device=CUDA, graph=graph, **changes) for graph in (False, True))
        for _ in range(28):
            advance(plain, 1)
            advance(graphed, 1)
            check_alike(graphed, plain)
        assert int(plain.statistics.count), f"{title}: no episode ended"
        replays = {each: step.replays for each, step in graphed._graphs.items()}  # type: ignore[attr-defined]
        print(f"{title}: {replays} replays, {graphed.agent.updates} updates")
        assert min(replays.values(), default=0), f"{title}: nothing was captured"
        if plain.environment.on_device:
            compare_evaluations(plain, graphed, title)


def compare_evaluations(plain: Trainer, graphed: Trainer, title: str) -> None:
    """The networks differ from evaluation to evaluation; the games of Catch end long before the graph is asked."""
    for turn in range(4):
        mine, theirs = (each.evaluator.evaluate(each.agent.judged, turn)[0] for each in (graphed, plain))
        assert mine == theirs, f"{title}: evaluation {turn} found {mine} instead of {theirs}"
        for each in (plain, graphed):
            advance(each, 5)
    replays = graphed.evaluator._graphs["an evaluation"].replays  # type: ignore[attr-defined]
    assert replays, f"{title}: no evaluation was captured"
    print(f"{title}, evaluation: {replays} replays, {mine.return_mean} in {mine.length_mean} steps")


if __name__ == "__main__":
    main()
