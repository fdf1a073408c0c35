"""What a run writes while it learns: progress bar, rows of progress.csv, TensorBoard events, curve, best network."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.console.atomic_files import replace
from gpu_replay.console.progress import progress_bar
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.evaluation import Evaluation
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.run_dir import BUFFER, CURVE, NETWORK, PROGRESS, TENSORBOARD, RunDir
from gpu_replay.training.settings import Settings
from gpu_replay.training.summary import draw_curve
from gpu_replay.training.trainer import REPLAY_STATS, Listener

COLUMNS = (
    *("step", "seconds", "episodes", "return_mean", "length_mean", "loss", "td_error", "beta", "epsilon"),
    *("updates_per_second", "steps_per_second", "updates", "value_mean", "learning_rate", "stored"),
    *("eval_return_mean", "eval_return_std"),
    *REPLAY_STATS,
    # of actors in processes of their own
    *("weights_age", "weights_seconds", "actor_restarts"),
)
COUNTS = frozenset({"step", "episodes", "updates", "stored"})
# drawing takes about half a second, so the curve is drawn rarely
CURVE_SECONDS = 30.0


class Recorder(Listener):
    """The listener of a run: writes to `run_dir` and shows a progress bar on standard error.

    progress.csv is flushed after each row and the other files are replaced atomically, so that a run which is killed
    keeps everything written so far.

    resumed: the recorder's state in the checkpoint of a resumed run; later rows are dropped.
    step:    of that checkpoint.
    """

    def __init__(
        self,
        run_dir: RunDir,
        spec: EnvironmentSpec,
        settings: Settings,
        seed: int,
        *,
        resumed: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        self.rows: list[dict[str, float]] = []
        self._path = run_dir.path
        self._spec = spec
        self._settings = settings
        self._title = f"{spec.name}, seed {seed}"
        self._evaluations: list[tuple[int, float, float]] = []
        self._last_evaluation: Evaluation | None = None
        if resumed is not None:
            self._restore(resumed)
        replace(self._path / PROGRESS, lambda path: _write_rows(path, self.rows))
        self._file = (self._path / PROGRESS).open("a", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        last = int(self.rows[-1]["step"]) if self.rows else 0
        self._events = _summary_writer(self._path, None if resumed is None else last + 1)
        self._bar = progress_bar(settings.steps, unit="step", initial=min(step, settings.steps))
        self._drawn = time.perf_counter()

    def close(self) -> None:
        """Close the bar and the files."""
        self._bar.close()
        self._file.close()
        if self._events is not None:
            self._events.close()

    def advance(self, step: int) -> None:
        """Update the bar."""
        self._bar.update(min(step, self._settings.steps) - self._bar.n)

    def row(self, row: dict[str, float]) -> None:
        """Write the row, show it beside the bar, and draw the curve if it was last drawn long ago."""
        evaluation, self._last_evaluation = self._last_evaluation, None
        row = dict.fromkeys(COLUMNS, float("nan")) | row
        row |= {
            "eval_return_mean": float("nan") if evaluation is None else evaluation.return_mean,
            "eval_return_std": float("nan") if evaluation is None else evaluation.return_std,
        }
        self.rows.append(row)
        self._csv.writerow(_formatted(row))
        self._file.flush()
        if self._events is not None:
            for name in COLUMNS[1:]:
                # TensorBoard has no use for NaN
                if row[name] == row[name]:
                    tag = f"replay/{name}" if name in REPLAY_STATS else name
                    self._events.add_scalar(tag, row[name], int(row["step"]))
        self._bar.set_postfix_str(
            f"return {row['return_mean']:.4g} at ε {row['epsilon']:.2g}, length {row['length_mean']:.4g}, "
            f"{row['updates_per_second']:.0f} upd/s",
            refresh=False,
        )
        if time.perf_counter() - self._drawn > CURVE_SECONDS:
            self.draw()

    def evaluated(self, step: int, evaluation: Evaluation, best: QNetwork | None) -> None:
        """Print the evaluation above the bar, and save the network if it is the best so far."""
        self._last_evaluation = evaluation
        self._evaluations.append((step, evaluation.return_mean, evaluation.length_mean))
        self._bar.write(
            f"step {step:>9,}: evaluation return {evaluation.return_mean:.2f} ± {evaluation.return_std:.2f}, "
            f"length {evaluation.length_mean:.0f}{', best so far' if best is not None else ''}",
            file=sys.stderr,
        )
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
        }
        weights = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
        replace(self._path / NETWORK, lambda path: path.write_bytes(save(weights, metadata)))

    def draw(self) -> None:
        """Write the learning curve so far."""
        stop_at = self._settings.stop_at
        threshold = self._spec.reward_threshold if stop_at is None else stop_at
        about = self._title, self.rows, self._evaluations, threshold, self._settings
        replace(self._path / CURVE, lambda path: draw_curve(path, *about))
        self._drawn = time.perf_counter()

    def draw_buffer(self, buffer: TrajectoryReplayBuffer) -> None:
        """Write the picture of the replay buffer."""
        replace(self._path / BUFFER, buffer.plot)

    def state(self) -> dict[str, Any]:
        """Rows and evaluations so far, and the evaluation that belongs to the next row."""
        rows = [[row[name] for name in COLUMNS] for row in self.rows]
        last = self._last_evaluation
        return {
            "columns": list(COLUMNS),
            "rows": torch.tensor(rows, dtype=torch.float64).reshape(-1, len(COLUMNS)),
            "evaluations": torch.tensor(self._evaluations, dtype=torch.float64).reshape(-1, 3),
            "last_evaluation": None if last is None else asdict(last),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        missing = dict.fromkeys(COLUMNS, float("nan"))
        self.rows = [missing | dict(zip(state["columns"], row, strict=True)) for row in state["rows"].tolist()]
        self._evaluations = [(int(step), mean, length) for step, mean, length in state["evaluations"].tolist()]
        last = state["last_evaluation"]
        self._last_evaluation = None if last is None else Evaluation(**last)


def _formatted(row: Mapping[str, float]) -> dict[str, int | str]:
    """A row as text for progress.csv."""
    return {
        name: int(row[name]) if name in COUNTS and row[name] == row[name] else f"{row[name]:.6g}" for name in COLUMNS
    }


def _write_rows(path: Path, rows: Iterable[Mapping[str, float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows(_formatted(row) for row in rows)


def _summary_writer(path: Path, purge_step: int | None) -> Any:
    """A writer of TensorBoard events, or None if TensorBoard is not installed.

    purge_step: events of earlier parts of a run are dropped from this step on.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # Readers take the files of one folder in the order of their names, which begin with the second in which each was
    # made; files of the same second follow in no useful order, and the dropped events could come last.
    folder = path / TENSORBOARD
    seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
    while int(time.time()) in seconds:
        time.sleep(0.05)
    return SummaryWriter(str(folder), purge_step=purge_step)
