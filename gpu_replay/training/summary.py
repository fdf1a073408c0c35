"""What a finished run amounts to: `summary.json`, and a few lines for the person who waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_replay.training.evaluation import Evaluation, Examiner
from gpu_replay.training.trainer import Trainer
from gpu_replay.training.versions import device_name, versions


def summarize(
    trainer: Trainer, examiner: Examiner, fresh: Evaluation | None, *, stopped_by: str, seed: int, wall_seconds: float
) -> dict[str, Any]:
    """The figures of a run.

    fresh: the best network on episodes that had no part in choosing it; without them (an interrupted run) the
           evaluation that chose it is reported, and `eval_fresh` is false.

    Rates are over `wall_seconds`, which hold evaluations, start-up and all parts of a resumed run. `time_split` is in
    seconds of the learning loop, its parts scaled up from timed steps on CUDA; `replay_share` is the share of replay in
    it, as `Trainer.shares` finds it. Call this last: it may go on learning.
    """
    best = examiner.best
    reported = fresh if fresh is not None or best is None else best.evaluation
    shares = trainer.shares()
    loop_seconds = max(trainer.loop_seconds, 1e-9)
    last = trainer.last_row
    return {
        "env": trainer.environment.spec.name,
        "seed": seed,
        "device": str(trainer.device),
        "device_name": device_name(trainer.device),
        "stopped_by": stopped_by,
        "steps": trainer.step,
        "updates": trainer.agent.updates,
        "episodes": last["episodes"],
        "wall_seconds": wall_seconds,
        "eval_return_mean": None if reported is None else reported.return_mean,
        "eval_return_std": None if reported is None else reported.return_std,
        "eval_length_mean": None if reported is None else reported.length_mean,
        "eval_episodes": 0 if reported is None else reported.episodes,
        "eval_fresh": fresh is not None,
        "best_step": trainer.step if best is None else best.step,
        "solved": best is not None and best.solved,
        "reward_threshold": trainer.environment.spec.reward_threshold,
        "train_return_mean": last["return_mean"],
        "train_length_mean": last["length_mean"],
        "steps_per_second": trainer.step / wall_seconds,
        "updates_per_second": trainer.agent.updates / wall_seconds,
        "replay_share": shares["replay"],
        "time_split": {part: share * loop_seconds for part, share in shares.items()},
        "loop_seconds": loop_seconds,
        "evaluation_seconds": examiner.seconds,
        "checkpoint_seconds": trainer.checkpoint_seconds,
        "resumed": trainer.resumed,
        "replay_bytes": trainer.buffer.nbytes,
        "versions": versions(),
    }


def closing_words(summary: dict[str, Any], folder: Path) -> str:
    """Three lines: how good, how fast, where."""
    reason = {"steps": "all steps done", "max_seconds": "time is up", "solved": "solved"}.get(
        summary["stopped_by"], f"interrupted by {summary['stopped_by']}"
    )
    if summary["eval_return_mean"] is None:
        quality = "not evaluated yet"
    else:
        kind = "fresh" if summary["eval_fresh"] else "evaluation"
        quality = (
            f"return {summary['eval_return_mean']:.2f} ± {summary['eval_return_std']:.2f} over "
            f"{summary['eval_episodes']} {kind} episodes, network of step {summary['best_step']:,}"
        )
    return (
        f"{summary['env']}, {reason}: {quality}\n"
        f"{summary['steps']:,} steps and {summary['updates']:,} updates in {summary['wall_seconds']:.1f} s: "
        f"{summary['steps_per_second']:,.0f} steps/s, {summary['updates_per_second']:,.0f} updates/s, "
        f"replay {summary['replay_share']:.1%} of the learning loop\n"
        f"written to {folder}"
    )
