"""The base class of both buffers: settings, reading by key, priorities, statistics. Subclasses add and sample.

Public methods check what users pass in; the work is done by an engine, on CPU tensors or through Triton kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, compiler

from gpu_replay import validation
from gpu_replay.base.state import StatefulBuffer
from gpu_replay.batch import Batch
from gpu_replay.engines.storage import check_live
from gpu_replay.fields import flattened
from gpu_replay.graphs import never_traced as never_traced
from gpu_replay.graphs import outside as outside
from gpu_replay.graphs import untraced
from gpu_replay.graphs.capture import WARM_UPS, Learn, LearningStep
from gpu_replay.ops.counters import Counter, HostWords
from gpu_replay.ops.masses import MassTree
from gpu_replay.stats import Stats

if TYPE_CHECKING:
    from typing_extensions import Never


@never_traced
class Buffer(StatefulBuffer):
    """What both buffers answer and do, whatever they store."""

    # the unit that is sampled, for messages
    _units: ClassVar[str]
    # the expected names, dtypes and shapes of the values of an `add`
    _checks: validation.Checks

    # attributes

    @property
    def capacity(self) -> int:
        """Transitions that fit, `N`."""
        return self._capacity

    @property
    def device(self) -> torch.device:
        """Where priorities are kept and batches come out; the transitions too, but for `storage_device` and
        `storage_path`.
        """
        return self._device

    @property
    def storage_device(self) -> torch.device:
        """Where the fields are: the buffer's device, or the CPU for pinned host memory and files."""
        return self._placement.storage_device

    @property
    def storage_path(self) -> Path | None:
        """The folder of the file that holds the fields; None where they are in memory."""
        return self._placement.path

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: fields, priorities and counters, wherever they are."""
        return sum(self._storage.sizes.values()) + self._state.nbytes + self._made_engine.sampling.scratch_bytes

    @property
    @untraced
    def added(self) -> int:
        """Transitions added so far, which is also the key of the next one; on CUDA this waits for the device."""
        with self._lock:
            return self._sampling.span()[1]

    def __len__(self) -> int:
        """Transitions stored, at most `capacity`; on CUDA this waits for the device."""
        with self._lock:
            first, added = self._sampling.span()
            return added - first

    def __repr__(self) -> str:
        """Size, fields, settings and memory in one line; on CUDA this waits for the device."""
        names = ", ".join(self._fields)
        return (
            f"{type(self).__name__}({len(self):,} of {self._capacity:,} transitions of {names}; {self._described()}; "
            f"{self.nbytes / 1e6:,.1f} MB on {self._device}"
            f"{f', fields {self._placement.where}' if self._placement.apart else ''})"
        )

    def _described(self) -> str:
        """The settings that `repr` names."""
        return str(self._sampler)

    # what is stored, by key and in order; on CUDA each of these calls waits for the device

    def __getitem__(self, keys: Any) -> Batch:
        """Return the stored transitions of these live keys, in their order: `buffer[keys]`.

        keys: (m,) int64, a list of ints, or one int for a batch of one.

        In a trajectory buffer a row is a whole window, or sequence. Raises KeyError naming the first key that is not
        live (or not eligible), TypeError for keys that are not integers.
        """
        with self._alone():
            key = validation.as_keys(keys, self._device).to(self._device).clone()
            slots = key % self._state.slots
            eligible = self._state.eligible.masses[slots] > 0 if self._shape is not None else True
            check_live(key, *self._sampling.span(), eligible)
            return Batch({**self._engine.read(slots), "key": key})

    def keys(self, eligible: bool = False) -> Tensor:
        """The live keys, (size,) int64 on the buffer's device, oldest first.

        eligible: True for the keys of rows that can be sampled alone.
        """
        chosen = validation.check_bool("eligible", eligible)
        with self._alone():
            keys = torch.arange(*self._sampling.span(), device=self._device)
            return keys[self._is_stored(keys, eligible=chosen)]

    def _is_stored(self, keys: Tensor, eligible: bool) -> Tensor:
        """(m,) bool: which of these keys are live, and eligible if asked; on CUDA this waits for the device."""
        (first, added), tree = self._sampling.span(), self._state.eligible_tree or self._state.tree
        live = (keys >= first) & (keys < added)
        return live & (tree.masses[keys % self._state.slots] > 0) if eligible and tree is not None else live

    def __contains__(self, key: object) -> bool:
        """Whether a key, an int, is live: `key in buffer`."""
        number = validation.check_key(key)
        with self._alone():
            first, added = self._sampling.span()
        return first <= number < added

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: `batches` walks over what is stored."""
        raise TypeError(
            f"a {type(self).__name__} is not iterable: `for batch in buffer.epoch(B)` gives every row that can be "
            "sampled once, `buffer.batches(size)` walks over all that is stored, `buffer.sample(B)` samples."
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over everything stored, in the order of keys, `size` rows at a time; the last batch may be smaller.

        To copy data elsewhere; `epoch` gives the rows to learn from. A batch holds what `buffer[keys]` does, but in a
        trajectory buffer its rows are single steps: their own `obs` without a stack, every other field, `reward`,
        `terminated`, `truncated` and `key`; among them steps that are no transitions, as reset steps, and the newest
        ones. It leaves out rows that are added meanwhile, and rows that these overwrite.
        """
        rows = validation.check_int("size", size, 1)
        with self._alone():
            keys = torch.arange(*self._sampling.span(), device=self._device)
        return self._walk(keys, rows, eligible=False)

    def _walk(self, keys: Tensor, rows: int, *, eligible: bool) -> Iterator[Batch]:
        while len(keys):
            batch, keys = self._first_rows(keys, rows, eligible)
            if batch:
                yield batch

    @untraced
    def _first_rows(self, keys: Tensor, rows: int, eligible: bool) -> tuple[Batch | None, Tensor]:
        """The first so many rows of these keys that are still stored, or can be sampled, None where there are none; the
        keys left.
        """
        with self._alone():
            chosen = keys[:0]
            while len(keys) and len(chosen) < rows:
                fits = torch.nonzero(self._is_stored(keys[:rows], eligible))[: rows - len(chosen), 0]
                chosen = torch.cat((chosen, keys[fits]))
                keys = keys[rows if len(chosen) < rows else int(fits[-1]) + 1 :]
            slots, read = chosen % self._state.slots, self._engine.read if eligible else self._engine.stored
            return (Batch({**read(slots), "key": chosen}) if len(chosen) else None), keys

    def epoch(self, batch_size: int, *, shuffle: bool = True) -> Iterator[Batch]:
        """Iterate over every row that can be sampled now, each once, `batch_size` rows at a time; the last batch may be
        smaller.

        shuffle: True for a random order, from the buffer's random stream: no two epochs have the same, equal seeds do,
                 on every device. False for the order of keys.

        A batch holds what `buffer[keys]` does: no `weight` and `probability`, and with `relabel` the goals that are
        stored. Rows and order are fixed by this call. It leaves out rows that are added meanwhile, and rows that are
        overwritten, or can no longer be sampled, when their turn comes. `stats()` does not count these rows as
        sampled. On CUDA each batch waits for the device.

        Raises RuntimeError if no row can be sampled, which says what is missing; TypeError or ValueError for invalid
        arguments.
        """
        rows, shuffled = validation.check_batch_size(batch_size), validation.check_bool("shuffle", shuffle)
        with self._alone():
            keys = self.keys(eligible=True)
            if not len(keys):
                self._refuse_empty(f"epoch({rows})")
            if shuffled:
                # raises inside of functions that may not sample
                _ = self._sampling.rebuild
                random = HostWords(self._seed, self._sampling.counts()[Counter.RANDOM])
                order = np.argsort(random.words(len(keys)), kind="stable")
                keys = keys[torch.from_numpy(order).to(self._device)]
                self._counters[Counter.RANDOM] = random.block
        return self._walk(keys, rows, eligible=True)

    def priorities(self, keys: Any) -> Tensor:
        """Return the priorities of these live keys, (m,) float64 on the buffer's device.

        keys: as for `buffer[keys]`.

        `RankBased` returns exactly what you gave; `Proportional` computes it from the mass, after `eps`, `clip` and
        rounding: `(mass / 2**20) ** (1 / alpha) - eps`, not below 0. A step of a trajectory buffer that is not eligible
        has the priority that waits for it, 0 where none was given. Raises KeyError naming the first key that is not
        live, RuntimeError for a sampler without priorities and for `alpha=0`, which keeps no trace of priorities.
        """
        if not self._sampler.base.prioritized or self._sampler.base.alpha == 0:
            raise RuntimeError(
                f"{self._sampler} keeps no priorities that could be read; use Proportional or RankBased with alpha > 0."
            )
        with self._alone():
            live, streams = validation.as_keys(keys, self._device).to(self._device), self._state.streams
            check_live(live, *self._sampling.span())
            masses = self._state.masses.masses[live % self._state.slots]
            if streams is not None:
                masses = torch.where(masses > 0, masses, streams.waiting_masses(live, *self._sampling.span()))
            leaves = masses.cpu().numpy()
        numbers = np.where(leaves > 0, self._state.rule.priorities(np.maximum(leaves, 1)), 0.0)
        return torch.from_numpy(numbers).to(self._device)

    # calls

    def _refuse_unnamed(self, call: str, values: Sized, fields: Iterable[str]) -> NoReturn:
        raise TypeError(
            f"{call} takes values by name, {call}({', '.join(f'{name}=...' for name in fields)}); found {len(values)} "
            "positional ones."
        )

    def _available(self, needed: int) -> int:
        """Rows that can be drawn, exact only below `needed`."""
        with self._lock:
            return self._engine.count_at_least(needed)

    def _missing(self) -> str:
        """What a row needs, for messages."""
        return ""

    def _check_enough(self, batch: int) -> None:
        """Raise unless `batch` rows can be drawn."""
        newest, distinct = self._needs(batch)
        if newest > batch:
            raise ValueError(
                f"sample({batch}) from Combined(newest={newest}) needs a batch of at least {newest}. "
                "Raise the batch size or lower newest."
            )
        count = self._engine.count_at_least(max(distinct, 1))
        if count and count >= distinct:
            return
        if count == 0:
            self._refuse_empty(f"sample({batch})")
        kind = "of the newest" if distinct == newest else "without replacement"
        remedy = "." if kind == "of the newest" else ", or sample with Uniform(replacement=True)."
        raise ValueError(
            f"sample({batch}) {kind} needs {distinct} {self._units}; the buffer holds {count}. "
            f"Add more or lower the batch size{remedy}"
        )

    def _refuse_empty(self, call: str) -> NoReturn:
        if self._state.excluded:
            excluded = f"all {len(self)} {self._units} that the buffer holds were excluded"
            raise RuntimeError(f"{call}: {excluded}. Add more first.")
        raise RuntimeError(f"{call}: the buffer holds no {self._units}. Add more first{self._missing()}.")

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Set the priorities of the transitions with these keys.

        keys:       (m,) int64 as `batch.key`; those no longer live are ignored and counted in `stats().stale_updates`;
                    -1 stands for no key.
        priorities: (m,) or (m, 1) absolute TD errors or other non-negative numbers; the sign is dropped. One per
                    sequence: reduce TD errors over time first.

        In a trajectory buffer the priority of a step that is not eligible yet counts once it is; one of a step that
        never will be, or of a row that was excluded, is ignored. A mass is at least one unit, 2^-20, also for a
        priority of 0 with `eps=0` and for TD errors below 1e-6 with `alpha=1` (below 1e-10 with `alpha=0.6`). If a key
        appears twice, the last priority wins. A sampler without priorities only checks the arguments and counts stale
        keys, so that one training loop works with every sampler.

        Raises ValueError for a wrong shape and, on the CPU, for priorities that are not finite (on CUDA such an entry
        keeps its priority and is counted); TypeError for keys that are not integers.
        """
        if compiler.is_dynamo_compiling():
            return outside(Buffer.update_priorities, self, keys, priorities)
        keys, priorities, ready = validation.as_update(keys, priorities, self._device, as_array=self._on_host)
        with self._lock:
            self._sampling.update(keys, priorities, ready)

    def write(self, keys: Any, **fields: Any) -> None:
        """Replace stored values of the transitions with these keys, such as recurrent states that a newer network
        computed.

        keys:   (m,) int64 as `batch.key`; those no longer live are ignored and counted in `stats().stale_updates`, -1
                stands for no key. If a key appears twice, the last row wins.
        fields: some of the constructor's fields, `[m, *shape]` each, in any form that `add` takes. They are stored
                unchanged: `scale` and `sample_dtype` apply only to samples.

        Priorities, sample counts and the order of keys stay. In a trajectory buffer, which stores each observation
        once, a new `obs` also appears in the stacks and as `next_obs` of neighbouring steps; rewards, flags and final
        observations stay. On CUDA it takes a few small launches and can be captured. It is the one call that is not a
        single step there: all values are made first, and an interrupt (KeyboardInterrupt) that comes while they are
        copied may leave some fields written and others not.

        Raises KeyError for an unknown field, ValueError for no field, another shape, device or number of rows,
        TypeError for a dtype that would lose values or keys that are not integers. A call that raises writes nothing.
        """
        given = flattened(fields, self._fields)
        unknown = [name for name in given if name not in self._fields]
        if unknown or not given:
            problem = f"has unknown {', '.join(map(repr, unknown))}" if unknown else "names no field to replace"
            raise (KeyError if unknown else ValueError)(f"write {problem}; it takes {', '.join(self._fields)}.")
        checked = validation.as_keys(keys, self._device)
        checks = [each for each in self._checks if each[0] in given]
        values, rows, _, _ = validation.as_rows(given, checks, None, self._device, on_host=self._on_host)
        if rows != len(checked):
            raise ValueError(f"write needs a row for each of {len(checked)} keys; found {rows} in its fields.")
        with self._lock:
            self._sampling.write(checked, values)

    def exclude(self, keys: Any) -> None:
        """Never sample the rows of these keys again, such as those of a crashed simulator or a failed demonstration.

        keys: (m,) int64 as `batch.key`; those no longer live are ignored and counted in `stats().stale_updates`, -1
              stands for no key.

        Later priorities do not bring them back, nor does a step that becomes eligible later; ranks, newest rows,
        `epoch`, `keys(eligible=True)` and the distribution of `stats()` leave them out, and checkpoints keep it. The
        row that overwrites one is like any other. `batches` still returns them, and `priorities` says 0. In a
        trajectory buffer a window, stack or sequence that begins at another step may still run through an excluded one:
        to take out an episode exclude all its keys. It is a few operations of torch, for rare calls: it takes the time
        of some samples, and the next sample by rank sorts all rows. On CUDA it cannot be captured.

        Raises RuntimeError for a ReplayBuffer whose sampler has no priorities (Uniform, Latest, one of your own), since
        it keeps nothing to take a row from; `Proportional(alpha=0)` is uniform and can. TypeError for keys that are not
        integers. An interrupt (KeyboardInterrupt) comes before the call has changed anything, or after all of it.
        """
        if not self._state.trees:
            raise RuntimeError(
                f"a {type(self).__name__} that samples by {self._sampler} keeps no tree from which rows could be taken "
                "out; make it with sampler=Proportional(alpha=0), which is uniform too."
            )
        checked = validation.as_keys(keys, self._device)
        with self._lock:
            self._sampling.exclude(checked)

    def stats(self) -> Stats:
        """Return diagnostics; on CUDA this waits for the device and reads all priorities once."""
        with self._alone():
            first, added = self._sampling.span()
            size = added - first
            counts = self._sampling.counts()
            next_step = self._shape is not None and self._shape.next_step
            eligible = counts[Counter.ELIGIBLE] if self._shape else self._state.left(size, size)
            leaves = self._counters[:0] if self._state.tree is None else self._state.tree.masses
            # slots that are not live have been sampled 0 times
            sampled = self._storage.times_sampled
            return Stats(
                size=size,
                added=added,
                eligible=eligible,
                **vars(self._sampler.base.distribution(leaves, self._state.rule, eligible)),
                mean_age=(size - 1) / 2 if size else 0.0,
                max_age=max(size - 1, 0),
                mean_times_sampled=int(sampled.sum()) / size if size else 0.0,
                max_times_sampled=int(sampled.max()) if size else 0,
                stale_updates=counts[Counter.STALE],
                rejected_priorities=counts[Counter.REJECTED],
                saturated_priorities=counts[Counter.SATURATED],
                lost_truncations=0 if next_step else counts[Counter.FLAWED],
                unexpected_resets=counts[Counter.FLAWED] if next_step else 0,
                nonfinite_rewards=counts[Counter.NONFINITE],
                lost_terminal_obs=counts[Counter.LOST_TERMINALS],
            )

    def masses(self) -> Tensor:
        """Return a copy of the masses, (capacity,) int64 in slot order; sampling is proportional to them.

        Raises RuntimeError for a sampler other than Proportional.
        """
        with self._alone():
            return self._summed_tree().masses.clone()

    def total_mass(self) -> int:
        """Return the exact sum of the masses. Raises RuntimeError for a sampler other than Proportional."""
        with self._alone():
            return self._summed_tree().total()

    def _summed_tree(self) -> MassTree:
        if not self._sampler.base.summed:
            kept = "the order of priorities, not masses" if self._sampler.base.prioritized else "no priorities"
            raise RuntimeError(f"{self._sampler} keeps {kept}; masses exist with Proportional.")
        return self._state.masses

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot the stored data, the sampling distribution and how often rows were sampled: .png, .pdf or .svg.

        `gpu-replay inspect DIR` plots a checkpoint. Raises ImportError without matplotlib.
        """
        # a program that lies above the buffers, imported when it is called
        from gpu_replay.console import inspection

        with self._alone():
            inspection.render(inspection.of_buffer(self._snapshot()), path)

    # captured steps

    @abstractmethod
    def sample(self, batch_size: int, *, beta: float | None = None) -> Batch:
        """Sample `B` rows as a Batch on the buffer's device; subclasses say which errors it raises."""

    def sample_sequences(self, *_: Never, **__: Never) -> Never:
        """Raises TypeError: what a row of a batch is, is a setting of a trajectory buffer, `sequences`."""
        raise TypeError(
            "a buffer samples one kind of row, said when it is made: TrajectoryReplayBuffer(..., "
            "sequences=Sequences(burn_in + length, strict=..., stride=...)), then sample(B); of a checkpoint "
            "load(path, sequences=...)."
        )

    def capture(
        self,
        batch_size: int | None,
        learn: Learn,
        *,
        beta: float | None = None,
        warm_ups: int = WARM_UPS,
        generators: Sequence[torch.Generator] = (),
    ) -> LearningStep:
        """Make one call of `sample`, `learn(batch)` and `update_priorities`; on a GPU it is one CUDA graph.

        batch_size, beta: as for `sample`. With None the step samples nothing: `learn()` may add, but not sample, and
                  returns only the output.
        learn:    takes the Batch and returns the priorities of its rows, (B,) on the device, or None to leave
                  priorities as they are; or `(priorities, output)`, where `output`, made of tensors, is what the step
                  returns.
        warm_ups: steps, at least 1, that run eagerly before the capture. They are ordinary steps, not extra ones.
        generators: of the buffer's device, from which `learn` draws in addition to torch's own, for example to explore:
                  replays advance them as calls do.

        Each call, replayed or not, takes a new sample and advances the beta schedule and, if `learn` adds, the ring. On
        a CPU every call runs eagerly, so the same program works on both. The capture runs `learn` once on the host, and
        replays do not run it again: they repeat none of its other effects on the host, and the tensors that it uses
        must keep their memory (optimisers need `capturable=True`). Between steps you may make any other call, such as
        `clear` and `load_state_dict`, from any thread and stream.

        Raises TypeError or ValueError for invalid arguments.
        """
        return LearningStep(self, learn, batch_size, beta, warm_ups, generators)
