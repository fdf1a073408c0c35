"""`gpu-replay train`: from flags to a finished run folder."""

from __future__ import annotations

import argparse
import dataclasses
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from gpu_replay.storage import check_device
from gpu_replay.training.errors import UserError, require
from gpu_replay.training.evaluation import Evaluation, Examiner
from gpu_replay.training.folder import SETTINGS, SUMMARY, RunFolder
from gpu_replay.training.interrupt import EXIT_CODES, Stopped, StopRequest
from gpu_replay.training.recorder import Recorder
from gpu_replay.training.registry import EnvironmentId, identify, make_environment
from gpu_replay.training.settings import PRESETS, Settings
from gpu_replay.training.summary import closing_words, summarize
from gpu_replay.training.trainer import Trainer

DESCRIPTION = """\
Train a double DQN with prioritized replay. ENV is catch, an Atari game (pong, breakout, ALE/Pong-v5, ...) or a
Gymnasium id with discrete actions and Box observations (CartPole-v1, Acrobot-v1, ...).

--output receives progress.csv (a row now and then, flushed), curve.png (redrawn as it grows), network.safetensors
(the network that did best in evaluation), settings.json, summary.json, and TensorBoard events where tensorboard
is installed. Ctrl-C or SIGTERM ends the run with everything written; the exit code is then 130 or 143, and bad
input gives 2. A second Ctrl-C ends it at once."""
FAMILIES = (
    "The first default is that of catch; others follow for Gymnasium environments with vectors or images as "
    "observations, and for Atari on a CPU or on CUDA, where they differ."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags: those of a run, and one for each setting of the agent."""
    parser.add_argument("env", metavar="ENV", help="catch, pong, any ALE game or any discrete Gymnasium id")
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--max-seconds", type=positive_float, metavar="X", help="stop after this many seconds (default: no limit)"
    )
    run.add_argument("--seed", type=natural, default=0, metavar="N", help="of everything that is random (default: 0)")
    run.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda when there is one)")
    run.add_argument("--output", type=Path, help="folder of the run (default: runs/ENV-seedSEED-TIME)")
    run.add_argument("--overwrite", action="store_true", help="replace the run that --output holds")
    agent = parser.add_argument_group("the agent", FAMILIES)
    types = get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['reason']} ({_defaults(field)})".replace("%", "%%")
        kind = types[field.name]
        options: dict[str, Any] = {"default": None, "help": text, "dest": field.name}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind is int:
            options |= {"type": whole, "metavar": "N"}
        elif kind is float:
            options |= {"type": float, "metavar": "X"}
        elif field.name == "hidden":
            options |= {"type": widths, "metavar": "N,N"}
        else:
            options["choices"] = get_args(kind)
        agent.add_argument(flag, **options)


def _defaults(field: dataclasses.Field[Any]) -> str:
    """The default, and the families that have another one."""
    others: dict[str, list[str]] = {}
    for family, preset in PRESETS.items():
        if preset.get(field.name, field.default) != field.default:
            others.setdefault(_show(preset[field.name]), []).append(family)
    parts = [f"default {_show(field.default)}", *(f"{', '.join(names)}: {value}" for value, names in others.items())]
    return "; ".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def whole(text: str) -> int:
    """An int, also written 1e6 or 1_000_000."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


def natural(text: str) -> int:
    """An int of at least 0."""
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0; found {text}")
    return number


def positive_float(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0; found {text}")
    return number


def widths(text: str) -> tuple[int, ...]:
    """`128,128` as (128, 128)."""
    return tuple(whole(part) for part in text.split(","))


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; returns the exit code. Raises UserError for what cannot be done."""
    began = time.perf_counter()
    require("tqdm", "matplotlib", "safetensors", purpose="gpu-replay train")
    try:
        device = check_device(options.device)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--device: {error}") from None
    environment_id = identify(options.env)
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = Settings.for_family(environment_id.family(device), **changes)
    torch.set_num_threads(settings.threads)
    folder = RunFolder(options.output or _default_output(environment_id, options.seed), options.overwrite)
    with StopRequest() as stop, ExitStack() as stack:
        environment, evaluation = (
            stack.enter_context(closing(make_environment(environment_id, count, settings, device)))
            for count in (settings.num_envs, settings.eval_episodes)
        )
        examiner = Examiner(evaluation, settings, device=device, seed=options.seed, stop=stop)
        try:
            trainer = Trainer(environment, examiner, settings, device=device, seed=options.seed)
        except MemoryError as error:
            raise UserError(f"{str(error).splitlines()[0].rstrip(':')}. Lower --capacity.") from None
        folder.open()
        identity = {"env": environment_id.name, "seed": options.seed, "device": str(device)}
        folder.write_json(SETTINGS, identity | settings.to_dict())
        recorder = stack.enter_context(Recorder(folder, environment.spec, settings, options.seed))
        reason, fresh = _learn(trainer, examiner, recorder, stop, options.max_seconds)
        if examiner.best is None:
            recorder.save(trainer.agent.online, trainer.step)
        recorder.draw()
        wall_seconds = time.perf_counter() - began
    summary = summarize(trainer, examiner, fresh, stopped_by=reason, seed=options.seed, wall_seconds=wall_seconds)
    folder.write_json(SUMMARY, summary)
    print(closing_words(summary, folder.path))
    return EXIT_CODES.get(reason, 0)


def _learn(
    trainer: Trainer, examiner: Examiner, recorder: Recorder, stop: StopRequest, max_seconds: float | None
) -> tuple[str, Evaluation | None]:
    """Why the run ended, and the best network's evaluation on fresh episodes unless it was interrupted."""
    reason = trainer.run(recorder, stop, max_seconds)
    try:
        stop.check()
        return reason, examiner.final()
    except Stopped as stopped:
        return stopped.reason, None


def _default_output(environment: EnvironmentId, seed: int) -> Path:
    name = environment.name.replace("/", "-")
    return Path("runs") / f"{name}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
