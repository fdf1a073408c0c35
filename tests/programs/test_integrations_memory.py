"""Buffers that adapters make are freed with them, without Python's collector: what tests of each adapter made is gone
when they end."""

from __future__ import annotations

import inspect
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from freed import collector_off_fixture as collector_off_fixture

from gpu_replay.base.buffer import Buffer

# an adapter, and a test of it
USES = {
    "gymnasium": "test_streams_are_those_of_the_physics_also_over_several_calls",
    "gymnasium, rows": "test_transitions_are_those_of_the_physics",
    "torchrl": "test_a_state_goes_on_in_memory_and_from_a_file",
    "torchrl, priorities": "test_priorities_are_taken_from_the_tensordict",
    "sb3": "test_the_first_steps_are_sampled_as_those_of_its_own_buffer",
    "sb3, goals": "test_hindsight_says_what_it_needs",
    "streams": "test_windows_do_not_cross_a_reset_outside_of_the_loop",
    "streams, flashsac": "test_a_saved_buffer_of_flashsac_continues_with_new_episodes",
    "skrl": "test_a_saved_memory_continues_with_new_episodes",
    "minari": "test_a_dataset_comes_back_as_it_was",
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.usefixtures("collector_off")
@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_what_is_dropped_is_freed_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, kept, init = import_module(f"test_integrations_{name.partition(',')[0]}"), [], Buffer.__init__

    def noted(buffer: Buffer, *given: Any, **named: Any) -> None:
        kept.append(weakref.ref(buffer))
        init(buffer, *given, **named)

    monkeypatch.setattr(Buffer, "__init__", noted)
    # a library may keep something at its first use
    for turn in ("first", "second"):
        kept.clear()
        folder = tmp_path / turn
        folder.mkdir()
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
        given = {"tmp_path": folder, "mode": getattr(adapter, "MODES", [None])[0], "steps": 3}
        test = getattr(adapter, USES[name])
        test(**{each: given[each] for each in inspect.signature(test).parameters})
    assert kept
    assert [each() for each in kept] == [None] * len(kept)
