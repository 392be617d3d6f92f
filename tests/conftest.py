"""Fixtures that every test folder shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from recollect import kernels

BACKENDS = {"native": nullcontext, "torch": kernels.force_torch, "no_exchange": kernels.without_exchange}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way that kernels run: native, torch ops, and native under a torch without the exchange API."""
    if request.param != "torch" and kernels.native() is None:
        pytest.skip("this install has no native core (no compiler)")
    with BACKENDS[request.param]():
        yield request.param
