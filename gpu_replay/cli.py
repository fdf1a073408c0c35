"""The command `gpu-replay`: train, play, study, bench, estimate, info.

Each command imports its dependencies when it runs, so that `--help` and `info` work on a bare installation. Bad input
ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gpu_replay.console.arguments import Parser
from gpu_replay.console.errors import UserError

EPILOG = "Each command has --help. Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` is without the program's name. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["gpu-replay", *arguments[:1]])
    try:
        return _run(arguments)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from gpu_replay.bench.main import main as bench

        return int(bench(arguments[1:]))
    if arguments[:2] == ["study", "cliffwalk"]:
        # a command of its own: after `study` comes the name of an environment otherwise
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    from gpu_replay import __version__
    from gpu_replay.console import info
    from gpu_replay.study import cliffwalk
    from gpu_replay.study import command as study
    from gpu_replay.training import command as train
    from gpu_replay.training import estimate, play

    parser = Parser(prog="gpu-replay", description="A GPU-resident tensor replay buffer for PyTorch.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"gpu_replay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("train", train, "train an agent: pong, CartPole-v1, catch, ..."),
        ("play", play, "a video of a trained agent, as GIF or MP4"),
        ("study", study, "compare kinds of replay on three small environments"),
        ("study cliffwalk", cliffwalk, "the Blind Cliffwalk of the paper on prioritized replay"),
        ("bench", None, "measure add, sample and update_priorities, and record the figures"),
        ("estimate", estimate, "bytes of a buffer before it is made"),
        ("info", info, "versions, devices, and which code would run"),
    ):
        if module is None:
            # bench has a parser of its own; the entry is for --help
            commands.add_parser(name, help=summary)
            continue
        # descriptions of several lines are wrapped already
        wrapped = "\n" in module.DESCRIPTION
        layout = argparse.RawDescriptionHelpFormatter if wrapped else argparse.HelpFormatter
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION, formatter_class=layout)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
