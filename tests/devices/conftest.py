"""The device that the tests of this folder run on: `pytest tests/devices --device cuda`, or RELIVE_TEST_DEVICE=cuda."""

from __future__ import annotations

import pytest

from tests.devices.place import Place, place


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Place:
    """The device of a test's buffers; without such a device the test fails and says so."""
    return place(str(request.config.getoption("--device")))


@pytest.fixture
def filled(on: Place) -> Place:
    """The same, for tests that look at values."""
    if on.device.type == "meta":
        pytest.skip("tensors of the meta device have no values")
    return on
