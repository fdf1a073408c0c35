"""Whether a run learns in bfloat16 or in float32, decided by timing updates of both."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time

import torch
from torch import Tensor

from gpu_replay import Batch
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.helper_thread import HelperThread
from gpu_replay.training.networks import QNetwork, cpu_has_bfloat16
from gpu_replay.training.settings import Settings

UPDATES = 10
UNTIMED = 3


def with_precision(settings: Settings, spec: EnvironmentSpec, device: torch.device) -> Settings:
    """The settings with `bfloat16` on or off, where it was neither; says on standard error what was timed.

    Some CPUs compute in bfloat16 twice as fast as in float32, others only emulate it, at half the speed, and say of
    themselves that they support it.
    """
    if settings.bfloat16 is not None:
        return settings
    if not settings.convolutional or (device.type == "cpu" and not cpu_has_bfloat16()):
        return dataclasses.replace(settings, bfloat16=False)
    if device.type != "cpu":
        return dataclasses.replace(settings, bfloat16=True)
    full, half = update_milliseconds(settings, spec, device)
    chosen = "bfloat16" if half < full else "float32"
    print(f"an update takes {half:.1f} ms in bfloat16 and {full:.1f} ms in float32: {chosen} it is", file=sys.stderr)
    return dataclasses.replace(settings, bfloat16=half < full)


def update_milliseconds(
    settings: Settings, spec: EnvironmentSpec, device: torch.device, updates: int = UPDATES
) -> tuple[float, float]:
    """Median time of an update of random transitions on a CPU, in float32 and in bfloat16, taken in turn."""
    batch = random_batch(spec, settings.batch_size)
    agents = [learner(dataclasses.replace(settings, bfloat16=half), spec, device) for half in (False, True)]
    times: list[list[float]] = [[], []]
    for turn in range(UNTIMED + updates):
        for agent, found in zip(agents, times, strict=True):
            began = time.perf_counter()
            agent.update(batch)
            if turn >= UNTIMED:
                found.append(1e3 * (time.perf_counter() - began))
    full, half = (statistics.median(found) for found in times)
    return full, half


def learner(
    settings: Settings, spec: EnvironmentSpec, device: torch.device, helper: HelperThread | None = None
) -> Agent:
    """An agent to time, which leaves the global random state as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
        return Agent(network, settings, device, seed=0, helper=helper)


def random_batch(spec: EnvironmentSpec, rows: int) -> Batch:
    """A batch of images of random pixels."""
    generator = torch.Generator().manual_seed(0)

    def images() -> Tensor:
        shape = (rows, *spec.stacked.shape)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(spec.observation.dtype)

    return Batch(
        {
            "obs": images(),
            "action": torch.randint(spec.num_actions, (rows,), generator=generator),
            "reward": torch.randn(rows, generator=generator),
            "next_obs": images(),
            "discount": torch.full((rows,), 0.9),
            "weight": torch.ones(rows),
        }
    )
