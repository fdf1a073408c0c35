"""What looks right and is not: buffers given to other processes, `load` on an instance, spaces in place of fields."""

from __future__ import annotations

import copy
import multiprocessing
import pickle  # noqa: TID251
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import host_only

from gpu_replay import Field, ReplayBuffer, TrajectoryReplayBuffer

pytestmark = [pytest.mark.contract, host_only]
NUMBER = {"x": Field((), torch.float32)}
STEP = {"obs": Field((2,), torch.float32), "action": Field((), torch.int64)}


def filled() -> ReplayBuffer:
    buffer = ReplayBuffer(8, NUMBER, device="cpu")
    buffer.add(x=torch.arange(5.0))
    return buffer


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_buffer_is_not_given_to_a_process_that_is_started(method: str) -> None:
    buffer, context = filled(), multiprocessing.get_context(method)
    for arguments in ((buffer,), ({"nested": [buffer]},)):
        child = context.Process(target=print, args=arguments)
        with pytest.raises(RuntimeError, match="its copy would add rows that nobody sees.*through a queue"):
            child.start()
    # pickling elsewhere goes on
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert torch.equal(other.sample(3).key, copy.deepcopy(buffer).sample(3).key)


@pytest.mark.parametrize(
    "make", [filled, lambda: TrajectoryReplayBuffer(8, 2, STEP, device="cpu")], ids=["transitions", "steps"]
)
def test_load_of_an_instance_is_refused(make: Any, tmp_path: Path) -> None:
    buffer = make()
    buffer.save(tmp_path / "c")
    name = type(buffer).__name__
    with pytest.raises(TypeError, match=rf"{name}\.load\(.*load_state_dict"):
        buffer.load(tmp_path / "c")
    assert type(buffer).load(tmp_path / "c", "cpu").added == buffer.added


def test_spaces_in_place_of_fields_are_sent_to_from_spaces() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space, action = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
    with pytest.raises(TypeError, match=r"ReplayBuffer\.from_spaces"):
        ReplayBuffer(8, space, action)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"TrajectoryReplayBuffer\.from_spaces"):
        TrajectoryReplayBuffer(8, 2, space, action)  # type: ignore[call-arg]
