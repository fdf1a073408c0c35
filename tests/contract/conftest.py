"""Contract tests run on every device there is."""

from __future__ import annotations

from devices import device_fixture as device_fixture
