"""`gpu-replay info`: versions, devices, and for each device which code runs there."""

from __future__ import annotations

import argparse
import os
import time

import torch

from gpu_replay.console.versions import OPTIONAL, device_name, versions
from gpu_replay.engines.memory import free_bytes
from gpu_replay.loops.compiling import Loop, compiler, modules
from gpu_replay.ops._backend import VARIABLE, choose
from gpu_replay.ops.advice import install

DESCRIPTION = "Print versions, devices, and for each device which code runs there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag --compile."""
    parser.add_argument("--compile", action="store_true", help="compile the loops of buffers on a CPU now")


def run(options: argparse.Namespace) -> int:
    """Print everything; returns the exit code."""
    found = versions()
    for name in (*found, *(name for name in OPTIONAL if name not in found)):
        print(f"{name:<12} {found.get(name, 'not installed')}")
    print(f"{VARIABLE:<12} {os.environ.get(VARIABLE) or 'not set: the code follows the device'}")
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        try:
            code: str = choose(device)
        except (ValueError, RuntimeError) as error:
            code = f"none ({error})"
        if code == "host":
            slowly = f"as Python, slowly; Numba compiles them: {install('cpu')}"
            code = f"host, loops {'compiled by Numba' if compiler() else slowly}"
        print(f"{device!s:<12} {device_name(device)}, {_memory(device)}, code: {code}")
    default = devices[1] if torch.cuda.is_available() else devices[0]
    print(f"{'default':<12} {default}")
    if options.compile and compiler():
        began, loops = time.perf_counter(), [each for file in modules() for each in vars(file).values()]
        count = sum(isinstance(each, Loop) and each.compiled() is not None for each in loops)
        print(f"{'compiled':<12} {count} loops in {time.perf_counter() - began:.1f} s, kept for later runs")
    elif options.compile:
        print(f"{'compiled':<12} nothing: Numba is missing, or told not to compile")
    return 0


def _memory(device: torch.device) -> str:
    free = free_bytes(device)
    amount = "free memory unknown" if free is None else f"{free / 1e9:.1f} GB free"
    if device.type == "cpu":
        return f"{os.cpu_count()} cores, {amount}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, {amount}"
