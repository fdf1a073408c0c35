"""Videos of episodes as GIF, or as MP4 where ffmpeg is installed."""

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

# colours of a GIF, and pictures from which they are chosen
COLOURS = 256
PALETTE_PICTURES = 48
# the last picture of an episode is shown for so long
PAUSE_SECONDS = 0.7


class Video:
    """Pictures of one size, compressed in memory: a game of Pong has two thousand.

    fps:   pictures per second.
    scale: magnification in the file; a pixel becomes a square of this side.
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
                f"all pictures of a video need one shape and uint8; the first has {self._shape}, this one "
                f"{picture.shape} of {picture.dtype}."
            )
        self._packed.append(zlib.compress(np.ascontiguousarray(picture).tobytes(), 1))

    def hold(self) -> None:
        """Hold the last picture for PAUSE_SECONDS."""
        self._packed += self._packed[-1:] * round(self.fps * PAUSE_SECONDS)

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def seconds(self) -> float:
        """Playing time."""
        return len(self) / self.fps

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in the file."""
        return self._shape[1] * self.scale, self._shape[0] * self.scale

    def pictures(self, every: int = 1) -> Iterator[np.ndarray]:
        """Every picture, or one in `every`."""
        for packed in self._packed[::every]:
            yield np.frombuffer(zlib.decompress(packed), np.uint8).reshape(self._shape)


def check_output(path: Path) -> None:
    """Raise UserError unless a video can be written there with what is installed."""
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise UserError(f"--output {path} must end in .gif or .mp4.")
    if path.suffix.lower() == ".mp4" and _ffmpeg() is None:
        raise UserError(
            "an .mp4 needs ffmpeg, which is not installed. Write a .gif, or run: pip install imageio-ffmpeg"
        )
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}.")


def write_video(video: Video, path: Path) -> None:
    """Write a video in the format of the file's suffix. Raises OSError if that fails."""
    if path.suffix.lower() == ".mp4":
        _write_mp4(video, path)
    else:
        _write_gif(video, path)


def _write_gif(video: Video, path: Path) -> None:
    from PIL import Image

    indexed = _indexer(video)
    images = (indexed(picture).resize(video.size, Image.Resampling.NEAREST) for picture in video.pictures())
    # a GIF counts in hundredths of a second: delays alternate between two values that give the right mean
    ends = np.round(np.arange(len(video) + 1) * 100 / video.fps).astype(int)
    delays = (np.diff(ends) * 10).tolist()
    next(images).save(path, "GIF", save_all=True, append_images=images, duration=delays, loop=0, optimize=False)


def _indexer(video: Video) -> Callable[[np.ndarray], Any]:
    """A function from pictures to images with a palette: exact if the video has at most 256 colours, else the nearest.

    All images share one palette, so that a GIF stores only the rectangle that changed.
    """
    from PIL import Image

    seen = np.zeros(1 << 24, dtype=bool)
    for picture in video.pictures():
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
    shown = np.concatenate(list(video.pictures(max(1, len(video) // PALETTE_PICTURES))))
    palette = Image.fromarray(shown).quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    return lambda picture: Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE)


def _codes(picture: np.ndarray) -> np.ndarray:
    """(height, width) uint32, one number for each colour."""
    wide = picture.astype(np.uint32)
    return np.asarray(wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2])


def _ffmpeg() -> str | None:
    """The system's ffmpeg, or that of the package imageio-ffmpeg, or None."""
    if shutil.which("ffmpeg") is None and importlib.util.find_spec("imageio_ffmpeg") is not None:
        import imageio_ffmpeg  # type: ignore[import-untyped, import-not-found, unused-ignore]

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    return shutil.which("ffmpeg")


def _write_mp4(video: Video, path: Path) -> None:
    width, height = video.size
    program = _ffmpeg()
    if program is None:
        raise OSError("ffmpeg is not installed")
    # players need an even width and height
    filters = f"scale={width}:{height}:flags=neighbor,pad=ceil(iw/2)*2:ceil(ih/2)*2"
    command = [program, "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width // video.scale}x{height // video.scale}", "-r", f"{video.fps:g}", "-i", "-"]
    command += ["-vf", filters, "-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    process = subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = process.communicate(b"".join(picture.tobytes() for picture in video.pictures()))
    if process.returncode:
        raise OSError(f"ffmpeg failed to write {path}: {' '.join(errors.decode(errors='replace').split())}")
