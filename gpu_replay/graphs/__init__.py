"""CUDA graphs and `torch.compile`: one learning step as one call, and calls that compiled code makes as eager code."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from torch import compiler

Class = TypeVar("Class", bound=type)
# those of every step ask by themselves: a wrapper would cost them a frame
_ASKING = ("add", "sample", "update_priorities")
_SPECIAL = ("__len__", "__getitem__", "__contains__")


def outside(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Make a call for a function that is being compiled: its graph ends here, and goes on with the result."""
    # imports the compiler, which is there by now
    from gpu_replay.graphs.disabled import run_disabled

    return run_disabled(method, *arguments, **named)


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as one that `torch.compile` never looks into."""

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        # by the module's name: Dynamo skips a frame that names no module of torch, and looks at those below it
        if compiler.is_dynamo_compiling():
            return outside(method, *arguments, **named)
        return method(*arguments, **named)

    return call


def never_traced(cls: Class) -> Class:
    """The class, into whose public methods `torch.compile` never looks."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name not in _ASKING and (name in _SPECIAL or name[0] != "_"):
            setattr(cls, name, untraced(method))
    return cls
