"""Pictures in a row, and how they become a file that a person can look at: GIF, or MP4 where ffmpeg is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpu_replay.console.errors import UserError

# colours of a GIF, and pictures that are looked at to choose them
COLOURS = 256
WHITENING_BATCHES = 48
# an ending is held for a moment
PAUSE_SECONDS = 0.7


class Film:
    """Pictures of one size, kept compressed: a game of Pong has two thousand of them.

    fps:   pictures in a second.
    scale: each pixel becomes a square of this side.
    """

    def __init__(self, fps: float, scale: int) -> None:
        self.fps = fps
        self.scale = scale
        self._shape: tuple[int, ...] = ()
        self._packed: list[bytes] = []

    def add(self, picture: np.ndarray) -> None:
        """picture: (height, width, 3) uint8."""
        if not self._shape:
            self._shape = picture.shape
        if picture.shape != self._shape or picture.dtype != np.uint8:
            raise ValueError(
                f"all pictures of a film need one shape and uint8; the first has {self._shape}, this one "
                f"{picture.shape} of {picture.dtype}."
            )
        self._packed.append(zlib.compress(np.ascontiguousarray(picture).tobytes(), 1))

    def hold(self) -> None:
        """Show the last picture for a moment."""
        self._packed += self._packed[-1:] * round(self.fps * PAUSE_SECONDS)

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def seconds(self) -> float:
        """How long it takes to watch."""
        return len(self) / self.fps

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in the file."""
        return self._shape[1] * self.scale, self._shape[0] * self.scale

    def pictures(self, every: int = 1) -> Iterator[np.ndarray]:
        """Each picture, or every so manieth, as it came."""
        for packed in self._packed[::every]:
            yield np.frombuffer(zlib.decompress(packed), np.uint8).reshape(self._shape)


def check_output(path: Path) -> None:
    """Raise UserError unless a film can be written there by what is installed."""
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise UserError(f"--output {path} must end in .gif or .mp4.")
    if path.suffix.lower() == ".mp4" and _ffmpeg() is None:
        raise UserError(
            "an .mp4 needs ffmpeg, which is not installed. Write a .gif, or run: pip install imageio-ffmpeg"
        )
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}.")


def write_film(film: Film, path: Path) -> None:
    """Write a film as what the name says. Raises OSError when that fails."""
    if path.suffix.lower() == ".mp4":
        _write_mp4(film, path)
    else:
        _write_gif(film, path)


def _write_gif(film: Film, path: Path) -> None:
    from PIL import Image

    indexed = _indexer(film)
    images = (indexed(picture).resize(film.size, Image.Resampling.NEAREST) for picture in film.pictures())
    # delays are hundredths of a second, so they alternate between two that make the speed right
    ends = np.round(np.arange(len(film) + 1) * 100 / film.fps).astype(int)
    delays = (np.diff(ends) * 10).tolist()
    # of pictures in a row only the rectangle that changed is written
    next(images).save(path, "GIF", save_all=True, append_images=images, duration=delays, loop=0, optimize=False)


def _indexer(film: Film) -> Callable[[np.ndarray], Any]:
    """How pictures become images with a palette: exactly while the whole film has few colours, else as near as it gets.

    All images have the same palette, without which nothing of the one before could stay.
    """
    from PIL import Image

    seen = np.zeros(1 << 24, dtype=bool)
    for picture in film.pictures():
        seen[_codes(picture)] = True
    codes = np.flatnonzero(seen)
    if len(codes) <= COLOURS:
        colours = np.stack((codes >> 16, codes >> 8 & 255, codes & 255), 1).astype(np.uint8).tobytes()
        places = np.zeros(1 << 24, dtype=np.uint8)
        places[codes] = np.arange(len(codes))

        def exact(picture: np.ndarray) -> Any:
            image = Image.fromarray(places[_codes(picture)])
            image.putpalette(colours)
            return image

        return exact
    shown = np.concatenate(list(film.pictures(max(1, len(film) // WHITENING_BATCHES))))
    palette = Image.fromarray(shown).quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    return lambda picture: Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE)


def _codes(picture: np.ndarray) -> np.ndarray:
    """(height, width) of one number for each colour."""
    wide = picture.astype(np.uint32)
    return np.asarray(wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2])


def _ffmpeg() -> str | None:
    """A program that makes MP4s: the system's, or the one that the package imageio-ffmpeg brings."""
    found = shutil.which("ffmpeg")
    if found is None and importlib.util.find_spec("imageio_ffmpeg") is not None:
        import imageio_ffmpeg  # type: ignore[import-untyped, import-not-found, unused-ignore]

        found = imageio_ffmpeg.get_ffmpeg_exe()
    return found


def _write_mp4(film: Film, path: Path) -> None:
    width, height = film.size
    program = _ffmpeg()
    if program is None:
        raise OSError("ffmpeg is not installed")
    # a width and height that players can show are even
    filters = f"scale={width}:{height}:flags=neighbor,pad=ceil(iw/2)*2:ceil(ih/2)*2"
    command = [program, "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width // film.scale}x{height // film.scale}", "-r", f"{film.fps:g}", "-i", "-"]
    command += ["-vf", filters, "-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    process = subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = process.communicate(b"".join(picture.tobytes() for picture in film.pictures()))
    if process.returncode:
        raise OSError(f"ffmpeg failed to write {path}: {' '.join(errors.decode(errors='replace').split())}")
