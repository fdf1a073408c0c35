"""Calls of any buffer that must be refused: the right kind of error, what is wrong by name, and nothing changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer

LOSSY = (TypeError, ValueError)
ANY, ROWS, STEPS = ("rows", "steps"), ("rows",), ("steps",)


class Refusal(NamedTuple):
    """One call, given a buffer and the arguments of an `add` that it would take."""

    name: str
    kinds: tuple[str, ...]
    call: Callable[[Any, dict[str, Any]], Any]
    error: Any
    words: str
    when: Callable[[Any], bool] = lambda buffer: True

    def check(self, buffer: ReplayBuffer | TrajectoryReplayBuffer) -> None:
        """Fail unless the buffer refuses it."""
        if self.when(buffer):
            with pytest.raises(self.error, match=self.words):
                self.call(buffer, valid(buffer))


def valid(buffer: ReplayBuffer | TrajectoryReplayBuffer) -> dict[str, Any]:
    """The arguments of an `add`: three rows, or one step of each environment."""
    rows = buffer.num_envs if isinstance(buffer, TrajectoryReplayBuffer) else 3
    given = {name: torch.zeros((rows, *field.shape), dtype=field.dtype) for name, field in buffer.fields.items()}
    if isinstance(buffer, TrajectoryReplayBuffer):
        no = torch.zeros(rows, dtype=torch.bool)
        given |= {"reward": torch.zeros(rows), "terminated": no, "truncated": no}
    return given


def whole_state(buffer: ReplayBuffer | TrajectoryReplayBuffer) -> str:
    """Everything that a call that raised must leave as it was."""
    state = buffer.state_dict()
    tensors = {name: tensor.tolist() for name, tensor in state.pop("tensors").items()}
    return json.dumps([state, tensors])


def first(buffer: Any) -> str:
    return next(iter(buffer.fields))


def without(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda buffer, given: buffer.add(**{each: value for each, value in given.items() if each != name})


def adding(name: str, value: Any) -> Callable[[Any, dict[str, Any]], Any]:
    """An `add` with another value, or what a function makes of the right one."""
    return lambda buffer, given: buffer.add(**given | {name: value(given[name]) if callable(value) else value})


def of_first(change: Callable[[torch.Tensor], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda buffer, given: buffer.add(**given | {first(buffer): change(given[first(buffer)])})


def priority_of(change: Callable[[torch.Tensor], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda buffer, given: buffer.add(**given, priority=change(torch.ones(len(given["action"]))))


def whole_action(buffer: Any) -> bool:
    return not buffer.fields["action"].dtype.is_floating_point


def takes_finals(buffer: Any) -> bool:
    # a buffer that keeps none does not look at them
    keeps = buffer.state_dict()["settings"]["final_capacity"] != 0
    return keeps and buffer.autoreset != "next_step" and "obs" in buffer.fields


def on_the_host(buffer: Any) -> bool:
    # a GPU counts such entries, as looking at them would stall it
    return buffer.device.type == "cpu"


def ending(value: Any) -> Callable[[Any, dict[str, Any]], Any]:
    """Every episode is cut, and this is given as the final observation."""

    def call(buffer: Any, given: dict[str, Any]) -> Any:
        obs, cut = given["obs"], torch.ones_like(given["truncated"])
        return buffer.add(**given | {"truncated": cut}, final_obs=value(obs) if callable(value) else value)

    return call


ADDS = [
    *(Refusal(f"missing {name}", ANY, without(name), KeyError, name) for name in ["action"]),
    *(
        Refusal(f"missing {name}", STEPS, without(name), KeyError, name)
        for name in ("reward", "terminated", "truncated")
    ),
    Refusal("nothing", ANY, lambda buffer, given: buffer.add(), KeyError, "missing.*action"),
    Refusal("unknown field", ANY, adding("rewards", torch.zeros(3)), KeyError, "rewards"),
    Refusal("result as a field", STEPS, adding("next_obs", torch.zeros(3)), KeyError, "next_obs"),
    Refusal("no names", ANY, lambda buffer, given: buffer.add(*given.values()), TypeError, "positional"),
    Refusal(
        "no rows", ANY, lambda b, given: b.add(**{name: value[:0] for name, value in given.items()}), ValueError, "0"
    ),
    Refusal(
        "rows twice",
        STEPS,
        lambda b, given: b.add(**{n: v.repeat_interleave(2, 0) for n, v in given.items()}),
        ValueError,
        "needs",
    ),
    Refusal("extra dimension", ANY, of_first(lambda value: value[..., None]), ValueError, r"obs.*\d, 1\]"),
    Refusal("one dimension too few", ANY, of_first(lambda value: value[0]), ValueError, "obs"),
    Refusal("scalar", ANY, adding("action", torch.tensor(0)), ValueError, "action"),
    Refusal("one row more", ANY, adding("action", lambda value: value[[0, *range(len(value))]]), ValueError, "action"),
    Refusal("column of rewards", STEPS, adding("reward", lambda value: value[:, None]), ValueError, r"reward.*, 1\]"),
    Refusal("more flags", STEPS, adding("terminated", torch.zeros(7, dtype=torch.bool)), ValueError, "terminated.*7"),
    Refusal("complex", ANY, adding("action", lambda value: value.to(torch.complex64)), LOSSY, "action.*complex"),
    Refusal("text", ANY, adding("action", "abc"), LOSSY, "action"),
    Refusal("None", ANY, adding("action", None), LOSSY, "action"),
    Refusal("numpy strings", ANY, adding("action", lambda v: v.numpy().astype(str)), LOSSY, "action"),
    Refusal("numpy objects", ANY, adding("action", lambda v: np.full(v.shape, None)), LOSSY, "action"),
    Refusal("floats into integers", ANY, adding("action", torch.Tensor.float), LOSSY, r"action.*float32", whole_action),
    Refusal(
        "numpy floats into integers", ANY, adding("action", lambda v: v.float().numpy()), LOSSY, "action", whole_action
    ),
    Refusal("flags as integers", STEPS, adding("terminated", torch.Tensor.long), LOSSY, "terminated.*int64"),
    Refusal("flags as floats", STEPS, adding("truncated", torch.Tensor.float), LOSSY, "truncated.*float32"),
    Refusal("reward out of range", STEPS, adding("reward", lambda v: v.double() + 1e39), LOSSY, "reward"),
    Refusal("other number of priorities", ANY, priority_of(lambda p: torch.ones(len(p) + 1)), ValueError, "priorit"),
    Refusal("column of priorities", ANY, priority_of(lambda p: p[:, None]), ValueError, "priorit"),
    Refusal("one priority for all", ANY, priority_of(lambda p: 1.0), ValueError, "priorit"),
    Refusal("priority that is text", ANY, priority_of(lambda p: "high"), LOSSY, "priorit"),
    Refusal("complex priority", ANY, priority_of(torch.Tensor.cfloat), LOSSY, "priorit"),
    Refusal("truths as priorities", ANY, priority_of(torch.Tensor.bool), LOSSY, "priorit"),
    *(
        Refusal(f"{value} as a priority", ANY, priority_of(lambda p, v=value: p * v), ValueError, "finite", on_the_host)
        for value in (math.nan, math.inf, -math.inf)
    ),
    Refusal("final_obs of another shape", STEPS, ending(lambda v: v[..., None]), ValueError, "final_obs", takes_finals),
    Refusal("final_obs of fewer rows", STEPS, ending(lambda v: v[:0]), ValueError, "final_obs.*0", takes_finals),
    Refusal("complex final_obs", STEPS, ending(lambda v: v.to(torch.complex64)), LOSSY, "final_obs", takes_finals),
    Refusal("final_obs that is text", STEPS, ending("last"), LOSSY, "final_obs", takes_finals),
    Refusal(
        "unknown final_obs",
        STEPS,
        adding("final_obs.image", torch.zeros(3, 2)),
        KeyError,
        "final_obs",
        lambda buffer: buffer.autoreset != "next_step",
    ),
    Refusal(
        "final_obs where none is taken",
        STEPS,
        ending(lambda value: value),
        ValueError,
        r'"next_step" takes no final_obs.*"same_step"',
        lambda buffer: buffer.autoreset == "next_step" and "obs" in buffer.fields,
    ),
    Refusal(
        "objects where none is taken",
        STEPS,
        lambda b, given: b.extend(**{n: v[None] for n, v in given.items()}, final_obs=[np.full(b.num_envs, None)]),
        ValueError,
        r'"next_step" takes no final_obs.*"same_step"',
        lambda buffer: buffer.autoreset == "next_step",
    ),
]
SIZES = [
    *((value, ValueError, str(value)) for value in (0, -3)),
    (10**400, ValueError, "must be at most"),
    *((value, TypeError, f"(?i){value}") for value in (True, 2.0, None)),
    ("4", TypeError, "4"),
]
BETAS = [*((value, ValueError) for value in (-0.5, math.nan, 10**400)), ("0.5", TypeError)]
ONES, TWO = torch.ones(2), torch.tensor([0, 1])
KEYS: list[tuple[Any, Any, str]] = [
    (torch.tensor([0.0, 1.0]), TypeError, "(?i)key.*float"),
    (np.array([0.5, 1]), TypeError, "(?i)key"),
    (torch.tensor([True, False]), TypeError, "(?i)key.*bool"),
    (torch.zeros(2, 1, dtype=torch.int64), ValueError, "(?i)key"),
    *((key, TypeError, "(?i)key") for key in ("01", None, True, 1.0, [0.5])),
    *(
        (key, TypeError, "keys must be integers of 64 bits.*list.*found")
        for key in (2**63, 2**70, -(2**70), slice(0, 3), slice(None), [2**70])
    ),
]
PRIORITIES: list[tuple[Any, Any]] = [
    (ONES[:1], ValueError),
    (torch.ones(3), ValueError),
    (ONES[:, None], ValueError),
    (torch.tensor(1.0), ValueError),
    (ONES.cfloat(), LOSSY),
    ("ab", LOSSY),
]
WINDOWS: dict[str, list[tuple[Any, Any]]] = {
    "length": [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)],
    "burn_in": [(-1, ValueError), (0.5, TypeError), (True, TypeError)],
    "beta": [(-1.0, ValueError), ("high", TypeError)],
    "stride": [(0, ValueError), (1.5, TypeError)],
    "strict": [("yes", TypeError), (1, TypeError)],
}
REFUSALS = [
    *ADDS,
    *(
        Refusal(f"sample({str(size)[:9]})", ANY, lambda b, _, size=size: b.sample(size), error, words)
        for size, error, words in SIZES
    ),
    *(
        Refusal(f"beta={str(beta)[:9]}", ANY, lambda b, _, beta=beta: b.sample(2, beta=beta), error, "beta")
        for beta, error in BETAS
    ),
    *(
        Refusal(f"{call} {keys}", ANY, made(keys), error, words)
        for keys, error, words in KEYS
        for call, made in (
            ("update of", lambda keys: lambda b, _: b.update_priorities(keys, ONES)),
            ("read of", lambda keys: lambda b, _: b[keys]),
        )
    ),
    *(
        Refusal(
            f"update with {given}", ANY, lambda b, _, given=given: b.update_priorities(TWO, given), error, "(?i)priorit"
        )
        for given, error in PRIORITIES
    ),
    *(
        Refusal(
            f"update with {value}",
            ANY,
            lambda b, _, value=value: b.update_priorities([max(b.added - 1, 0), 0], [2.0, value]),
            ValueError,
            "finite",
            on_the_host,
        )
        for value in (math.nan, math.inf, -math.inf)
    ),
    *(
        Refusal(
            f"windows with {name}={value}",
            STEPS,
            lambda b, _, given={name: value}: b.sample_sequences(**{"batch_size": 2, "length": 3} | given),
            error,
            f"{name}.*{value}",
        )
        for name, wrong in WINDOWS.items()
        for value, error in wrong
    ),
    *(
        Refusal(f"{str(size)[:9]} windows", STEPS, lambda b, _, size=size: b.sample_sequences(size, 3), error, words)
        for size, error, words in SIZES
    ),
    *(
        Refusal(f"mask: {words}", STEPS, lambda b, _, mask=mask: b.begin_episodes(mask(b.num_envs)), error, words)
        for mask, error, words in (
            (lambda envs: np.ones(envs + 1, bool), ValueError, "environments; found"),
            (np.ones, LOSSY, "(?i)bool"),
            (np.arange, LOSSY, "(?i)bool"),
        )
    ),
    *(
        Refusal(f"batches({size})", ANY, lambda b, _, size=size: b.batches(size), error, "size")
        for size, error in ((0, ValueError), (1.5, TypeError), (None, TypeError))
    ),
    Refusal("a loop", ANY, lambda buffer, _: iter(buffer), TypeError, r"batches\(size\)"),
    Refusal("a state of nothing", ANY, lambda b, _: b.load_state_dict({}), (TypeError, ValueError, KeyError), "."),
    *(
        Refusal(f"{key!r} in buffer", ANY, lambda b, _, key=key: key in b, TypeError, "needs a key, an int")
        for key in ("5", 5.0, True, None, torch.tensor(5.0), [5])
    ),
]
