"""Schedules: beta moves by one step with each sample, and may be overridden for one."""

from __future__ import annotations

from typing import Any

import pytest
from devices import device_fixture as device_fixture
from tolerances import close
from transitions import fill, make

from gpu_replay import LinearSchedule, Proportional, ReplayBuffer

pytestmark = pytest.mark.contract


def measured_beta(buffer: ReplayBuffer, beta: float | None = None) -> float:
    """The exponent of the next sample, read from the weight of a transition with four times the lowest mass."""
    weights = buffer.sample(8, beta=beta).weight.double()
    return float(-(weights.min().log2() / 2).item())


def annealed(steps: int, *, device: str) -> ReplayBuffer:
    settings = Proportional(alpha=1.0, eps=0.0, beta=LinearSchedule(0.25, 1.0, steps))
    buffer = make(2, settings, device=device)
    fill(buffer, 2, priority=[1, 4])
    return buffer


@pytest.mark.parametrize("start, end", [(0.4, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("step, share", [(0, 0), (1, 0.25), (2, 0.5), (4, 1), (5, 1), (10**9, 1)])
def test_schedule_goes_from_start_to_end_and_stays(step: int, share: float, start: float, end: float) -> None:
    assert LinearSchedule(start, end, steps=4)(step) == pytest.approx(start + (end - start) * share)


def test_beta_advances_by_one_with_each_sample(device: str) -> None:
    buffer = annealed(3, device=device)
    assert close([measured_beta(buffer) for _ in range(6)], [0.25, 0.5, 0.75, 1.0, 1.0, 1.0], "weight")


def test_beta_does_not_advance_with_other_calls_and_a_clear_does_not_rewind_it(device: str) -> None:
    buffer = annealed(3, device=device)
    first = measured_beta(buffer)
    buffer.clear()
    keys = fill(buffer, 2, priority=[4, 1])
    buffer.update_priorities(keys, keys * 0 + 1)
    buffer.update_priorities(keys, (keys - keys.min()) * 3 + 1)
    buffer.stats()
    buffer[keys]
    with pytest.raises(ValueError):
        buffer.sample(0)
    assert close([first, measured_beta(buffer)], [0.25, 0.5], "weight")


@pytest.mark.parametrize("beta, last", [(LinearSchedule(0.25, 1.0, 3), 1.0), (0.25, 0.25)], ids=["schedule", "number"])
def test_beta_of_a_call_overrides_the_setting_and_a_schedule_goes_on(beta: Any, last: float, device: str) -> None:
    buffer, twin = (make(2, Proportional(alpha=1.0, eps=0.0, beta=beta), device=device) for _ in range(2))
    for each in (buffer, twin):
        fill(each, 2, priority=[1, 4])
    assert close([measured_beta(buffer, each) for each in (None, 0.0, 2, None)], [0.25, 0.0, 2.0, last], "weight")
    # beta changes no draw
    for _ in range(4):
        twin.sample(8)
    assert buffer.sample(16, beta=3.0).key.tolist() == twin.sample(16).key.tolist()
