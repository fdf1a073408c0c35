"""Play episodes with the greedy policy of a trained network and write them as a video: Atari games in the console's
colours, resolution and speed; Gymnasium environments as they render themselves; the board of catch.
CHECKPOINT is the output folder of `gpu-replay train`, or the network.safetensors in it. Prints each return and length.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_replay.console.arguments import natural, pathname, positive, share
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.progress import progress_bar
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training.agent import greedy_actions
from gpu_replay.training.environments import Actors, EnvironmentSpec
from gpu_replay.training.networks import CHANNELS_LAST, CONVOLUTIONS, QNetwork
from gpu_replay.training.records import NETWORK
from gpu_replay.training.registry import CPU, EnvironmentId, identify
from gpu_replay.training.rendering import RenderedEnvironment
from gpu_replay.training.settings import Settings

VIDEO = "episode.gif"
# how long the last image of an episode is shown
PAUSE_SECONDS = 0.7
# an image of 600x400 pixels then takes 61 MB
MOST_SCALE = 16
DESCRIPTION = __doc__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=pathname, help="output folder of a run, or its network file")
    output = f".gif, or .mp4 if imageio[ffmpeg] is installed (default: {VIDEO} beside the network)"
    add("--output", type=pathname, metavar="FILE", help=output)
    add("--episodes", type=positive, default=1, metavar="N", help="number of episodes (default: 1)")
    add("--seed", type=natural, default=0, metavar="N", help="seed of the episodes (default: 0)")
    add("--max-steps", type=positive, metavar="N", help="cut episodes off (default: as in the run's evaluations)")
    scale = f"magnification of pixels, at most {MOST_SCALE} (default: 2 for Atari, else 1)"
    add("--scale", type=positive, metavar="N", help=scale)
    add("--epsilon", type=share, metavar="X", help="share of random actions (default: that of the run's evaluations)")


def run(options: argparse.Namespace) -> int:
    """Play as the flags say; returns the exit code. Raises UserError for bad input."""
    require("safetensors", "tqdm", "PIL", purpose="gpu-replay play")
    if options.scale is not None and options.scale > MOST_SCALE:
        raise UserError(f"--scale must be from 1 to {MOST_SCALE}; found {options.scale}.")
    path = options.checkpoint / NETWORK if options.checkpoint.is_dir() else options.checkpoint
    output: Path = options.output if options.output is not None else path.with_name(VIDEO)
    check_output(output)
    environment, settings, step = described(path)
    torch.set_num_threads(settings.threads)
    with closing(environment.rendered(settings)) as rendered:
        network = load(path, rendered.spec, settings)
        video = Video(rendered.fps, options.scale if options.scale is not None else rendered.scale)
        epsilon = settings.eval_epsilon if options.epsilon is None else options.epsilon
        limit = settings.eval_max_steps if options.max_steps is None else options.max_steps
        print(f"{environment.name}, network of step {step:,}")
        for episode in range(options.episodes):
            seed = stream_seed(options.seed, "play", episode)
            total, length, ended = play(network, rendered, video, seed, epsilon, limit)
            print(f"episode {episode + 1}: return {total:g}, length {length:,}{'' if ended else ', cut off'}")
            video.hold()
    video.write(output)
    print(f"written to {output}: {len(video.images) / video.fps:.0f} s, {output.stat().st_size / 1e3:,.0f} kB")
    return 0


@torch.no_grad()
def play(
    network: QNetwork, rendered: RenderedEnvironment, video: Video, seed: int, epsilon: float, max_steps: int
) -> tuple[float, int, bool]:
    """Add one episode to the video; returns its return, its length, and whether it ended before `max_steps`."""
    actors, generator = Actors(rendered, CPU), torch.Generator().manual_seed(seed)
    actors.reset(seed)
    video.add(rendered.picture)
    total = 0.0
    with progress_bar(max_steps, unit="step", leave=False, disable=not sys.stderr.isatty()) as bar:
        for length in range(1, max_steps + 1):
            rendered.send(greedy_actions(network(actors.stack.obs), epsilon, generator))
            step = actors.recv()
            actors.push(step)
            video.add(rendered.picture)
            total += float(step.reward)
            bar.update()
            if bool(step.ended):
                return total, length, True
    return total, max_steps, False


class Video:
    """Images of at most 256 colours: a GIF can show no more, and they take a third of the memory.

    fps:   pictures per second.
    scale: magnification in the file; a pixel becomes a square of this side.
    """

    def __init__(self, fps: float, scale: int) -> None:
        self.fps, self.scale = fps, scale
        self.images: list[Any] = []

    def add(self, picture: np.ndarray) -> None:
        """picture: (height, width, 3) uint8, of one size in a video."""
        from PIL import Image

        self.images.append(Image.fromarray(picture).convert("P", palette=Image.Palette.ADAPTIVE))

    def hold(self) -> None:
        """Hold the last picture for PAUSE_SECONDS."""
        self.images += self.images[-1:] * round(self.fps * PAUSE_SECONDS)

    def write(self, path: Path) -> None:
        """Write a video in the format of the file's suffix. Raises OSError if that fails."""
        width, height = self.images[0].size
        # images with a palette are resized by nearest neighbour
        shown = (image.resize((width * self.scale, height * self.scale)) for image in self.images)
        if path.suffix.lower() == ".mp4":
            import imageio  # type: ignore[import-untyped, import-not-found, unused-ignore]

            # players need an even width and height
            with imageio.get_writer(path, fps=self.fps, macro_block_size=2, quality=8) as file:
                for image in shown:
                    file.append_data(np.asarray(image.convert("RGB")))
            return
        # GIF delays are whole hundredths of a second: alternate between two of them to get the right mean
        ends = np.round(np.arange(len(self.images) + 1) * 100 / self.fps).astype(int)
        delays = (np.diff(ends) * 10).tolist()
        next(shown).save(path, "GIF", save_all=True, append_images=shown, duration=delays, loop=0)


def check_output(path: Path) -> None:
    """Raise UserError unless a video can be written there with what is installed."""
    if path.suffix.lower() == ".mp4":
        require("imageio", "imageio_ffmpeg", purpose="an .mp4", extra='pip install "imageio[ffmpeg]", or write a .gif')
    elif path.suffix.lower() != ".gif":
        raise UserError(f"--output {path} must end in .gif or .mp4.")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}.")


def described(path: Path) -> tuple[EnvironmentId, Settings, int]:
    """Read environment, settings and step from a network file. Raises UserError if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"{path} is not there. Name the output folder of `gpu-replay train`, or a {NETWORK}.")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
        return identify(metadata["env"]), Settings.from_dict(json.loads(metadata["settings"])), int(metadata["step"])
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} was not written by `gpu-replay train`: {error!r}") from None


def load(path: Path, spec: EnvironmentSpec, settings: Settings) -> QNetwork:
    """Load the network of a file. Raises UserError if it does not fit the environment."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    network, weights = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds), load_file(path)
    with safe_open(str(path), "pt") as file:
        features = file.metadata().get("features")
    if len(network.convolutions) and features != CHANNELS_LAST:
        channels = CONVOLUTIONS[settings.network][-1][0]
        weights["hidden.0.weight"] = weights["hidden.0.weight"].unflatten(1, (channels, -1)).mT.flatten(1)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit {spec.name}: {' '.join(str(error).split())}") from None
    return network
