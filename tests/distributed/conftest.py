"""A small cluster on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, started once for all tests that need it, and always shut down."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'recollect[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about settings of later versions
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield
    ray.shutdown()
