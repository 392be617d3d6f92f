"""Backends differ in their kernels: `make test`, too, runs the tests of this folder on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import BACKENDS, running


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on each backend."""
    with running(request.param):
        yield request.param
