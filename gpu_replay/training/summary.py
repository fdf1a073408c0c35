"""The summary of a finished run: `summary.json`, the closing lines on standard output, and the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_replay.console.versions import device_name, versions
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.ray_actors import ActorTrainer
from gpu_replay.training.settings import Settings
from gpu_replay.training.trainer import Trainer


def summarize(
    trainer: Trainer, evaluator: Evaluator, fresh: Evaluation | None, *, stopped_by: str, seed: int, wall_seconds: float
) -> dict[str, Any]:
    """The figures of a run.

    fresh: evaluation of the best network on episodes that were not used to choose it; without it (an interrupted run)
           the evaluation by which it was chosen is reported, and `eval_fresh` is false.

    Rates are over `wall_seconds`, which include evaluations, start-up and all parts of a resumed run. `time_split` is
    in seconds of the learning loop, extrapolated from timed steps on CUDA; `replay_share` is the share of replay in it,
    see `Trainer.shares`. Call this last: it may continue to learn.
    """
    best = evaluator.best
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
        "reward_threshold": evaluator.threshold,
        "train_return_mean": last["return_mean"],
        "train_length_mean": last["length_mean"],
        "epsilon": last["epsilon"],
        "persistence": trainer.settings.persistence,
        "eval_epsilon": trainer.settings.eval_epsilon,
        "steps_per_second": trainer.step / wall_seconds,
        "updates_per_second": trainer.agent.updates / wall_seconds,
        "replay_share": shares["replay"],
        "time_split": {part: share * loop_seconds for part, share in shares.items()},
        "loop_seconds": loop_seconds,
        "evaluation_seconds": evaluator.seconds,
        "checkpoint_seconds": trainer.checkpoint_seconds,
        "resumed": trainer.resumed,
        "replay_bytes": trainer.buffer.nbytes,
        "versions": versions(),
        **_of_actors(trainer),
    }


def _of_actors(trainer: Trainer) -> dict[str, Any]:
    """What is known of actors in processes of their own."""
    if not isinstance(trainer, ActorTrainer):
        return {}
    fleet, (updates, seconds) = trainer.fleet, trainer.weights_age
    figures = {"actors": fleet.count, "envs_of_an_actor": fleet.num_envs, "actor_restarts": fleet.restarts}
    ages = {"weights_age": updates, "weights_seconds": seconds}
    return figures | ages | {"frame_bytes": fleet.unpacked, "frame_bytes_sent": fleet.received}


def closing_lines(summary: dict[str, Any], folder: Path) -> str:
    """Four lines: how good, exploring as well, how fast, where."""
    solved = f"solved, the mean return reached {summary['reward_threshold']}"
    reason = {"steps": "all steps done", "max_seconds": "time is up", "solved": solved}.get(
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
    actors = ""
    if "actors" in summary:
        actors = (
            f"{summary['actors']} actor{'s' * (summary['actors'] > 1)}, {summary['actor_restarts']} replaced; "
            f"their weights were {summary['weights_age']:.0f} updates ({summary['weights_seconds']:.2f} s) old"
        )
        ratio = summary["frame_bytes"] / max(summary["frame_bytes_sent"], 1)
        actors += f", frames sent in 1/{ratio:.0f} of their bytes\n" if ratio > 1.5 else "\n"
    return (
        f"{summary['env']}, {reason}: {quality}\n"
        f"training episodes explore: return {summary['train_return_mean']:.2f} with "
        f"{explored(summary['epsilon'], summary['persistence'])}\n"
        f"{summary['steps']:,} steps and {summary['updates']:,} updates in {summary['wall_seconds']:.1f} s: "
        f"{summary['steps_per_second']:,.0f} steps/s, {summary['updates_per_second']:,.0f} updates/s, "
        f"replay {summary['replay_share']:.1%} of the learning loop\n"
        f"{actors}written to {folder}"
    )


def explored(epsilon: float, persistence: float) -> str:
    """What an agent explores with, in words."""
    persisting = f", each repeated with probability {persistence:g}" if persistence and epsilon else ""
    return f"{epsilon:.3g} of the actions random{persisting}"


def draw_curve(
    path: Path,
    title: str,
    rows: Sequence[dict[str, float]],
    evaluations: Sequence[tuple[int, float, float]],
    threshold: float | None,
    settings: Settings,
) -> None:
    """Return, episode length and what training explores with over environment steps, as a PNG.

    rows:        of progress.csv.
    evaluations: (step, mean return, mean length) of the greedy policy.
    threshold:   the return at which the environment counts as solved, or None.
    """
    # without pyplot, which looks for a display and keeps global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(8, 7), dpi=120)
    canvas = FigureCanvasAgg(figure)
    # fixed margins: finding them takes as long as all the rest
    sides = {"left": 0.105, "right": 0.98, "bottom": 0.07, "top": 0.95, "hspace": 0.08}
    returns, lengths, random = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2.2, 1], **sides})
    greedy = f"{settings.eval_epsilon:g} of the actions random" if settings.eval_epsilon else "greedy"
    names = f"training, which explores: mean of the last {settings.return_window} episodes", f"evaluation, {greedy}"
    steps = [row["step"] for row in rows]
    panels = ((returns, "return_mean", 1, "return of an episode"), (lengths, "length_mean", 2, "steps in an episode"))
    for axes, column, position, label in panels:
        axes.plot(steps, [row[column] for row in rows], color="tab:blue", label=names[0])
        if evaluations:
            points = [each[0] for each in evaluations], [each[position] for each in evaluations]
            axes.plot(*points, "o-", color="tab:orange", markersize=4, linewidth=1, label=names[1])
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    if threshold is not None:
        returns.axhline(threshold, color="tab:green", linestyle="--", linewidth=1, label=f"solved at {threshold:g}")
    returns.set_title(title)
    returns.legend(loc="best", fontsize="small")
    repeated = f", repeated with probability {settings.persistence:g}" if settings.persistence else ""
    random.plot(steps, [row["epsilon"] for row in rows], color="tab:purple", label=f"random actions{repeated}")
    random.set(ylim=(0, 1.05), ylabel="ε of training")
    random.legend(loc="upper right", fontsize="small")
    random.grid(alpha=0.3)
    random.set_xlabel("environment steps")
    random.xaxis.set_major_formatter(EngFormatter())
    lengths.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    figure.align_ylabels()
    canvas.print_png(path)
