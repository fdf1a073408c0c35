"""Schedules: beta moves by one step with each sample, and may be overridden for one."""

from __future__ import annotations

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


def annealed(steps: int, start: float = 0.25, end: float = 1.0, *, device: str) -> ReplayBuffer:
    settings = Proportional(alpha=1.0, eps=0.0, beta=LinearSchedule(start, end, steps))
    buffer = make(2, settings, device=device)
    fill(buffer, 2, priority=[1, 4])
    return buffer


@pytest.mark.parametrize("step, value", [(0, 0.4), (1, 0.55), (2, 0.7), (4, 1.0), (5, 1.0), (10**9, 1.0)])
def test_schedule_goes_from_start_to_end_and_stays(step: int, value: float) -> None:
    assert LinearSchedule(0.4, 1.0, steps=4)(step) == pytest.approx(value)


def test_schedule_may_fall() -> None:
    schedule = LinearSchedule(1.0, 0.0, steps=4)
    assert [schedule(step) for step in range(6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_beta_advances_by_one_with_each_sample(device: str) -> None:
    buffer = annealed(3, device=device)
    assert close([measured_beta(buffer) for _ in range(6)], [0.25, 0.5, 0.75, 1.0, 1.0, 1.0], "weight")


def test_beta_does_not_advance_with_other_calls(device: str) -> None:
    buffer = annealed(3, device=device)
    first = measured_beta(buffer)
    keys = fill(buffer, 2, priority=[1, 4])
    buffer.update_priorities(keys, keys * 0 + 1)
    buffer.update_priorities(keys, (keys - keys.min()) * 3 + 1)
    buffer.stats()
    buffer[keys]
    with pytest.raises(ValueError):
        buffer.sample(0)
    assert close([first, measured_beta(buffer)], [0.25, 0.5], "weight")


def test_beta_of_a_call_overrides_the_schedule_and_the_schedule_goes_on(device: str) -> None:
    buffer = annealed(3, device=device)
    found = [measured_beta(buffer, beta) for beta in (None, 0.0, 2.0, None)]
    assert close(found, [0.25, 0.0, 2.0, 1.0], "weight")


def test_beta_of_a_call_overrides_a_number(device: str) -> None:
    buffer = make(2, Proportional(alpha=1.0, eps=0.0, beta=0.5), device=device)
    fill(buffer, 2, priority=[1, 4])
    assert close([measured_beta(buffer, beta) for beta in (None, 1, 0, None)], [0.5, 1.0, 0.0, 0.5], "weight")


def test_beta_changes_no_draw(device: str) -> None:
    one, other = annealed(3, device=device), annealed(3, device=device)
    for beta in (0.0, 1.0, 3.0):
        assert one.sample(16, beta=beta).key.tolist() == other.sample(16).key.tolist()


def test_clear_does_not_rewind_the_schedule(device: str) -> None:
    buffer = annealed(3, device=device)
    measured_beta(buffer)
    buffer.clear()
    fill(buffer, 2, priority=[1, 4])
    assert close([measured_beta(buffer)], [0.5], "weight")
