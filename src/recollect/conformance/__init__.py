"""What a correct experience buffer does, asked of this library, of its peers, and of your own buffer.

`recollect conformance` runs the cases; `recollect conformance my_package:MyBuffer` asks your own.
"""

from recollect.conformance.case import Case
from recollect.conformance.cases import CASES
from recollect.conformance.outcome import Differs, Outcome
from recollect.conformance.peers.off_policy import NotOffered, ReplayShape, Transitions
from recollect.conformance.peers.protocol import Peer

__all__ = ["CASES", "Case", "Differs", "NotOffered", "Outcome", "Peer", "ReplayShape", "Transitions", "case"]


def case(number: str) -> Case:
    """The case of this number, "T1" to "T28"."""
    return {found.number: found for found in CASES}[number]
