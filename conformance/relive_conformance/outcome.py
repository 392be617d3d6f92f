"""The outcome of a case for a library: it passes, it differs, or the library does not offer it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_MAX_SHOWN = 12
"""Maximum number of array elements to show."""
PASSES, DIFFERS, NOT_OFFERED = "pass", "differs", "not offered"


class Differs(AssertionError):
    """Raised if a result differs; `expected` and `got` are the figures."""

    def __init__(self, expected: object, got: object) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = str(expected), str(got)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case for one library."""

    status: str
    expected: str = ""
    got: str = ""
    reason: str = ""
    """Why the library does not offer the case."""
    reproduction: str = ""
    """A few lines of code that show the difference."""

    def to_json(self) -> dict[str, str]:
        """Return the non-empty fields."""
        return {name: text for name, text in asdict(self).items() if text}


def expect(holds: Any, expected: object, got: object) -> None:
    """Raise `Differs` unless a condition holds."""
    if not holds:
        raise Differs(expected, got)


def expect_equal(what: str, got: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise `Differs` with the first unequal figures; trailing axes of length 1 are ignored."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.size == expected.size:
        got = got.reshape(expected.shape)
    if got.shape != expected.shape:
        raise Differs(f"{what} of shape {expected.shape}", f"shape {got.shape}")
    wide_got, wide_expected = got.astype(np.float64), expected.astype(np.float64)
    differs = ~np.isclose(wide_got, wide_expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if differs.any():
        row = () if expected.size <= _MAX_SHOWN else np.unravel_index(int(differs.argmax()), differs.shape)[0]
        raise Differs(f"{what} {figures(expected[row])}", figures(got[row]))


def figures(array: Any) -> str:
    """Return the numbers of an array as text."""
    array = np.asarray(array)
    if array.ndim == 0:
        return str(array) if array.dtype == bool else f"{array:g}"
    array = array.reshape(-1)[:_MAX_SHOWN]
    return "[" + ", ".join(figures(number) for number in array) + "]"
