"""Every test in this folder runs under Triton's interpreter, but for those that compile in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton.interpreter import quick_arithmetic


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with quick_arithmetic():
        yield
