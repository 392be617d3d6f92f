"""ApexRL's buffers on our core: its constructors, names, containers and errors, with its learning mistakes corrected.

Its module paths are here too (`relive.compat.apexrl.buffer.rollout_buffer`, `relive.compat.apexrl.utils`).
`relive.compat.patch("apexrl")` lets its algorithms and runners use ours. `core` of a buffer is the relive buffer
underneath.
"""

from relive.compat.apexrl.buffer import (
    DistillationBuffer,
    MultiAgentRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
    RolloutRNNBuffer,
)
from relive.compat.apexrl.utils import TensorLeafSpec, space_to_spec

__all__ = [
    "DistillationBuffer", "MultiAgentRolloutBuffer", "ReplayBuffer", "RolloutBuffer", "RolloutRNNBuffer",
    "TensorLeafSpec", "space_to_spec",
]  # fmt: skip
