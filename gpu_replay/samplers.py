"""The samplers: frozen settings that say how a buffer draws. The buffer owns all state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gpu_replay.schedule import LinearSchedule


def _number(owner: str, name: str, value: object, low: float = 0.0, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner} {name} must be a number; found {value!r}.")
    if not math.isfinite(value) or value < low or (open_low and value == low):
        bound = "greater than" if open_low else "at least"
        raise ValueError(f"{owner} {name} must be finite and {bound} {low:g}; found {value!r}.")


def _flag(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner} {name} must be True or False; found {value!r}.")


@dataclass(frozen=True)
class Uniform:
    """Every stored transition is equally likely.

    replacement: False draws `B` distinct transitions in random order (`B > len(buffer)` is a ValueError);
                 True draws each row independently.
    """

    replacement: bool = False

    def __post_init__(self) -> None:
        _flag("Uniform", "replacement", self.replacement)


@dataclass(frozen=True)
class Proportional:
    """P(i) is proportional to mass(i) = min(priority + eps, clip) ** alpha.

    alpha:      0 is uniform, 1 fully proportional; at least 0.
    beta:       exponent of the importance weights, a number at least 0 or a LinearSchedule.
    eps:        added to every priority, so that none is zero.
    clip:       largest value of priority + eps, or None.
    initial:    priority of new transitions: "running" the largest ever given (1.0 before any), "stored" the largest
                among those stored now (1.0 when there is none), or a number.
    normalize:  weights are divided by the largest in the batch ("batch"), or by the largest that any stored
                transition could get ("buffer").
    stratified: one draw from each of `B` equal parts of the total mass; False draws independently.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
    """

    alpha: float = 0.6
    beta: float | LinearSchedule = 0.4
    eps: float = 1e-6
    clip: float | None = None
    initial: Literal["running", "stored"] | float = "running"
    normalize: Literal["batch", "buffer"] = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        _number("Proportional", "alpha", self.alpha)
        if isinstance(self.beta, LinearSchedule):
            _number("Proportional", "beta.start", self.beta.start)
            _number("Proportional", "beta.end", self.beta.end)
        else:
            _number("Proportional", "beta", self.beta)
        _number("Proportional", "eps", self.eps)
        if self.clip is not None:
            _number("Proportional", "clip", self.clip, open_low=True)
        if isinstance(self.initial, str):
            if self.initial not in ("running", "stored"):
                raise ValueError(
                    f"Proportional initial must be 'running', 'stored' or a number; found {self.initial!r}."
                )
        else:
            _number("Proportional", "initial", self.initial)
        if self.normalize not in ("batch", "buffer"):
            raise ValueError(f"Proportional normalize must be 'batch' or 'buffer'; found {self.normalize!r}.")
        _flag("Proportional", "stratified", self.stratified)


@dataclass(frozen=True)
class Latest:
    """The newest `B` transitions, newest last: learning without a memory."""


@dataclass(frozen=True)
class Combined:
    """`base` for the first `B - newest` rows, then the `newest` newest transitions: combined experience replay.

    The newest rows have probability 1 and weight 1: they are always in the batch.

    Zhang and Sutton 2017, "A Deeper Look at Experience Replay".
    """

    base: Uniform | Proportional
    newest: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.base, (Uniform, Proportional)):
            raise TypeError(f"Combined base must be Uniform(...) or Proportional(...); found {self.base!r}.")
        if isinstance(self.newest, bool) or not isinstance(self.newest, int):
            raise TypeError(f"Combined newest must be an int; found {self.newest!r}.")
        if self.newest < 1:
            raise ValueError(f"Combined newest must be at least 1; found {self.newest}.")


Sampler = Uniform | Proportional | Latest | Combined
