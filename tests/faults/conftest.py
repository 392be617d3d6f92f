"""Fault tests do not wait for fsync."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """`os.fsync` and `os.fdatasync` do nothing to a file that is open.

    What a killed process has written stays in the kernel's memory, and what a loss of power takes is computed from the
    recorded operations: only the time of a real fsync could be seen here. `tests/checkpoint` saves with real ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, _find)
        yield


def _find(file: int) -> None:
    os.fstat(file)  # raises for a closed file, as fsync does
