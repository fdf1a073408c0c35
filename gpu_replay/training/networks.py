"""Q networks: an MLP for vectors, stacks of convolutions or a cosine transform for images.

Networks take observations as they are stored: they scale integers by the field's `scale`, map vectors with bounds to
[-1, 1], and can whiten images. All of it is part of the network, so that a saved file is complete.

The cosine transform keeps the lowest frequencies of each image, and MLPs learn from those. Where a few things move
before an empty background, that is far faster than from pixels: an object that moves by a pixel changes all inputs a
little, instead of two of them from nothing to all, so that what is learned of one place holds for places near it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_replay.console.errors import UserError
from gpu_replay.fields import Field
from gpu_replay.training.settings import Settings

# (channels, kernel, stride) of each convolution
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "mlp": (),
    "cosine": (),
    "compact": ((16, 8, 4), (32, 4, 2)),
    "fine": ((16, 8, 4), (32, 3, 1)),
    "small": ((16, 6, 3), (32, 4, 2), (32, 3, 1)),
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
}


# frequencies of the cosine transform, down and across
FREQUENCIES = (4, 12)


class CosineTransform(nn.Module):
    """The lowest frequencies of images, and of how they differ from one image of a stack to the next.

    shape: (channels, height, width) of the images.

    Differences show how fast things move, which would otherwise be a small part of large numbers.

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


class QNetwork(nn.Module):
    """Action values of a batch of observations.

    observation: the field that stores them; images are (channels, height, width).
    bounds:      (low, high) of a vector observation where both are finite, else None.

    Raises UserError if the network does not fit the observation.
    """

    centre: Tensor
    stretch: Tensor
    offset: Tensor
    gain: Tensor

    def __init__(
        self, observation: Field, num_actions: int, settings: Settings, bounds: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.scale = observation.scale if observation.scale is not None else 1.0
        self.dueling = settings.dueling
        self.convolutions, features = _convolutions(settings.network, observation.shape)
        self.cosines = CosineTransform(observation.shape) if settings.network == "cosine" else None
        self.whitens = settings.whiten and settings.network != "mlp" and len(observation.shape) == 3
        if self.cosines is not None:
            features = self.cosines.features
            centre, stretch = torch.zeros(features), torch.ones(features)
        elif self.whitens:
            # the same for all channels, which are frames of one stack
            centre, stretch = torch.zeros(observation.shape[1:]), torch.ones(())
        else:
            centre, stretch = _normalisation(observation.shape, bounds)
        self.register_buffer("centre", centre)
        self.register_buffer("stretch", stretch)
        # whitened is offset + gain * stored
        for name, like in (("offset", centre), ("gain", stretch)):
            self.register_buffer(name, torch.empty_like(like), persistent=False)
        _fold(self)
        self.register_load_state_dict_post_hook(_fold)
        self.normalises = bounds is not None and not self.whitens
        layers: list[nn.Module] = []
        for width in settings.hidden:
            norm: list[nn.Module] = [nn.LayerNorm(width)] if settings.layer_norm else []
            layers += [nn.Linear(features, width), *norm, nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, num_actions + (1 if settings.dueling else 0)))
        self.head = nn.Sequential(*layers)
        # weights that may be bfloat16: of convolutions and hidden layers, not of norms and of the last layer
        last = f"head.{len(layers) - 1}."
        halved = [name for name, layer in self.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
        names = [f"{name}.{part}" for name in halved if f"{name}." != last for part in ("weight", "bias")]
        self._halved = frozenset(names if settings.bfloat16 and len(self.convolutions) else ())

    def forward(self, obs: Tensor) -> Tensor:
        """obs: (B, *shape) as stored or as sampled; returns (B, actions) float32."""
        return self.forward_with(self.prepare(obs), self.lowered())

    def prepare(self, obs: Tensor) -> Tensor:
        """What the first layer takes: scaled, mapped, transformed or whitened, of the dtype in which it computes.

        It depends on no weight, so the networks of one run share it. Images are prepared channels last: on a CPU the
        gradient of a convolution then takes a third of the time, and cuDNN would transpose those of bfloat16, and what
        comes out of them, before each convolution.
        """
        if self.cosines is not None:
            return (self._frequencies(self.cosines, obs) - self.centre) * self.stretch
        if not len(self.convolutions):
            return self._scaled(obs)
        half = self._half_on(obs.device)
        if obs.device.type != "cpu":
            return self._in_one_pass(obs, torch.bfloat16 if half else torch.float32)
        obs = _channels_last(obs)
        scale = 1.0 if obs.is_floating_point() else self.scale
        prepared = obs.float()
        if self.whitens:
            # over pixels of all channels, which lie side by side
            offset = self.offset[..., None].expand(*self.offset.shape, obs.shape[1]).contiguous()
            torch.addcmul(offset, _pixels(prepared), self._gain_of(obs), out=_pixels(prepared))
        elif scale != 1.0:
            prepared = prepared.mul_(scale) if prepared is not obs else prepared * scale
        return prepared.to(torch.bfloat16) if half else prepared

    def lowered(self) -> list[Tensor]:
        """The weights as the layers compute with them, in the order of `parameters`.

        Convolutions and hidden layers compute in bfloat16 where that is set; weights of float32 are the parameters
        themselves, but for kernels, which are copies that are channels last, as images are.
        """
        lowered = []
        for name, weight in self.named_parameters():
            half = self._half_on(weight.device) and name in self._halved
            dtype = torch.bfloat16 if half else torch.float32
            layout = torch.channels_last if weight.dim() == 4 else torch.preserve_format
            lowered.append(weight.to(dtype, memory_format=layout))
        return lowered

    def forward_with(self, prepared: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """prepared: from `prepare`; weights: from `lowered`; returns (B, actions) float32."""
        found, rest = prepared, iter(weights)
        for layer in self.convolutions:
            if isinstance(layer, nn.Conv2d):
                found = functional.conv2d(found, next(rest), next(rest), layer.stride)
            else:
                found = functional.relu_(found)
        found = found.flatten(1)
        for layer in self.head:
            if isinstance(layer, nn.Linear):
                weight = next(rest)
                found = functional.linear(found.to(weight.dtype), weight, next(rest))
            elif isinstance(layer, nn.LayerNorm):
                found = functional.layer_norm(found.float(), layer.normalized_shape, next(rest), next(rest), layer.eps)
            else:
                found = functional.relu_(found)
        if not self.dueling:
            return found
        value, advantage = found[:, :1], found[:, 1:]
        return value + advantage - advantage.mean(1, keepdim=True)

    def _frequencies(self, cosines: CosineTransform, obs: Tensor) -> Tensor:
        """The transform of images as stored or as sampled."""
        found: Tensor = cosines(obs.float())
        return found if obs.is_floating_point() else found * self.scale

    def _scaled(self, obs: Tensor) -> Tensor:
        """Vectors, or images as an MLP takes them."""
        if not obs.is_floating_point():
            obs = obs.float() * self.scale
        return (obs.float() - self.centre) * self.stretch if self.normalises else obs

    def _in_one_pass(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images channels last, scaled and whitened: a GPU reads each number once, as stored, and writes it once."""
        prepared = torch.empty_like(images, dtype=dtype, memory_format=torch.channels_last)
        if self.whitens:
            return torch.addcmul(self.offset, images, self._gain_of(images), out=prepared)
        if images.is_floating_point():
            return prepared.copy_(images)
        return torch.mul(images, self.scale, out=prepared)

    def _gain_of(self, images: Tensor) -> Tensor:
        """What images are multiplied by when they are whitened: sampled ones may be scaled already."""
        return self.stretch if images.is_floating_point() else self.gain

    @torch.no_grad()
    def whiten(self, obs: Tensor) -> None:
        """Fit the whitening: subtract the mean image of `obs`, divide by the standard deviation of all pixels from it.

        obs: (B, channels, height, width) as stored or as sampled. A static background vanishes, and what moves is large
        even if it is one grey pixel in a thousand. Frequencies of a cosine transform have a mean and a deviation each.
        """
        if not self.whitens:
            return
        if self.cosines is not None:
            deviation, mean = torch.std_mean(self._frequencies(self.cosines, obs), 0, correction=0)
            self._whiten_by(mean, deviation)
            return
        images = obs.float() * (1.0 if obs.is_floating_point() else self.scale)
        mean = images.mean((0, 1))
        self._whiten_by(mean, (images - mean).square().mean().sqrt())

    def _whiten_by(self, mean: Tensor, deviation: Tensor) -> None:
        self.centre.copy_(mean)
        # what never changes stays finite
        self.stretch.copy_(1 / deviation.clamp(min=1e-3))
        _fold(self)

    def _half_on(self, device: torch.device) -> bool:
        """Whether convolutions and hidden layers compute in bfloat16."""
        return bool(self._halved) and (device.type != "cpu" or cpu_has_bfloat16())


@torch.no_grad()
def _fold(network: QNetwork, _: object = None) -> None:
    """Renew what follows from centre, stretch and scale, in its place, where captured graphs read it."""
    torch.mul(network.centre, -network.stretch, out=network.offset)
    torch.mul(network.stretch, network.scale, out=network.gain)


@cache
def cpu_has_bfloat16() -> bool:
    """Whether the CPU can run convolutions in bfloat16, if only by emulation."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _channels_last(images: Tensor) -> Tensor:
    """Images (B, channels, height, width) in host memory with the channels of each pixel side by side."""
    if images.dtype != torch.uint8 or images.shape[1] != 4 or sys.byteorder != "little":
        return images.contiguous(memory_format=torch.channels_last)
    # four bytes of a pixel as one integer: half the time of a copy to other strides
    count, channels, height, width = images.shape
    packed = images[:, 3].to(torch.int32)
    plane = torch.empty_like(packed)
    for channel in (2, 1, 0):
        plane.copy_(images[:, channel])
        packed.bitwise_left_shift_(8).bitwise_or_(plane)
    return packed.view(torch.uint8).view(count, height, width, channels).permute(0, 3, 1, 2)


def _pixels(images: Tensor) -> Tensor:
    """Channels-last images as contiguous (B, height, width, channels)."""
    return images.permute(0, 2, 3, 1)


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
            raise UserError(
                f"--network {name} is too deep for images of {shape[1]}x{shape[2]}. Use a smaller one or mlp."
            )
        layers += [nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU()]
        channels, height, width = out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers), channels * height * width
