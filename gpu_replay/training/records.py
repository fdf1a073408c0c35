"""The files of a run: its folder and lock, rows of progress.csv, TensorBoard events, curve, network and summary."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpu_replay import CheckpointError, TrajectoryReplayBuffer
from gpu_replay.checkpoint.files import replace_file, replace_text, save_lock
from gpu_replay.console import figures
from gpu_replay.console.errors import UserError
from gpu_replay.console.progress import progress_bar
from gpu_replay.training.checkpoints import saved_steps
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.evaluation import Evaluation
from gpu_replay.training.networks import CHANNELS_LAST, QNetwork
from gpu_replay.training.settings import Settings

FILES = ("progress.csv", "curve.png", "buffer.png", "network.safetensors", "settings.json", "summary.json")
PROGRESS, CURVE, BUFFER, NETWORK, SETTINGS, SUMMARY = FILES
FOLDERS = TENSORBOARD, CHECKPOINT = ("tensorboard", "checkpoint")
EVENTS = "events.out.tfevents.*"
# columns of progress.csv with statistics of the replay buffer
REPLAY_STATS = (
    *("effective_sample_size", "entropy", "mean_priority", "max_priority", "mean_age", "max_age"),
    *("mean_times_sampled", "stale_updates", "rejected_priorities", "saturated_priorities"),
)
Row = Mapping[str, float]
# columns of whole numbers
COUNTS = frozenset({"step", "episodes", "updates", "stored"})
# plotting takes about half a second, so the curve is plotted rarely
CURVE_SECONDS = 30.0


class RunDir:
    """The folder of one run, locked while the run goes on. If there is no such folder, `open` makes it.

    existing: "refuse", "replace" or "resume" a run that is already there.

    Nothing is removed that no run wrote: only beside a run's settings.json, only under the names that a run gives.
    Raises UserError if the folder holds a run that is refused, one that is still going on, or names of a run's files
    without a run.
    """

    def __init__(self, path: Path, existing: Literal["refuse", "replace", "resume"]) -> None:
        self.path, self._existing, self._new = path, existing, not path.is_dir()
        self._lock = ExitStack()
        if not self._new:
            self._enter()

    def open(self) -> None:
        """Make the folder and remove the previous run but for its settings, or only its summary if it is resumed.

        Raises UserError if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._new:
                self._enter()
            files = [self.path / SUMMARY]
            if self._existing == "replace":
                # settings.json is replaced at once: without it the rest would not be known as that of a run
                files = [self.path / name for name in FILES if name != SETTINGS]
                files += (self.path / TENSORBOARD).glob(EVENTS)
                for folder in saved_steps(self.path / CHECKPOINT):
                    shutil.rmtree(folder)
            for file in files:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--output {self.path} cannot be written: {error.strerror or error}.") from None

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file; non-finite numbers become null, which JSON has no other way to write."""
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        replace_text(self.path / name, json.dumps(finite, indent=2) + "\n")

    def _enter(self) -> None:
        """Lock the folder until the process ends in whatever way (not on Windows), and check what is in it."""
        try:
            self._lock.enter_context(save_lock(self.path.resolve(), self.path))
        except CheckpointError:
            raise UserError(f"--output {self.path}: a run in it is still going on. Wait for its end.") from None
        present = ", ".join(name for name in (*FILES, *FOLDERS) if os.path.lexists(self.path / name))
        of_run = {"env", "seed", "device", "steps"} <= read_json(self.path / SETTINGS).keys()
        if not present or self._existing == "resume" or (of_run and self._existing == "replace"):
            return
        self.close()
        if of_run:
            advice = "Continue it with --resume, replace it with --overwrite, or choose another directory"
            raise UserError(f"--output {self.path} already holds a run ({present}). {advice}.")
        raise UserError(
            f"--output {self.path} holds {present}, but no {SETTINGS} of a run: no run wrote that. Choose another "
            "directory, or move it away."
        )


class Recorder:
    """Writes a run's progress to `folder`, and shows a progress bar on standard error.

    progress.csv is flushed after each row and the other files are replaced atomically, so that a run which is killed
    keeps everything written so far.

    rows: the rows of progress.csv, beginning with those of earlier parts of the run.
    step: step of the checkpoint from which the run continues.
    """

    def __init__(
        self, folder: Path, spec: EnvironmentSpec, settings: Settings, seed: int, rows: Sequence[Row], step: int
    ) -> None:
        self.rows = list(rows)
        self._folder, self._spec, self._settings = folder, spec, settings
        self._title = f"{spec.name}, seed {seed}"
        self._threshold = spec.reward_threshold if settings.stop_at is None else settings.stop_at
        replace_file(folder / PROGRESS, partial(_write, rows=self.rows, mode="w"))
        self._events = _summary_writer(folder, int(self.rows[-1]["step"]) + 1 if self.rows else 0)
        self._bar = progress_bar(settings.steps, unit="step", initial=min(step, settings.steps))
        self._drawn = time.perf_counter()

    def close(self) -> None:
        """Close the bar and the files."""
        self._bar.close()
        if self._events is not None:
            self._events.close()

    def advance(self, step: int) -> None:
        """Update the bar."""
        self._bar.update(min(step, self._settings.steps) - self._bar.n)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def row(self, row: Row) -> None:
        """Write the row, show it beside the bar, and plot the curve if it is out of date."""
        self.rows.append(row)
        _write(self._folder / PROGRESS, self.rows[-1:], mode="a" if len(self.rows) > 1 else "w")
        if self._events is not None:
            for name, value in row.items():
                # TensorBoard has no use for NaN
                if name != "step" and not math.isnan(value):
                    tag = f"replay/{name}" if name in REPLAY_STATS else name
                    self._events.add_scalar(tag, value, int(row["step"]))
        shown = f"return {row['return_mean']:.4g} at ε {row['epsilon']:.2g}, length {row['length_mean']:.4g}, "
        shown = shown if row["episodes"] else "no episode has ended, "
        self._bar.set_postfix_str(f"{shown}{row['updates_per_second']:.0f} upd/s", refresh=False)
        if time.perf_counter() - self._drawn > CURVE_SECONDS:
            self.plot()

    def evaluated(self, step: int, evaluation: Evaluation, best: QNetwork | None) -> None:
        """Print the evaluation above the bar, and save the network if it is the best so far."""
        shown = (
            f"return {evaluation.return_mean:.2f} ± {evaluation.return_std:.2f}, length {evaluation.length_mean:.0f}"
        )
        if not evaluation.episodes:
            shown = f"stopped: {self._threshold:g} is out of reach"
        better = "" if best is None else ", best so far"
        self.say(f"step {step:>9,}: evaluation {shown}{better}")
        if best is not None:
            self.save(best, step)

    def save(self, network: QNetwork, step: int) -> None:
        """Write the weights; the metadata of the file holds everything needed to rebuild the network."""
        from safetensors.torch import save

        field = self._spec.stacked
        metadata = {
            "env": self._spec.name,
            "step": str(step),
            "actions": str(self._spec.num_actions),
            "observation": json.dumps({"shape": field.shape, "dtype": str(field.dtype), "scale": field.scale}),
            "settings": json.dumps(self._settings.to_dict()),
            "features": CHANNELS_LAST,
        }
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
        replace_file(self._folder / NETWORK, lambda path: path.write_bytes(save(weights, metadata)))

    def plot(self) -> None:
        """Write the learning curve so far."""
        draw_curve(self._folder / CURVE, self._title, self.rows, self._threshold, self._settings)
        self._drawn = time.perf_counter()

    def plot_buffer(self, buffer: TrajectoryReplayBuffer) -> None:
        """Plot the replay buffer to a file."""
        replace_file(self._folder / BUFFER, buffer.plot)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; empty if the file is missing or holds something else."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def read_rows(folder: Path, last: int) -> list[dict[str, float]]:
    """The rows of progress.csv up to step `last`; none if there is no such file."""
    if not (folder / PROGRESS).is_file():
        return []
    with (folder / PROGRESS).open(newline="", encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in rows if row["step"] <= last]


def _write(path: Path, rows: Sequence[Row], mode: Literal["a", "w"]) -> None:
    """Append rows to progress.csv, or begin it with its header."""
    with path.open(mode, newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, rows[0] if rows else ())
        if mode == "w" and rows:
            out.writeheader()
        for row in rows:
            out.writerow({name: int(value) if name in COUNTS else f"{value:.6g}" for name, value in row.items()})


def _summary_writer(folder: Path, purge_step: int) -> Any:
    """A writer of TensorBoard events, or None if TensorBoard is not installed.

    purge_step: events of earlier parts of a run are dropped from this step on.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard reads the files of a folder in the order of their names, which begin with the second of creation. Two
    # files of the same second have no useful order, and the events to be dropped could come last.
    events = folder / TENSORBOARD
    seconds = [int(file.name.split(".")[3]) for file in events.glob(EVENTS)]
    while int(time.time()) in seconds:
        time.sleep(0.05)
    return SummaryWriter(str(events), purge_step=purge_step)


def closing_lines(summary: dict[str, Any], folder: Path) -> str:
    """The closing lines of a run: its evaluation, return, speed, actors if any and folder, and what to do next."""
    solved = f"solved, the mean return reached {summary['reward_threshold']}"
    reasons = {"steps": "all steps done", "max_seconds": "time is up", "solved": solved}
    reason = reasons.get(summary["stopped_by"], f"interrupted by {summary['stopped_by']}")
    kind = "fresh" if summary["eval_fresh"] else "evaluation"
    quality = "return {eval_return_mean:.2f} ± {eval_return_std:.2f} over {eval_episodes} "
    quality += f"{kind} episodes, network of step {{best_step:,}}"
    lines = [
        f"{{env}}, {reason}: {quality if summary['eval_episodes'] else 'not evaluated yet'}",
        "training episodes explore: return {train_return_mean:.2f} with {epsilon:.3g} of the actions random"
        + ", each repeated with probability {persistence:g}" * (summary["persistence"] > 0)
        if summary["episodes"]
        else "no training episode has ended yet",
        "{steps:,} steps and {updates:,} updates in {wall_seconds:.1f} s: {steps_per_second:,.0f} steps/s, "
        "{updates_per_second:,.0f} updates/s"
        + ", replay {replay_share:.1%} of the learning loop"
        * (summary["replay_share"] > 0),
    ]
    if "actors" in summary:
        lines.append(f"{{actors}} actor{'s' * (summary['actors'] > 1)}, {{actor_restarts}} replaced")
    run, then = shlex.quote(str(folder)), {}
    if summary["stopped_by"] not in ("steps", "solved"):
        then[f"gpu-replay train --resume --output {run}"] = "go on"
    then[f"gpu-replay play {run}"] = "record a video of its network"
    if any(folder.glob(f"{CHECKPOINT}/*/replay/manifest.json")):
        then[f"gpu-replay inspect {run}"] = "plot its replay buffer"
    width = max(map(len, then))
    told = "\n".join(lines).format_map(summary)
    told += f"\nwritten to {folder}: returns over steps in {CURVE}, the replay buffer in {BUFFER}\nnext:"
    return "\n  ".join([told, *(f"{command:<{width}}  # {why}" for command, why in then.items())])


def draw_curve(path: Path, title: str, rows: Sequence[Row], threshold: float | None, settings: Settings) -> None:
    """Plot return, episode length and exploration rate over environment steps, as a PNG.

    rows:      the rows of progress.csv.
    threshold: the return at which the environment counts as solved, or None.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # fixed margins: computing them takes as long as the rest of the plot
    sides = {"left": 0.105, "right": 0.98, "bottom": 0.07, "top": 0.95, "hspace": 0.08}
    figure, axes = figures.panels(3, 1, 8, 7, sharex=True, gridspec_kw={"height_ratios": [3, 2.2, 1], **sides})
    figure.set_layout_engine("none")
    returns, lengths, random = axes[:, 0]
    greedy = f"{settings.eval_epsilon:g} of the actions random" if settings.eval_epsilon else "greedy"
    repeated = f", repeated with probability {settings.persistence:g}" if settings.persistence else ""
    training = f"training, which explores: mean of the last {settings.return_window} episodes"
    point = {"marker": "o", "markersize": 4, "linewidth": 1}
    lines = [
        (returns, "return_mean", "tab:blue", training, {}),
        (returns, "eval_return_mean", "tab:orange", f"evaluation, {greedy}", point),
        (lengths, "length_mean", "tab:blue", training, {}),
        (lengths, "eval_length_mean", "tab:orange", f"evaluation, {greedy}", point),
        (random, "epsilon", "tab:purple", f"random actions{repeated}", {}),
    ]
    for axes, column, color, label, style in lines:
        points = [(row["step"], row[column]) for row in rows if style == {} or not math.isnan(row[column])]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
    if threshold is not None:
        returns.axhline(threshold, color="tab:green", linestyle="--", linewidth=1, label=f"solved at {threshold:g}")
    for axes, label in ((returns, "return of an episode"), (lengths, "steps in an episode"), (random, "ε of training")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    returns.set_title(title)
    returns.legend(loc="best", fontsize="small")
    random.legend(loc="upper right", fontsize="small")
    random.set(ylim=(0, 1.05), xlabel="environment steps")
    random.xaxis.set_major_formatter(EngFormatter())
    lengths.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    figure.align_ylabels()
    figures.save(figure, path)
