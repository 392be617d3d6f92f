"""ApexRL's buffers on relive's core, with ApexRL's constructors, names, containers and errors, but not its mistakes.

The modules have ApexRL's paths below this package: `relive.compat.apexrl.buffer.rollout_buffer`,
`relive.compat.apexrl.utils`. `relive.compat.patch("apexrl")` lets ApexRL's algorithms and runners use relive's buffers.
`core` of a buffer is the relive buffer underneath.
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
