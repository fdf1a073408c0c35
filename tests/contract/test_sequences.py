"""Rows that are sequences of steps: what their settings may be, what a row bootstraps from, and other rows on loading.

Which steps begin a row, and what it holds, is compared with the model in `test_programs.py` and, worked out by hand, in
`test_trajectory_oracle.py`.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from hindsight_oracle import GOALS, hindsight
from model import StepModel
from pairs import StepPair, live_through
from programs import SAMPLERS

from gpu_replay import (
    Batch,
    Combined,
    Field,
    Latest,
    Proportional,
    ReplayMixture,
    Sequences,
    TrajectoryReplayBuffer,
    Uniform,
)

pytestmark = pytest.mark.contract

FIELDS = {"obs": Field((), torch.float32), "action": Field((), torch.int64)}


def made(device: str, envs: int = 4, steps: int = 1000, **settings: Any) -> TrajectoryReplayBuffer:
    known = {"autoreset": "same_step", "gamma": 0.9, "device": device, **settings}
    return TrajectoryReplayBuffer(envs * steps, envs, FIELDS, **known)


def fill(buffer: TrajectoryReplayBuffer, steps: int, limit: int = 0) -> TrajectoryReplayBuffer:
    """Steps whose observation is their number, and whose episodes a time limit ends without a final observation."""
    envs = buffer.num_envs
    for _ in range(steps):
        number = buffer.added // envs
        ended = torch.full((envs,), limit > 0 and number % limit == limit - 1)
        row = {"obs": torch.full((envs,), float(number)), "action": torch.arange(envs) + number * envs}
        buffer.add(**row, reward=torch.ones(envs), terminated=ended & False, truncated=ended)
    return buffer


# sampler, rows, batch, steps, time limit, steps of a window
BOOTSTRAPS: dict[str, tuple[Any, Sequences, int, int, int, int]] = {
    "a rollout": (Latest(), Sequences(32), 4, 100, 0, 1),
    "half of them new": (Combined(Uniform(), newest=16), Sequences(20), 32, 120, 0, 1),
    "strict": (Uniform(replacement=True), Sequences(5, strict=True), 64, 60, 0, 1),
    "time limits": (Uniform(replacement=True), Sequences(10), 64, 120, 20, 1),
    "time limits, strict": (Uniform(replacement=True), Sequences(10, strict=True), 64, 120, 20, 1),
    "time limits, windows": (Uniform(replacement=True), Sequences(10), 64, 120, 20, 3),
}


@pytest.mark.filterwarnings("ignore:an episode was truncated:UserWarning")
@pytest.mark.parametrize("case", BOOTSTRAPS)
def test_a_step_that_counts_bootstraps_from_the_observation_after_its_window(case: str, device: str) -> None:
    sampler, rows, size, steps, limit, n_step = BOOTSTRAPS[case]
    buffer = fill(made(device, sampler=sampler, sequences=rows, n_step=n_step), steps, limit)
    batch = buffer.sample(size)
    assert bool(batch.mask[:, 0].all())
    expected = torch.full_like(batch.discount, 0.9**n_step)
    assert torch.equal(batch.next_obs[batch.mask], batch.obs[batch.mask] + n_step)
    assert torch.allclose(batch.discount[batch.mask], expected[batch.mask])
    assert not batch.discount[~batch.mask].any()
    if limit:
        # the last steps of an episode, whose windows reach its end
        number = batch.obs % limit
        same = batch.obs // limit == batch.obs[:, :1] // limit
        assert torch.equal(batch.mask, same & (number < limit - n_step))


@pytest.mark.filterwarnings("ignore:an episode was truncated:UserWarning")
def test_an_episode_that_a_time_limit_ends_is_a_strict_row_whose_last_step_is_masked(device: str) -> None:
    buffer = fill(made(device, sequences=Sequences(20, strict=True)), 65, limit=20)
    batch = buffer.sample(12)
    assert sorted(batch.key.tolist()) == [t * 4 + e for t in (0, 20, 40) for e in range(4)]
    assert batch.mask.tolist() == [[True] * 19 + [False]] * 12
    assert batch.truncated.tolist() == [[False] * 19 + [True]] * 12


def test_keys_of_all_steps_follow_from_that_of_the_first(device: str) -> None:
    buffer = fill(made(device, sequences=Sequences(6, stride=4), n_step=2), 40)
    batch = buffer.sample(8)
    assert (batch.key // 4 % 4).tolist() == [0] * 8
    keys = batch.key[:, None] + torch.arange(6, device=batch.key.device) * 4
    assert torch.equal(batch.action, keys)
    parts = batch.minibatches(4) if hasattr(batch, "minibatches") else [batch[i::4] for i in range(4)]
    assert [tuple(part.obs.shape) for part in parts] == [(2, 6)] * 4


def test_a_captured_step_learns_from_rows(device: str) -> None:
    rows = {"sampler": Proportional(alpha=1.0, eps=0.0), "sequences": Sequences(5), "seed": 3}
    buffer, twin = (fill(made(device, **rows), 30) for _ in range(2))

    def learn(batch: Batch) -> torch.Tensor:
        return (batch.mask * batch.obs).amax(1) % 8 + 1

    step = buffer.capture(6, learn)
    for _ in range(3):
        step()
        batch = twin.sample(6)
        twin.update_priorities(batch.key, learn(batch))
    assert torch.equal(buffer.masses(), twin.masses())


WRONG: dict[str, tuple[Callable[[str], Any], type[Exception], str]] = {
    "a number": (lambda device: made(device, sequences=80), TypeError, r"must be Sequences\(80\), or None .* found 80"),
    "a name": (lambda device: made(device, sequences="L"), TypeError, r"must be Sequences\(length\).* found 'L'"),
    "no steps": (lambda _: Sequences(0), ValueError, "length must be at least 1; found 0"),
    "half a step": (lambda _: Sequences(1.5), TypeError, "length must be an int; found 1.5"),  # type: ignore[arg-type]
    "no stride": (lambda _: Sequences(2, stride=0), ValueError, "stride must be at least 1; found 0"),
    "no bool": (lambda _: Sequences(2, strict=1), TypeError, "strict must be True or False; found 1"),  # type: ignore[arg-type]
    "longer than the ring": (
        lambda device: made(device, steps=20, n_step=3, stack=2, sequences=Sequences(17)),
        *(ValueError, r"n_step=3 and stack=2 a row needs 21 steps .* 20 of each.* capacity to at least 84"),
    ),
    "goals": (
        lambda device: TrajectoryReplayBuffer(
            90, 1, GOALS, relabel=hindsight("future", 0.5), sequences=Sequences(3), device=device
        ),
        *(ValueError, "without sequences, or without relabel"),
    ),
    "the call of before": (
        lambda device: made(device).sample_sequences(32, 80, burn_in=40),
        *(TypeError, r"sequences=Sequences\(burn_in \+ length, strict=..., stride=...\)"),
    ),
    "a mixture": (
        lambda device: ReplayMixture([made(device), made(device, sequences=Sequences(3))], [0.5, 0.5]),
        *(ValueError, r"kind of row \(sequences=\); number 1 has Sequences\(length=3.*first one None. Make them alike"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_make_no_sense(case: str, device: str) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=f"(?s){message}"):
        call(device)


def test_the_longest_row_fills_the_ring(device: str) -> None:
    buffer = fill(made(device, steps=20, n_step=3, stack=2, sequences=Sequences(16)), 19)
    assert sorted(buffer.sample(4).key.tolist()) == [0, 1, 2, 3]
    assert sorted(fill(buffer, 13).sample(4).key.tolist()) == [13 * 4 + env for env in range(4)]


def test_what_is_missing_is_said(device: str) -> None:
    short, strict = made(device, sequences=Sequences(9)), made(device, sequences=Sequences(9, strict=True, stride=7))
    fill(short, 9)
    for step in range(40):
        ended = torch.full((4,), step % 5 == 4)
        row = {"obs": torch.zeros(4), "action": torch.zeros(4, dtype=torch.int64), "reward": torch.zeros(4)}
        strict.add(**row, terminated=ended, truncated=ended & False)
    with pytest.raises(
        RuntimeError, match=r"sample\(2\): .*Add more first: .* 9 steps of an environment, .*; 9 steps of"
    ):
        short.sample(2)
    with pytest.raises(
        RuntimeError, match=r"needs an episode of 9 steps that begin.* multiple of 7 .*; 40 steps of each"
    ):
        strict.sample(2)
    assert fill(short, 1).sample(2).key.max() < 4


# other rows for steps that are stored


def with_rows(model: StepModel, rows: Sequences | None) -> StepModel:
    """The model of a buffer that was loaded with these rows: priorities stay, those that still wait too."""
    after, lines = copy.deepcopy(model), model.n_step + (model.sequences.length if model.sequences else 1)
    after.sequences, after._view = rows, None
    for key in model.live():
        env, number = model.view().place(key)
        waits = model._own(key) if number >= model.count - lines else None
        after.steps[env][number]["priority"] = model.held.get(key, waits)
    own = {key: after._own(key) for key in after.eligible()}
    after.held = {key: given for key, given in own.items() if given is not None}
    initial = after.initial()
    after.held = {key: initial if given is None else given for key, given in own.items()}
    return after


ROWS = (None, Sequences(1, stride=2), Sequences(3, strict=True), Sequences(6))


@pytest.mark.parametrize("name", ["proportional", "annealed", "rank", "uniform", "latest"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_loaded_buffer_may_give_other_rows(name: str, mode: str, device: str, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {mode}")
    pairs = [(one, other) for one in ROWS for other in ROWS if one != other]
    for case, (before, after) in enumerate(draw.sample(pairs, scale(12, 2))):
        settings = {"sampler": SAMPLERS[name], "n_step": 2, "stack": 2, "autoreset": mode, "sequences": before}
        pair = StepPair(2 * 30, 2, device=device, **settings)
        for turn in range(draw.randint(1, 9)):
            live_through(pair, draw.randint(1, 9), turn, end=0.1)
            keys = pair.model.eligible()[-6:]
            pair.update(keys, [draw.choice((0.25, 1.0, 8.0)) for _ in keys])
            if draw.random() < 0.2:
                draw.choice((pair.clear, pair.begin_episodes))()
        pair.buffer.save(tmp_path / str(case))
        pair.buffer = TrajectoryReplayBuffer.load(tmp_path / str(case), device, sequences=after)
        pair.model = with_rows(pair.model, after)
        assert pair.buffer.sequences == after
        pair.warned = None
        for turn in range(3):
            pair.check_all()
            pair.check_contents()
            pair.sample(2)
            if turn == 0:
                pair.renew("checkpoint")
            live_through(pair, 5, turn, end=0.1)


def test_rows_are_saved_and_another_kind_is_refused_where_states_are_exchanged(device: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    single, rows = made(device, steps=30), made(device, steps=30, sequences=Sequences(3, strict=True, stride=2))
    fill(rows, 20).save(path)
    assert TrajectoryReplayBuffer.load(path, device).sequences == Sequences(3, strict=True, stride=2)
    for buffer, other in ((single, rows), (rows, single)):
        with pytest.raises(ValueError, match="the state is of another buffer: sequences is"):
            buffer.load_state_dict(other.state_dict())
    for wrong, error, message in (
        (7, TypeError, r"must be Sequences\(7\)"),
        (Sequences(30), ValueError, "a row needs 31 steps"),
    ):
        with pytest.raises(error, match=message):
            TrajectoryReplayBuffer.load(path, device, sequences=wrong)  # type: ignore[arg-type]
    assert re.search(r"sequences=Sequences\(length=3, strict=True, stride=2\)", repr(rows))
    assert "sequences" not in repr(single)
