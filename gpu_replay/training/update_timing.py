"""`python -m gpu_replay.training.update_timing`: what an update costs on this CPU, beside what its operations need.

The peak is that of the largest matrix product, in one thread. Of an update's operations only multiplications of its
convolutions and matrix products are counted: three forward passes, the gradients of all weights, and those of all
activations but the first layer's. Times are the least of several, taken in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import nn

from gpu_replay import Batch, Field
from gpu_replay.console.arguments import positive
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.helper_thread import HelperThread
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.precision import learner, random_batch
from gpu_replay.training.settings import Settings

CPU = torch.device("cpu")
PONG = EnvironmentSpec("pong", Field((42, 42), torch.uint8, torch.float32, 1 / 255), 3, None, None, stack=4)
SIDE = 1024


def operations(network: QNetwork, batch_size: int) -> int:
    """Floating-point operations of an update with double Q-learning, a multiplication and an addition being two."""
    side = PONG.stacked.shape[1]
    products: list[int] = []
    for layer in [*network.convolutions, *network.head]:
        if isinstance(layer, nn.Conv2d):
            side = (side - layer.kernel_size[0]) // layer.stride[0] + 1
            products.append(layer.weight.numel() * side * side)
        elif isinstance(layer, nn.Linear):
            products.append(layer.weight.numel())
    # three passes, gradients of weights, and of what enters each layer but the first
    return 2 * batch_size * (4 * sum(products) + sum(products[1:]))


def least(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each call, the least of `rounds`, the calls in turn."""
    found = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="default: 30")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings.for_family("atari", batch_size=options.batch_size)
    count = settings.updates_a_sample
    drawn = random_batch(PONG, count * options.batch_size)
    batches = [Batch({name: rows[part::count] for name, rows in drawn.items()}) for part in range(count)]
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    calls: dict[str, Callable[[], object]] = {}
    for name, dtype in names.items():
        square = torch.randn(SIDE, SIDE).to(dtype)
        half = dataclasses.replace(settings, bfloat16=dtype == torch.bfloat16)
        one, two = learner(half, PONG, CPU), learner(half, PONG, CPU, helper=HelperThread())
        calls[f"{name} product"] = lambda square=square: square @ square  # type: ignore[misc]
        calls[f"{name} one"] = lambda agent=one: agent.updates_with(batches)  # type: ignore[misc]
        calls[f"{name} two"] = lambda agent=two: agent.updates_with(batches)  # type: ignore[misc]
    found = least(calls, options.rounds)
    work = operations(one.online, options.batch_size)
    weights = sum(weight.nbytes for weight in one.online.parameters())
    pixels = 2 * batches[0].obs.nbytes
    print(f"an update of {options.batch_size}: {work / 1e6:.0f} MFLOP")
    print(f"{pixels / 1e6:.2f} MB of pixels, {weights / 1e6:.2f} MB of weights")
    for name in names:
        peak = 2 * SIDE**3 / found[f"{name} product"]
        one_ms, two_ms = (1e3 * found[f"{name} {threads}"] / count for threads in ("one", "two"))
        bound = 1e3 * work / peak
        print(
            f"{name:8s} peak {peak / 1e9:.0f} GFLOP/s, an update at that {bound:.2f} ms; one thread {one_ms:.2f} ms, "
            f"{bound / one_ms:.0%} of peak; with the helper {two_ms:.2f} ms"
        )


if __name__ == "__main__":
    main()
