"""Fixtures of these tests: every device there is, and a collector of cycles that is off."""

from __future__ import annotations

from devices import device_fixture as device_fixture
from freed import collector_off_fixture as collector_off_fixture
