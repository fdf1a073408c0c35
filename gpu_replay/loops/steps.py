# mypy: ignore-errors
# (types are what Numba infers)
"""Adds steps of all environments to the ring one by one: which starts they complete, and which they remove.

A step completes the window that began `n_step` steps before it in each environment, or all open windows where an
episode ends, and takes away the starts that it overwrites and those that lose a frame of their stack.
"""

from __future__ import annotations

import numpy as np

from gpu_replay.loops.compiling import inner, loop
from gpu_replay.loops.constants import Counter, Flag
from gpu_replay.loops.masses import sum_above
from gpu_replay.loops.ring import initial_mass

_ADDED, _FIRST, _FINALS, _ELIGIBLE = Counter.ADDED, Counter.FIRST, Counter.FINALS, Counter.ELIGIBLE
_NONFINITE, _TERMINALS, _LOST_TERMINALS = Counter.NONFINITE, Counter.TERMINALS, Counter.LOST_TERMINALS
_MAX_MASS, _SATURATED, _REJECTED, _FLAWED = Counter.MAX_MASS, Counter.SATURATED, Counter.REJECTED, Counter.FLAWED
_TERMINATED, _TRUNCATED, _DEAD, _FINAL, _CUT = Flag.TERMINATED, Flag.TRUNCATED, Flag.DEAD, Flag.FINAL, Flag.CUT
_TARGET, _EXCLUDED = Flag.TARGET, Flag.EXCLUDED
_ENDED = Flag.TERMINATED | Flag.TRUNCATED


@inner
def is_dead(next_step, before):
    """Whether a step after one with these flags has the final observation alone; after a cut comes a first one."""
    return next_step and before & _ENDED != 0 and before & _CUT == 0


@inner
def is_flawed(next_step, dead, terminated, truncated, reward, kept):
    """Whether a reset step has a reward or an ending, or a truncated ending no final observation that is kept."""
    if next_step:
        return dead and (reward != 0 or terminated or truncated)
    return truncated and not terminated and not kept


@loop(
    "(boolean[::1], boolean[::1], int64[::1], int32[::1], int64[:, ::1],"
    " int64[::1], uint8[::1], int64[::1], int64, boolean, boolean)"
)
def place_finals(
    terminated, truncated, place_of, places, moves, owner, flags, counters, num_envs, terminal, hindsight
):  # fmt: skip
    """Choose rows of the pool for the final observations that come with T steps; nothing is changed.

    terminated, truncated: (T * E,). owner: (F,) keys of the steps whose final observations the pool holds.
    flags:       of the ring. place_of: (T,) which E of the given rows are those of a step, -1 where none came.
    terminal:    whether those of terminated episodes are kept too.
    places:      (T * E,) gets the row of the pool, -1 where none came, -2 where one of a terminated episode found none.
    moves:       (2, T * E) gets given rows, and the distinct rows of the pool that they go to.
    returns:     how many are moved.

    A row is free when the step that owns it has been overwritten. Those of truncated episodes take the rows in turn, so
    that the oldest come first, and also rows of terminated ones, which each try one row, from the other end. With
    hindsight, which remembers of each episode how far its observations go, both take free rows in turn, the truncated
    ones of a step first.
    """
    slots, finals, added = flags.size, owner.size, counters[_ADDED]
    kept, tried, taken = counters[_FINALS], counters[_TERMINALS], 0
    # the claims of this call are made as it goes, and taken back at its end
    keys, earlier = np.empty((2, terminated.size), dtype=np.int64)
    for at in range(place_of.size):
        oldest = max(counters[_FIRST], added + (at + 1) * num_envs - slots)
        for turn in range(2 if terminal else 1):
            for env in range(num_envs):
                number = at * num_envs + env
                if turn == 0:
                    places[number] = -1
                wanted = terminated[number] if turn else truncated[number] and not terminated[number]
                if not wanted or place_of[at] < 0:
                    continue
                backwards = turn == 1 and not hindsight
                place = finals - 1 - tried % finals if backwards else kept % finals
                tried += backwards
                held = owner[place]
                free = held < oldest
                if turn == 0 and not free and not hindsight:
                    free = terminated[held - added] if held >= added else flags[held % slots] & _TERMINATED != 0
                if not free:
                    places[number] = -1 - turn
                    continue
                kept += not backwards
                places[number], keys[taken], earlier[taken] = place, added + number, held
                moves[0, taken], moves[1, taken] = place_of[at] * num_envs + env, place
                owner[place] = added + number
                taken += 1
    moved = 0
    for each in range(taken):
        # of a row that was taken more than once the last one stays
        if owner[moves[1, each]] == keys[each]:
            moves[0, moved], moves[1, moved] = moves[0, each], moves[1, each]
            moved += 1
    for each in range(taken - 1, -1, -1):
        owner[places[keys[each] - added]] = earlier[each]
    return moved


@loop(
    "(boolean[::1], boolean[::1], float32[::1], int64[::1], int32[::1], int64, int64[::1],"
    " uint8[::1], int32[::1], int64[::1], int32[::1], int64[::1], int32[::1], int32[::1],"
    " float32[::1], int32[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])"
)
def add_steps(
    terminated, truncated, new_rewards, masses, places, saturated, settings,
    flags, depth, open_masses, final, owner, episode_length, clipped_length,
    rewards, times_sampled, counters,
    flat, starts, changed_slots, ones, one_starts,
):  # fmt: skip
    """Add T steps of E environments; this one call changes all metadata of the ring.

    terminated, truncated, new_rewards: (T * E,) of the steps.
    masses:    (T * E,) given with the steps, 0 for a priority that is no number; or nothing.
    places:    (T * E,) as `place_finals` gives them; or nothing where no final observations came.
    saturated: how many masses were cut.
    settings:  environments, frames of a stack, whether the step after an ending carries the final observation, where
               the mass of starts without one is found, the fixed one, or that before any other, whether final
               observations of terminated episodes are kept apart; steps of a sequence, 0 where rows are single steps,
               whether all lie in one episode, and its stride; and whether steps with a flawed ending are refused,
               before anything changes.
    flags to clipped_length: as in `ops.steps.Streams`, flat; the last two are empty without hindsight.
    rewards, times_sampled: (slots,) of the ring.
    flat, starts, changed_slots: a tree of masses, or of ones without masses.
    ones, one_starts: a second tree, of ones, or empty.
    returns:   whether the steps were refused.
    """
    envs, stack, next_step, first_mass, source = settings[0], settings[1], settings[2] != 0, settings[4], settings[3]
    length, strict, stride = settings[6], settings[7] != 0, settings[8]
    ahead = max(length - 1, 0)
    settles = _TERMINATED | _DEAD if next_step else _ENDED
    slots, lines = flags.size, open_masses.size // envs
    steps, count, n, hindsight = slots // envs, terminated.size // envs, lines - 1 - ahead, episode_length.size > 0
    first, deepest = counters[_ADDED] // envs, 2**31 - 1 - n
    # neither an early return nor a write: each would cost a count of references to all arrays
    refused, terminal = False, settings[5] != 0
    if settings[9]:
        for env in range(envs):
            before = np.int64(flags[(first - 1) % steps * envs + env])
            for at in range(count):
                index = at * envs + env
                dead, kept = is_dead(next_step, before), places.size > 0 and places[index] >= 0
                if is_flawed(next_step, dead, terminated[index], truncated[index], new_rewards[index], kept):
                    refused = True
                before = np.int64(0 if dead else terminated[index] * _TERMINATED | truncated[index] * _TRUNCATED)
    if refused:
        count, saturated = 0, 0
    for at in range(count):
        step = first + at
        row, line = step % steps, step % lines
        base, last = row * envs, (row - 1 if row else steps - 1) * envs
        oldest = max(counters[_FIRST] // envs, step + 1 - steps)
        initial = initial_mass(source, first_mass, counters, flat, starts)
        largest, more, rejected, flawed, nonfinite = 0, 0, 0, 0, 0
        for env in range(envs):
            slot, previous, index = base + env, last + env, at * envs + env
            before, behind, gone = flags[previous], np.int64(depth[previous]) + 1, depth[slot] == 0
            # a step that was broken off from outside is followed by a first one, in every mode
            dead, kept = is_dead(next_step, before), places.size > 0 and places[index] >= 0
            flawed += is_flawed(next_step, dead, terminated[index], truncated[index], new_rewards[index], kept)
            nonfinite += not dead and not np.isfinite(new_rewards[index])
            over = before & (_DEAD | _CUT) != 0 if next_step else before & (_ENDED | _CUT) != 0
            reach = 0 if over or step == 0 else min(behind, deepest)
            flag = _DEAD if dead else terminated[index] * _TERMINATED | truncated[index] * _TRUNCATED
            if hindsight:
                # the first step of an episode is overwritten: the rest of the episode is found by its environment
                if gone:
                    clipped_length[env] = episode_length[slot]
                if reach == 0 and step > 0:
                    span = behind - 1 + (before & _FINAL != 0)
                    if behind < steps:
                        episode_length[(row - behind) % steps * envs + env] = span
                    else:
                        clipped_length[env] = span
                episode_length[slot] = -1
            if dead and steps > 1:
                # the final observation of the step before has come
                flags[previous] = before | _FINAL
            if kept:
                held = owner[places[index]]
                if held >= oldest * envs:
                    # of a terminated episode, which has its own last observation from now on
                    flags[held % slots] &= 255 - _FINAL
                    counters[_LOST_TERMINALS] += 1
                flag |= _FINAL
                final[slot] = places[index]
                owner[places[index]] = step * envs + env
                counters[_FINALS] += hindsight or not terminated[index]
            if terminal and terminated[index] and places.size:
                counters[_TERMINALS] += not hindsight and places[index] != -1
                counters[_LOST_TERMINALS] += places[index] == -2
            flags[slot], depth[slot], times_sampled[slot], rewards[slot] = flag, reach, 0, new_rewards[index]
            open_masses[line * envs + env] = masses[index] if masses.size else 0
            rejected += masses.size > 0 and masses[index] == 0 and not dead
            # the observation of a step ends the full windows, an ending or its final observation all windows
            closing, waited = flag & (_TERMINATED | _FINAL) != 0, dead and before & _ENDED == _TRUNCATED
            youngest = 0 if closing else 1 if waited else n
            completed = 0 if dead and not waited else max(0, min(n, steps) + 1 - youngest)
            if length:
                # so far these are the steps whose targets are stored now
                for age in range(youngest, min(youngest + completed, reach + 1)):
                    flags[slot - age * envs + (slots if slot < age * envs else 0)] |= _TARGET
                # from here on those that are settled now, which the step before has left open
                youngest = 0 if flag & settles != 0 else 1 if before & _CUT != 0 else n
                completed = max(0, (0 if before & settles != 0 else min(n, behind)) + 1 - youngest)
            # first the starts that the step removes, then those that it completes
            for turn in range(-min(stack, steps) if step >= steps else 0, completed):
                age = turn + 1 if turn < 0 else youngest + turn
                back = age if turn < 0 else age + ahead
                start = slot - back * envs
                start += slots if start < 0 else -slots if start >= slots else 0
                if turn < 0:
                    # overwritten, or without the first frame of its stack; a deep stack lost that steps ago
                    if depth[start] < -age:
                        continue
                    mass = 0
                else:
                    # this start is of another episode or lacks its stack, like all before it
                    frames = min(depth[start] if length else reach - age, stack - 1)
                    if (age > reach and length == 0) or step - back - frames < oldest:
                        break
                    if length:
                        if flags[start] & _TARGET == 0 or (step - back) % stride != 0:
                            continue
                        # a reset step is of no episode; steps before this one may be of the one that was cut
                        if strict and ((dead and age == 0) or (behind - age if age else reach) < ahead):
                            continue
                    if flags[start] & _EXCLUDED:
                        continue
                    mass = open_masses[(line - back if line >= back else line - back + lines) * envs + env]
                    largest = max(largest, mass)
                    mass = mass if mass > 0 else initial
                old = flat[start]
                if old != mass:
                    if changed_slots.size:
                        changed_slots[min(changed_slots[0] + 1, changed_slots.size - 1)] = start
                        changed_slots[0] += 1
                    flat[start] = mass
                    more += min(mass, 1) - min(old, 1)
                    if ones.size:
                        ones[start] = min(mass, 1)
        counters[_MAX_MASS] = max(counters[_MAX_MASS], largest)
        counters[_ELIGIBLE] += more
        counters[_REJECTED] += rejected
        counters[_FLAWED] += flawed
        counters[_NONFINITE] += nonfinite
        counters[_ADDED] += envs
    counters[_SATURATED] += saturated
    # from the oldest start that may have been completed to the newest that may have lost a frame
    for part in range(2 if ahead else 1):
        row, left = (first - n - ahead if part == 0 else first) % steps, min(steps, n + count + stack)
        while left:
            stop = min(row + left, steps)
            sum_above(flat, starts, row * envs, stop * envs)
            sum_above(ones, one_starts, row * envs, stop * envs)
            left -= stop - row
            row = 0
    return refused
