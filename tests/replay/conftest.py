"""Fixtures of the tests of replay buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive import kernels
from tests.conftest import BACKENDS


@pytest.fixture(params=[*BACKENDS, "shared", "disk"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return the memory of a buffer: of this process with each backend, shared memory, and a disk."""
    name = request.param
    if name != "torch" and kernels.native_core() is None:
        pytest.skip("this install has no native core (no compiler)")
    if name in BACKENDS:
        with BACKENDS[name]():
            yield "cpu"
    else:
        yield rl.Memory.shared() if name == "shared" else rl.Memory.disk(tmp_path / "memory")
