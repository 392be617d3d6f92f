"""Every test in this folder runs under Triton's interpreter; tests that compile use new processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton.interpreter import quick_arithmetic


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with quick_arithmetic():
        yield
