"""`gpu-replay play`: an episode of a trained agent as a film."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_replay.console.arguments import natural, positive, share
from gpu_replay.console.errors import UserError, require
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training.actors import Actors
from gpu_replay.training.exploration import greedy_actions
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import EnvironmentId, identify
from gpu_replay.training.rendering import CPU, Scene, make_scene
from gpu_replay.training.run_dir import NETWORK
from gpu_replay.training.settings import Settings
from gpu_replay.training.video import Film, check_output, write_film

FILM = "episode.gif"
DESCRIPTION = """\
Play episodes with the greedy policy of a trained network and write them as a film: Atari games in the colours and the
resolution of the console, at the console's speed; Gymnasium environments as they draw themselves; the board of catch.
CHECKPOINT is the output folder of `gpu-replay train`, or the network.safetensors in it. Prints return and length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="output folder of a run, or its network file"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f".gif, or .mp4 where ffmpeg is (default: {FILM} beside the network)",
    )
    parser.add_argument("--episodes", type=positive, default=1, metavar="N", help="one after another (default: 1)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the episodes (default: 0)")
    parser.add_argument("--max-steps", type=positive, metavar="N", help="cut an episode off (default: the run's limit)")
    parser.add_argument("--scale", type=positive, metavar="N", help="enlarge pixels (default: 2 for Atari, else 1)")
    parser.add_argument(
        "--epsilon", type=share, metavar="X", help="share of random actions (default: that of the run's evaluations)"
    )


@dataclass(frozen=True)
class Player:
    """A trained network and what it was trained on."""

    network: QNetwork
    environment: EnvironmentId
    settings: Settings
    step: int


def run(options: argparse.Namespace) -> int:
    """Play as the flags say; returns the exit code. Raises UserError for what cannot be done."""
    require("safetensors", "tqdm", "PIL", purpose="gpu-replay play")
    path = options.checkpoint / NETWORK if options.checkpoint.is_dir() else options.checkpoint
    output: Path = options.output if options.output is not None else path.with_name(FILM)
    check_output(output)
    environment, settings, step = described(path)
    torch.set_num_threads(settings.threads)
    with closing(make_scene(environment, settings)) as scene:
        player = Player(load(path, scene, settings), environment, settings, step)
        film = Film(scene.fps, options.scale if options.scale is not None else scene.scale)
        epsilon = settings.eval_epsilon if options.epsilon is None else options.epsilon
        limit = settings.eval_max_steps if options.max_steps is None else options.max_steps
        print(f"{environment.name}, network of step {player.step:,}")
        for episode in range(options.episodes):
            seed = stream_seed(options.seed, "play", episode)
            total, length, ended = play(player.network, scene, film, seed, epsilon, limit)
            rest = "" if ended else ", cut off"
            print(f"episode {episode + 1}: return {total:g}, length {length:,}{rest}")
            film.hold()
    write_film(film, output)
    print(f"written to {output}: {film.seconds:.0f} s, {output.stat().st_size / 1e6:.2f} MB")
    return 0


@torch.no_grad()
def play(
    network: QNetwork, scene: Scene, film: Film, seed: int, epsilon: float, max_steps: int
) -> tuple[float, int, bool]:
    """One episode into the film; its return, its length, and whether it ended by itself."""
    from tqdm import tqdm

    actors = Actors(scene, CPU)
    generator = torch.Generator().manual_seed(seed)
    _, obs = actors.reset(seed)
    film.add(scene.picture)
    total = 0.0
    with tqdm(total=max_steps, unit="step", file=sys.stderr, leave=False, disable=not sys.stderr.isatty()) as bar:
        for length in range(1, max_steps + 1):
            actors.send(greedy_actions(network(obs), epsilon, generator))
            arrival = actors.recv()
            film.add(scene.picture)
            total += float(arrival.step.reward)
            bar.update()
            if bool(arrival.step.terminated | arrival.step.truncated):
                return total, length, True
            obs = arrival.obs
    return total, max_steps, False


def described(path: Path) -> tuple[EnvironmentId, Settings, int]:
    """What a network file says of itself: its environment, its settings, and its step. Raises UserError."""
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


def load(path: Path, scene: Scene, settings: Settings) -> QNetwork:
    """The network of a file, to play in this scene. Raises UserError if it does not fit."""
    from safetensors.torch import load_file

    network = QNetwork(scene.spec.stacked, scene.spec.num_actions, settings, scene.spec.bounds)
    try:
        network.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise UserError(f"{path} does not fit {scene.spec.name}: {' '.join(str(error).split())}") from None
    return network
