"""Rows as people have them: one without its axis, columns, flags that are numbers; and guesses, with answers.

Random programs give rows in these forms too, and none at all: see `handed_in`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import INTERPRETED
from refusals import whole_state

from gpu_replay import Field, Hindsight, Proportional, RankBased, ReplayBuffer, TrajectoryReplayBuffer

gymnasium = pytest.importorskip("gymnasium")

pytestmark = pytest.mark.contract

ROW = {
    "obs": Field((2,), torch.float32),
    "action": Field((), torch.int64),
    "reward": Field((), torch.float32),
    "terminated": Field((), torch.bool),
}
OBS = np.array([0.5, -2.0], np.float32)
# one transition, as Python, NumPy and torch have it, and lists
SINGLE: dict[str, dict[str, Any]] = {
    "python": {"obs": OBS, "action": 3, "reward": 0.25, "terminated": True},
    "numpy": {"obs": OBS, "action": np.int64(3), "reward": np.float64(0.25), "terminated": np.bool_(True)},
    "small": {"obs": OBS.astype(np.float16), "action": np.uint8(3), "reward": np.float32(0.25), "terminated": 1},
    "torch": {
        "obs": torch.from_numpy(OBS),
        "action": torch.tensor(3),
        "reward": torch.tensor(0.25, dtype=torch.float64),
        "terminated": torch.tensor(1.0),
    },
    "lists": {"obs": [0.5, -2.0], "action": np.array(3), "reward": 0.25, "terminated": np.float32(1)},
}


@pytest.mark.parametrize("form", SINGLE)
def test_one_row_as_a_single_environment_gives_it(form: str, device: str) -> None:
    buffer = ReplayBuffer(5, ROW, sampler=RankBased(), device=device)
    keys = buffer.add(**SINGLE[form], priority=4.0)
    assert (keys.tolist(), keys.dtype, keys.device) == ([0], torch.int64, buffer.device)
    assert buffer.priorities(keys).tolist() == [4.0]
    assert buffer.add(**SINGLE[form]).tolist() == [1]
    batch = buffer[[0, 1]]
    assert batch.obs.tolist() == 2 * [OBS.tolist()]
    assert (batch.action.tolist(), batch.reward.tolist(), batch.terminated.tolist()) == (
        [3, 3],
        [0.25, 0.25],
        [True] * 2,
    )


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"obs": OBS[None]}, ValueError, r"'action' needs shape \[m\]; found \[\].*value\[None\], or give no value"),
        ({"reward": [0.25]}, ValueError, "'obs' needs shape"),
        ({"action": 0.5}, TypeError, "'action' is stored as torch.int64; found torch.float64"),
        ({"action": 2**63}, TypeError, "'action'"),
        ({"reward": 1e300}, ValueError, "'reward'.*does not fit"),
        ({"reward": None}, TypeError, "'reward'"),
        ({"terminated": 2}, ValueError, "'terminated'.*0 and 1"),
        ({"priority": [1.0, 2.0]}, ValueError, r"priority must have shape \[1\]"),
    ],
    ids=str,
)
def test_a_row_that_does_not_fit_is_refused(
    change: dict[str, Any], error: type[Exception], words: str, device: str
) -> None:
    buffer = ReplayBuffer(5, ROW, device=device)
    with pytest.raises(error, match=words):
        buffer.add(**SINGLE["python"] | change)
    assert len(buffer) == 0


NOTHING: dict[str, Any] = {
    "list": [],
    "tuple": (),
    "array": np.array([]),
    "integers": np.zeros(0, np.int64),
    "tensor": torch.empty(0),
    "array of the right sides": np.zeros((0, 6, 8), np.uint8),
}


@pytest.mark.parametrize("form", NOTHING)
def test_no_rows_of_vectors_and_images_are_stored(form: str, device: str) -> None:
    nothing = NOTHING[form]
    fields = ROW | {"image": Field((6, 8), torch.uint8), "note": Field((3,), torch.bfloat16)}
    buffer = ReplayBuffer(5, fields, sampler=RankBased(), device=device)
    buffer.add(**{name: np.zeros((2, *field.shape), np.uint8) for name, field in fields.items()})
    before, image = whole_state(buffer), {"image": nothing}
    empty = image | {key: [] for key in ("obs", "action", "reward", "terminated", "note")}
    if isinstance(nothing, torch.Tensor):
        empty = {name: nothing.to(device) if name in ("image", "obs") else value for name, value in empty.items()}
    for order in (empty, dict(reversed(empty.items()))):
        keys = buffer.add(**order, priority=[])
        assert (keys.tolist(), keys.dtype, keys.device) == ([], torch.int64, buffer.device)
    buffer.write([], **empty)
    assert whole_state(buffer) == before
    for other, words in (
        ({"obs": np.zeros((2, 2))}, "rows where the others"),
        ({"image": [[]]}, "'image' needs shape"),
    ):
        with pytest.raises(ValueError, match=words):
            buffer.add(**empty | other)
    with pytest.raises(ValueError, match="a row for each of 1 keys; found 0"):
        buffer.write([1], **empty)
    assert whole_state(buffer) == before


@pytest.mark.parametrize("final", ["array", "dict", "tuple"])
def test_the_classic_loop_gives_its_rows_as_they_come(final: str, device: str) -> None:
    space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    spaces = {"array": space, "dict": gymnasium.spaces.Dict({"a": space}), "tuple": gymnasium.spaces.Tuple([space])}
    parts = {"array": lambda v: v, "dict": lambda v: {"a": v}, "tuple": lambda v: (v,)}[final]
    settings: dict[str, Any] = {"autoreset": "disabled", "sampler": RankBased(), "device": device}
    buffer = TrajectoryReplayBuffer.from_spaces(9, 1, spaces[final], gymnasium.spaces.Discrete(4), **settings)
    for step in range(3):
        ended = step == 1
        buffer.add(
            obs=parts(OBS + step),
            action=step,
            reward=step / 2,
            terminated=False,
            truncated=ended,
            priority=step + 1.0,
            final_obs=parts(-OBS) if ended else None,
        )
    batch = buffer[[0, 1]]
    name = {"array": "next_obs", "dict": "next_obs.a", "tuple": "next_obs.item_0"}[final]
    assert batch[name].tolist() == [(OBS + 1).tolist(), (-OBS).tolist()]
    assert (batch.reward.tolist(), batch.truncated.tolist()) == ([0.0, 0.5], [False, True])
    assert buffer.priorities([0, 1]).tolist() == [1.0, 2.0]
    assert buffer.stats().lost_truncations == 0


def guesses(path: Path) -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    """What other libraries have, by what it is, and the answer."""
    steps = {name: ROW[name] for name in ("obs", "action")}
    rows = ReplayBuffer(9, ROW, sampler=Proportional(), device="cpu")
    rows.add(obs=torch.zeros(3, 2), action=[0, 1, 2], reward=[0.0] * 3, terminated=[False] * 3)
    stream = TrajectoryReplayBuffer(9, 1, steps, n_step=3, autoreset="next_step", device="cpu")
    rows.save(path / "rows")
    stream.save(path / "stream")
    env: Any = gymnasium.make("CartPole-v1")
    load = TrajectoryReplayBuffer.load
    return {
        "positions": (lambda: rows.add(OBS, 1, 0.0, False), TypeError, r"add\(obs=..., action=.*4 positional"),  # type: ignore[arg-type]
        "from_env": (lambda: ReplayBuffer.from_env(env, 9), TypeError, r"ReplayBuffer\.from_spaces\(capacity, obs"),
        "n_steps": (lambda: TrajectoryReplayBuffer(9, 1, steps, n_steps=3), TypeError, "did you mean n_step\\?"),  # type: ignore[call-arg]
        "max_size": (lambda: ReplayBuffer(max_size=9, fields=ROW), TypeError, "did you mean capacity\\?"),  # type: ignore[call-arg]
        "alpha": (lambda: ReplayBuffer(9, ROW, alpha=0.6), TypeError, r"sampler=Proportional\(alpha=\.\.\.\)\?"),  # type: ignore[call-arg]
        "seq_len": (lambda: TrajectoryReplayBuffer(9, 1, steps, seq_len=4), TypeError, r"sequences=Sequences\(le"),  # type: ignore[call-arg]
        "typo": (lambda: TrajectoryReplayBuffer.from_env(env, 9, samplers=1), TypeError, "did you mean sampler\\?"),
        "unlike": (lambda: ReplayBuffer(9, ROW, wings=2), TypeError, "no setting 'wings'. It takes capacity, fi"),  # type: ignore[call-arg]
        "load": (lambda: load(path / "stream", capacity=9), TypeError, r"no 'capacity'.*old\.batches\(size\).*guide"),  # type: ignore[arg-type]
        "sampler": (lambda: ReplayBuffer.load(path / "rows", sampler=1), TypeError, "sampler must be.*found 1"),  # type: ignore[arg-type]
        "rows": (lambda: ReplayBuffer.load(path / "rows", sequences=None), TypeError, "no 'sequences'"),  # type: ignore[arg-type]
        "ratio": (lambda: Hindsight(reward_fn=max, ratio=4), ValueError, r"from 0 to 1; found 4\..*ratio=0\.8 here"),
        "beta": (lambda: Proportional(beta=(0.4, 1.0)), TypeError, r"LinearSchedule\(start, end, steps\)"),  # type: ignore[arg-type]
        "early": (lambda: stream.sample(2), RuntimeError, "no eligible starts.*n_step=3 steps.*observation after"),
    }


@pytest.mark.skipif(INTERPRETED, reason="nothing is drawn or stored")
def test_guesses_of_other_libraries_are_answered(tmp_path: Path) -> None:
    for call, error, words in guesses(tmp_path).values():
        with pytest.raises(error, match=words):
            call()
