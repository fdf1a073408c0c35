"""What `torch.compile` runs as eager code does; imported while something is compiled, since it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="call a buffer outside of the compiled function, or use buffer.capture")
def run_disabled(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a buffer's method."""
    return method(*arguments, **named)
