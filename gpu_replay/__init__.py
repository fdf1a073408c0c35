"""A tensor replay buffer for PyTorch that lives on the GPU: exact prioritized sampling with no host in the loop."""

from pathlib import Path

# In a checkout the device code and the benchmarks stand beside the package; installed, they are inside it. The real
# folder comes first: an editable install reaches this file through a folder of links, which new modules are not in.
_folder = Path(__file__).resolve().parent
if (_folder.parent / "pyproject.toml").is_file():
    __path__[:] = [str(_folder), str(_folder.parent)]

from gpu_replay.batch import Batch
from gpu_replay.buffer import ReplayBuffer
from gpu_replay.errors import CheckpointError
from gpu_replay.fields import Field
from gpu_replay.hindsight import Hindsight
from gpu_replay.samplers import Combined, Latest, Proportional, RankBased, Uniform
from gpu_replay.schedule import LinearSchedule
from gpu_replay.sharded.buffer import ShardedReplayBuffer
from gpu_replay.stats import Stats
from gpu_replay.trajectory_buffer import TrajectoryReplayBuffer

__version__ = "0.1.0"

__all__ = [
    "ReplayBuffer",
    "TrajectoryReplayBuffer",
    "ShardedReplayBuffer",
    "Field",
    "Batch",
    "Uniform",
    "Proportional",
    "RankBased",
    "Latest",
    "Combined",
    "LinearSchedule",
    "Hindsight",
    "Stats",
    "CheckpointError",
    "__version__",
]
