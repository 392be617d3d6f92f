"""The device that the tests of this folder run on: `pytest tests/devices --device cuda`, or RELIVE_TEST_DEVICE=cuda."""

from __future__ import annotations

import pytest

from tests.devices.place import Place, place


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Place:
    """The device of a test's buffers; the test fails without such a device."""
    return place(str(request.config.getoption("--device")))


@pytest.fixture
def filled(on: Place) -> Place:
    """The same device, for tests that read values."""
    if on.device.type == "meta":
        pytest.skip("tensors of the meta device have no values")
    return on
