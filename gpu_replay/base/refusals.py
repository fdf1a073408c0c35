"""Refuses common misuse, such as forks, spawned processes and wrong calls, with a message that says what to do."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import getfullargspec
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gpu_replay.ops.advice import warn_caller

_INSTEAD = (
    "its copy would add rows that nobody sees and sample what others sample. Let actors in other processes send their "
    "steps through a queue to the process of the buffer, as gpu_replay/examples/async_actors.py does, or make a buffer "
    "in that process."
)
# what settings of samplers and of other libraries are here
_MEANT = dict.fromkeys(("max_size", "size", "buffer_size", "memory_size", "max_length"), "capacity")
_MEANT |= {name: f"sampler=Proportional({name}=...)" for name in ("alpha", "beta", "eps", "clip", "initial")}
_MEANT |= dict.fromkeys(("seq_len", "sequence_length", "length", "burn_in"), "sequences=Sequences(length)")
_MEANT |= dict.fromkeys(("batch_size",), "sample(batch_size)")
_OF_STEPS = ("num_envs", "stack", "n_step", "gamma", "autoreset", "relabel", "sequences")
_MEANT |= dict.fromkeys(_OF_STEPS, "a TrajectoryReplayBuffer, to which it belongs")
# what earlier versions had
_GONE = {"random_shift": "sampled images are shifted by eight lines of torch: see the guide, Random shifts of images."}
# all buffers of this process
_buffers: weakref.WeakSet[Any] = weakref.WeakSet()
Init = TypeVar("Init", bound=Callable[..., None])


class ForkedLock:
    """Replaces the lock of a buffer in forked processes; entering it raises RuntimeError."""

    def __enter__(self) -> None:
        raise RuntimeError(f"this process was forked from the one that made the buffer: {_INSTEAD}")

    def __exit__(self, *_: object) -> None:
        """Never entered, so never left."""


HALF_LOADED = (
    "a load or clear of this buffer was interrupted, and so was the clear after it: rows may be mixtures of two "
    "states. Call clear(), or load a state that was saved."
)
RELABELS = (
    "reward_fn and terminated_fn run inside sample: they must not change their buffer, nor sample from it. Make such "
    "calls once sample has returned."
)


class Refusing:
    """Replaces an engine, or its sampler, while the calls of a buffer would find it half changed: they raise.

    allowed: what may be asked of the engine meanwhile.
    """

    def __init__(self, message: str, engine: Any, allowed: tuple[str, ...]) -> None:
        self._message, self._engine, self._allowed = message, engine, allowed

    def __getattr__(self, name: str) -> Any:
        if name in self._allowed:
            return getattr(self._engine, name)
        raise RuntimeError(self._message)


def refuse_in_forks(buffer: Any) -> None:
    """From now on every call of this buffer raises RuntimeError in processes that are forked from this one."""
    _buffers.add(buffer)


def _replace_locks() -> None:
    for buffer in _buffers:
        buffer._lock = ForkedLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks)


def refuse_for_spawned() -> None:
    """Raise RuntimeError while the arguments of a process that is being started are pickled."""
    if get_spawning_popen() is not None:
        raise RuntimeError(f"a buffer was given to a process that is being started: {_INSTEAD}")


def warn_of_assumed_autoreset() -> None:
    """Warn that a buffer of one environment was made without saying how that is reset."""
    warn_caller(
        "a buffer of one environment was made without autoreset=, and takes 'next_step': for an environment that "
        "resets itself in the step after an episode's end, as those of gymnasium.make_vec do. If your loop calls "
        "env.reset(), give autoreset='disabled', and final_obs= to add where an episode was truncated; if the "
        "environment resets itself within the last step, 'same_step'; else write 'next_step'. "
        "TrajectoryReplayBuffer.from_env finds out by itself."
    )


if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):
        """A class method that makes a new buffer; calling it on an instance raises TypeError."""

        def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
            bound = super().__get__(None, owner)
            if instance is None:
                return bound

            @wraps(bound)
            def refuse(*_: object, **__: object) -> NoReturn:
                name, instead = owner.__name__, ", or change this one with `load_state_dict(state)`"
                raise TypeError(
                    f"{self.__name__} makes another buffer and leaves this one as it is: write "
                    f"`buffer = {name}.{self.__name__}(...)`{instead * hasattr(owner, 'load_state_dict')}."
                )

            return refuse


def hint_from_spaces(init: Init) -> Init:
    """Decorate a constructor to raise a TypeError that names `from_spaces` when it gets Gymnasium spaces, and what was
    meant by a setting that there is not, or what to do without one that there was.
    """
    arguments = getfullargspec(init)
    names, known = arguments.args[1:], [*arguments.args[1:], *arguments.kwonlyargs]

    @wraps(init)
    def checked(self: Any, *given: Any, **settings: Any) -> None:
        if len(given) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes ({', '.join(names)}) and settings by name; found {len(given)} arguments. "
                f"Gymnasium's spaces go to {type(self).__name__}.from_spaces."
            )
        for name in settings.keys() - known:
            if name in _GONE:
                raise TypeError(f"{type(self).__name__} has no setting {name!r} any more: {_GONE[name]}")
            meant = _MEANT.get(name) or next(iter(get_close_matches(name, known)), None)
            raise TypeError(
                f"{type(self).__name__} has no setting {name!r}{f'; did you mean {meant}?' if meant else '.'} It takes "
                f"{', '.join(known)}."
            )
        init(self, *given, **settings)

    return checked  # type: ignore[return-value]
