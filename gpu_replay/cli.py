"""The command `gpu-replay`: train, play, study, bench, estimate, soak, inspect, info.

Each command imports its dependencies when it runs, so that `--help` and `info` work on a bare installation. Bad input
ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_replay.checkpoint import files
from gpu_replay.console.arguments import Parser
from gpu_replay.console.errors import UserError
from gpu_replay.console.progress import bytes_bar

# the soak program exists only in a checkout
TESTS = Path(__file__).resolve().parents[1] / "tests"
EPILOG = "Each command has --help. Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` is without the program's name. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["gpu-replay", *arguments[:1]])
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        if not (isinstance(error, BrokenPipeError) and _reader_has_ended()):
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _reader_has_ended() -> bool:
    """Whether the reader of standard output has ended, as `head` does; the flush at exit then goes nowhere."""
    output, poll = 1, select.poll()
    poll.register(output, 0)
    ended = any(event & select.POLLERR for _, event in poll.poll(0))
    if ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return ended


def _run(arguments: list[str]) -> int:
    began = time.perf_counter()
    files.show = bytes_bar
    if arguments[:1] == ["bench"]:
        from gpu_replay.bench.main import main as bench

        return int(bench(arguments[1:]))
    if arguments[:1] == ["soak"]:
        return _soak(arguments[1:])
    if arguments[:2] == ["study", "cliffwalk"]:
        # `study cliffwalk` is a command of its own; otherwise the name of an environment follows `study`
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    if not arguments:
        _parser().print_help()
        return 0
    options = _parser().parse_args(arguments)
    # parsing imports torch, which takes a second or more
    options.began = began
    return int(options.run(options))


def _soak(arguments: list[str]) -> int:
    """Run `tests/soak.py`, which compares with the reference implementations of the tests."""
    if not (TESTS / "soak.py").is_file():
        raise UserError("the soak needs the tests/ of a checkout: install one with pip install -e .")
    sys.path[:0] = [str(TESTS), *map(str, sorted(TESTS.glob("[a-z]*/")))]
    return int(importlib.import_module("soak").main(arguments))


def _parser() -> argparse.ArgumentParser:
    from gpu_replay import __version__
    from gpu_replay.console import info, inspect
    from gpu_replay.study import cliffwalk
    from gpu_replay.study import command as study
    from gpu_replay.training import command as train
    from gpu_replay.training import estimate, play

    parser = Parser(prog="gpu-replay", description="A GPU-resident tensor replay buffer for PyTorch.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"gpu_replay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("train", train, "train an agent: pong, CartPole-v1, catch, ..."),
        ("play", play, "record a video of a trained agent, as GIF or MP4"),
        ("study", study, "compare kinds of replay on three small environments"),
        ("study cliffwalk", cliffwalk, "repeat the Blind Cliffwalk of the paper on prioritized replay"),
        ("bench", None, "measure add, sample and update_priorities, and record the figures"),
        ("estimate", estimate, "estimate the memory of a buffer before it is made"),
        ("soak", None, "test buffers with random calls, damaged files and kills for some minutes"),
        ("inspect", inspect, "summarize and plot a saved buffer"),
        ("info", info, "show versions, devices, and which code runs on each"),
    ):
        if module is None:
            # these have their own parsers; the entries only serve --help
            if name != "soak" or (TESTS / "soak.py").is_file():
                commands.add_parser(name, help=summary)
            continue
        # descriptions of several lines are already wrapped
        wrapped = "\n" in module.DESCRIPTION
        layout = argparse.RawDescriptionHelpFormatter if wrapped else argparse.HelpFormatter
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION, formatter_class=layout)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
