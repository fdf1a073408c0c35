"""Calls of any buffer that must be refused: the right kind of error, what is wrong by name, and nothing changed."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from launches import rows_of
from torch import Tensor

from gpu_replay import ReplayBuffer, TrajectoryReplayBuffer

LOSSY = (TypeError, ValueError)
ANY, ROWS, STEPS = ("rows", "steps"), ("rows",), ("steps",)
Call = Callable[[Any, dict[str, Any]], Any]


class Refusal(NamedTuple):
    """One call, given a buffer and the arguments of an `add` that it would take."""

    name: str
    kinds: tuple[str, ...]
    call: Call
    error: Any
    words: str
    when: Callable[[Any], bool] = lambda buffer: True

    def check(self, buffer: ReplayBuffer | TrajectoryReplayBuffer) -> None:
        """Fail unless the buffer refuses it."""
        if self.when(buffer):
            with warnings.catch_warnings():
                # torch warns of kinds of tensors that are young or old
                warnings.simplefilter("ignore")
                with pytest.raises(self.error, match=f"(?s){self.words}"):
                    self.call(buffer, valid(buffer))


def valid(buffer: ReplayBuffer | TrajectoryReplayBuffer) -> dict[str, Any]:
    """The arguments of an `add`: three rows, or one step of each environment."""
    return rows_of(buffer, buffer.num_envs if isinstance(buffer, TrajectoryReplayBuffer) else 3)


def whole_state(buffer: ReplayBuffer | TrajectoryReplayBuffer) -> str:
    """Everything that a call that raised must leave as it was."""
    state = buffer.state_dict()
    tensors = {name: tensor.tolist() for name, tensor in state.pop("tensors").items()}
    return json.dumps([state, tensors])


def changed(argument: str, value: Any, steps: int = 0) -> Call:
    """An `add`, or an `extend` by so many steps, with another value, or what a function makes of the right one.

    "obs" is the first field, whatever its name; with "final_obs" every episode is cut.
    """

    def call(buffer: Any, given: dict[str, Any]) -> Any:
        name = next(iter(buffer.fields)) if argument == "obs" else argument
        given = {each: torch.stack([it] * steps) if steps else it for each, it in given.items()}
        right = given | {"priority": torch.ones(len(given["action"])), "final_obs": given.get("obs")}
        more = {"truncated": torch.ones_like(given["truncated"])} if argument == "final_obs" else {}
        made = value(right.get(name)) if callable(value) else value
        return (buffer.extend if steps else buffer.add)(**given | more | {name: made})

    return call


def whole_action(buffer: Any) -> bool:
    return not buffer.fields["action"].dtype.is_floating_point


def takes_finals(buffer: Any) -> bool:
    # a buffer that keeps none does not look at them
    keeps = buffer.state_dict()["settings"]["final_capacity"] != 0
    return keeps and buffer.autoreset != "next_step" and "obs" in buffer.fields


def takes_none(buffer: Any) -> bool:
    return buffer.autoreset == "next_step" and "obs" in buffer.fields


def on_the_host(buffer: Any) -> bool:
    # a GPU counts such entries, as looking at them would stall it
    return buffer.device.type == "cpu"


NOT_FINITE = (math.nan, math.inf, -math.inf)
NO_FINALS = r'"next_step" takes no final_obs.*"same_step"'
# argument of an `add`, what is given for it, the error, the words, and when
GIVEN: list[tuple[Any, ...]] = [
    ("rewards", torch.zeros(3), KeyError, "rewards"),
    ("next_obs", torch.zeros(3), KeyError, "next_obs"),
    ("obs", lambda v: v[..., None, None], ValueError, r"obs.*\d, 1\]"),
    ("action", lambda v: v[[0, *range(len(v))]], ValueError, "action"),
    ("reward", lambda v: v[:, None, None], ValueError, r"reward.*, 1\]"),
    ("terminated", torch.zeros(7, dtype=torch.bool), ValueError, "terminated.*7"),
    ("action", Tensor.cfloat, LOSSY, "action.*complex"),
    ("action", "abc", LOSSY, "action"),
    ("action", lambda v: v.numpy().astype(str), LOSSY, "action"),
    ("action", lambda v: [torch.ones(each.shape, requires_grad=True) for each in v], LOSSY, "action.*found list"),
    ("action", Tensor.float, LOSSY, r"action.*float32", whole_action),
    ("action", lambda v: v.float().numpy(), LOSSY, "action", whole_action),
    ("terminated", lambda v: v.long() + 2, ValueError, "terminated.*int64.*0 and 1", on_the_host),
    ("terminated", lambda v: v * math.nan, ValueError, "terminated.*float32.*0 and 1", on_the_host),
    ("terminated", Tensor.cfloat, LOSSY, "terminated.*complex"),
    ("terminated", lambda v: v[0], ValueError, "terminated"),
    (
        "next_obs",
        lambda v: v,
        KeyError,
        "takes no next_obs.*final_obs=",
        lambda b: isinstance(b, TrajectoryReplayBuffer),
    ),
    ("priority", lambda p: torch.ones(len(p) + 1), ValueError, "priorit"),
    ("priority", 1.0, ValueError, "priorit"),
    ("priority", Tensor.cfloat, LOSSY, "priorit"),
    *(("priority", lambda p, v=value: p * v, ValueError, "finite", on_the_host) for value in NOT_FINITE),
    ("final_obs", lambda v: v[..., None], ValueError, "final_obs", takes_finals),
    (
        "final_obs",
        lambda v: [None] * len(v),
        TypeError,
        r"'final_obs' must be an array \[E.*object array",
        takes_finals,
    ),
    ("final_obs.image", torch.zeros(3, 2), KeyError, "final_obs", lambda buffer: buffer.autoreset != "next_step"),
    ("final_obs", lambda v: v, ValueError, NO_FINALS, takes_none),
]
# the same for an `extend` by two steps
EXTENDED: list[tuple[Any, ...]] = [
    ("obs", lambda v: v[0], ValueError, r"needs shape \[T, \d.*found \["),
    ("action", lambda v: v[[0, 0, 0]], ValueError, "'action' has 3 steps where the others of this extend have 2"),
    ("terminated", lambda v: v + 0.5, ValueError, "'terminated' is stored as torch.bool.*0 and 1", on_the_host),
    ("reward", lambda v: v[..., None, None], ValueError, r"needs shape \[T, \d.*found \["),
    ("priority", torch.ones(2), ValueError, r"priority needs shape \[2, \d"),
    ("note2", torch.zeros(2, 2), KeyError, "unknown 'note2'"),
    ("final_obs", [None] * 3, ValueError, "'final_obs' needs 2 steps; found 3", lambda buffer: "obs" in buffer.fields),
    ("final_obs", lambda v: v[..., None], ValueError, r"'final_obs' needs shape \[2, ", takes_finals),
    ("final_obs", lambda v: [np.full(v.shape[1], None)] * 2, ValueError, "None for environment", takes_finals),
    ("final_obs", (None, None), TypeError, r"'final_obs' must be an array \[E.*object array", takes_finals),
    ("final_obs", np.full(2, None), ValueError, r"'final_obs' needs shape \[2, \d.*found \[2\]", takes_finals),
    ("final_obs", Tensor.to_sparse, TypeError, "'final_obs' must be a dense", takes_finals),
    ("final_obs", {"x": 1}, TypeError, "'final_obs' .*found a dictionary", takes_finals),
]
# tensors without memory that could be read, and numbers that are not all there
NOT_DENSE: dict[str, Callable[[Tensor], Any]] = {
    "coo": Tensor.to_sparse,
    "nested": lambda values: torch.nested.nested_tensor([values, values]),
    "masked": lambda values: torch.masked.masked_tensor(values, values > 0),
    "masked array": lambda values: np.ma.masked_equal(values.numpy(), 1),
    "quantized": lambda values: torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
    "float8": lambda values: values.to(torch.float8_e5m2),
    "uint64": lambda values: values.to(torch.uint64),
}
DENSE_PRIORITIES = [kind for kind in NOT_DENSE if kind != "nested"]


def alike(error: Any, words: str, *values: Any) -> list[tuple[Any, Any, str]]:
    """Values that are refused by one error."""
    return [(value, error, words) for value in values]


SIZES = [
    *alike(ValueError, "at least 1; found (0|-3)", 0, -3),
    (10**400, ValueError, "must be at most"),
    *((value, TypeError, f"(?i:{value})") for value in (True, 2.0)),
]
ONES, TWO = torch.ones(2), torch.tensor([0, 1])
KEYS: list[tuple[Any, Any, str]] = [
    (torch.tensor([0.0, 1.0]), TypeError, "(?i:key).*float"),
    (torch.tensor([True, False]), TypeError, "(?i:key).*bool"),
    (torch.zeros(2, 1, dtype=torch.int64), ValueError, "(?i:key)"),
    *alike(TypeError, "(?i:key)", "01", True, 1.0, [0.5]),
    *alike(TypeError, "keys must be integers of 64 bits.*list.*found", 2**63, slice(0, 3), [2**70]),
]
# where the buffer may have neither priorities nor a tree
OF_SOME = [(keys, (error, RuntimeError), f"{words}|no priorities|keeps no tree") for keys, error, words in KEYS]
NOT_LIVE = [(-1, (KeyError, RuntimeError), "key -1 is not live|no priorities")]
PRIORITIES: list[tuple[Any, Any, str]] = [
    *alike(ValueError, "(?i:priorit)", ONES[:1], torch.ones(3), ONES[None], torch.ones(())),
    (torch.ones(2, 5), ValueError, r"(?i:priorit).*reduce over time.*amax\(1\)"),
    *alike(LOSSY, "(?i:priorit)", ONES.cfloat(), [np.ma.masked, 1.0]),
]
PATHS = [*alike(TypeError, "must be the path of a folder or file; found", None, 3, b"c"), ("", ValueError, "is empty")]


def calls(
    kinds: tuple[str, ...], call: Callable[[Any, Any], Any], table: list[tuple[Any, Any, str]]
) -> list[tuple[tuple[str, ...], Call, Any, str]]:
    """A call for each row of a table."""
    return [(kinds, lambda b, _, v=value: call(b, v), error, words) for value, error, words in table]


def without(name: str) -> Call:
    return lambda buffer, given: buffer.add(**{each: value for each, value in given.items() if each != name})


def each_of(given: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: change(value) for name, value in given.items()}


def nothing_of(given: dict[str, Any]) -> dict[str, Any]:
    return {name: [] for name in given}


def written(given: dict[str, Any], actions: int) -> dict[str, Any]:
    """One row of the first field, and so many actions."""
    name = next(iter(given))
    return {name: given[name][:1], "action": given["action"][:1].repeat_interleave(actions, 0)}


def kinds_of(argument: str) -> tuple[str, ...]:
    return STEPS if argument[:5] in ("rewar", "termi", "trunc", "next_", "final") and argument != "rewards" else ANY


RESULTS = ("reward", "terminated", "final_obs")
CALLS: list[tuple[tuple[str, ...], Call, Any, str]] = [
    *((kinds_of(name), without(name), KeyError, name) for name in ("action", "reward", "terminated", "truncated")),
    (ANY, lambda b, given: b.add(), KeyError, "missing.*action"),
    (ANY, lambda b, given: b.add(*given.values()), TypeError, "positional"),
    (STEPS, lambda b, given: b.add(**each_of(given, lambda v: v[:0])), ValueError, "0"),
    (STEPS, lambda b, given: b.extend(*given.values()), TypeError, r"extend\(obs.*positional"),
    (STEPS, lambda b, given: b.add(**each_of(given, lambda v: v.repeat_interleave(2, 0))), ValueError, "needs"),
    (STEPS, lambda b, given: b.extend(**each_of(given, lambda v: v[None][:0])), ValueError, "at least one step"),
    *calls(ANY, lambda b, size: b.sample(size), SIZES),
    *calls(ANY, lambda b, beta: b.sample(2, beta=beta), alike(ValueError, "beta", -0.5, math.nan, 1e308)),
    (ANY, lambda b, _: b.sample(2, beta="0.5"), TypeError, "beta"),
    *calls(ANY, lambda b, keys: b.update_priorities(keys, ONES), KEYS),
    *calls(ANY, lambda b, keys: b[keys], KEYS),
    *calls(ANY, lambda b, keys: b.priorities(keys), [*OF_SOME, *NOT_LIVE]),
    *calls(ANY, lambda b, keys: b.exclude(keys), OF_SOME),
    *calls(ANY, lambda b, priorities: b.update_priorities(TWO, priorities), PRIORITIES),
    *calls(ANY, lambda b, kind: b[NOT_DENSE[kind](ONES)], alike(TypeError, "keys.*found", "coo", "quantized")),
    (STEPS, lambda b, given: b.add(**nothing_of(given)), ValueError, r"one step of each.*found \[0\]"),
    (STEPS, lambda b, given: b.extend(**nothing_of(given)), ValueError, r"needs shape \[T, \d.*found \[0\]"),
    (ANY, lambda b, _: b.write([0], other=[1.0]), KeyError, "unknown 'other'; it takes .*action"),
    (ANY, lambda b, _: b.write([0]), ValueError, "names no field"),
    *calls(STEPS, lambda b, name: b.write([0], **{name: [0.0]}), alike(KeyError, "unknown '.*it takes", *RESULTS)),
    (ANY, lambda b, given: b.write([0, 1], **written(given, 1)), ValueError, "a row for each of 2 keys; found 1"),
    (ANY, lambda b, given: b.write([0, 1], **written(given, 2)), ValueError, "rows where the others"),
    (ANY, lambda b, given: b.write([0.0], **written(given, 1)), TypeError, "keys must be integers"),
    (ANY, lambda b, given: b.write([0], action=given["action"][:1, None, None]), ValueError, "action"),
    (ANY, lambda b, given: b.write([0], action=given["action"][:1].cfloat()), LOSSY, "action"),
    (ANY, lambda b, _: b.sample_sequences(2, 3), TypeError, r"sequences=Sequences\("),
    (STEPS, lambda b, _: b.begin_episodes(np.ones(b.num_envs + 1, bool)), ValueError, "environments; found"),
    (STEPS, lambda b, _: b.begin_episodes(np.ones(b.num_envs)), LOSSY, "(?i:bool)"),
    *calls(ANY, lambda b, size: b.batches(size), alike(LOSSY, "size", 0, 1.5)),
    *calls(ANY, lambda b, size: b.epoch(size), SIZES),
    *calls(ANY, lambda b, shuffle: b.epoch(2, shuffle=shuffle), alike(TypeError, "shuffle", 1, None, "yes")),
    *calls(ANY, lambda b, eligible: b.keys(eligible), alike(TypeError, "eligible", 1, None)),
    (ANY, lambda b, _: iter(b), TypeError, r"epoch\(B\).*batches\(size\)"),
    (ANY, lambda b, _: b.load_state_dict({}), (TypeError, ValueError, KeyError), "."),
    *calls(ANY, lambda b, key: key in b, alike(TypeError, "needs a key", "5", 5.0, True, [5])),
    *calls(ANY, lambda b, path: b.save(path), PATHS),
    *calls(ANY, lambda b, path: type(b).load(path), PATHS),
    *calls(ANY, lambda b, path: b.plot(path), PATHS),
]
REFUSALS = [
    *(Refusal(f"add {one[:2]}", kinds_of(one[0]), changed(*one[:2]), *one[2:]) for one in GIVEN),
    *(Refusal(f"extend {one[:2]}", STEPS, changed(*one[:2], 2), *one[2:]) for one in EXTENDED),
    *(
        Refusal(f"{name} {kind}", ANY, changed(name, lambda v, of=of: of(torch.ones(v.shape))), TypeError, name)
        for name, kinds in (("obs", NOT_DENSE), ("priority", DENSE_PRIORITIES))
        for kind, of in NOT_DENSE.items()
        if kind in kinds
    ),
    *(Refusal(f"call {number}: {words}", *one, words) for number, (*one, words) in enumerate(CALLS)),
    *(
        Refusal(f"call: {words}", *one, words, on_the_host)
        for *one, words in calls(
            *(ANY, lambda b, value: b.update_priorities([max(b.added - 1, 0), 0], [2.0, value])),
            alike(ValueError, "finite.*loss of the learner.*stored rewards or observations", *NOT_FINITE),
        )
    ),
]
