"""What a trajectory buffer is made with, checked: fields, shape of the ring, and the choices by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from gpu_replay.fields import Field, check_fields
from gpu_replay.ops.eligibility import StreamShape
from gpu_replay.storage import check_capacity

Autoreset = Literal["next_step", "same_step", "disabled"]
Padding = Literal["reset", "zero"]

_OWN = ("reward", "terminated", "truncated", "discount", "next_obs", "final_obs")
# bytes that may go to final observations in any case, and bytes per step of a long ring
_FINALS_AT_LEAST = 3 * 2**20
_FINALS_PER_STEP = 32


def observation_names(fields: Mapping[str, Field]) -> tuple[str, ...]:
    """The fields that are stacked and sampled as `next_` too: `obs`, or all `obs.NAME`."""
    return tuple(name for name in fields if name == "obs" or name.startswith("obs."))


def stream_shape(
    capacity: object,
    num_envs: object,
    fields: Mapping[str, Field],
    stack: object,
    n_step: object,
    autoreset: object,
    final_capacity: object,
    *,
    hindsight: bool = False,
) -> StreamShape:
    """The shape of a ring with these settings, or TypeError / ValueError.

    final_capacity: None for one final observation per slot where they are small or few, else fewer: of frames of 84x84
                    bytes 445, and 4.5 per 1,000 steps of a ring of more than 98,000.
    """
    asked, envs = check_capacity(capacity), whole("num_envs", num_envs, 1)
    if asked < envs:
        raise ValueError(f"capacity {asked} does not hold one step of num_envs={envs} environments. Raise it.")
    steps = asked // envs
    slots = steps * envs
    row = sum(fields[name].row_bytes for name in observation_names(fields))
    finals = min(slots, max(_FINALS_AT_LEAST, slots * _FINALS_PER_STEP) // row)
    if final_capacity is not None:
        finals = min(whole("final_capacity", final_capacity, 0), slots)
    next_step = choice("autoreset", autoreset, get_args(Autoreset)) == "next_step"
    kept = 0 if next_step else finals
    return StreamShape(envs, steps, whole("stack", stack, 1), whole("n_step", n_step, 1), next_step, kept, hindsight)


def check_stream_fields(fields: object) -> dict[str, Field]:
    """The fields of one step as a dict of their own, or an error that says which one is wrong."""
    checked = check_fields(fields)
    for name in checked:
        if name in _OWN or name.startswith(("next_obs.", "final_obs.")):
            raise ValueError(
                f"field name {name!r} is reserved in a trajectory buffer ({', '.join(_OWN)}): it makes these itself."
            )
    observations = observation_names(checked)
    if not observations:
        raise ValueError(f"fields need 'obs' (or several 'obs.NAME'); found {', '.join(checked)}.")
    if "obs" in observations and len(observations) > 1:
        raise ValueError(f"fields have 'obs' as well as {observations[1]!r}; use one observation or named ones only.")
    if not any(name == "action" or name.startswith("action.") for name in checked):
        raise ValueError(f"fields need 'action'; found {', '.join(checked)}.")
    return checked


def whole(name: str, value: object, least: int) -> int:
    """A whole number of at least `least`, or TypeError / ValueError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int; found {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; found {value}.")
    return int(value)


def check_gamma(gamma: object) -> float:
    """A discount as a float, or TypeError / ValueError."""
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float, np.integer, np.floating)):
        raise TypeError(f"gamma must be a number; found {gamma!r}.")
    if not 0 <= float(gamma) <= 1:
        raise ValueError(f"gamma must be from 0 to 1; found {gamma!r}.")
    return float(gamma)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """The value if it is one of those allowed, else ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}; found {value!r}.")
    return value
