"""`gpu-replay train --from DIR`: a new run with other settings that begins where the checkpoint of another one is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpu_replay import CheckpointError
from gpu_replay.console.errors import UserError
from gpu_replay.training.checkpoints import latest
from gpu_replay.training.registry import identify
from gpu_replay.training.resume import IDENTITY, given_device, given_settings
from gpu_replay.training.run_dir import CHECKPOINT, SETTINGS, RunDir
from gpu_replay.training.session import Plan, ResumeState
from gpu_replay.training.settings import Settings

# what the saved networks, statistics and environments are made for
SHAPES = (
    *("network", "hidden", "layer_norm", "dueling", "whiten", "num_envs", "return_window"),
    *("frame_size", "frame_stack", "reduced_actions"),
)
# what the saved replay buffer is made for: with another value a new one is filled
BUFFER = ("capacity", "n_step", "gamma", "sampler", "alpha", "beta_start", "beta_end", "newest", "clip_reward")


def branched_plan(options: argparse.Namespace, run_dir: RunDir, began: float) -> Plan:
    """The plan of a run that branches off the one in `--from`, whose settings it has where flags give no others.

    The step, the networks, the optimiser, the replay buffer, the rows so far and the seconds are those of the
    checkpoint; the best network is chosen anew.

    Raises UserError if there is no checkpoint, or if flags change what the saved state is made for.
    """
    source: Path = options.source
    if not source.is_dir():
        raise UserError(f"--from {source} holds no run: there is no such folder.")
    written = RunDir(source, "resume").read_json(SETTINGS)
    if written is None or any(name not in written for name in IDENTITY):
        raise UserError(f"--from {source} holds no run: {SETTINGS} is missing or does not say {', '.join(IDENTITY)}.")
    identity = {name: written.pop(name) for name in IDENTITY}
    if written.pop("actors", None) is not None:
        raise UserError(f"--from {source} is a run with --actors, whose games have no common start to branch from.")
    if options.env is not None and identify(options.env).name != identity["env"]:
        raise UserError(f"--from {source} is a run of {identity['env']}, not of {options.env}.")
    before = Settings.from_dict(written)
    settings = Settings.from_dict({**before.to_dict(), **given_settings(options)})
    changed = [name for name in SHAPES if getattr(settings, name) != getattr(before, name)]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')} (it is {getattr(before, name)})" for name in changed)
        raise UserError(f"--from {source}: its networks and environments were made with another {flags}. Leave it out.")
    try:
        saved = latest(source / CHECKPOINT)
        if saved is None:
            raise UserError(f"--from {source} holds no checkpoint.")
        state, replay = saved.state(), saved.replay
    except CheckpointError as error:
        raise UserError(f"--from: {error}") from None
    refilled = [name for name in BUFFER if getattr(settings, name) != getattr(before, name)]
    if refilled and replay is not None:
        print(f"--from: a new replay buffer is filled, for another {', '.join(refilled)}", file=sys.stderr)
        replay = None
    step = state["trainer"]["step"]
    if settings.steps <= step:
        raise UserError(f"--steps {settings.steps} are done: the checkpoint in {source} is of step {step}. Raise it.")
    return Plan(
        environment=identify(identity["env"]),
        settings=settings,
        seed=identity["seed"] if options.seed is None else options.seed,
        device=given_device(identity["device"] if options.device is None else options.device),
        run_dir=run_dir,
        max_seconds=options.max_seconds,
        checkpoint_every=options.checkpoint_every,
        checkpoint_replay=options.checkpoint_replay,
        began=began,
        earlier=ResumeState(_unjudged(state), replay),
    )


def _unjudged(state: dict[str, Any]) -> dict[str, Any]:
    """A state without its best network: what was judged with other settings is no match for what comes."""
    return {
        **state,
        "trainer": {**state["trainer"], "solved": False},
        "examiner": {**state["examiner"], "best": None},
    }
