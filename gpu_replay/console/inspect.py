"""`gpu-replay inspect`: the contents of a saved buffer, as text and as a plot."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from gpu_replay import CheckpointError
from gpu_replay.console.arguments import pathname
from gpu_replay.console.errors import UserError
from gpu_replay.console.inspection import TITLE, of_checkpoint, render

SUFFIXES = (".png", ".pdf", ".svg")
DESCRIPTION = (
    "Print and plot what a checkpoint of a buffer (or the newest one of a run) holds and how it is sampled. Only "
    "priorities, counts and a few rows are read, however large it is."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("folder", type=pathname, metavar="DIR", help="a checkpoint, or a run of gpu-replay train")
    picture = "the picture (default: buffer.png in a run, DIR.png beside a checkpoint)"
    parser.add_argument("--output", type=pathname, metavar="FILE", help=picture)


def run(options: argparse.Namespace) -> int:
    """Print the text and write the plot; returns the exit code. Raises UserError for bad input."""
    folder = options.folder.resolve()
    in_run = (folder / "checkpoint").is_dir() and not (folder / "manifest.json").is_file()
    output = options.output or (folder / "buffer.png" if in_run else folder.with_name(f"{folder.name}.png"))
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output}: the picture's name must end in one of {', '.join(SUFFIXES)}.")
    try:
        found = of_checkpoint(options.folder)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    if not options.output and not in_run and output.exists() and not _is_of_a_buffer(output):
        raise UserError(f"{output} is there, and no picture of a buffer. Name another file: --output FILE.")
    print("\n".join(found.lines()))
    try:
        render(found, output)
    except ImportError as error:
        raise UserError(str(error)) from None
    print(f"picture: {output}")
    return 0


def _is_of_a_buffer(path: Path) -> bool:
    """Whether a picture was made by `inspect` or `plot`, by the title in the file."""
    with suppress(ImportError, OSError):
        from PIL import Image

        with Image.open(path) as image:
            return image.info.get("Title") == TITLE
    return False
