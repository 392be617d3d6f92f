"""Fixtures for the device of the tests: `pytest tests/devices --device cuda`, or RELIVE_TEST_DEVICE=cuda."""

from __future__ import annotations

import pytest

from tests.devices.place import Place, place


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Place:
    """Return the device of the command line; fails without such a device."""
    return place(str(request.config.getoption("--device")))


@pytest.fixture
def device_with_values(on: Place) -> Place:
    """Return the device of the command line; skips the meta device, whose tensors have no values."""
    if on.device.type == "meta":
        pytest.skip("tensors of the meta device have no values")
    return on
