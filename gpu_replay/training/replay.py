"""The replay buffer of a run, built from its settings."""

from __future__ import annotations

import dataclasses

import torch

from gpu_replay import Combined, Field, LinearSchedule, Proportional, RankBased, TrajectoryReplayBuffer, Uniform
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.settings import Settings


def make_buffer(
    spec: EnvironmentSpec,
    settings: Settings,
    device: torch.device,
    seed: int,
    num_envs: int | None = None,
    planned: int | None = None,
) -> TrajectoryReplayBuffer:
    """An empty buffer for `num_envs` environments, by default those of the settings; frames are stored once.

    planned: updates of the run, where these settings are those of one of its ranks.

    Raises MemoryError if it does not fit.
    """
    updates = settings.planned_updates if planned is None else planned
    # the schedule advances by one with each sample, so its length is the planned number of samples
    beta = LinearSchedule(settings.beta_start, settings.beta_end, steps=max(1, updates // settings.updates_a_sample))
    prioritized = Proportional(alpha=settings.alpha, beta=beta)
    sampler: Uniform | Proportional | RankBased | Combined = prioritized
    if settings.sampler == "uniform":
        sampler = Uniform()
    elif settings.sampler == "rank":
        sampler = RankBased(alpha=settings.alpha, beta=beta)
    elif settings.sampler == "combined":
        sampler = Combined(prioritized, newest=settings.newest)
    return TrajectoryReplayBuffer(
        settings.capacity,
        settings.num_envs if num_envs is None else num_envs,
        {"obs": sampled_field(spec.observation, settings, device), "action": Field((), torch.int64)},
        stack=spec.stack,
        n_step=settings.n_step,
        gamma=settings.gamma,
        autoreset="same_step",
        # as stacks of ALE and of the agent begin
        padding="zero",
        sampler=sampler,
        device=device,
        seed=seed,
    )


def sampled_field(frame: Field, settings: Settings, device: torch.device) -> Field:
    """The field that stores frames, with the dtype in which `sample` returns them.

    Frames are sampled as stored where the network makes a pass over them anyway, in which it scales: on a CPU, where a
    quarter of the bytes then leave the buffer, and both together took 836 µs instead of 894 µs for a batch of 64 with
    two stacks of 42x42 frames each; and on any device where it whitens or has convolutions, which want channels last.
    Elsewhere the gather scales integers, without a pass of its own.
    """
    passes = settings.whiten or settings.convolutional
    if frame.dtype.is_floating_point or device.type == "cpu" or passes:
        return Field(frame.shape, frame.dtype)
    return dataclasses.replace(frame, sample_dtype=torch.float32)


def beta_of(buffer: TrajectoryReplayBuffer, samples: int) -> float:
    """The buffer's beta after so many samples; NaN without priorities."""
    sampler = buffer.sampler
    base = sampler.base if isinstance(sampler, Combined) else sampler
    if not isinstance(base, (Proportional, RankBased)):
        return float("nan")
    return base.beta(samples) if isinstance(base.beta, LinearSchedule) else base.beta
