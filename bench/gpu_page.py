"""The page of one GPU: everything that `bench/on_gpu.sh` left in a folder, as Markdown with its pictures.

Every figure comes from a record: JSON lines, JUnit XML, the files of a training run. A part that was not run is named
with the command that runs it, so that a page can be made at any time of whatever is there.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_replay.console.markdown import table

from . import cost_model, report, runs
from .record import Record
from .results import read

# parts of bench/on_gpu.sh, and their steps in the order in which they run
PARTS: dict[str, tuple[str, ...]] = {
    "tests": ("tests",),
    "kernels-and-bench": ("kernels", "bench-kernels", "bench-gpu", "bench-frames", "bench-peers"),
    "train": ("catch", "pong"),
}
# tables of report.SECTIONS with a heading of their own; those of a GPU are named even where nothing was measured
HEADINGS = {
    "kernels": "Kernels",
    "kernels-cpu": "Kernels' work on the CPU",
    "gpu": "Whole steps",
    "frames": "Atari frames",
    "peers": "Peers",
    "cpu": "On the CPU",
    "memory": "Memory",
}
_ALWAYS = ("kernels", "gpu", "frames", "peers")
# what `timeout` ends with when the time is over
_TIMED_OUT = 124
CURVE = "curve.png"


@dataclass(frozen=True)
class Step:
    """One step that was run, as its line in PART.steps.jsonl says."""

    part: str
    step: str
    status: int
    seconds: int
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        if self.status == _TIMED_OUT:
            return "**out of time**"
        return "done" if self.status == 0 else f"**failed, status {self.status}**"


def steps_in(folder: Path) -> list[Step]:
    """All steps that were run, in the order of their lines; ValueError names a line that is none."""
    found = []
    for file in sorted(folder.glob("*.steps.jsonl")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                found.append(Step(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number}: not the line of a step ({error}).") from error
    return found


def records_in(folder: Path) -> list[Record]:
    """All measurements of the folder; trial runs, which are not to be quoted, only where there is nothing else."""
    found = [
        record
        for file in sorted(folder.glob("*.jsonl"))
        if not file.name.endswith(".steps.jsonl")
        for record in read(file)
    ]
    return [record for record in found if not record.quick] or found


def page(folder: Path, output: Path) -> str:
    """The whole page of the records in a folder, with links to pictures as seen from the file `output`.

    Raises ValueError where the folder holds no record of any kind.
    """
    steps, records, trained = steps_in(folder), records_in(folder), _runs_in(folder)
    if not (steps or records or trained):
        raise ValueError(f"{folder} holds no records; `bench/on_gpu.sh --output {folder}` makes them.")
    beside = _relative(folder, output)
    parts = [
        f"# {_machine(folder, steps, records)}",
        f"Made by `gpu-replay bench page` from the records in [`{beside}`]({beside}); nothing here is typed.",
    ]
    if records:
        parts.append(report.conditions(records))
    parts += ["## What was run", _steps_table(steps), _tests_text(folder)]
    parts += ["## Bars", _BARS, cost_model.expected_table(records)]
    for name in report.SECTIONS:
        heading, text = HEADINGS.get(name), report.section(name, records)
        measured = not text.startswith("Not measured yet")
        if heading is not None and (name in _ALWAYS or measured):
            parts += [f"## {heading}", text]
            if measured and name.startswith("kernels"):
                parts += _pictures(folder, output)
    parts += ["## Training", *_trained_text(trained, output)]
    return "\n\n".join(parts) + "\n"


_BARS = (
    "What was asked for, what was worked out beforehand as `bench/README.md` says, and what the records say. Expected "
    "times are those of bytes at the bandwidth of a data sheet and of assumed costs of a launch and a trip to memory."
)


def _machine(folder: Path, steps: Sequence[Step], records: Sequence[Record]) -> str:
    names = [step.gpu for step in steps]
    names += [record.environment.device for record in records if record.environment.device != "cpu"]
    names += [record.environment.cpu for record in records]
    return names[0] if names else folder.name


def _relative(path: Path, output: Path) -> str:
    return Path(os.path.relpath(path, output.parent)).as_posix()


def _steps_table(steps: Sequence[Step]) -> str:
    rows = []
    for part, names in PARTS.items():
        found = [step for step in steps if step.part == part]
        for step in found:
            rows.append([part, step.step, step.ended, f"{step.seconds}", step.date, step.commit])
        missing = [name for name in names if name not in {step.step for step in found}]
        rows += [[part, name, f"not run: `bench/on_gpu.sh {part}`", "", "", ""] for name in missing]
    lines = table(["part", "step", "", "seconds", "date", "commit"], rows)
    versions = dict.fromkeys(f"torch {step.torch}, triton {step.triton}" for step in steps)
    return f"{lines}\n\n{'; '.join(versions)}." if versions else lines


def _tests_text(folder: Path) -> str:
    """Counts of every JUnit file, and the names of the tests that failed."""
    rows, failed = [], []
    for file in sorted(folder.glob("*.xml")):
        try:
            suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
        except ElementTree.ParseError as error:
            raise ValueError(f"{file} is not JUnit XML ({error}).") from error
        counts = {
            name: sum(int(suite.get(name, "0")) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        }
        seconds = sum(float(suite.get("time", "0")) for suite in suites)
        wrong = counts["failures"] + counts["errors"]
        passed = counts["tests"] - wrong - counts["skipped"]
        rows.append([file.stem, f"{passed:,}", f"{wrong:,}", f"{counts['skipped']:,}", f"{seconds:.0f}"])
        for case in (case for suite in suites for case in suite.iter("testcase")):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"- `{case.get('classname')}.{case.get('name')}`")
    if not rows:
        return "No tests were recorded."
    return "\n\n".join(
        [table(["tests", "passed", "failed", "skipped", "seconds"], rows), *(["\n".join(failed)] * bool(failed))]
    )


def _pictures(folder: Path, output: Path) -> list[str]:
    """The pictures of the folder and of the folders in it, those of training runs apart."""
    found = [path for path in folder.rglob("*.png") if path.name != CURVE]
    # the one of all operations comes first
    found.sort(key=lambda path: (path.stem != "roofline", path))
    if not found:
        return ["Not drawn yet: `gpu-replay bench plot FILE`."]
    return [f"![{path.stem.replace('-', ' ')}]({_relative(path, output)})" for path in found]


def _runs_in(folder: Path) -> list[Path]:
    """Folders of training runs, finished or not."""
    return sorted({path.parent for path in folder.rglob("progress.csv")})


def _trained_text(folders: Sequence[Path], output: Path) -> list[str]:
    if not folders:
        return ["Not measured yet: `bench/on_gpu.sh train`."]
    finished = [folder for folder in folders if (folder / "summary.json").is_file()]
    atari = [folder for folder in finished if _env_of(folder) not in _OTHERS]
    parts = [runs.section(atari)] if atari else ["Pong: not measured yet: `bench/on_gpu.sh train`."]
    for folder in folders:
        parts.append(_one_run(folder))
        if (folder / CURVE).is_file():
            parts.append(f"![return of {folder.name} over environment steps]({_relative(folder / CURVE, output)})")
    return parts


# environments whose returns have other marks than those of Pong
_OTHERS = ("catch", "CartPole-v1", "Acrobot-v1")


def _env_of(folder: Path) -> str:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return str(summary["env"])


def _one_run(folder: Path) -> str:
    """A sentence on a run: its last row, and its summary where it came to one."""
    with (folder / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return f"`{folder.name}`: nothing was recorded before it ended."
    last = rows[-1]
    text = (
        f"`{folder.name}`: {float(last['step']):,.0f} environment steps in {float(last['seconds']) / 60:.1f} minutes, "
        f"mean return of training {float(last['return_mean']):.2f}"
    )
    if not (folder / "summary.json").is_file():
        return f"{text}; it did not come to its end."
    summary = json.loads((folder / "summary.json").read_text())
    solved = "" if summary.get("solved") is None else f", solved: {'yes' if summary['solved'] else 'no'}"
    return f"{text}; {summary['updates']:,} updates, stopped by {summary['stopped_by']}{solved}."
