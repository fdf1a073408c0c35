"""Q networks: an MLP for vectors, three stacks of convolutions for images.

Networks take observations as they are stored: they scale integers by the field's `scale`, map vectors with bounds to
[-1, 1], and can whiten images. All of it is part of the network, so that a saved file is complete.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from gpu_replay.console.errors import UserError
from gpu_replay.fields import Field
from gpu_replay.training.settings import Settings

# (channels, kernel, stride) of each convolution
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "mlp": (),
    "compact": ((16, 8, 4), (32, 4, 2)),
    "small": ((16, 6, 3), (32, 4, 2), (32, 3, 1)),
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
}


class QNetwork(nn.Module):
    """Action values of a batch of observations.

    observation: the field that stores them; images are (channels, height, width).
    bounds:      (low, high) of a vector observation where both are finite, else None.

    Raises UserError if the network does not fit the observation.
    """

    centre: Tensor
    stretch: Tensor

    def __init__(
        self, observation: Field, num_actions: int, settings: Settings, bounds: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.scale = observation.scale if observation.scale is not None else 1.0
        self.dueling = settings.dueling
        self.half_convolutions = settings.bfloat16
        self.whitens = settings.whiten and settings.network != "mlp" and len(observation.shape) == 3
        if self.whitens:
            # the same for all channels, which are frames of one stack
            centre, stretch = torch.zeros(observation.shape[1:]), torch.ones(())
        else:
            centre, stretch = _normalisation(observation.shape, bounds)
        self.register_buffer("centre", centre)
        self.register_buffer("stretch", stretch)
        self.normalises = bounds is not None and not self.whitens
        self.convolutions, features = _convolutions(settings.network, observation.shape)
        layers: list[nn.Module] = []
        for width in settings.hidden:
            norm: list[nn.Module] = [nn.LayerNorm(width)] if settings.layer_norm else []
            layers += [nn.Linear(features, width), *norm, nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, num_actions + (1 if settings.dueling else 0)))
        self.head = nn.Sequential(*layers)

    def forward(self, obs: Tensor) -> Tensor:
        """obs: (B, *shape) as stored or as sampled; returns (B, actions) float32."""
        if self.whitens:
            # one pass over the images, integers included
            scale = 1.0 if obs.is_floating_point() else self.scale
            obs = torch.addcmul(-self.centre * self.stretch, obs, self.stretch * scale)
        elif not obs.is_floating_point():
            obs = obs.float() * self.scale
        if self.normalises:
            obs = (obs - self.centre) * self.stretch
        if len(self.convolutions):
            with torch.autocast(obs.device.type, dtype=torch.bfloat16, enabled=self._runs_bfloat16(obs.device)):
                obs = self.convolutions(obs)
        out = self.head(obs.flatten(1).float())
        if not self.dueling:
            return out
        value, advantage = out[:, :1], out[:, 1:]
        return value + advantage - advantage.mean(1, keepdim=True)

    @torch.no_grad()
    def whiten(self, obs: Tensor) -> None:
        """Fit the whitening: subtract the mean image of `obs`, divide by the standard deviation of all pixels from it.

        obs: (B, channels, height, width) as stored or as sampled. A static background vanishes, and what moves is large
        even if it is one grey pixel in a thousand.
        """
        if not self.whitens:
            return
        images = obs.float() * (1.0 if obs.is_floating_point() else self.scale)
        mean = images.mean((0, 1))
        deviation = (images - mean).square().mean().sqrt()
        self.centre.copy_(mean)
        # images that never change stay finite
        self.stretch.copy_(1 / deviation.clamp(min=1e-3))

    def _runs_bfloat16(self, device: torch.device) -> bool:
        """Whether convolutions run in bfloat16, which is slower on CPUs without instructions for it."""
        return self.half_convolutions and (device.type != "cpu" or _cpu_has_bfloat16())


@cache
def _cpu_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _normalisation(shape: tuple[int, ...], bounds: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Centre and stretch that map bounded components to [-1, 1] and leave the others unchanged."""
    if bounds is None:
        return torch.zeros(()), torch.ones(())
    low, high = (bound.double().reshape(shape) for bound in bounds)
    # unbounded components have bounds of infinity or of the largest float
    known = (low.abs() < 1e6) & (high.abs() < 1e6) & (high > low)
    centre = torch.where(known, (low + high) / 2, 0.0)
    stretch = torch.where(known, 2 / (high - low), 1.0)
    return centre.float(), stretch.float()


def _convolutions(name: str, shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """The stack of convolutions and its number of output features."""
    stack = CONVOLUTIONS[name]
    if not stack:
        return nn.Sequential(), math.prod(shape)
    if len(shape) != 3:
        raise UserError(f"--network {name} needs images (channels, height, width); observations are {shape}. Use mlp.")
    channels, height, width = shape
    layers: list[nn.Module] = []
    for out_channels, kernel, stride in stack:
        if min(height, width) < kernel:
            raise UserError(
                f"--network {name} is too deep for images of {shape[1]}x{shape[2]}. Use a smaller one or mlp."
            )
        layers += [nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU()]
        channels, height, width = out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers), channels * height * width
