"""What a case says about a library: it passes, it differs, or the library does not offer it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_SHOWN = 12
"""Figures of an array that a person reads."""
PASSES, DIFFERS, NOT_OFFERED = "pass", "differs", "not offered"


class Differs(AssertionError):
    """A case came out otherwise; `expected` and `got` are the figures."""

    def __init__(self, expected: object, got: object) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = str(expected), str(got)


@dataclass(frozen=True)
class Outcome:
    """One cell of the table."""

    status: str
    expected: str = ""
    got: str = ""
    reason: str = ""
    """Why it is not offered."""
    reproduction: str = ""
    """Three lines that show the difference."""

    def to_json(self) -> dict[str, str]:
        """Only what is said."""
        return {name: text for name, text in asdict(self).items() if text}


def require(holds: Any, expected: object, got: object) -> None:
    """Raise `Differs` unless it holds."""
    if not holds:
        raise Differs(expected, got)


def same(what: str, got: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise `Differs` with the first figures that are not equal; axes of length 1 at the end are nobody's business."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.size == expected.size:
        got = got.reshape(expected.shape)
    if got.shape != expected.shape:
        raise Differs(f"{what} of shape {expected.shape}", f"shape {got.shape}")
    wide_got, wide_expected = got.astype(np.float64), expected.astype(np.float64)
    wrong = ~np.isclose(wide_got, wide_expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if wrong.any():
        row = () if expected.size <= _SHOWN else np.unravel_index(int(wrong.argmax()), wrong.shape)[0]
        raise Differs(f"{what} {figures(expected[row])}", figures(got[row]))


def figures(array: Any) -> str:
    """Numbers as a person writes them."""
    array = np.asarray(array)
    if array.ndim == 0:
        return str(array) if array.dtype == bool else f"{array:g}"
    array = array.reshape(-1)[:_SHOWN]
    return "[" + ", ".join(figures(number) for number in array) + "]"
