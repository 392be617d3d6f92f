"""One small adapter a library, used by the benchmarks and by the conformance suite."""

from recollect.conformance.peers.discovery import Discovery, Missing, discover
from recollect.conformance.peers.off_policy import (
    ALPHA,
    BETA,
    NotOffered,
    PrioritizedReplay,
    Replay,
    ReplayBatch,
    ReplayShape,
    Transitions,
)
from recollect.conformance.peers.protocol import (
    Batch,
    Epoch,
    Gae,
    Peer,
    Recurrent,
    Rollout,
    RolloutShape,
    Sequences,
    Step,
    Trajectory,
)

__all__ = [
    "ALPHA",
    "BETA",
    "Batch",
    "Discovery",
    "Epoch",
    "Gae",
    "Missing",
    "NotOffered",
    "Peer",
    "PrioritizedReplay",
    "Recurrent",
    "Replay",
    "ReplayBatch",
    "ReplayShape",
    "Rollout",
    "RolloutShape",
    "Sequences",
    "Step",
    "Trajectory",
    "Transitions",
    "discover",
]
