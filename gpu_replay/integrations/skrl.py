"""skrl: a memory for its off-policy agents (SAC, TD3, DDPG, DQN) in which each observation is stored once.

    from gpu_replay.integrations.skrl import ReplayMemory

    memory = ReplayMemory(memory_size=10_000, num_envs=env.num_envs, device=device)

`memory` replaces a `RandomMemory`. skrl's agents do not weight their losses: priorities need an agent that does, and
that calls `memory.buffer.update_priorities(memory.get_sampling_indexes(), td_error)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_replay import Field, Sequences, TrajectoryReplayBuffer, Uniform
from gpu_replay.integrations.streams import equal_rows, library, load_like, ring
from gpu_replay.samplers import Sampler

with library(__name__):
    from skrl.memories.torch import Memory
    from skrl.utils.spaces.torch import compute_space_size

# names of skrl to those in the buffer; any other tensor is a field of its own name
_NAMES = {
    "observations": "obs.observation",
    "states": "obs.state",
    "actions": "action",
    "rewards": "reward",
    "next_observations": "next_obs.observation",
    "next_states": "next_obs.state",
}
# what the buffer always has, or derives
_OWN = ("rewards", "terminated", "truncated", "next_observations", "next_states")
_NEEDED = ("observations", "actions", "rewards", "next_observations", "terminated")


class ReplayMemory(Memory):
    """The last `memory_size` steps of `num_envs` environments.

    memory_size: steps of each environment.
    device:      default: skrl's.
    replacement: as of RandomMemory: with False a batch has no row twice, and has fewer rows than asked for while fewer
                 are stored. Default: True.
    sampler:     in place of `replacement`; by default each row is sampled independently.
    dtype:       of stored float observations and states, such as torch.bfloat16; samples have the dtype that the agent
                 asks for.
    seed:        seed of sampling.
    sequence_length: steps of the windows that `sample` gives, which the specification of the agent's recurrent models
                 says; 1 for single steps.

    The next call, which brings the observation after a step, stores that step. If the observation differs from the
    step's `next_observations`, as when the trainer resets an environment, the memory takes the episode as truncated and
    keeps `next_observations`. So samples equal RandomMemory's, even if an agent passes no `truncated`. `buffer` is the
    underlying TrajectoryReplayBuffer, None before the first step. Tensors cannot be read or written by name, and there
    is no `export`: on-policy agents need RandomMemory. Raises ValueError for `replacement` together with a sampler.
    """

    def __init__(
        self,
        *,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        replacement: bool | None = None,
        sampler: Sampler | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        sequence_length: int = 1,
    ) -> None:
        if None not in (replacement, sampler):
            raise ValueError(
                f"replacement={replacement} is of uniform sampling; leave it out, or the sampler {sampler}."
            )
        super().__init__(memory_size=memory_size, num_envs=num_envs, device=device)
        self._distinct = replacement is not None and not replacement
        sampler = sampler or Uniform(replacement=not self._distinct)
        self.buffer: TrajectoryReplayBuffer | None = None
        self._settings: dict[str, Any] = {"sampler": sampler, "device": self.device, "seed": seed}
        rows = Sequences(sequence_length)
        self._length = rows.length
        if rows.length > 1:
            self._settings["sequences"] = rows
        self._dtype = dtype
        # shape and dtype of each tensor
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        # the newest step, by the names of skrl, and how many there have been
        self._held: dict[str, Tensor] = {}
        self._steps = 0

    def create_tensor(
        self, name: str, *, size: Any, dtype: torch.dtype | None = None, keep_dimensions: bool = False
    ) -> bool:
        """Declare a tensor; True if it is new. Raises ValueError for another size or dtype than before."""
        if size is None:
            return False
        shape = tuple(size) if keep_dimensions else (compute_space_size(size, occupied_size=True),)
        kind = shape, dtype or torch.get_default_dtype()
        if (found := self._kinds.setdefault(name, kind)) is kind:
            return True
        if found[0] != shape or dtype not in (None, found[1]):
            raise ValueError(
                f"{name!r} was created with size {found[0]} and {found[1]}; found {kind[0]} and {kind[1]}."
            )
        return False

    def get_tensor_names(self) -> list[str]:
        """Names of the declared tensors, sorted."""
        return sorted(self._kinds)

    def add_samples(self, **tensors: Any) -> None:
        """Store one step of all environments; tensors that were not created are not stored.

        Raises ValueError for steps of some environments only, KeyError without `observations`, `actions`, `rewards`,
        `next_observations` and `terminated`, and what `TrajectoryReplayBuffer.add` raises.
        """
        missing = [name for name in _NEEDED if name not in self._kinds or tensors.get(name) is None]
        if missing:
            raise KeyError(f"ReplayMemory needs the tensors {', '.join(_NEEDED)}; {', '.join(missing)} is missing.")
        step = {}
        for name, (shape, dtype) in self._kinds.items():
            value = tensors.get(name)
            if value is not None:
                if value.numel() != self.num_envs * Field(shape, dtype).elements:
                    wanted = [self.num_envs, *shape]
                    raise ValueError(
                        f"{name} needs shape {wanted}, all environments at once; found {list(value.shape)}."
                    )
                # environments may write their next step into the same tensors
                step[name] = value.detach().reshape(self.num_envs, *shape).to(self.device, dtype, copy=True)
        if self._held:
            self._store(self._held, step["observations"])
        self._held, self._steps = step, self._steps + 1

    def _store(self, step: dict[str, Tensor], following: Tensor) -> None:
        """Store a step that these observations follow."""
        buffer = self.buffer
        if buffer is None:
            fields = {_NAMES.get(name, name): self._field(name) for name in self._kinds if name not in _OWN}
            buffer = ring(self.memory_size * self.num_envs, self.num_envs, fields, **self._settings)
        ended = ~equal_rows(following, step["next_observations"])
        terminated = step["terminated"].flatten() != 0
        if "truncated" in step:
            ended |= step["truncated"].flatten() != 0
        values = {_NAMES.get(name, name): value for name, value in step.items() if name not in _OWN}
        final = {f"final_obs.{name}": step[f"next_{name}s"] for name in ("observation", "state") if f"{name}s" in step}
        flags = {"terminated": terminated, "truncated": ended & ~terminated}
        buffer.add(reward=step["rewards"].flatten(), **flags, **values, **final)
        self.buffer = buffer

    def _field(self, name: str) -> Field:
        shape, dtype = self._kinds[name]
        short = self._dtype is not None and dtype.is_floating_point and name in ("observations", "states")
        return Field(shape, self._dtype, dtype) if short and self._dtype else Field(shape, dtype)

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Tensor | None]]:
        """Sample `batch_size` steps, or windows of `sequence_length` steps, as a list of the named tensors for each
        mini-batch: row `i` is in mini-batch `i % mini_batches`. With `replacement=False` there may be fewer rows.

        Windows are of one environment and do not cross the newest step. Before three steps were added the newest one
        is sampled. Raises RuntimeError while there is nothing to sample, ValueError for another `sequence_length` than
        the memory's.
        """
        buffer, rows = self.buffer, None
        if sequence_length != self._length:
            raise ValueError(
                f"sample({sequence_length=}) of a memory that gives windows of {self._length} steps; make it with "
                f"ReplayMemory(..., {sequence_length=})."
            )
        if not self._steps or (sequence_length > 1 and buffer is None):
            raise RuntimeError(f"sample({batch_size}): the memory holds {self._steps} steps. Add more first.")
        stored = buffer if sequence_length > 1 or self._steps > 2 else None
        if self._distinct:
            distinct = self.num_envs if stored is None else stored._available(batch_size)
            batch_size = min(batch_size, max(1, distinct))
        if stored is not None:
            rows = stored.sample(batch_size)
        self.sampling_indexes = None if rows is None else rows.key
        chosen = torch.arange(batch_size, device=self.device) % self.num_envs

        def column(name: str) -> Tensor | None:
            if name not in self._kinds:
                return None
            shape, dtype = self._kinds[name]
            value = self._held[name][chosen] if rows is None else rows[_NAMES.get(name, name)]
            return value.reshape(batch_size, -1, *shape).to(dtype)

        columns = [column(name) for name in names]
        parts = range(mini_batches)
        return [[None if each is None else each[i::mini_batches].flatten(0, 1) for each in columns] for i in parts]

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "ReplayMemory has no tensors that can be read or written by name: use sample(), memory.buffer[keys] or "
            "memory.buffer.batches(size). On-policy agents, which work on all steps in order, need RandomMemory."
        )

    sample_all = sample_by_index = get_tensor_by_name = set_tensor_by_name = _refused

    def __len__(self) -> int:
        stored = 0 if self.buffer is None else len(self.buffer)
        return min(stored + self.num_envs * bool(self._held), self.memory_size * self.num_envs)

    def reset(self) -> None:
        """Forget all steps."""
        self._held, self._steps = {}, 0
        if self.buffer is not None:
            self.buffer.clear()
            self.buffer.begin_episodes()

    def save(self, directory: str = "", *, format: str = "pt") -> None:
        """Write all steps but the newest to a folder, which `load` reads; `format` is not used.

        Raises ValueError without a folder, RuntimeError before the second step; see `TrajectoryReplayBuffer.save`.
        """
        if not directory:
            raise ValueError("save needs a folder: save('runs/memory').")
        if self.buffer is None:
            raise RuntimeError(f"save: the memory holds {self._steps} steps. Add more first.")
        self.buffer.save(Path(directory))

    def load(self, path: str) -> None:
        """Load what `save` wrote; new episodes begin. Raises CheckpointError if it is damaged or of other settings."""
        envs, sampler = self.num_envs, self._settings["sampler"]
        wanted = {"capacity": self.memory_size * envs, "num_envs": envs, "sampler": sampler}
        self.buffer = load_like(TrajectoryReplayBuffer, path, self.device, **wanted)
        self._held, self._steps = {}, 3
