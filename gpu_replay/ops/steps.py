"""Host: adds steps of all environments to a trajectory buffer and applies the rules of eligibility.

The rules are those of `eligibility.py`, whose kernel does the same on a device. All that a step changes except the
fields is changed by one loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap
from typing import NamedTuple, TypeVar

import numpy as np

from gpu_replay.loops import steps as loops
from gpu_replay.ops.eligibility import GivenFinals, Streams, warn_of_flaw
from gpu_replay.ops.mass_tree import MassTree
from gpu_replay.ops.ring import commit, contiguous

Result = TypeVar("Result")
_NOTHING = np.zeros(0, dtype=np.int64)
# raises KeyError for steps that were refused
_TAKEN = {False: None}
_NOWHERE = np.zeros(0, dtype=np.int32)


class KeptFinals(NamedTuple):
    """Which final observations a call keeps.

    places: (T * E,) int32 row of the pool of each step, -1 where no final observation came, -2 where the one of a
            terminated episode found no place; or nothing.
    given, pool: (k,) given rows, and the distinct rows of the pool that they go to.
    """

    places: np.ndarray
    given: np.ndarray
    pool: np.ndarray


NONE_KEPT = KeptFinals(_NOWHERE, _NOTHING, _NOTHING)


class HostSteps:
    """Adds steps to what is known of one ring: streams, trees and counters.

    trees:   of masses, and of ones for eligible starts; either or both.
    initial: where the mass of starts without a priority of their own is found, and the fixed one, or that before any.
    rewards, times_sampled: (slots,) of the ring.
    """

    def __init__(
        self,
        streams: Streams,
        trees: tuple[MassTree | None, MassTree | None],
        initial: tuple[int, int],
        counters: np.ndarray,
        rewards: np.ndarray,
        times_sampled: np.ndarray,
    ) -> None:
        self._add = loops.add_steps.compiled()
        self._shape = shape = streams.shape
        self._owned = streams.owner.numpy(), streams.flags.numpy(), counters
        tree, ones = trees if trees[0] is not None else trees[::-1]
        if tree is None:
            raise RuntimeError("a trajectory buffer keeps masses, an eligible tree or both; found neither.")
        # the last one: nobody has been warned of a flawed ending
        rule = shape.length, shape.strict, shape.stride
        settings = shape.num_envs, shape.stack, shape.next_step, *initial, shape.terminal, *rule, 1
        self._settings = np.array(settings, dtype=np.int64)
        metadata = [each.numpy().reshape(-1) for each in streams.tensors]
        eligible = (_NOTHING, _NOTHING) if ones is None else ones.host[:2]
        self._arguments = self._settings, *metadata, rewards, times_sampled, counters, *tree.host, *eligible

    def keep(self, terminated: np.ndarray, truncated: np.ndarray, finals: GivenFinals) -> KeptFinals:
        """Choose rows of the pool for the final observations that came with these (T, E) or (E,) flags."""
        if not (terminated.any() or truncated.any()):
            return NONE_KEPT
        shape, rows = self._shape, terminated.size
        places, moves = np.empty(rows, np.int32), np.empty((2, rows), np.int64)
        ended, cut, place_of = map(contiguous, (terminated, truncated, finals.place))
        kinds = shape.num_envs, shape.terminal, shape.hindsight
        count = loops.place_finals.compiled()(ended, cut, place_of, places, moves, *self._owned, *kinds)
        return KeptFinals(places, *moves[:, :count])

    def add(
        self,
        steps: tuple[np.ndarray, np.ndarray, np.ndarray],
        masses: np.ndarray | None,
        saturated: int,
        kept: KeptFinals,
        result: Result,
        *changes: Iterable[object],
    ) -> Result:
        """Add steps together with other changes, as `commit` makes them; returns `result`.

        steps:  terminated, truncated and rewards, (T, E) or (E,). masses: of all of them, or None. saturated: how many
                of these were cut.

        Warns of the first flawed ending, before anything changes.
        """
        flat_masses = _NOTHING if masses is None else contiguous(masses)
        ended, cut, rewards = steps
        # arrays of a step mostly lie end to end
        if ended.ndim > 1 or not (ended.flags.carray and cut.flags.carray and rewards.flags.carray):
            ended, cut, rewards = map(contiguous, steps)
        call = ended, cut, rewards, flat_masses, kept.places, saturated, *self._arguments
        try:
            # the loop comes first: where it refuses, nothing is written
            return commit(result, map(_TAKEN.__getitem__, starmap(self._add, (call,))), *changes)
        except KeyError:
            warn_of_flaw(self._shape)
            self._settings[-1] = 0
        return commit(result, starmap(self._add, (call,)), *changes)
