"""The trajectory buffer's work on CUDA tensors, through Triton kernels; also on CPU tensors, interpreted.

As in `device.py` nothing waits for the device except where the docstring says so. How many starts are eligible only the
device knows; the host keeps a lower bound of it, and reads the number again when the bound does not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_replay.engines.device import DeviceEngine, Drawn
from gpu_replay.engines.host_trajectory import unreadable
from gpu_replay.engines.trajectory_storage import TrajectoryStorage
from gpu_replay.ops.counters import Counter
from gpu_replay.ops.eligibility import Flag, launch_follow, launch_keep_finals
from gpu_replay.ops.eligible_draw import launch_eligible_draw
from gpu_replay.ops.frames import launch_gather_sequences, launch_gather_windows
from gpu_replay.ops.hindsight import Chosen, Strategy, launch_choose_goals
from gpu_replay.ops.mass import Rule
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.windows import powers_of
from gpu_replay.samplers import Latest, Proportional, RankBased, Sampler, Uniform
from gpu_replay.stream_order import StreamOrder


class TrajectoryDeviceEngine(DeviceEngine):
    """Follows steps, draws starts and updates for one trajectory buffer, in at most 3, 2 and 2 launches; a draw by rank
    sorts besides.

    The buffer has checked all arguments and holds the lock.
    """

    sparse = True

    def __init__(
        self,
        storage: TrajectoryStorage,
        sampler: Sampler,
        tree: MassTree | None,
        marks: MassTree | None,
        rule: Rule,
        counters: Tensor,
        seed: int,
        stream_order: StreamOrder,
    ) -> None:
        super().__init__(storage, sampler, tree, rule, counters, seed, stream_order)
        self._steps = storage
        self._marks = marks
        self._shape = storage.streams.shape
        self._powers = torch.from_numpy(powers_of(storage.gamma, self._shape.n_step)).to(self._device)
        # the oldest stored step and the next one, but for adds that others replay
        self._first_step = self._next_step = 0
        # steps overwritten since the number of eligible starts, `_known`, was read
        self._overwritten = 0

    def reseed(self, seed: int) -> None:
        """Follow a restored state; the counters hold the seed. Waits for the device."""
        first, added = self.span()
        self._first_step, self._next_step = first // self._shape.num_envs, added // self._shape.num_envs
        self._known = self._overwritten = 0
        if self._ranks is not None:
            self._ranks.recall()

    def forget(self) -> None:
        """Follow a `clear`."""
        self._first_step = self._next_step
        super().forget()
        self._overwritten = 0

    def recall(self) -> None:
        """Follow a restored state: windows are looked up when they are sampled."""

    # add

    def follow(
        self,
        values: dict[str, Tensor],
        terminated: Tensor,
        truncated: Tensor,
        priorities: Tensor | None,
        finals: dict[str, Tensor] | None,
    ) -> Tensor:
        """Store one step of all environments and return its (num_envs,) keys; 2 launches, 3 with final observations."""
        storage = self._steps
        with self._ordered():
            own = self._write(values, priorities)
            keys = launch_follow(
                storage.streams,
                self._masses,
                self._marks,
                self._counters,
                storage.times_sampled,
                self._moved(terminated),
                self._moved(truncated),
                own,
                self._source,
                with_final=finals is not None,
            )
            if finals is not None:
                moved = {name: self._moved(value) for name, value in finals.items()}
                launch_keep_finals(storage.streams, storage.finals, storage.fields, moved, self._counters)
            self._note(self._shape.num_envs)
        return keys

    def replayed(self, rows: int) -> None:
        """Follow a replay that added so many rows, whole steps of all environments."""
        steps = rows // self._shape.num_envs
        self._next_step += steps
        self._overwritten += min(steps, max(0, self._next_step - self._shape.steps))

    def break_streams(self, envs: Tensor) -> None:
        """The next step of these environments, a bool (num_envs,), is the first of an episode."""
        num_envs, flags = self._shape.num_envs, self._steps.streams.flags
        with self._ordered():
            added = self._counters[Counter.ADDED]
            # before the first step there is none to mark
            cut = self._moved(envs).to(torch.uint8) * Flag.CUT * (added > 0)
            slots = (added - num_envs + torch.arange(num_envs, device=self._device)) % self._shape.slots
            flags.index_copy_(0, slots, flags[slots] | cut)

    def span_of_steps(self) -> tuple[int, int]:
        """The oldest stored step and the next one.

        Waits for the device only when adds that others replay may have changed the answer; while capturing it takes the
        ring for full then.
        """
        steps, envs = self._shape.steps, self._shape.num_envs
        if self._captured:
            if self._capturing():
                return 0, steps
            first, added = self.span()
            self._first_step, self._next_step = first // envs, added // envs
        return max(self._first_step, self._next_step - steps), self._next_step

    # sample

    def count_at_least(self, wanted: int, skipped: int) -> int:
        """Eligible starts, those in the newest `skipped` slots left out, exact only below `wanted`.

        Waits for the device when the host does not know of enough: a few times while a buffer fills, and whenever
        adds that others replay may have changed the answer. While capturing it takes them for enough.
        """
        if self._capturing():
            return wanted
        least = self._at_least() - skipped
        if least >= wanted:
            return least
        with self._ordered():
            counts = self._counters.tolist()
            self._known, self._overwritten = counts[Counter.ELIGIBLE], 0
            return self._known - self._count_newest(counts[Counter.ADDED], skipped)

    def _at_least(self) -> int:
        """A lower bound of the eligible starts, without asking the device."""
        if self._captured:
            return 0
        if not self._overwritten:
            return self._known
        # with k steps overwritten, whatever lost a frame of its stack lies in them and the stack - 1 steps after them
        return self._known - (self._overwritten + self._shape.stack - 1) * self._shape.num_envs

    def _count_newest(self, added: int, slots: int) -> int:
        """Eligible starts in so many newest slots; waits for the device."""
        if not slots:
            return 0
        held = self._leaves() > 0
        head = added % self._shape.slots
        begin = (head - slots) % self._shape.slots
        newest = held[begin:head].sum() if begin < head else held[begin:].sum() + held[:head].sum()
        return int(newest)

    def _leaves(self) -> Tensor:
        """(slots,) numbers that are 0 where a start is not eligible."""
        tree = self._tree if self._tree is not None else self._marks
        if tree is None:
            raise RuntimeError("a trajectory buffer keeps masses, marks or both; found neither.")
        return tree.masses

    def sample(self, batch: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts: fields, windows, key, probability and weight; 2 launches.

        By rank 2 and a sort come first where the order is made anew.
        """
        with self._ordered():
            drawn = self._starts(batch, beta, 0)
            tensors = launch_gather_windows(
                self._steps, drawn.slots, self._powers, self._counters, words=drawn.words, weighing=drawn.weighing
            )
        return {**tensors, **drawn.named}

    def sample_sequences(self, batch: int, length: int, beta: float | None) -> dict[str, Tensor]:
        """Draw `batch` starts whose `length` steps are stored, and read those steps."""
        with self._ordered():
            drawn = self._starts(batch, beta, (length - 1) * self._shape.num_envs, exact=True)
            tensors = launch_gather_sequences(
                self._steps, drawn.slots, length, self._counters, words=drawn.words, weighing=drawn.weighing
            )
        return {**tensors, **drawn.named}

    def _starts(self, batch: int, beta: float | None, skipped: int, *, exact: bool = False) -> Drawn:
        """The next starts, none of them in the newest `skipped` slots; 1 launch.

        exact: ranks are those of this moment in any case.
        """
        base, newest = self._base, self._newest
        drawn = 0 if isinstance(base, Latest) else batch - newest
        shifted = self._steps.random_shift > 0
        if isinstance(base, RankBased) and drawn > 0:
            return self._by_rank(base, self._marks, drawn, batch, beta, skipped=skipped, shifted=shifted, exact=exact)
        if self._ranks is not None:
            self._ranks.passed(self._capturing())
        found = launch_eligible_draw(
            self._tree,
            self._marks,
            self._counters,
            self._steps.times_sampled,
            drawn,
            batch,
            skipped=skipped,
            shifted=shifted,
            stratified=isinstance(base, Proportional) and base.stratified,
            lowest_of_all=isinstance(base, Proportional) and base.normalize == "buffer",
            replacement=isinstance(base, Uniform) and base.replacement,
        )
        weight, weighing = found.weight, None
        if weight is None and found.masses is not None and isinstance(base, Proportional):
            weighing = self._weighing(base, found.masses, beta, drawn, batch if shifted else 0)
            weight = weighing.weight
        if weight is None:
            raise RuntimeError("a draw by mass left no masses to weigh.")
        named = {"key": found.keys, "probability": found.probability, "weight": weight}
        return Drawn(found.slots, named, weighing, found.words)

    def choose_goals(self, keys: Tensor, count: int, strategy: Strategy) -> Chosen:
        """Choose `count` rows of the batch with these keys, and where their new goals are; 1 launch."""
        with self._ordered():
            return launch_choose_goals(self._steps.streams, keys, self._counters, count, strategy)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """The transitions from these keys; KeyError naming the first that is not live or not eligible.

        Waits for the device.
        """
        with self._ordered():
            first, added = self.span()
            slots = keys % self._shape.slots
            readable = (keys >= first) & (keys < added) & (self._leaves()[slots] > 0)
            refused = readable.logical_not().nonzero()
            if refused.numel():
                raise unreadable(int(keys[refused[0, 0]]), first, added)
            return launch_gather_windows(self._steps, slots, self._powers, self._counters)
