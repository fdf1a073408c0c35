"""`python -m gpu_replay.bench.rehearsal rehearsed_cycle`: steps replayed as graphs are the steps of a plain loop.

There a graph repeats what was done while it was captured, in the same memory: whatever the host decided, counted or put
elsewhere meanwhile would be repeated as it was, and differ.
"""

from __future__ import annotations

import torch
from host_games import sums_trainer
from test_training_cycle import AHEAD, GAMES, advance, all_tensors, played

from gpu_replay.graphs.learning_step import LearningStep
from gpu_replay.training.stopwatch import Part
from gpu_replay.training.trainer import Trainer

CUDA = torch.device("cuda")


def main() -> None:
    """Compare; prints what was replayed."""
    for name, changes in GAMES:
        plain, whole = (played(name, 0, device=CUDA, graph=graph, **changes) for graph in (False, True))
        for _ in range(22):
            advance(plain, 1)
            advance(whole, 1)
            check_alike(name, whole, plain)
        step = whole._cycle.whole_step
        report(name, whole, [] if step is None else [step], ("env", "act", "replay"))
    for groups, stack, persistence in AHEAD:
        name = f"games on the host in {groups} groups"
        changes = {"frame_stack": stack, "persistence": persistence}
        plain, ahead = (
            sums_trainer(CUDA, count, graph=graph, **changes) for count, graph in ((1, False), (groups, True))
        )
        for turn in range(28):
            advance(plain, 1)
            # stored by calls of its own
            plain._cycle.settle()
            advance(ahead, 1)
            # in between steps are left under way
            if turn % 6 == 5:
                check_alike(name, ahead, plain)
        if not int(plain._statistics.state()["count"]):
            raise SystemExit(f"{name}: no episode ended")
        # acting is what is left of them
        report(name, ahead, ahead._cycle.answers, ("env", "replay"))


def check_alike(name: str, mine: Trainer, other: Trainer) -> None:
    """End unless both trainers hold the same bits."""
    found, expected = all_tensors(mine), all_tensors(other)
    differing = [path for path in expected if not torch.equal(found[path], expected[path])]
    if differing or found.keys() != expected.keys():
        raise SystemExit(f"{name}: after {mine.step} steps {differing} differ")


def report(name: str, trainer: Trainer, steps: list[LearningStep], parts: tuple[Part, ...]) -> None:
    """Say what was replayed, or end if that is nothing, or if one of these parts of its time is left out."""
    # as many steps go untimed
    trainer.watch.seconds |= {"learn": 1.0, "act": 1.0}
    shares = trainer.shares()
    replays = [step.replays for step in steps]
    print(f"{name}: {replays} replays, {trainer.agent.updates} updates, {shares}")
    if not steps or not all(step.captured for step in steps):
        raise SystemExit(f"{name}: nothing was captured")
    # how much each takes here means nothing
    if min(shares[part] for part in parts) <= 0:
        raise SystemExit(f"{name}: {shares} leave a part out")


if __name__ == "__main__":
    main()
