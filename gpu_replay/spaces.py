"""Fields and settings of buffers from Gymnasium's spaces and environments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpu_replay.fields import FLAG, REWARD, Field, check_fields, flattened

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.vector import VectorEnv

# unsigned numbers that torch cannot compute with are stored in the next wider signed dtype
_WIDENED = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
# the values of Gymnasium's AutoresetMode
_AUTORESET = {"NextStep": "next_step", "SameStep": "same_step", "Disabled": "disabled"}


class _Assumed(str):
    """A default: it equals what it stands for, and is told apart from the same value given by a caller."""

    __slots__ = ()


ASSUMED_AUTORESET: Any = _Assumed("next_step")


def autoreset_name(mode: Any) -> Any:
    """The name of an autoreset mode in this package, given Gymnasium's AutoresetMode, its text, or that name itself."""
    value = getattr(mode, "value", mode)
    return _AUTORESET.get(value, str(value)) if isinstance(value, str) else mode


def step_fields(
    observation_space: Space[Any], action_space: Space[Any], dtypes: Any = None, extra: Any = None, whole: bool = False
) -> dict[str, Field]:
    """obs and action of one step of one environment; composite spaces give one field per leaf, `obs.NAME`.

    dtypes: of fields by their names, or of whole groups; the dtype of `obs` applies to `next_obs` too.
    extra:  further fields by name.
    whole:  whether they are of a whole transition: reward, next_obs and terminated follow.
    """
    fields = {**_fields("obs", observation_space), **_fields("action", action_space)}
    if whole:
        fields |= {"reward": REWARD, **_fields("next_obs", observation_space), "terminated": FLAG}
    if dtypes is not None and not isinstance(dtypes, Mapping):
        raise TypeError(f"dtypes must be a dict such as {{'obs': torch.float64}}; found {dtypes!r}.")
    asked = flattened(dtypes or {})
    for name in asked:
        if not any(each == name or each.startswith(f"{name}.") for each in fields):
            raise KeyError(f"dtypes has unknown {name!r}; the fields are {', '.join(fields)}.")
    stored = {}
    for name, field in fields.items():
        # the longest name that fits, and for next_obs those of obs after its own
        names = _groups(name) + _groups(name.removeprefix("next_"))
        dtype = next((asked[each] for each in names if each in asked), field.dtype)
        stored[name] = Field(field.shape, dtype)
    further = {} if extra is None else check_fields(extra)
    if twice := [name for name in further if name in fields]:
        raise KeyError(f"extra has {twice[0]!r}, which the spaces give; leave it out, or change its dtype with dtypes.")
    return {**stored, **further}


def vector_settings(env: VectorEnv[Any, Any, Any] | Env[Any, Any], *, single: bool = False) -> dict[str, Any]:
    """`num_envs`, the spaces of one environment, and `autoreset` where a vector environment says which it is.

    single: whether one environment is taken too: its loop resets it, or its Autoreset wrapper does at the next step.

    Wrappers are looked through for numbers and modes that they hide, but not for spaces, which they may have changed.
    Raises TypeError for anything but an environment of Gymnasium.
    """
    from gymnasium import Env, Wrapper
    from gymnasium.wrappers import Autoreset

    inner: Any = getattr(env, "unwrapped", env)
    count = getattr(env, "num_envs", None) or getattr(inner, "num_envs", None)
    if single and count is None and isinstance(env, Env):
        settings = {"num_envs": 1, "observation_space": env.observation_space, "action_space": env.action_space}
        while isinstance(env, Wrapper) and not isinstance(env, Autoreset):
            env = env.env
        return {**settings, "autoreset": "next_step" if isinstance(env, Autoreset) else "disabled"}
    spaces = [getattr(env, f"single_{name}", None) for name in ("observation_space", "action_space")]
    if count is None or None in spaces:
        raise TypeError(
            f"from_env and collect need a vector environment of Gymnasium, and from_env takes a single one too; found "
            f"{type(env).__name__}, without num_envs or the spaces of one environment, single_observation_space and "
            "single_action_space. Make one with gymnasium.make_vec(...), or use from_spaces."
        )
    settings = {"num_envs": count, "observation_space": spaces[0], "action_space": spaces[1]}
    modes = ((getattr(each, "metadata", None) or {}).get("autoreset_mode") for each in (env, inner))
    mode = next((each for each in modes if each is not None), None)
    if mode is None:
        return settings
    if autoreset_name(mode) not in _AUTORESET.values():
        raise ValueError(f"the environment's metadata has autoreset_mode={mode!r}; give autoreset=... yourself.")
    # before gymnasium 1.4 vector environments of a class share their metadata, with the mode of the last one made
    inner_mode = autoreset_name(getattr(inner, "autoreset_mode", mode))
    return {**settings, "autoreset": inner_mode if inner_mode in _AUTORESET.values() else autoreset_name(mode)}


def warn_of_stacks(fields: Mapping[str, Field]) -> None:
    """Warn if observations look like stacks of frames, since each frame would be stored once in every stack."""
    for name, field in fields.items():
        if name.split(".")[0] != "obs" or field.dtype != torch.uint8 or len(field.shape) not in (3, 4):
            continue
        frames, *frame = field.shape
        # (frames, height, width), with channels behind them or not; three may be colours
        pictures = frame[:2] if len(frame) == 2 else sorted(frame)[1:]
        if 1 < frames <= 8 and (frames != 3 or len(frame) == 3) and min(pictures) >= 16:
            warnings.warn(
                f"{name} {list(field.shape)} looks like {frames} stacked frames: each would be stored {frames} times. "
                f"Make the buffer with Field({tuple(frame)}, torch.uint8) for {name!r} and stack={frames} instead, and "
                f"add `{name}[:, -1]`: then each frame is stored once, and batches have the stacks.",
                stacklevel=3,
            )


def _groups(name: str) -> list[str]:
    """`a.b.c` and the groups that it is in: `a.b` and `a`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _fields(name: str, space: Space[Any]) -> dict[str, Field]:
    from gymnasium import spaces

    if not isinstance(space, spaces.Space):
        raise TypeError(f"{name} needs a Gymnasium space such as Box or Discrete; found {space!r}.")
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts: Any = space.spaces
        if isinstance(space, spaces.Tuple):
            parts = {f"item_{place}": part for place, part in enumerate(parts)}
        return {leaf: field for key in parts for leaf, field in _fields(f"{name}.{key}", parts[key]).items()}
    if space.shape is None or space.dtype is None or isinstance(space, (spaces.Text, spaces.Sequence, spaces.Graph)):
        raise TypeError(
            f"{name} has the space {space}, which has no fixed shape and dtype; describe the fields yourself, with "
            "fields={...} of the buffer's constructor."
        )
    dtype = _dtype(name, space.dtype)
    if isinstance(space, spaces.Box) and dtype == torch.float64:
        # networks take float32; simulators return float64 by default
        dtype = torch.float32
    return {name: Field(tuple(int(side) for side in space.shape), dtype)}


def _dtype(name: str, dtype: Any) -> torch.dtype:
    kind = np.dtype(dtype).name
    stored = _WIDENED.get(kind, getattr(torch, kind, None))
    if not isinstance(stored, torch.dtype):
        raise TypeError(f"{name} has NumPy dtype {kind}, which cannot be stored; describe the fields yourself.")
    return stored
