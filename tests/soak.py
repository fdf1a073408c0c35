"""`gpu-replay soak`: random use, damaged files, interrupts, kills, threads and ranks, compared with oracles.

The parts run in child processes, so that a crash is a finding too; whatever is found is printed with the line that
repeats it. A case is one call, or one file that was read, whose outcome was compared: with the model of the tests, with
rows kept beside, or, where something is wrong, with what was there before.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from checkpoints import edit, spoiled
from children import ended, forked
from places import STEPS
from programs import KINDS, SAMPLERS, any_program, run
from ranks import ranks_of
from refusals import whole_state
from test_damage import DAMAGE
from test_interrupts import interrupt_everywhere, large_calls, under_signals
from test_kills import test_killed_at_random_moments_leaves_the_old_or_the_new_one
from test_sharded import check_one_sided, one_sided
from test_threads import SAMPLERS as OF_THREADS
from test_threads import adding, made, repeated, users

from gpu_replay import CheckpointError, Field, Proportional, ReplayBuffer
from gpu_replay.bench.records import current_environment
from gpu_replay.checkpoint.files import replace_text
from gpu_replay.console.arguments import Parser, natural, pathname, positive_float
from gpu_replay.console.markdown import table

ROUND_SECONDS = 60.0
# after which a part that has not ended hangs
MOST_SECONDS = 600.0
# how the case that failed is run again, from the root of the checkout
REPEAT = "cd tests; PYTHONPATH=helpers:durability:contract python -c"
NUMBERED = {"a": Field((3,), torch.int16), "n": Field((), torch.int64)}


def programs(seed: int) -> int:
    """Random calls of either buffer, right and wrong, and of its model in lists."""
    draw = random.Random(seed)
    run(any_program(draw, draw.choice(KINDS), draw.choice(list(SAMPLERS)), calls=150))
    return 150


def hurt(draw: random.Random, path: Path) -> str:
    """Damage a checkpoint in one way; returns which."""
    way = draw.choice((*DAMAGE, "changed", "missing", "edited", "edited", "edited", "link"))
    file = draw.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    if way == "edited":

        def change(body: Any) -> None:
            _, changed = draw.choice([each for each in spoiled(body) if isinstance(each[1], dict)])
            body.clear()
            body.update(changed)

        edit(path, change)
        return way
    file.unlink()
    if way in DAMAGE:
        file.write_bytes(DAMAGE[way](content, draw.random()))
    if way == "link":
        file.symlink_to("/dev/zero")
    return way


def damage(seed: int) -> int:
    """A checkpoint that was damaged is refused, or gives what was saved; or, edited by hand, a buffer that works."""
    draw = random.Random(seed)
    sampler = SAMPLERS[draw.choice(list(SAMPLERS))]
    buffer = ReplayBuffer(draw.randint(1, 30), NUMBERED, sampler=sampler, device="cpu", seed=seed)
    for _ in range(8):
        numbers = torch.arange(buffer.added, buffer.added + 5)
        buffer.add(a=numbers[:, None].expand(5, 3).short(), n=numbers)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "c"
            buffer.save(path)
            way = hurt(draw, path)
            with suppress(CheckpointError, MemoryError):
                found = ReplayBuffer.load(path, device="cpu")
                assert way == "edited" or whole_state(found) == whole_state(buffer), way
                # settings that were edited may ask for larger batches
                with suppress(ValueError):
                    if len(found):
                        found.update_priorities(found.sample(1).key, [2.0])
            # what was damaged can be saved over, or is refused because it is not known to be a checkpoint
            with suppress(CheckpointError):
                buffer.save(path)
                assert whole_state(ReplayBuffer.load(path, device="cpu")) == whole_state(buffer)
    return 16


def interrupts(seed: int) -> int:
    """A signal in the middle of each call of a buffer, beside a twin without; and an interrupt anywhere, also in the
    standard library, of calls that could leave a lock held.
    """
    draw = random.Random(seed)
    under_signals(draw.choice(("transitions", *STEPS)), draw.choice(list(SAMPLERS)), seed, rounds=120)
    with tempfile.TemporaryDirectory() as folder, large_calls(Path(folder)) as calls:
        for call in calls.values():
            interrupt_everywhere(call, calls.values(), lambda total: draw.sample(range(total), 5))
    return 120 + 5 * len(calls)


def kills(seed: int) -> int:
    """SIGKILLs while a process saves: the old checkpoint or the new one, and nothing left behind."""
    with tempfile.TemporaryDirectory() as folder:
        test_killed_at_random_moments_leaves_the_old_or_the_new_one(Path(folder), False)
    return 20


def threads(seed: int) -> int:
    """Adders, learners, readers and savers of two buffers at once."""
    done: list[Any] = []
    capacity = 1500 + seed % 200
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        for number in range(2):
            buffer = made("cpu", OF_THREADS[(seed + number) % len(OF_THREADS)], capacity, capacity)
            running.enter_context(adding(buffer, "cpu"))
            # batches of more than 1 MB
            for use in users(buffer, Path(folder) / str(number), 1200).values():
                running.enter_context(repeated(lambda use=use: done.append(use())))
        time.sleep(1.5)
    return len(done)


def sharded(seed: int) -> int:
    """Two ranks that make different calls, or the same with wrong arguments: all raise, and the buffer goes on."""
    with ranks_of(2) as ranks, tempfile.TemporaryDirectory() as folder:
        found = ranks.run(2, one_sided, str(Path(folder) / "c"))
        check_one_sided(found)
    return len(found[0])


def day(seed: int) -> int:
    """Millions of adds and tens of thousands of pairs of sample and update, in steady memory and time."""
    buffer = ReplayBuffer(100_000, {"n": Field((), torch.int64)}, sampler=Proportional(), device="cpu", seed=seed)
    seconds, resident = [], []
    for _ in range(10):
        began = time.process_time()
        for _ in range(500):
            buffer.add(n=torch.arange(buffer.added, buffer.added + 1000))
            for _ in range(10):
                batch = buffer.sample(32)
                assert torch.equal(batch.n, batch.key)
                buffer.update_priorities(batch.key, batch.probability)
        seconds.append(time.process_time() - began)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20)
        assert buffer.total_mass() == int(buffer.masses().sum())
    # medians, as other programs on the machine can double the time of any one tenth
    assert statistics.median(resident[-3:]) <= statistics.median(resident[:3]) + 16, f"MiB in memory: {resident}"
    assert statistics.median(seconds[-3:]) <= 2 * statistics.median(seconds[:3]), f"seconds of each tenth: {seconds}"
    return 50_000


PARTS: dict[str, Callable[[int], int]] = {
    part.__name__: part for part in (programs, damage, interrupts, threads, sharded, kills, day)
}
# how often each of them comes in turn, after one of each
CYCLE = ["programs"] * 160 + ["damage"] * 16 + ["interrupts"] * 12 + ["threads", "sharded", "kills", "kills", "day"]
Job = tuple[str, int]


def all_jobs(seed: int) -> Iterator[Job]:
    """Each part once, then the cycle in one order after another, without an end."""
    draw = random.Random(seed)
    cycles = (draw.sample(CYCLE, len(CYCLE)) for _ in itertools.count())
    names = itertools.chain(PARTS, itertools.chain.from_iterable(cycles))
    return zip(names, itertools.count(seed * 10**9))


def soak(minutes: float, seed: int) -> tuple[Counter[str], list[Job]]:
    """Run for so long; returns how many cases each part compared, and what failed."""
    cases: Counter[str] = Counter()
    failures: list[Job] = []
    deadline = time.monotonic() + 60 * minutes
    jobs = all_jobs(seed)
    job = next(jobs)
    while time.monotonic() < deadline and len(failures) < 10:
        reading, writing = os.pipe()
        until = min(deadline, time.monotonic() + ROUND_SECONDS)

        def work(first: Job = job, said: int = writing, until: float = until) -> None:
            # with a copy of all jobs to come
            for name, argument in itertools.chain([first], jobs):
                faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
                os.write(said, f"{PARTS[name](argument)}\n".encode())
                if time.monotonic() > until:
                    break

        child = forked(work)
        os.close(writing)
        with os.fdopen(reading) as lines:
            for line in lines:
                cases[job[0]] += int(line)
                job = next(jobs)
        if ended(child):
            failures.append(job)
            print(f"FAILED; again with: {REPEAT} 'import soak; soak.PARTS[\"{job[0]}\"]({job[1]})'")
            job = next(jobs)
        print(f"{cases.total():,} cases, {len(failures)} failures", file=sys.stderr, flush=True)
    return cases, failures


def page(cases: Counter[str], failures: Sequence[Job], command: str) -> str:
    """What was done and found as Markdown."""
    where = current_environment(torch.device("cpu"))
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items() if version)
    lines = [
        "# Reliability",
        "",
        f"Written by `{command}` on {where.date}, commit {where.commit}, {where.cpu}, {versions}.",
        "",
        table(["part", "cases compared"], [[name, f"{count:,}"] for name, count in sorted(cases.items())]),
        "",
        f"- failures: {len(failures)}",
        *(f'  - `soak.PARTS["{name}"]({argument})`' for name, argument in failures),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Soak, print what was done, and return 1 if anything failed."""
    parser = Parser(prog="gpu-replay soak", description="Random use, hostile input, damage and kills, compared.")
    parser.add_argument("--minutes", type=positive_float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--seed", type=natural, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--record", type=pathname, metavar="FILE", help="Markdown page to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases, failures = soak(options.minutes, options.seed)
    found = page(cases, failures, f"gpu-replay soak --minutes {options.minutes:g} --seed {options.seed}")
    print(found)
    if options.record is not None:
        replace_text(options.record, found)
    return 1 if failures else 0
