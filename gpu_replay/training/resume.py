"""`gpu-replay train --resume`: the plan to continue the run in a directory, unless the flags contradict it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from gpu_replay import CheckpointError
from gpu_replay.console.errors import UserError
from gpu_replay.engines.storage import check_device
from gpu_replay.training.checkpoints import latest
from gpu_replay.training.ray_actors import check_actors
from gpu_replay.training.registry import identify
from gpu_replay.training.run_dir import CHECKPOINT, SETTINGS, SUMMARY, RunDir
from gpu_replay.training.session import Plan, ResumeState
from gpu_replay.training.settings import Settings

# what settings.json holds besides the settings of the agent
IDENTITY = ("env", "seed", "device")


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the agent that were given as flags."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    return {name: value for name, value in given.items() if value is not None}


def given_device(name: str | None) -> torch.device:
    """The device of `--device`. Raises UserError if it is not available."""
    try:
        return check_device(name)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--device: {error}") from None


def resumed_plan(options: argparse.Namespace, began: float) -> Plan | str:
    """The plan to resume the run in `--output`, or a message that it is finished.

    Raises UserError if there is no such run, it has no checkpoint, or flags contradict what it was started with.
    """
    if options.output is None:
        raise UserError("--resume needs --output DIR, the directory of the run to continue.")
    if not options.output.is_dir():
        raise UserError(f"--output {options.output} holds no run to resume: there is no such folder.")
    run_dir = RunDir(options.output, "resume")
    written = run_dir.read_json(SETTINGS)
    if written is None:
        raise UserError(f"--output {options.output} holds no run to resume: {SETTINGS} is missing.")
    missing = [name for name in IDENTITY if name not in written]
    if missing:
        raise UserError(f"{options.output / SETTINGS} does not say {', '.join(missing)}.")
    identity = {name: written.pop(name) for name in IDENTITY}
    actors = _resumed_actors(written.pop("actors", None), options)
    settings = _raised(Settings.from_dict(written), identity, options)
    try:
        saved = latest(run_dir.path / CHECKPOINT)
        if saved is None:
            raise UserError(
                f"{run_dir.path} holds no checkpoint: the run ended before its first one. Start "
                "it again with --overwrite."
            )
        _check_unchanged(saved.values, settings)
        finished = _finished(run_dir, settings)
        if finished is not None:
            return finished
        state = saved.state()
    except CheckpointError as error:
        raise UserError(f"--resume: {error}") from None
    used = float(state["trainer"]["seconds"])
    if options.max_seconds is not None and options.max_seconds <= used:
        raise UserError(
            f"--max-seconds {options.max_seconds:g} is used up: the run has taken {used:.1f} s so far, all its parts "
            "together. Raise it, or leave it out."
        )
    return Plan(
        environment=identify(identity["env"]),
        settings=settings,
        seed=identity["seed"],
        device=given_device(identity["device"]),
        run_dir=run_dir,
        max_seconds=options.max_seconds,
        checkpoint_every=options.checkpoint_every,
        checkpoint_replay=options.checkpoint_replay,
        began=began,
        earlier=ResumeState(state, saved.replay),
        actors=actors,
    )


def _resumed_actors(before: str | None, options: argparse.Namespace) -> str | None:
    """The actors to go on with: others, on request, but not where there were none."""
    if before is None and options.actors is not None:
        raise UserError(f"the run in {options.output} was started without --actors, and cannot go on with them.")
    if options.actors is None and before is not None:
        check_actors(before)
    return options.actors or before


def _raised(settings: Settings, identity: Mapping[str, Any], options: argparse.Namespace) -> Settings:
    """The settings of the run, with more steps if requested. Raises UserError for any other change."""
    given = given_settings(options)
    steps = given.pop("steps", settings.steps)
    contradictions = []
    if options.env is not None and identify(options.env).name != identity["env"]:
        contradictions.append(f"{options.env} (the run is of {identity['env']})")
    if options.seed is not None and options.seed != identity["seed"]:
        contradictions.append(f"--seed {options.seed} (it has {identity['seed']})")
    if options.device is not None and str(given_device(options.device)) != identity["device"]:
        contradictions.append(f"--device {options.device} (it has {identity['device']})")
    for name, value in given.items():
        if value != getattr(settings, name):
            contradictions.append(f"--{name.replace('_', '-')} {value} (it has {getattr(settings, name)})")
    if steps < settings.steps:
        contradictions.append(f"--steps {steps} (it has {settings.steps}, which can only be raised)")
    if contradictions:
        raise UserError(
            f"--resume continues the run in {options.output} with its own settings; these flags contradict them: "
            f"{', '.join(contradictions)}. Leave them out, or start another run."
        )
    return dataclasses.replace(settings, steps=steps)


def _check_unchanged(values: Mapping[str, Any], settings: Settings) -> None:
    """Raise UserError if settings.json was edited since the checkpoint."""
    before = Settings.from_dict(values["settings"])
    for field in dataclasses.fields(Settings):
        then, now = getattr(before, field.name), getattr(settings, field.name)
        if then != now and not (field.name == "steps" and now > then):
            raise UserError(f"{SETTINGS} was changed: {field.name} is {now}, the checkpoint was made with {then}.")


def _finished(run_dir: RunDir, settings: Settings) -> str | None:
    """A message if the run is complete and has no steps left."""
    summary = run_dir.read_json(SUMMARY)
    if summary is None:
        return None
    if summary.get("stopped_by") == "solved":
        return f"the run in {run_dir.path} is finished: solved after {summary.get('steps'):,} steps."
    if summary.get("stopped_by") == "steps" and summary.get("steps", 0) >= settings.steps:
        return f"the run in {run_dir.path} is finished: all {settings.steps:,} steps are done. Raise --steps to go on."
    return None
