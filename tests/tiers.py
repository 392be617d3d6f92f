"""Selection of the cases of `make test`; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def select(*selected: Any, of: Iterable[Any]) -> list[Any]:
    """Return all cases `of` for `pytest.mark.parametrize`, and mark those that are not selected `thorough`.

    A tuple holds the values of several arguments.
    """
    cases = list(of)
    assert all(case in cases for case in selected), f"expected some of {cases}, got {selected}"
    return [case if case in selected else _thorough(case) for case in cases]


def _thorough(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
