"""Tests of what a correct experience buffer does, for the libraries that are installed and for your own buffer.

`relive-conformance` runs the cases; `relive-conformance my_package:MyBuffer` tests your own buffer.
"""

from relive_conformance.adapters.off_policy import NotOffered, ReplayShape, Transitions
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.cases import CASES
from relive_conformance.outcome import Differs, Outcome

__version__ = "0.1.0"

__all__ = ["CASES", "Adapter", "Case", "Differs", "NotOffered", "Outcome", "ReplayShape", "Transitions", "case"]


def case(number: str) -> Case:
    """Return the case of a number, "T1" to "T28"."""
    return {each.number: each for each in CASES}[number]
