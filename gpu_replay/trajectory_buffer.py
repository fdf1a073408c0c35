"""`TrajectoryReplayBuffer`: streams of steps in which every observation is stored once.

Stacks, `next_obs`, n-step rewards and discounts are put together when a batch is sampled. This file checks what users
pass in; the work is done by an engine, `host_trajectory.py` on CPU tensors or `device_trajectory.py` through kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, compiler

from gpu_replay import validation
from gpu_replay.base.buffer import Buffer, never_traced, outside
from gpu_replay.base.refusals import RELABELS, class_only, hint_from_spaces, warn_of_assumed_autoreset
from gpu_replay.base.steps import StepInput, objects
from gpu_replay.batch import Batch
from gpu_replay.engines.device_trajectory import TrajectoryDeviceEngine
from gpu_replay.engines.host_trajectory import TrajectoryHostEngine
from gpu_replay.engines.memory import MakeMemory, StoragePath
from gpu_replay.engines.storage import (
    Autoreset,
    Padding,
    StreamSettings,
    TrajectoryStorage,
    check_sequences,
    check_stream_fields,
)
from gpu_replay.fields import FLAG, REWARD, Field
from gpu_replay.hindsight import Hindsight, check_saved_relabel
from gpu_replay.samplers import UNIFORM, Sampler, Sequences
from gpu_replay.spaces import ASSUMED_AUTORESET, autoreset_name, step_fields, vector_settings, warn_of_stacks

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.vector import AutoresetMode, VectorEnv
    from typing_extensions import Never, Self


@never_traced
class TrajectoryReplayBuffer(Buffer):
    """A ring of the last `capacity` steps of `num_envs` environments, sampled as n-step transitions with stacks.

    capacity:       steps of all environments together; rounded down to a multiple of `num_envs`.
    num_envs:       environments that step together; the key of environment `e` at step `t` is `t * num_envs + e`.
    fields:         name to Field, of one step: "obs" (or several "obs.NAME"), "action", and anything else to store.
                    The buffer always stores `reward`, `terminated` and `truncated`.
    stack:          frames `S` in an observation, oldest first; no stack axis when it is 1.
    n_step, gamma:  steps `n` until bootstrapping, and the discount of one step.
    autoreset:      what `obs` holds in the step after an ending: with "next_step" (Gymnasium's default) the final
                    observation, with "same_step" and "disabled" (your loop calls `env.reset()`) the new episode's first
                    one. Also Gymnasium's AutoresetMode. Name it for `num_envs=1`, where leaving it out warns
                    (UserWarning): loops of one environment mostly reset it themselves.
    padding:        frames before an episode's first one: "reset" repeats it, "zero" is zeros (as ALE's own stacks).
    sampler:        Uniform, Proportional, RankBased, Latest, Combined, or one of your own.
    device:         by default "cuda" if torch finds a CUDA device, else "cpu".
    seed:           of the random stream.
    final_capacity: number of final observations to keep, with "same_step" and "disabled". Default: as many as fit in
                    max(3 MiB, 32 bytes * capacity), at least one per 32 steps (3% of the frames) and one per
                    environment. When all are in use, newly truncated windows are not sampled until an old one is
                    overwritten: `stats().lost_truncations` counts them, and the first one warns.
    terminal_obs:   whether to keep final observations of terminated episodes too, so that `next_obs` of a terminated
                    window is its final observation, as with "next_step": for world models, or statistics of
                    observations. Truncated episodes take their places where places are few;
                    `stats().lost_terminal_obs` counts terminated ones without a place, whose `next_obs` is the last
                    observation before. Set `final_capacity` where episodes are short.
    relabel:        Hindsight, for goals: rewrites goals and rewards of a share of every batch; needs `n_step=1`.
                    Implies `terminal_obs`; truncated and terminated episodes then share the places.
    sequences:      Sequences(length), to sample sequences of `length` steps instead of single ones; None for these.
    storage_device, storage_path: where the fields are, as in `ReplayBuffer`; rewards, flags and final observations
                    stay with the priorities.

    A step is an eligible start of a window while its stack, its window of at most `n_step` steps and the observation
    after the window (unless the episode terminated inside) are stored. With `sequences` it begins a row while it is
    such a start, and the `L` steps from it on are stored and settled: each has its window and the observation after it,
    or is known never to have them: windows that end with a truncation without a final observation, reset steps, and
    windows that `begin_episodes` broke off (from the next `add` on). With `strict` all `L` lie in one episode, to which
    a reset step does not belong. One thread may `add` while another samples and updates. Raises MemoryError with a
    per-field table, before it allocates anything, when the device lacks the bytes; KeyError, TypeError, ValueError for
    invalid settings.

    Mnih et al. 2015 (frames stored once); Sutton 1988 (n-step returns).
    """

    _engine: TrajectoryHostEngine | TrajectoryDeviceEngine
    _host_engine = TrajectoryHostEngine
    _device_engine = TrajectoryDeviceEngine
    _units = "eligible starts"

    @hint_from_spaces
    def __init__(
        self,
        capacity: int,
        num_envs: int,
        fields: Mapping[str, Field],
        *,
        stack: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        autoreset: Autoreset | AutoresetMode = ASSUMED_AUTORESET,
        padding: Padding = "reset",
        sampler: Sampler = UNIFORM,
        device: torch.device | str | None = None,
        seed: int = 0,
        final_capacity: int | None = None,
        terminal_obs: bool = False,
        relabel: Hindsight | None = None,
        sequences: Sequences | None = None,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
    ) -> None:
        checked = check_stream_fields(fields)
        mode = autoreset_name(autoreset)
        given = StreamSettings(
            capacity, num_envs, stack, n_step, gamma, mode, padding, final_capacity, terminal_obs, relabel, sequences
        )
        self._settings = given.checked(checked)
        if autoreset is ASSUMED_AUTORESET and self._settings.num_envs == 1:
            warn_of_assumed_autoreset()
        self._shape = self._settings.shape
        super().__init__(self._shape.slots, checked, sampler, device, seed, storage_device, storage_path)
        self._step_fields = {**self._fields, "reward": REWARD, "terminated": FLAG, "truncated": FLAG}
        observations, on_host = list(self._streams.observations), self._on_host
        self._checks, self._names = validation.checks_of(self._step_fields, on_host=on_host), self._step_fields.keys()
        self._input = StepInput(self._step_fields, observations, self._shape, self._device, on_host)

    def _missing(self) -> str:
        rows, envs = self._settings.sequences, self._settings.num_envs
        if rows is None:
            return f": a start needs n_step={self.n_step} steps of its environment, and the observation after them"
        first, added = self._sampling.span()
        needed = f"an episode of {rows.length} steps" if rows.strict else f"{rows.length} steps of an environment"
        begins = f" that begin at a multiple of {rows.stride} steps" if rows.stride > 1 else ""
        return (
            f": a row of {rows} needs {needed}{begins}, and the observation after its first n_step={self.n_step}; "
            f"{(added - first) // envs} steps of each environment are stored"
        )

    def _make_storage(self, device: torch.device, memory: MakeMemory | None = None) -> TrajectoryStorage:
        self._streams = TrajectoryStorage(self._settings, self._fields, device, memory)
        return self._streams

    @classmethod
    def from_spaces(
        cls,
        capacity: int,
        num_envs: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        dtypes: Mapping[str, Any] | None = None,
        extra: Mapping[str, Field] | None = None,
        **settings: Any,
    ) -> Self:
        """Make a buffer of obs and action for the Gymnasium spaces of one environment.

        dtypes:   of fields by name, such as `{"obs": torch.float64}`, which for a Dict space means every `obs.NAME`.
                  Default: float32 for Boxes of float64, the space's dtype for everything else.
        extra:    further fields, such as `{"hidden": Field((256,), torch.float32)}`.
        settings: stack, n_step, gamma, sampler, device and any other setting of the class.

        Dict and Tuple spaces become fields named `obs.NAME`. Raises TypeError for spaces without a fixed shape, such as
        Text, Sequence and Graph; KeyError for a name in `dtypes` that is no field, or in `extra` that is one already.
        """
        return cls(capacity, num_envs, step_fields(observation_space, action_space, dtypes, extra), **settings)

    @classmethod
    def from_env(
        cls,
        env: VectorEnv[Any, Any, Any] | Env[Any, Any],
        capacity: int,
        *,
        dtypes: Mapping[str, Any] | None = None,
        extra: Mapping[str, Field] | None = None,
        **settings: Any,
    ) -> Self:
        """Make a buffer for a Gymnasium vector environment: its number of environments, spaces and autoreset mode.

        env:      vector environment, or a single one. The loop of a single one calls `reset` after an ending
                  (`autoreset="disabled"`), unless it contains `gymnasium.wrappers.Autoreset` ("next_step"). `num_envs`
                  and the metadata may come from `env.unwrapped`; spaces always come from `env`.
        dtypes, extra, settings: as in `from_spaces`; give `autoreset` if the environment's metadata has no
                  `autoreset_mode`.

        Raises TypeError for anything but an environment. Warns if its observations look like stacks of frames, which
        the buffer would store several times.
        """
        if isinstance(env, (int, float, np.number)):
            found = f"({env}, {type(capacity).__name__})"
            raise TypeError(f"from_env takes (env, capacity), and the two are exchanged: found {found}.")
        arguments = {**vector_settings(env, single=True), **settings}
        if "autoreset" not in arguments:
            raise ValueError(
                "the environment's metadata do not say its autoreset_mode; give autoreset='next_step', 'same_step' or "
                "'disabled'."
            )
        buffer = cls.from_spaces(capacity, dtypes=dtypes, extra=extra, **arguments)
        warn_of_stacks(buffer.fields)
        return buffer

    # attributes

    @property
    def num_envs(self) -> int:
        """Environments stepped together, `E`."""
        return self._settings.num_envs

    @property
    def stack(self) -> int:
        """Frames of an observation, `S`."""
        return self._settings.stack

    @property
    def n_step(self) -> int:
        """Steps until bootstrapping, `n`."""
        return self._settings.n_step

    @property
    def gamma(self) -> float:
        """The discount of one step."""
        return self._settings.gamma

    @property
    def autoreset(self) -> Autoreset:
        """What follows an ending: "next_step", "same_step" or "disabled"."""
        return self._settings.autoreset

    @property
    def relabel(self) -> Hindsight | None:
        """How sampled batches are relabelled, or None."""
        return self._settings.relabel

    @property
    def sequences(self) -> Sequences | None:
        """What a row of a batch is, or None for a single step."""
        return self._settings.sequences

    # calls

    def add(self, *unnamed: Never, priority: Any = None, final_obs: Any = None, **fields: Any) -> Tensor:
        """Store one step of all `E` environments and return its keys, (E,) int64 on the buffer's device.

        fields:    every field of the buffer, and `reward`, `terminated`, `truncated`, each `[E, *shape]`: NumPy arrays,
                   CPU tensors or tensors on the buffer's device. `obs` is the newest frame, in which the agent chose
                   `action`; reward and flags are what the environment returned for it. With `num_envs=1` you may leave
                   out the leading axis of all values, `final_obs` included. Scalars may be `[E, 1]`, and flags 0 and 1
                   of any dtype. A dictionary, nested or not, means dotted names: `obs={"image": x}` is the field
                   `obs.image`.
        priority:  (E,) absolute TD errors or other non-negative numbers (the sign is dropped); each counts when its
                   step becomes eligible. A mass is at least one unit, 2^-20, also for a priority of 0 with `eps=0`.
        final_obs: `[E, *shape]` last observations of the episodes that ended with this step; other rows are not read.
                   Or Gymnasium's `info.get("final_obs")`, an object array (E,) of observations, None where nothing
                   ended. For several observation fields also a dictionary of these (or `final_obs.NAME`). Give it with
                   "same_step" and "disabled", to bootstrap truncated episodes, and with `terminal_obs` for
                   `next_obs` of terminated ones; ValueError with "next_step".

        With `autoreset="next_step"` only the observation of a step after an ending counts; the first such step with a
        reward or a flag, which a reset step does not have, warns (UserWarning). With the other modes the first
        truncated episode without a stored final observation warns. Both warnings come before the call stores the step;
        on CUDA they come with the next call that waits for the device, such as `stats`. Raises KeyError for a missing
        or unknown field, ValueError for a wrong shape, device or a value out of range, TypeError for a dtype that would
        lose values. A call that raises stores nothing; an interrupt (KeyboardInterrupt) takes effect before or after
        the call stores the step.
        Values on CUDA are not checked: floats too large for the field become infinite, and any number but 0 is a true
        flag.
        """
        if unnamed:
            self._refuse_unnamed("add", unnamed, self._step_fields)
        if compiler.is_dynamo_compiling():
            return outside(TrajectoryReplayBuffer.add, self, priority=priority, final_obs=final_obs, **fields)
        finals: dict[str, Any] = {}
        if final_obs is not None or fields.keys() != self._names:
            fields, finals = self._input.split(fields, final_obs)
        on_host, num_envs = self._on_host, self._settings.num_envs
        values, envs, ready, single = validation.as_rows(fields, self._checks, num_envs, self._device, on_host=on_host)
        if single:
            finals = {name: objects([value]) for name, value in finals.items()}
        final_rows = self._input.finals(finals, values["terminated"], values["truncated"]) if finals else None
        if priority is not None:
            given = validation.with_axis(priority) if single else priority
            priority = validation.as_priorities("priority", given, envs, self._device, as_array=on_host)
        with self._lock:
            return self._engine.add_step(values, priority, final_rows, ready)

    def extend(self, *unnamed: Never, priority: Any = None, final_obs: Any = None, **fields: Any) -> Tensor:
        """Store T steps of all `E` environments and return their keys, (T, E) int64 on the buffer's device.

        fields:    as in `add`, each `[T, E, *shape]`, oldest first; `[T, 1, *shape]` for a stream of one environment.
                   Arrays of the field's dtype may be larger than memory (`numpy.memmap`); T may exceed the capacity.
        priority:  (T, E), as in `add`.
        final_obs: as in `add` with T before it: `[T, E, *shape]` or an object array [T, E]; or a list of T entries,
                   each None or what `add` takes; or a dictionary of these.

        Equals T calls of `add`, bit for bit: the same masses, keys and samples. Raises as `add` does; a call that
        raises stores nothing.

        On a CPU a million steps of one environment take less than a second, and an interrupt (KeyboardInterrupt) takes
        effect before or after all of them. On CUDA each of the T steps is a launch: a million of them may take 20 s,
        and an interrupt keeps the steps before it. There it is quicker to fill a buffer with the same settings on the
        CPU, and to load its state: `buffer.load_state_dict(on_cpu.state_dict())`.
        """
        if unnamed:
            self._refuse_unnamed("extend", unnamed, self._step_fields)
        if self._stream_order.capturing():
            raise RuntimeError("extend waits for the device and cannot be captured in a CUDA graph; use add.")
        fields, given = self._input.split(fields, final_obs)
        values: dict[str, Any] = {}
        for name, field in self._step_fields.items():
            steps = len(next(iter(values.values()))) if values else None
            values[name] = self._input.steps(name, fields[name], field, steps)
        terminated, truncated = [_on_host(values[name]) for name in ("terminated", "truncated")]
        count, envs = terminated.shape
        if priority is not None:
            checked = validation.as_tensor("priority", priority, self._device)
            if tuple(checked.shape) not in ((count, envs), (count, envs, 1)):
                raise ValueError(f"priority needs shape {[count, envs]}; found {list(checked.shape)}.")
            flat = checked.reshape(-1)
            priority = validation.as_priorities("priority", flat, len(flat), self._device, as_array=self._on_host)
            priority = priority.reshape(count, envs)
        finals = self._input.many_finals(given, terminated, truncated) if given else None
        with self._lock:
            first = self._sampling.span()[1]
            keys = torch.arange(first, first + count * envs, device=self._device).view(count, envs)
            return self._engine.extend(values, priority, finals, keys)

    def begin_episodes(self, envs: Any = None) -> None:
        """Mark the next step of all environments, or of those in `envs`, as the first of a new episode.

        envs: (E,) bool, or None for all.

        Call it when a stream is interrupted: when you reset environments by hand, or restart them and load a
        checkpoint. Unfinished windows are never sampled. Raises ValueError or TypeError for another shape or dtype.
        """
        count, device, on_host = self._settings.num_envs, self._device, self._on_host
        if envs is None:
            chosen = torch.ones(count, dtype=torch.bool, device=device)
        else:
            if (mask := validation.as_tensor("envs", envs, device)).dtype != torch.bool:
                raise TypeError(f"envs must be a mask of bool, one for each environment; found {mask.dtype}.")
            chosen = validation.as_field("envs", mask, FLAG, count, device, on_host=on_host, steps=True)
        with self._lock:
            self._engine.break_streams(chosen)

    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` eligible steps, with their windows, as a Batch on the buffer's device.

        batch_size: B >= 1.
        beta:       exponent of the importance weights for this call, instead of the sampler's.

        A window has `m` steps: `n_step`, or fewer if the episode ends. A batch holds:

        obs:         (B, S, *shape), without the stack axis when S is 1.
        next_obs:    the same m steps later; of a terminated window its final observation, where that is stored: with
                     "next_step" once the next step is added, else with `terminal_obs` if `add` got it. Without it the
                     last observation before stands in its place.
        reward:      (B,) float32, the sum of gamma ** k * reward[k] for k < m.
        discount:    (B,) float32, gamma ** m, or 0 where the episode terminated: the target is
                     `reward + discount * value(next_obs)`.
        terminated, truncated: (B,) bool, whether the window ended that way.
        key, probability, weight: (B,), as in ReplayBuffer.

        Every other field is taken from the first step. With `relabel`, a share of the rows has other goals and rewards.
        With `sequences` a row is `L` steps, and a batch holds:

        obs:         (B, L, S, *shape), without the stack axis when S is 1; every other field (B, L, *shape).
        next_obs, reward, discount: (B, L, ...), of each step's window as above.
        terminated, truncated: (B, L), of the single steps.
        mask:        (B, L) bool, where a step belongs to the episode of the first one and the observation after its
                     window is stored, unless the episode terminated inside. So the first is always True; False are the
                     steps from the next episode on, and those before a truncation without `final_obs` or
                     `begin_episodes` whose windows reach it. There `obs`, `action`, your own fields,
                     `reward`, `terminated` and `truncated` are right all the same, `discount` is 0, and `next_obs`
                     means nothing.
        key, probability, weight: (B,), of the first step. The keys of all steps are
                     `key[:, None] + torch.arange(L, device=key.device) * E`; `write` takes them flattened.

        Raises RuntimeError when no step is eligible, which says what is missing, ValueError when fewer distinct steps
        are eligible than `B`. A beta schedule advances by one.
        """
        if compiler.is_dynamo_compiling():
            return outside(TrajectoryReplayBuffer.sample, self, batch_size, beta=beta)
        batch, exponent = validation.check_batch_size(batch_size), validation.check_beta(beta)
        with self._lock:
            self._check_enough(batch)
            if self._settings.relabel is None:
                return Batch(self._engine.sample(batch, exponent))
            engine = self._engine
            # two, since an interrupt may end the exit of the inner one
            with self._accepting_after(), self._accepting_after():
                # what the user's functions may do
                self._refuse_calls(RELABELS, "sampling", "span", "counts", "read", "stored")
                return Batch(engine.sample(batch, exponent))

    # state

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), **vars(self._settings)}

    def _described(self) -> str:
        return f"{self._settings}; {self._sampler}"

    @class_only
    def load(
        cls,
        path: str | PathLike[str],
        device: torch.device | str | None = None,
        relabel: Hindsight | None = None,
        *,
        sampler: Sampler | None = None,
        sequences: Sequences | Literal["saved"] | None = "saved",
        begin_episodes: bool = False,
        storage_device: torch.device | str | None = None,
        storage_path: StoragePath | None = None,
        **others: Never,
    ) -> Self:
        """Load the buffer that `save` wrote, on any device.

        relabel:  the saved buffer's `relabel`, whose functions are not saved.
        sampler:  another sampler for the stored steps, as in `ReplayBuffer.load`; priorities that wait for their steps
                  go on too.
        sequences: another kind of row for the stored steps: Sequences(length), or None for single steps. Priorities
                  stay; a start that had none has that of a new one.
        begin_episodes: True if you reset the environments since the save, as nearly every program does: the next steps
                  begin episodes, as after `begin_episodes()`. Otherwise they continue the saved episodes, and windows
                  would join the old episode with the new one.
        storage_device, storage_path: where to put the fields, wherever the saved buffer had them.

        Raises CheckpointError that says what is damaged, ValueError for another `relabel` than the saved buffer's and
        for sequences that do not fit, TypeError for anything but these.
        """
        begins = validation.check_bool("begin_episodes", begin_episodes)
        rows = {} if isinstance(sequences, str) and sequences == "saved" else {"sequences": check_sequences(sequences)}
        given: dict[str, Any] = {**others, **rows, "relabel": relabel}
        buffer = super().load(
            path, device, sampler=sampler, storage_device=storage_device, storage_path=storage_path, **given
        )
        if begins:
            buffer.begin_episodes()
        return buffer

    @classmethod
    def _check_others(cls, path: object, saved: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        given = {name: others[name] for name in ("relabel", "sequences") if name in others}
        super()._check_others(path, saved, {name: others[name] for name in others.keys() - given.keys()})
        check_saved_relabel(path, given["relabel"], saved)
        if "sequences" in given:
            known = {each.name: saved[each.name] for each in dataclass_fields(StreamSettings) if each.name in saved}
            StreamSettings(**(known | given)).checked(saved["fields"])


def _on_host(flags: Tensor | np.ndarray) -> np.ndarray:
    return flags if isinstance(flags, np.ndarray) else flags.cpu().numpy()
