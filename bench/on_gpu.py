"""Run everything that needs a GPU, in parts that can be run one by one.

    python bench/on_gpu.py [PART ...] [options]

Without names it runs the parts of a round, which fits fifteen minutes; others are run on request. It needs this
checkout and a Python with PyTorch, Triton, NumPy and pytest, but no installation and no network. Each step of a part is
a process with its own time limit: it is interrupted at the limit and killed ten seconds later, and the next step
starts. A step leaves NAME.log. Results are written at once, so a part may be killed at any moment. The exit status is 0
only if every step succeeded. At its end it says what the records of its folder decide.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# seconds of each part: those of a round, in the order in which they run, and those on request
ROUND = {"contact": 100, "host": 45, "records": 310, "peers": 260, "tests": 130}
PARTS = ROUND | {"pong": 180, "all-tests": 420, "memcheck": 120}
# the exit status of a suite that lost the device, and how often it is then restarted for the missing cases
LOST, AGAIN = 3, 3
NO_LAUNCH = 3
OUT_OF_TIME = 124
# tests that say nothing without a GPU, before those that say the same of the interpreter
GPU_ONLY = "test_gpu"
TINY = "--steps 120 --num-envs 8 --capacity 400 --warmup 80 --batch-size 8 --updates 1 --eval-episodes 2"
TINY += " --eval-max-steps 5 --log-every 40"
DESCRIBE = "import torch, triton; print(torch.cuda.get_device_name())"


class Decision(NamedTuple):
    """A part of the code that stays as it is if medians are small enough.

    suite:    whose records.
    compared: of each case an implementation, and the other one that it is divided by; "" for its microseconds alone.
    most:     that each may be.
    change:   what is done otherwise.
    """

    suite: str
    compared: Sequence[tuple[str, str, str]]
    most: float
    change: str


OURS, HOST, BUSY_DRAWS, FEW_DRAWS = "gpu_replay", "host/N=100k/B=256", "draw/N=1M/B=65536", "draw/N=1M/B=256"
_scans = [(f"prefix-sum/N={size}", OURS, "cumsum") for size in ("1M", "10M", "100M")]
_frames = [(f"frame-gather/N=1M/B={batch}", OURS, "index_select") for batch in (256, 4096, 65_536)]
_calls = [(HOST, call, f"{call}, Triton's launcher") for call in ("add", "sample", "update_priorities")]
_wide = [("wide-sample/N=200k/B=32768", OURS, "")]
# microseconds of an H200; 32 draws a program must take half of what 16 took in the first round (29.2), and of few draws
# at most 5% more (5.74)
DECISIONS = {
    "the scan": Decision("kernels", _scans, 1.03, "take torch.cumsum, or one launch with a look-back"),
    "32 draws a program": Decision("kernels", [(BUSY_DRAWS, OURS, "")], 14.6, "try 64 and 128"),
    "32 draws a program of few": Decision("kernels", [(FEW_DRAWS, OURS, "")], 6.0, "take fewer for small batches"),
    "frames": Decision("kernels", _frames, 1.0, "choose the tiles of the slower batches anew (ops/windows.py)"),
    "direct launches": Decision("host", _calls, 1.0, "launch with Triton's own launcher alone"),
    "32,768 rows of 3.7 kB": Decision("gpu", _wide, 80.0, "choose the tile of wide rows anew (ops/ring.py)"),
}


class Step(NamedTuple):
    """A named command and its time limit in seconds; `again` restarts it for missing cases."""

    name: str
    command: list[str]
    seconds: float
    again: bool = False


class Round:
    """The steps of all parts for the given options; `fallbacks` are the options that avoid features broken here."""

    def __init__(self, options: argparse.Namespace, fallbacks: dict[str, list[str]]) -> None:
        self._output: Path = options.output
        self._small: bool = options.rehearsal
        # test processes on the one GPU
        self._workers = max(1, (os.cpu_count() or 1) - 2) if find_spec("xdist") and not options.rehearsal else 1
        self._fallbacks = fallbacks
        self._run = [sys.executable, "-m", *(["rehearsal"] if options.rehearsal else [])]

    def _words(self, *kinds: str) -> list[str]:
        return [word for kind in kinds for word in self._fallbacks.get(kind, [])]

    def _bench(
        self,
        suite: str,
        seconds: float,
        *kinds: str,
        only: str = "",
        skip: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> Step:
        small = ["--quick", *(["--only", only] if only else [])] if self._small else []
        skips = [word for pattern in (*skip, *self._words("skip")) for word in ("--skip", pattern)]
        words = ["gpu_replay", "bench", suite, *more, *small, *self._words(*kinds), *skips]
        output = ["--output", str(self._output / f"{suite}.jsonl")]
        return Step(f"bench-{suite}", [*self._run, *words, *output], seconds, again=True)

    def _train(self, env: str, seconds: float, reserve: float, *small: str) -> Step:
        # a buffer in a checkpoint takes gigabytes
        words = ["--device", "cuda", "--seed", "0", "--no-checkpoint-replay", "--overwrite", *self._words("train")]
        words += ["--max-seconds", f"{seconds - reserve:.0f}", "--output", str(self._output / env)]
        tiny = [*TINY.split(), *small] if self._small else []
        return Step(env, [*self._run, "gpu_replay", "train", env, *words, *tiny], seconds)

    def _pytest(self, name: str, seconds: float, *where: str, before: Sequence[str] = (), workers: int = 0) -> Step:
        workers = workers or self._workers
        parallel = ["-p", "xdist.plugin", "-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        options = [*parallel, "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "-W", "default", "-m", "gpu"]
        options += ["--continue-on-collection-errors", "-v", *self._words("pytest")]
        return Step(name, [*before, *self._run, "pytest", *options, *where], seconds)

    def contact(self, seconds: float) -> Iterator[Step]:
        """Which features work here."""
        given = ["--seconds", f"{0.9 * seconds:.0f}", "--output", str(self._output / "contact.jsonl")]
        yield Step("contact", [*self._run, "gpu_replay", "bench", "contact", *given], seconds)

    def host(self, seconds: float) -> Iterator[Step]:
        """What calls cost the host."""
        yield self._bench("host", seconds)

    def records(self, seconds: float) -> Iterator[Step]:
        """The suites of this package alone."""
        # what its time holds; `bench SUITE --missing --output FILE` adds the others
        small = ("prefix-sum", "tree-build", "draw", "update", "rank-draw")
        skipped = [*(f"{name}/N=10*k*" for name in small), "draw/N=10M*", "update/N=10M*"]
        skipped += ["rank-draw/N=10*M*", "draw-update/N=100k*"]
        yield self._bench("kernels", 0.7 * seconds, "timing", only="N=1k", skip=skipped)
        # cycles and wide rows
        yield self._bench("gpu", 0.3 * seconds, "timing", only="*[cw][yi]*", skip=("*N=10k*", "*N=100k*", "*N=10M*"))

    def peers(self, seconds: float) -> Iterator[Step]:
        """Beside other libraries, those that are installed."""
        yield self._bench("peers", seconds, more=["--device", "cuda"])

    def pong(self, seconds: float) -> Iterator[Step]:
        """Two games, the second one by ALE if it is installed."""
        yield self._train("device-pong", 0.2 * seconds, 15, "--steps", "168")
        if find_spec("ale_py"):
            yield self._train("pong", 0.8 * seconds, 30, "--n-step", "3", "--warmup", "40", "--steps", "104")

    def tests(self, seconds: float) -> Iterator[Step]:
        """Tests marked gpu that only a GPU can show."""
        some = ["tests/kernels/test_gpu.py", "-k", "test_every_call_once and everything and transitions"]
        yield self._pytest("gpu-tests", seconds, *(some if self._small else ["tests/kernels", "-k", GPU_ONLY]))

    def all_tests(self, seconds: float) -> Iterator[Step]:
        """Those tests, then all the others that are marked."""
        yield from self.tests(0.4 * seconds)
        rest = ["tests/programs/test_bench.py"] if self._small else ["tests", "-k", f"not {GPU_ONLY}"]
        yield self._pytest("tests", 0.6 * seconds, *rest)

    def memcheck(self, seconds: float) -> Iterator[Step]:
        """Some calls under compute-sanitizer, if it is installed."""
        tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if tool or self._small:
            # no caching allocator: memory outside a tensor is then unallocated, and an access to it is an error
            before = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
            before += [tool, "--tool", "memcheck", "--error-exitcode", "9"] if tool else []
            chosen = f"test_every_call_once and {'transitions-' * self._small}everything"
            where = ["tests/kernels/test_gpu.py", "-k", chosen]
            yield self._pytest("memcheck", seconds, *where, before=before, workers=1)


def main(argv: Sequence[str]) -> int:
    """Run the parts; returns the exit status."""
    options = _options(argv)
    helpers = [f"{ROOT}/tests/helpers", f"{ROOT}/tests/contract"] if options.rehearsal else []
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # packages that the machine lacks may be in a folder of the caller's
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *helpers, *filter(None, given)])
    status = 0
    for part in options.parts:
        fallbacks = found_fallbacks(options.output / "contact.jsonl")
        variables |= dict(word.split("=", 1) for word in fallbacks.get("environment", []))
        seconds = PARTS[part] * (10 if options.rehearsal else 1)
        steps = getattr(Round(options, fallbacks), part.replace("-", "_"))(seconds)
        if options.dry_run:
            for step in steps:
                print(f"{step.seconds:.0f} s: {shlex.join(step.command)}")
            continue
        ended = run(part, steps, seconds, options.output, variables)
        status |= any(ended.values())
        if ended.get("contact") == NO_LAUNCH:
            print("== no kernel can be launched, so nothing else is tried")
            break
    if not options.dry_run:
        print("== what the records decide", *decided(options.output), sep="\n")
    return int(status)


def decided(output: Path) -> list[str]:
    """A line for each decision, with figures of the newest commit; replayed calls count before launched ones.

    What the folder has no record of leaves it open, unless another figure is too large already.
    """
    files = [output / f"{suite}.jsonl" for suite in {each.suite for each in DECISIONS.values()}]
    records = [json.loads(line) for file in files if file.is_file() for line in file.read_text().splitlines()]
    # earlier rounds may have left theirs
    newest: dict[str, Any] = max((each["environment"] for each in records), key=lambda made: made["date"], default={})
    records = [each for each in records if each["environment"]["commit"] == newest["commit"]]
    records.sort(key=lambda record: record["timing"] == "graph")
    medians = {(each["case"], each["implementation"]): each["quantiles"]["p50"] for each in records}
    lines = []
    for about, (_, compared, most, change) in DECISIONS.items():
        told, found = [], []
        for case, mine, other in compared:
            time, base = medians.get((case, mine)), medians.get((case, other)) if other else 1.0
            told.append(f"{case if mine == OURS else mine} not measured")
            if time and base:
                found.append(time / base)
                told[-1] = told[-1].replace(
                    "not measured", f"{time:.1f} µs" + (f", {found[-1]:.2f} of {other}" if other else "")
                )
        over = any(value > most for value in found)
        verdict = change if over else "stays" if len(found) == len(told) else "open"
        lines.append(f"{about}: {verdict} ({'; '.join(told)}; at most {most:g})")
    return lines


def _options(argv: Sequence[str]) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("on_gpu.py", description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: {', '.join(ROUND)})")
    parser.add_argument("--output", type=Path, help="where records go (default: bench/results/NAME-OF-THE-GPU)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead; needs no GPU")
    parser.add_argument("--rehearsal", action="store_true", help="all of it without a GPU, in small; measures nothing")
    options = parser.parse_args(argv)
    # the other parts are longer forms of those of a round
    options.parts = options.parts or [*ROUND, *(("pong", "memcheck") if options.rehearsal else ())]
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    gpu = "a rehearsal" if options.rehearsal else "no GPU"
    if not (options.rehearsal or options.dry_run):
        try:
            done = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            parser.error(f"this needs a GPU, or --dry-run: {error.stderr.strip().splitlines()[-1]}")
        gpu = done.stdout
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    options.output = (options.output or ROOT / "bench" / "results" / slug).absolute()
    return options


def found_fallbacks(file: Path) -> dict[str, list[str]]:
    """The options, by kind and each once, for later programs to avoid all features that first contact found broken."""
    found: dict[str, list[str]] = {}
    for line in file.read_text().splitlines() if file.is_file() else []:
        for kind, words in json.loads(line).get("fallback", {}).items():
            # those of one kind are the same list or patterns of one word
            found[kind] = found.get(kind, []) + [word for word in words if word not in found.get(kind, [])]
    return found


def run(part: str, steps: Iterator[Step], seconds: float, output: Path, variables: dict[str, str]) -> dict[str, int]:
    """Run the steps of a part within its time, each within its own; returns how they ended.

    output:    where each leaves its log.
    variables: the environment of their commands.
    """
    output.mkdir(parents=True, exist_ok=True)
    until, saved, ended = time.monotonic() + seconds, 0.0, {}
    for step in steps:
        for number in range(1 + AGAIN * step.again):
            # time that earlier steps did not need is left for this one
            limit = min(step.seconds + saved, until - time.monotonic())
            began, command = time.monotonic(), [*step.command, *(["--missing"] if number else [])]
            print(f"== {part}: {step.name}{', again' * bool(number)}", flush=True)
            status = ended[step.name] = _ended(output / f"{step.name}.log", command, limit, variables)
            took = time.monotonic() - began
            saved += step.seconds * (number == 0) - took
            print(f"== {part}: {step.name} ended with status {status} after {took:.0f} s", flush=True)
            if status != LOST:
                break
    return ended


def _ended(log: Path, command: list[str], limit: float, variables: dict[str, str]) -> int:
    """The exit status of a command; what it prints goes to the log, and at once to where this prints."""
    if limit <= 0:
        log.write_text("no time was left for it\n")
        return OUT_OF_TIME
    until, told = time.monotonic() + limit, None
    with log.open("wb") as written, log.open("rb") as shown:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                print(shown.read().decode(errors="replace"), end="", flush=True)
                if time.monotonic() > until:
                    # interrupted first, so that what was measured is still written
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL if told else signal.SIGINT)
                    told, until = OUT_OF_TIME, time.monotonic() + 10
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print(shown.read().decode(errors="replace"), end="", flush=True)
    return told or process.returncode


if __name__ == "__main__":
    # a shell lets what it starts in the background ignore SIGINT, and so would its steps
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
