"""Tests of what a correct experience buffer does, for this library, for others, and for your own buffer.

`relive conformance` runs the cases; `relive conformance my_package:MyBuffer` tests your own buffer.
"""

from relive.conformance.case import Case
from relive.conformance.cases import CASES
from relive.conformance.outcome import Differs, Outcome
from relive.conformance.peers.off_policy import NotOffered, ReplayShape, Transitions
from relive.conformance.peers.protocol import Peer

__all__ = ["CASES", "Case", "Differs", "NotOffered", "Outcome", "Peer", "ReplayShape", "Transitions", "case"]


def case(number: str) -> Case:
    """The case with this number, "T1" to "T28"."""
    return {found.number: found for found in CASES}[number]
