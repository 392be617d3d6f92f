"""Fault tests do not wait for the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Replace `os.fsync` and `os.fdatasync` by checks that the file is open.

    Bytes written by a killed process stay in the kernel's memory, and power failures are simulated from recorded
    operations: a real fsync would only take time. `tests/checkpoint` uses the real one.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, _check_open)
        yield


def _check_open(file: int) -> None:
    os.fstat(file)  # raises for a closed file, as fsync does
