"""The loss of DQN in torch, whose gradient every implementation in the package is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_huber(
    values: Tensor, following: Tensor, best: Tensor, action: Tensor, reward: Tensor, discount: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of an update and its TD errors (target minus value), of `B` rows.

    values:    (B, A) of the observations, through which the gradient flows.
    following: (B, A) values of the target network of what comes after, `best` (B,) the action that is taken there.
    """
    rows = torch.arange(len(action))
    error = reward + discount * following.detach()[rows, best] - values[rows, action]
    size = error.abs()
    huber = torch.where(size < 1, size.square() / 2, size - 0.5)
    return (weight * huber).mean(), error.detach()
