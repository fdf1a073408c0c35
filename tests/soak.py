"""`gpu-replay soak`: random use, hostile input, damaged files, interrupts, kills and a long day, compared with oracles.

The cases of `soak_cases.py` run in child processes, so that a crash is a finding too; whatever is found is printed with
the lines that repeat it.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from children import ended, forked
from soak_cases import Tally, damage, interrupts, programs, racing, sharded, threads
from test_kills import test_killed_at_random_moments_leaves_the_old_or_the_new_one
from training_runs import without_times

from gpu_replay import Batch, Field, Proportional, ReplayBuffer, TrajectoryReplayBuffer
from gpu_replay.bench.records import current_environment
from gpu_replay.cli import main as command
from gpu_replay.console.arguments import Parser, natural, positive_float
from gpu_replay.console.atomic_files import write_text
from gpu_replay.console.markdown import table

# the minutes of a whole run; shorter ones do their share of what is done once
WHOLE_MINUTES, ADDS, PAIRS = 25.0, 10**8, 10**6
ROUND_SECONDS = 60.0
# how the case that failed is run again, from the root of the checkout
REPEAT = "cd tests; PYTHONPATH=helpers:durability python -c"
# how often each of them comes in turn
CYCLE = ([programs] * 40 + [damage] * 4 + [interrupts] * 3) * 4 + [threads] * 2 + [racing, sharded]


def kills(count: int) -> Tally:
    """So many SIGKILLs while a process saves: the old checkpoint or the new one, and nothing left behind."""
    for _ in range(-(-count // 10)):
        with tempfile.TemporaryDirectory() as folder:
            test_killed_at_random_moments_leaves_the_old_or_the_new_one(Path(folder), False)
    return Tally(kills=10 * -(-count // 10), cases=2 * 10 * -(-count // 10))


def trainer(count: int) -> Tally:
    """A trainer of Catch that is killed so many times and resumed: the curve of one that was not."""
    flags = ["catch", "--device", "cpu", "--log-every", "2000", "--eval-every", "8000", "--eval-episodes", "16"]
    flags += ["--steps", "24000", "--checkpoint-every", "0.2", "--overwrite"]
    draw, killed, status = random.Random(count), 0, -1

    def train(run: Path, *arguments: str) -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            assert command(["train", *arguments, "--output", str(run)]) == 0

    with tempfile.TemporaryDirectory() as folder:
        run, whole = Path(folder) / "killed", Path(folder) / "whole"
        while status != 0:
            begun = any(run.glob("checkpoint/*/state/manifest.json"))
            child = forked(lambda arguments=["--resume"] if begun else flags: train(run, *arguments))
            if killed < count:
                time.sleep(draw.uniform(1.0, 3.0))
                os.kill(child, signal.SIGKILL)
            status = ended(child)
            expected = -signal.SIGKILL if killed < count else 0
            assert status in (0, expected), f"the trainer ended with {status}"
            killed += status != 0
        train(whole, *flags)
        assert without_times(run) == without_times(whole), "the curves differ"
    return Tally(kills=killed, cases=1)


def in_tenths(
    buffer: Any, adds: int, pairs: int, block: int, add: Callable[[int], object], check: Callable[[Batch], object]
) -> Tally:
    """So many adds and pairs of sample and update, across 2^31 and 2^40, in steady memory and time.

    block: rows of an add. check: of a batch. The first field of a row is its key.
    """
    tally, seconds, resident, calls = Tally(), [], [], adds // 10 // block
    own = next(iter(buffer.fields))
    add(buffer.capacity)
    for part in range(10):
        if part in (3, 6):
            # the counters as after years, in the same slot
            buffer.clear()
            state = buffer.state_dict()
            started = (2**31 if part == 3 else 2**40) - adds // 20
            started += buffer.added % buffer.capacity - started % buffer.capacity
            state["counters"] |= dict.fromkeys(("ADDED", "FIRST"), started)
            buffer.load_state_dict(state)
        began = time.process_time()
        for call in range(calls):
            add(block)
            for _ in range(pairs // 10 * (call + 1) // calls - pairs // 10 * call // calls):
                batch = buffer.sample(32)
                check(batch)
                buffer.update_priorities(batch.key, batch.probability)
                tally += Tally(cases=1, pairs=1, bytes=sum(values.nbytes for values in batch.to_dict().values()))
        tally["adds"] += calls * block
        seconds.append(time.process_time() - began)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20)
        for stored in buffer.batches(10_000):
            assert torch.equal(stored[own], stored.key)
        assert buffer.total_mass() == int(buffer.masses().sum())
    # medians, as other programs on the machine can double the time of any one tenth
    assert statistics.median(resident[-3:]) <= statistics.median(resident[:3]) + 16, f"MiB in memory: {resident}"
    assert statistics.median(seconds[-3:]) <= 2 * statistics.median(seconds[:3]), f"seconds of each tenth: {seconds}"
    tally["MiB more in the last tenth than in the first"] = resident[-1] - resident[0]
    tally["percent of the time of the first tenth that the last one took"] = round(100 * seconds[-1] / seconds[0])
    return tally


def day(thousandths: int) -> Tally:
    """So much of a long day: 10^8 adds and 10^6 pairs of sample and update."""
    buffer = ReplayBuffer(100_000, {"n": Field((), torch.int64)}, sampler=Proportional(), device="cpu")

    def add(rows: int) -> None:
        buffer.add(n=torch.arange(buffer.added, buffer.added + rows))

    def check(batch: Batch) -> None:
        assert torch.equal(batch.n, batch.key)

    return in_tenths(buffer, thousandths * ADDS // 1000, thousandths * PAIRS // 1000, 1000, add, check)


def day_of_steps(thousandths: int) -> Tally:
    """A tenth of that with a trajectory buffer, each episode of 97 steps."""
    envs, fields = 8, {"obs": Field((), torch.int64), "action": Field((), torch.int64)}
    buffer = TrajectoryReplayBuffer(
        100_000, envs, fields, stack=2, n_step=3, autoreset="same_step", sampler=Proportional(), device="cpu"
    )

    def add(rows: int) -> None:
        if not len(buffer):
            buffer.begin_episodes()
        key = torch.arange(buffer.added, buffer.added + rows).view(-1, envs)
        ended = (key // envs) % 97 == 96
        more = {"terminated": ended, "truncated": torch.zeros_like(ended)}
        buffer.extend(obs=key, action=key + 1, reward=torch.ones(key.shape), **more)

    def check(batch: Batch) -> None:
        assert torch.equal(batch.obs[:, 1], batch.key)
        assert torch.equal(batch.action, batch.key + 1)
        # what is left of the episode, at most the window
        assert torch.equal(batch.terminated, (batch.key // envs) % 97 >= 94)

    return in_tenths(buffer, thousandths * ADDS // 10_000, thousandths * PAIRS // 10_000, 10_000, add, check)


# what is done once, and how much of it in a whole run
ONCE = {"kills": 180, "trainer": 20, "day": 1000, "day_of_steps": 1000}
PARTS: dict[str, Callable[[int], Tally]] = {part.__name__: part for part in (*CYCLE, kills, trainer, day, day_of_steps)}
Job = tuple[str, int]


def in_child(jobs: Iterator[Job], seconds: float, done: Callable[[str, Tally], object]) -> Job | None:
    """Run jobs in a child process until the time is over; returns the one that failed, or that it died of."""
    reading, writing = os.pipe()

    def work() -> None:
        deadline = time.monotonic() + seconds
        for name, argument in jobs:
            os.write(writing, f"{json.dumps([name, argument])}\n".encode())
            os.write(writing, f"{json.dumps(PARTS[name](argument))}\n".encode())
            if time.monotonic() > deadline:
                break

    child = forked(work)
    os.close(writing)
    begun: Job | None = None
    with os.fdopen(reading) as lines:
        for line in lines:
            found = json.loads(line)
            if isinstance(found, list):
                begun = found[0], found[1]
            elif begun is not None:
                done(begun[0], Tally(found))
    return begun if ended(child) else None


def shuffled(seed: int) -> list[Callable[[int], Tally]]:
    """All parts of the cycle in another order, so that a short round leaves none out for ever."""
    return random.Random(seed).sample(CYCLE, len(CYCLE))


def soak(minutes: float, seed: int) -> tuple[dict[str, Tally], list[Job]]:
    """Run for so long, but each of `ONCE` and a case of the cycle; returns what each part did, and what failed."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    failures: list[Job] = []
    share = min(1.0, minutes / WHOLE_MINUTES)
    once = [(name, count) for name, most in ONCE.items() if (count := round(most * share))]
    deadline = time.monotonic() + 60 * minutes
    rounds = (
        ((part.__name__, seed * 10**9 + at) for at, part in enumerate(itertools.cycle(shuffled(start)), start * 10**5))
        for start in itertools.count()
    )
    jobs: Iterator[Iterator[Job]] = itertools.chain((iter([job]) for job in once), rounds)
    for number, child in enumerate(jobs):
        if number > len(once) and (time.monotonic() > deadline or len(failures) >= 10):
            break
        left = max(0.0, min(ROUND_SECONDS, deadline - time.monotonic()))
        failed = in_child(child, left, lambda name, tally: tallies[name].update(tally))
        if failed is not None:
            failures.append(failed)
            print(f"FAILED; again with: {REPEAT} 'import soak; soak.PARTS[\"{failed[0]}\"]({failed[1]})'")
        cases = sum(tally["cases"] for tally in tallies.values())
        print(f"{cases:,} cases, {len(failures)} failures", file=sys.stderr, flush=True)
    return tallies, failures


def page(tallies: dict[str, Tally], failures: Sequence[Job], command: str) -> str:
    """What was done and found as Markdown."""
    names = ("cases", "faults", "kills", "bytes")
    rows = [[name, *(f"{tally[each]:,}" for each in names)] for name, tally in sorted(tallies.items())]
    rows.append(["all", *(f"{sum(tally[each] for tally in tallies.values()):,}" for each in names)])
    more = [
        f"- {name}, {each}: {count:,}"
        for name, tally in sorted(tallies.items())
        for each, count in tally.items()
        if each not in names
    ]
    where = current_environment(torch.device("cpu"))
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items() if version)
    return "\n".join(
        [
            "# Reliability",
            "",
            f"Written by `{command}` on {where.date}, commit {where.commit}, {where.cpu}, "
            f"{versions}. What each part does is said in `tests/helpers/soak_cases.py` and `tests/soak.py`.",
            "",
            table(["part", "cases compared", "faults injected", "kills survived", "bytes verified"], rows),
            "",
            *more,
            f"- failures: {len(failures)}",
            *(f'  - `soak.PARTS["{name}"]({argument})`' for name, argument in failures),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Soak, print what was done, and return 1 if anything failed."""
    parser = Parser(prog="gpu-replay soak", description="Random use, hostile input, damage and kills, compared.")
    parser.add_argument("--minutes", type=positive_float, default=1.0, help="how long (default: 1; 25 for all kills)")
    parser.add_argument("--seed", type=natural, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="Markdown page to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tallies, failures = soak(options.minutes, options.seed)
    found = page(tallies, failures, f"gpu-replay soak --minutes {options.minutes:g} --seed {options.seed}")
    print(found)
    if options.record is not None:
        write_text(options.record, found)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
