"""A tensor replay buffer for PyTorch that lives on the GPU: exact prioritized sampling with no host in the loop."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the device code and the benchmarks stand beside the package; installed, they are inside it. The real
# folder is named because an editable install reaches this file through a folder of links, which new modules are not in.
# The checkout's root is not: the package lies there too, and `gpu_replay.gpu_replay` would be a second copy of it.
_folder = Path(__file__).resolve().parent
if (_folder.parent / "pyproject.toml").is_file():
    __path__[:] = [str(_folder)]
    for _name in ("kernels", "bench"):
        _spec = ModuleSpec(f"{__name__}.{_name}", None, is_package=True)
        _spec.submodule_search_locations = [str(_folder.parent / _name)]
        globals()[_name] = sys.modules[_spec.name] = module_from_spec(_spec)

if TYPE_CHECKING:
    from gpu_replay.batch import Batch
    from gpu_replay.buffer import ReplayBuffer, ReplayMixture
    from gpu_replay.checkpoint import CheckpointError
    from gpu_replay.fields import Field
    from gpu_replay.hindsight import Hindsight
    from gpu_replay.samplers import (
        Combined,
        Latest,
        LinearSchedule,
        Proportional,
        RankBased,
        Sampler,
        Sequences,
        Uniform,
    )
    from gpu_replay.sharded.buffer import ShardedReplay
    from gpu_replay.stats import Stats
    from gpu_replay.trajectory_buffer import TrajectoryReplayBuffer

__version__ = "0.4.0"

__all__ = [
    "ReplayBuffer",
    "TrajectoryReplayBuffer",
    "ShardedReplay",
    "ReplayMixture",
    "Field",
    "Batch",
    "Uniform",
    "Proportional",
    "RankBased",
    "Latest",
    "Combined",
    "LinearSchedule",
    "Sampler",
    "Hindsight",
    "Sequences",
    "Stats",
    "CheckpointError",
    "__version__",
]

# modules whose names differ from the names that they export
_MODULES = {"ReplayBuffer": "buffer", "TrajectoryReplayBuffer": "trajectory_buffer", "ReplayMixture": "buffer"}
_SAMPLERS = ("Uniform", "Proportional", "RankBased", "Latest", "Combined", "LinearSchedule", "Sampler", "Sequences")
_MODULES |= dict.fromkeys(_SAMPLERS, "samplers")
_MODULES |= {"Field": "fields", "CheckpointError": "checkpoint"}
_MODULES["ShardedReplay"] = "sharded.buffer"


def __getattr__(name: str) -> Any:
    # importing torch takes two seconds: the command starts before that, so that Ctrl-C ends it without a traceback
    if name == "ShardedReplayBuffer":
        # the text of an AttributeError would not reach those who import the name
        raise ImportError(
            "ShardedReplayBuffer went in 0.4.0: let each rank make a buffer of its own, with another seed, and write "
            "ShardedReplay(buffer)."
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, name.lower())}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
