"""One small adapter a library, used by the benchmarks and by the conformance suite."""

from recollect.conformance.peers.discovery import Discovery, Missing, discover
from recollect.conformance.peers.protocol import Batch, Epoch, Gae, Peer, Rollout, RolloutShape, Step, Trajectory

__all__ = [
    "Batch",
    "Discovery",
    "Epoch",
    "Gae",
    "Missing",
    "Peer",
    "Rollout",
    "RolloutShape",
    "Step",
    "Trajectory",
    "discover",
]
