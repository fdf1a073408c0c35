"""Rows that are sequences of steps: how long they may be, what is missing, and other rows on loading.

Which steps begin a row, and what it holds, is compared with the model in `test_programs.py` and, worked out by hand, in
`test_trajectory_oracle.py`.
"""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
from devices import loops, scale, thinned
from model import StepModel
from pairs import StepPair, live_through, play
from programs import SAMPLERS

from gpu_replay import Sequences, TrajectoryReplayBuffer

pytestmark = pytest.mark.contract


def made(device: str, steps: int, **settings: Any) -> StepPair:
    return StepPair(4 * steps, 4, autoreset="same_step", device=device, **settings)


def test_the_longest_row_fills_the_ring(device: str) -> None:
    pair = live_through(made(device, 20, n_step=3, stack=2, sequences=Sequences(16)), 19, end=0.0)
    assert sorted(pair.buffer.sample(4).key.tolist()) == [0, 1, 2, 3]
    live_through(pair, 13, end=0.0)
    assert sorted(pair.buffer.sample(4).key.tolist()) == [13 * 4 + env for env in range(4)]


def test_what_is_missing_is_said(device: str) -> None:
    short, strict = (made(device, 40, sequences=rows) for rows in (Sequences(9), Sequences(9, strict=True, stride=7)))
    live_through(short, 9, end=0.0)
    play(strict, *["....T" * 8] * 4)
    for pair, words in (
        (short, r"sample\(2\): .*Add more first: .* 9 steps of an environment, .*; 9 steps of"),
        (strict, r"needs an episode of 9 steps that begin.* multiple of 7 .*; 40 steps of each"),
    ):
        with pytest.raises(RuntimeError, match=words):
            pair.buffer.sample(2)
    assert live_through(short, 1, end=0.0).buffer.sample(2).key.max() < 4


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


@thinned("name, mode", ["proportional", "annealed", "rank", "uniform", "latest"], ["next_step", "same_step"])
def test_a_loaded_buffer_may_give_other_rows(name: str, mode: str, device: str, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {mode}")
    pairs = [(one, other) for one in ROWS for other in ROWS if one != other]
    for case, (before, after) in enumerate(draw.sample(pairs, scale(12, 1))):
        settings = {"sampler": SAMPLERS[name], "n_step": 2, "stack": 2, "autoreset": mode, "sequences": before}
        with loops():
            pair = StepPair(2 * 30, 2, device=device, **settings)
            for turn in range(draw.randint(1, 9)):
                live_through(pair, draw.randint(1, 9), turn, end=0.1)
                keys = pair.model.eligible()[-6:]
                pair.update(keys, [draw.choice((0.25, 1.0, 8.0)) for _ in keys])
                if draw.random() < 0.2:
                    draw.choice((pair.clear, pair.begin_episodes))()
            pair.exclude(pair.model.eligible()[-4:-2])
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
    single, rows = (made(device, 30, sequences=each).buffer for each in (None, Sequences(3, strict=True, stride=2)))
    rows.save(path)
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
