"""The replay buffer of a run, made as its settings say."""

from __future__ import annotations

import dataclasses

import torch

from gpu_replay import Combined, Field, LinearSchedule, Proportional, RankBased, TrajectoryReplayBuffer, Uniform
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.settings import Settings


def make_buffer(spec: EnvironmentSpec, settings: Settings, device: torch.device, seed: int) -> TrajectoryReplayBuffer:
    """An empty buffer for steps of `settings.num_envs` environments: each frame once, stacks and windows when sampled.

    Raises MemoryError when it does not fit.
    """
    # the buffer advances the schedule by one with each sample, so it runs over the samples of the run
    beta = LinearSchedule(
        settings.beta_start, settings.beta_end, steps=max(1, settings.planned_updates // settings.updates_a_sample)
    )
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
        settings.num_envs,
        {"obs": sampled_field(spec.observation, settings, device), "action": Field((), torch.int64)},
        stack=spec.stack,
        n_step=settings.n_step,
        gamma=settings.gamma,
        autoreset="same_step",
        # as ALE's own stacks begin, and the agent's
        padding="zero",
        sampler=sampler,
        device=device,
        seed=seed,
    )


def sampled_field(frame: Field, settings: Settings, device: torch.device) -> Field:
    """How frames leave the buffer.

    On CUDA integers are scaled within the gather, to what the first convolution computes in: no pass of their own. A
    CPU samples them as they are stored and the network scales them: four times fewer bytes leave the buffer, and the
    two together took 836 µs against 894 µs for a batch of 64 stacks of 42x42, two stacks each. So does a network that
    whitens, anywhere: it passes over all values once, which scales them too.
    """
    if frame.dtype.is_floating_point or device.type == "cpu" or settings.whiten:
        return Field(frame.shape, frame.dtype)
    half = settings.bfloat16 and settings.network != "mlp"
    return dataclasses.replace(frame, sample_dtype=torch.bfloat16 if half else torch.float32)


def beta_of(buffer: TrajectoryReplayBuffer, samples: int) -> float:
    """The buffer's beta after so many samples; not-a-number without priorities."""
    sampler = buffer.sampler
    base = sampler.base if isinstance(sampler, Combined) else sampler
    if not isinstance(base, (Proportional, RankBased)):
        return float("nan")
    return base.beta(samples) if isinstance(base.beta, LinearSchedule) else base.beta
