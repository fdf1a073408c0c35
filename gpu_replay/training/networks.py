"""Q networks: an MLP for vectors; convolutions, or an MLP on a cosine transform, for images.

Networks take observations as they are stored: `prepare` scales integers by the field's `scale`, maps vectors with
bounds to [-1, 1], and can whiten images. These steps are part of the network, so a saved file is complete.

The cosine transform keeps the lowest frequencies of each image, and an MLP learns from those. Where a few objects move
in front of an empty background, it learns far faster than from pixels: an object that moves by one pixel changes every
input a little, instead of switching one pixel off and another on, so the values of nearby positions generalise.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_replay import Field
from gpu_replay.console.errors import UserError
from gpu_replay.training.settings import Settings

# (channels, kernel, stride) of each convolution
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "mlp": (),
    "cosine": (),
    "fine": ((16, 8, 4), (32, 3, 1)),
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
}
# how saved networks name the order of the features of an image; before 0.3 they were in the order of channels
CHANNELS_LAST = "channels last"
# frequencies of the cosine transform, down and across
FREQUENCIES = (4, 12)


class CosineTransform(nn.Module):
    """The lowest frequencies of the newest image of a stack, and of the differences between its successive images.

    shape: (channels, height, width) of the images.

    Differences show speeds, which would otherwise be small differences of large numbers.

    Ahmed et al. 1974, "Discrete Cosine Transform", type II.
    """

    down: Tensor
    across: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = shape
        for name, pixels, count in (("down", height, FREQUENCIES[0]), ("across", width, FREQUENCIES[1])):
            angle = (torch.arange(pixels) + 0.5) * (math.pi / pixels)
            self.register_buffer(name, torch.cos(torch.arange(count)[:, None] * angle), persistent=False)
        self.features = channels * math.prod(FREQUENCIES)

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, *shape) float32; returns (B, features): differences, oldest first, and the newest image."""
        spectrum = self.down @ (images @ self.across.T)
        return torch.cat((spectrum[:, 1:] - spectrum[:, :-1], spectrum[:, -1:]), 1).flatten(1)


class Conv(nn.Conv2d):
    """A convolution that computes in the dtype of its input."""

    bias: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, channels, height, width)."""
        weight, bias = self.weight.to(images.dtype), self.bias.to(images.dtype)
        return functional.conv2d(images, weight, bias, self.stride)


class Hidden(nn.Linear):
    """A linear layer that computes in the dtype `computes`, whatever its input's dtype, and returns float32."""

    def __init__(self, features: int, width: int, computes: torch.dtype) -> None:
        super().__init__(features, width)
        self.computes = computes

    def forward(self, features: Tensor) -> Tensor:
        """features: (B, features); returns (B, width) float32."""
        weight, bias = self.weight.to(self.computes), self.bias.to(self.computes)
        return functional.linear(features.to(self.computes), weight, bias).float()


class QNetwork(nn.Module):
    """Action values of a batch of observations, as a value and centred advantages (Wang et al. 2016).

    observation: the field that stores the observations; images are (channels, height, width).
    bounds:      (low, high) of a vector observation where both are finite, else None.

    Raises UserError if the network does not fit the observation.
    """

    centre: Tensor
    stretch: Tensor
    offset: Tensor
    gain: Tensor
    dueling: Tensor

    def __init__(
        self, observation: Field, num_actions: int, settings: Settings, bounds: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.scale = observation.scale if observation.scale is not None else 1.0
        convolutions, features = _convolutions(settings.network, observation.shape)
        # channels last: a convolution's gradient takes a third of the time on a CPU, and cuDNN transposes nothing
        self.convolutions = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.cosines = CosineTransform(observation.shape) if settings.network == "cosine" else None
        self.whitens = settings.whiten and settings.network != "mlp" and len(observation.shape) == 3
        if self.cosines is not None:
            features = self.cosines.features
            centre, stretch = torch.zeros(features), torch.ones(features)
        elif self.whitens:
            # one pair for all channels, which are frames of one stack
            centre, stretch = torch.zeros(observation.shape[1:]), torch.ones(())
        else:
            bounds = None if len(self.convolutions) else bounds
            centre, stretch = _normalisation(observation.shape, bounds)
        self.register_buffer("centre", centre)
        self.register_buffer("stretch", stretch)
        # whitening is offset + gain * stored value; both follow from centre and stretch
        self.register_buffer("offset", torch.zeros_like(centre * stretch), persistent=False)
        self.register_buffer("gain", torch.zeros_like(stretch), persistent=False)
        self.register_load_state_dict_post_hook(QNetwork._set_gain)
        self._set_gain()
        half = settings.bfloat16 is True and len(self.convolutions) > 0
        # the dtype of convolutions and hidden layers; norms and the last layer compute in float32
        self.dtype = torch.bfloat16 if half else torch.float32
        self.normalises = bounds is not None and not self.whitens
        layers: list[nn.Module] = []
        for width in settings.hidden:
            norm: list[nn.Module] = [nn.LayerNorm(width)] if settings.layer_norm else []
            layers += [Hidden(features, width, self.dtype), *norm, nn.ReLU(inplace=True)]
            features = width
        self.hidden = nn.Sequential(*layers)
        # a value, and an advantage for each action
        self.last = nn.Linear(features, num_actions + 1)
        # the value plus each advantage less their mean, as one matrix: (actions, actions + 1)
        centred = torch.eye(num_actions) - 1 / num_actions
        self.register_buffer("dueling", torch.cat((torch.ones(num_actions, 1), centred), 1), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """obs: (B, *shape) as stored or as sampled; returns (B, actions) float32."""
        return self.values(self.prepare(obs))

    def lower(self) -> None:
        """Convert the weights to the dtype of the computation; the network must not learn afterwards."""
        for layer in (*self.convolutions, *self.hidden):
            if isinstance(layer, (Conv, Hidden)):
                layer.to(self.dtype)

    def values(self, prepared: Tensor) -> Tensor:
        """prepared: from `prepare`; returns (B, actions) float32."""
        features = self.convolutions(prepared)
        if len(self.convolutions):
            # in the order of their memory, so that neither they nor their gradients are moved
            features = features.permute(0, 2, 3, 1)
        hidden = self.hidden(features.flatten(1))
        return functional.linear(hidden, self.dueling @ self.last.weight, self.dueling @ self.last.bias)

    def prepare(self, obs: Tensor) -> Tensor:
        """The first layer's input: `obs` scaled, mapped, transformed or whitened, in the layer's dtype.

        It depends on no weight, so the networks of one run share it. Images become channels last.
        """
        scale = 1.0 if obs.is_floating_point() else self.scale
        if self.cosines is not None:
            return (self.cosines(obs.float()) * scale - self.centre) * self.stretch
        if not len(self.convolutions):
            obs = obs if obs.is_floating_point() else obs.float() * scale
            return (obs.float() - self.centre) * self.stretch if self.normalises else obs
        offset, gain = self.offset, self.stretch if obs.is_floating_point() else self.gain
        if obs.device.type != "cpu":
            # on a GPU each number is read once, as stored, and written once
            prepared = torch.empty_like(obs, dtype=self.dtype, memory_format=torch.channels_last)
            return torch.addcmul(offset, obs, gain, out=prepared)
        pixels = _channels_last(obs).float().permute(0, 2, 3, 1)
        # channels last: the channels of a pixel are adjacent in memory
        offset = offset[..., None].expand(*offset.shape, pixels.shape[-1]).contiguous()
        prepared = torch.addcmul(offset, pixels, gain, out=pixels if obs.dtype == torch.uint8 else None)
        return prepared.permute(0, 3, 1, 2).to(self.dtype)

    @torch.no_grad()
    def whiten(self, obs: Tensor) -> None:
        """Fit the whitening: subtract the mean image of `obs`, divide by the standard deviation of all pixels from it.

        obs: (B, channels, height, width) as stored or as sampled. A static background vanishes, and moving objects stay
        visible even if they are one grey pixel in a thousand. Each cosine frequency has its own mean and deviation.
        """
        if not self.whitens:
            return
        scale = 1.0 if obs.is_floating_point() else self.scale
        if self.cosines is not None:
            deviation, mean = torch.std_mean(self.cosines(obs.float()) * scale, 0, correction=0)
        else:
            images = obs.float() * scale
            mean = images.mean((0, 1))
            deviation = (images - mean).square().mean().sqrt()
        self.centre.copy_(mean)
        # a pixel or frequency that never changes must stay finite
        self.stretch.copy_(1 / deviation.clamp(min=1e-3))
        self._set_gain()

    @torch.no_grad()
    def _set_gain(self, *_: object) -> None:
        """Follow centre and stretch, which were fitted or loaded."""
        self.offset.copy_(-self.centre * self.stretch)
        self.gain.copy_(self.stretch * self.scale)


def _channels_last(images: Tensor) -> Tensor:
    """Images (B, channels, height, width) in host memory with the channels of each pixel side by side."""
    if images.dtype != torch.uint8 or images.shape[1] != 4 or sys.byteorder != "little":
        return images.contiguous(memory_format=torch.channels_last)
    # the four bytes of a pixel move as one integer: half the time of a strided copy
    count, channels, height, width = images.shape
    packed = images[:, 3].to(torch.int32)
    plane = torch.empty_like(packed)
    for channel in (2, 1, 0):
        plane.copy_(images[:, channel])
        packed.bitwise_left_shift_(8).bitwise_or_(plane)
    return packed.view(torch.uint8).view(count, height, width, channels).permute(0, 3, 1, 2)


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
    if name == "mlp":
        return nn.Sequential(), math.prod(shape)
    if len(shape) != 3:
        raise UserError(f"--network {name} needs images (channels, height, width); observations are {shape}. Use mlp.")
    channels, height, width = shape
    layers: list[nn.Module] = []
    for out_channels, kernel, stride in stack:
        if min(height, width) < kernel:
            raise UserError(f"--network {name} is too deep for images of {shape[1]}x{shape[2]}. Use another or mlp.")
        layers += [Conv(channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]
        channels, height, width = out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers), channels * height * width
