"""`ReplayBuffer`: single transitions in a ring of preallocated tensors, sampled uniformly or by priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, compiler

from gpu_replay import validation
from gpu_replay.base.buffer import Buffer, never_traced, outside
from gpu_replay.base.mixture import ReplayMixture as ReplayMixture
from gpu_replay.base.refusals import hint_from_spaces
from gpu_replay.batch import Batch
from gpu_replay.engines.device import DeviceEngine
from gpu_replay.engines.host import HostEngine
from gpu_replay.engines.memory import StoragePath
from gpu_replay.engines.storage import check_capacity
from gpu_replay.fields import Field, check_fields, check_names, flattened
from gpu_replay.samplers import UNIFORM, Sampler
from gpu_replay.spaces import step_fields

if TYPE_CHECKING:
    from gymnasium import Space
    from typing_extensions import Never, Self


@never_traced
class ReplayBuffer(Buffer):
    """A ring of the last `capacity` transitions, sampled by `sampler`.

    capacity: transitions, from 1 to 2**31 - 1; powers of two or not.
    fields:   name to Field; one tensor `[capacity, *shape]` is allocated for each, once.
    sampler:  Uniform, Proportional, RankBased, Latest, Combined, or one of your own.
    device:   by default "cuda" if torch finds a CUDA device, else "cpu".
    seed:     of the random stream; equal seeds and priority masses sample the same keys on every device.
    storage_device: "cpu" keeps the fields of a buffer on a GPU in pinned host memory, which kernels read and write over
              the bus; masses, keys and batches stay on the GPU. Default: the buffer's own device.
    storage_path: folder for the fields of a buffer on the CPU: they are in a file there, mapped into memory, which may
              be larger than memory. The folder is created if missing; several buffers may share it.

    Samples and checkpoints do not depend on where the fields are. The file is temporary and has no name: the
    constructor reserves its blocks, and the system frees them with the buffer, even if the process is killed. Use
    `save` for what must last.

    One thread may `add` while another samples and updates. Raises MemoryError with a per-field table, before it
    allocates anything, when the device, the host or the disk lacks the bytes; OSError for a folder that cannot be
    written to; TypeError, ValueError for invalid settings.
    """

    _engine: HostEngine | DeviceEngine
    _host_engine = HostEngine
    _device_engine = DeviceEngine
    _units = "transitions"

    @hint_from_spaces
    def __init__(
        self,
        capacity: int,
        fields: Mapping[str, Field],
        *,
        sampler: Sampler = UNIFORM,
        device: torch.device | str | None = None,
        seed: int = 0,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> None:
        checked = check_fields(fields)
        super().__init__(check_capacity(capacity), checked, sampler, device, seed, storage_device, storage_path)
        self._checks, self._names = validation.checks_of(self._fields, on_host=self._on_host), self._fields.keys()

    @classmethod
    def from_spaces(
        cls,
        capacity: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        dtypes: Mapping[str, Any] | None = None,
        extra: Mapping[str, Field] | None = None,
        **settings: Any,
    ) -> Self:
        """Make a buffer of the five classic fields obs, action, reward, next_obs, terminated for two Gymnasium spaces.

        dtypes:   of fields by name, such as `{"obs": torch.float64}`, which applies to `next_obs` too, and for a Dict
                  space to all `obs.NAME`. Default: float32 for Boxes of float64, the space's dtype for everything else.
        extra:    further fields, such as `{"hidden": Field((256,), torch.float32)}`.
        settings: sampler, device and any other setting of the class.

        A Dict (or Tuple) observation space becomes fields named `obs.NAME` and `next_obs.NAME`, and a Dict action space
        fields named `action.NAME`. Raises TypeError for spaces without a fixed shape, such as Text, Sequence and Graph;
        KeyError for a name in `dtypes` that is no field, or in `extra` that is one already.
        """
        fields = step_fields(observation_space, action_space, dtypes, extra, whole=True)
        return cls(capacity, fields, **settings)

    @classmethod
    def from_env(cls, *_: object, **__: object) -> NoReturn:
        """Raise TypeError: single transitions need no number of environments and no mode; use `from_spaces`."""
        raise TypeError(
            f"{cls.__name__}.from_spaces(capacity, observation_space, action_space) makes this buffer from an "
            "environment's spaces (single_observation_space and single_action_space of a vector environment)."
        )

    def add(self, *unnamed: Never, priority: Any = None, **fields: Any) -> Tensor:
        """Store `m` transitions and return their keys, (m,) int64 on the buffer's device.

        fields:   every field of the buffer, `[m, *shape]`: NumPy arrays, CPU tensors or tensors on the buffer's device.
                  `m` may differ between calls, may be 0, and may exceed the capacity: the last ones stay. One
                  transition may be given as a single environment gives it: then no value has the leading axis. Scalars
                  may be `[m, 1]`, and flags 0 and 1 of any dtype. A dictionary, nested too, is the same as dotted
                  names: `obs={"image": x}` is the field `obs.image`.
        priority: (m,) absolute TD errors or other non-negative numbers (the sign is dropped). A mass is never below
                  one unit, 2^-20: a priority of 0 with `eps=0` counts as that. Without it new transitions enter with
                  the priority that the sampler's `initial` says.

        Raises KeyError for a missing or unknown field, ValueError for a wrong shape, device or a value out of range,
        TypeError for a dtype that would lose values. Nothing is stored by a call that raises; an interrupt
        (KeyboardInterrupt) comes before the call has stored anything, or after all of it.
        Values of tensors on CUDA are not looked at: floats too large for the field become infinite, and any number but
        0 is a true flag.
        """
        if unnamed:
            self._refuse_unnamed("add", unnamed, self._fields)
        if compiler.is_dynamo_compiling():
            return outside(ReplayBuffer.add, self, priority=priority, **fields)
        if fields.keys() != self._names:
            fields = flattened(fields, self._fields)
            check_names(fields, self._fields)
        on_host = self._on_host
        values, rows, ready, single = validation.as_rows(
            fields, self._checks, None, self._device, on_host=on_host, bare=on_host
        )
        if priority is not None:
            given = validation.with_axis(priority) if single else priority
            priority = validation.as_priorities("priority", given, rows, self._device, as_array=on_host)
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        with self._lock:
            return self._engine.append(values, rows, priority, single if on_host else ready)

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` transitions as a Batch on the buffer's device.

        batch_size: B >= 1.
        beta:       exponent of the importance weights for this call, instead of the sampler's.
        returns:    fields (B, *shape), `key` (B,) int64, `probability` (B,) float32 of drawing that transition once,
                    `weight` (B,) float32, the importance weight, at most 1.

        Raises RuntimeError when nothing is stored, ValueError when more distinct transitions are asked for than there
        are. A beta schedule advances by one.
        """
        if compiler.is_dynamo_compiling():
            return outside(ReplayBuffer.sample, self, batch_size, beta=beta)
        batch, exponent = validation.check_batch_size(batch_size), validation.check_beta(beta)
        with self._lock:
            self._check_enough(batch)
            return Batch(self._engine.sample(batch, exponent))
