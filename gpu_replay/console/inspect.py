"""`gpu-replay inspect`: the contents of a saved buffer, as text and as a plot."""

from __future__ import annotations

import argparse

from gpu_replay import CheckpointError
from gpu_replay.base.inspection import draw, of_checkpoint
from gpu_replay.console.arguments import pathname
from gpu_replay.console.errors import UserError

SUFFIXES = (".png", ".pdf", ".svg")
DESCRIPTION = (
    "Print and plot what a checkpoint of a buffer (or the newest one of a run) holds and how it is sampled. Only "
    "priorities, counts and a few rows are read, however large it is."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("folder", type=pathname, metavar="DIR", help="a checkpoint, or a run of gpu-replay train")
    parser.add_argument("--output", type=pathname, metavar="FILE", help="the picture (default: DIR.png beside it)")


def run(options: argparse.Namespace) -> int:
    """Print the text and write the plot; returns the exit code. Raises UserError for bad input."""
    folder = options.folder
    output = options.output or folder.resolve().with_name(f"{folder.resolve().name}.png")
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output}: the picture's name must end in one of {', '.join(SUFFIXES)}.")
    try:
        found = of_checkpoint(folder)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    print("\n".join(found.lines()))
    try:
        draw(found, output)
    except ImportError as error:
        raise UserError(str(error)) from None
    print(f"picture: {output}")
    return 0
