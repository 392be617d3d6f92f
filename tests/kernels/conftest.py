"""Kernels are what differs between backends: `make test`, too, runs the tests of this folder on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import BACKENDS, running


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way that kernels run."""
    with running(request.param):
        yield request.param
