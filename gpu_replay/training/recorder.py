"""What a run shows and leaves behind while it goes: progress bar, CSV rows, TensorBoard events, curve, best network."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.evaluation import Evaluation
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.run_dir import CURVE, NETWORK, PROGRESS, TENSORBOARD, RunFolder
from gpu_replay.training.settings import Settings
from gpu_replay.training.summary import draw_curve

COLUMNS = (
    "step",
    "seconds",
    "episodes",
    "return_mean",
    "length_mean",
    "loss",
    "td_error",
    "beta",
    "epsilon",
    "updates_per_second",
    "steps_per_second",
    "updates",
    "value_mean",
    "learning_rate",
    "stored",
    "eval_return_mean",
    "eval_return_std",
)
COUNTS = frozenset({"step", "episodes", "updates", "stored"})
# drawing takes about half a second, so the curve is drawn rarely
CURVE_SECONDS = 30.0


class Recorder:
    """The listener of a run that writes into `folder` and shows a progress bar on standard error.

    progress.csv is flushed after each row, the other files are replaced whole, so that a run which is killed leaves
    what it had.

    resumed: the state of the recorder of the run that goes on: rows that came after it are dropped.
    step:    where that run goes on.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: EnvironmentSpec,
        settings: Settings,
        seed: int,
        *,
        resumed: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        from tqdm import tqdm

        self.rows: list[dict[str, float]] = []
        self._folder = folder
        self._spec = spec
        self._settings = settings
        self._title = f"{spec.name}, seed {seed}"
        self._evaluations: list[tuple[int, float, float]] = []
        self._last_evaluation: Evaluation | None = None
        if resumed is not None:
            self._restore(resumed)
        folder.replace(PROGRESS, lambda path: _write_rows(path, self.rows))
        self._file = (folder.path / PROGRESS).open("a", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        self._events = _summary_writer(folder, None if resumed is None else self._last_step + 1)
        self._bar: Any = tqdm(
            total=settings.steps,
            initial=min(step, settings.steps),
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            # in a log file every refresh is a line of its own
            mininterval=0.2 if sys.stderr.isatty() else 30.0,
        )
        self._drawn = time.perf_counter()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._file.close()
        if self._events is not None:
            self._events.close()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(min(step, self._settings.steps) - self._bar.n)

    def row(self, row: dict[str, float]) -> None:
        """Write a row, show it beside the bar, and draw the curve when it is time."""
        evaluation = self._last_evaluation
        self._last_evaluation = None
        row = row | {
            "eval_return_mean": float("nan") if evaluation is None else evaluation.return_mean,
            "eval_return_std": float("nan") if evaluation is None else evaluation.return_std,
        }
        self.rows.append(row)
        self._csv.writerow(_written(row))
        self._file.flush()
        if self._events is not None:
            for name in COLUMNS[1:]:
                # not-a-number leaves no mark in the events
                if row[name] == row[name]:
                    self._events.add_scalar(name, row[name], int(row["step"]))
        self._bar.set_postfix_str(
            f"return {row['return_mean']:.4g}, length {row['length_mean']:.4g}, {row['updates_per_second']:.0f} upd/s",
            refresh=False,
        )
        if time.perf_counter() - self._drawn > CURVE_SECONDS:
            self.draw()

    def evaluated(self, step: int, evaluation: Evaluation, best: QNetwork | None) -> None:
        """Say it in a line that stays, and save the network if it is the best so far."""
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
        """Write the weights, with all that is needed to build the network again in the file's metadata."""
        from safetensors.torch import save

        field = self._spec.stacked
        metadata = {
            "env": self._spec.name,
            "step": str(step),
            "actions": str(self._spec.num_actions),
            "observation": json.dumps({"shape": field.shape, "dtype": str(field.dtype), "scale": field.scale}),
            "settings": json.dumps(self._settings.to_dict()),
        }
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
        self._folder.replace(NETWORK, lambda path: path.write_bytes(save(weights, metadata)))

    def draw(self) -> None:
        """Write the curve of what there is."""
        threshold = self._spec.reward_threshold
        self._folder.replace(CURVE, lambda path: draw_curve(path, self._title, self.rows, self._evaluations, threshold))
        self._drawn = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Rows and evaluations so far, and the evaluation that the next row will carry."""
        rows = [[row[name] for name in COLUMNS] for row in self.rows]
        last = self._last_evaluation
        return {
            "columns": list(COLUMNS),
            "rows": torch.tensor(rows, dtype=torch.float64).reshape(-1, len(COLUMNS)),
            "evaluations": torch.tensor(self._evaluations, dtype=torch.float64).reshape(-1, 3),
            "last_evaluation": None if last is None else asdict(last),
        }

    @property
    def _last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def _restore(self, state: Mapping[str, Any]) -> None:
        missing = dict.fromkeys(COLUMNS, float("nan"))
        self.rows = [missing | dict(zip(state["columns"], row, strict=True)) for row in state["rows"].tolist()]
        self._evaluations = [(int(step), mean, length) for step, mean, length in state["evaluations"].tolist()]
        last = state["last_evaluation"]
        self._last_evaluation = None if last is None else Evaluation(**last)


def _written(row: Mapping[str, float]) -> dict[str, int | str]:
    """A row as it stands in progress.csv."""
    return {name: int(row[name]) if name in COUNTS else f"{row[name]:.6g}" for name in COLUMNS}


def _write_rows(path: Path, rows: Iterable[Mapping[str, float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows(_written(row) for row in rows)


def _summary_writer(folder: RunFolder, purge_step: int | None) -> Any:
    """A writer of TensorBoard events, or None where TensorBoard is not installed.

    purge_step: events of earlier parts of a run from this step on count no more.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / TENSORBOARD), purge_step=purge_step)
