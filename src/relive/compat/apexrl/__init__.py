"""ApexRL's buffers on our core: its constructors, names, containers and errors, without its mistakes about learning.

Its module paths are here too (`relive.compat.apexrl.buffer.rollout_buffer`, `relive.compat.apexrl.utils`). Where ApexRL
is installed, its algorithms and runners are, with our buffers (`relive.compat.apexrl.algorithms`,
`relive.compat.apexrl.agent`), and every other module of it. `core` of a buffer is the relive buffer underneath.
"""

from relive.compat.apexrl.buffer import (
    DistillationBuffer,
    MultiAgentRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
    RolloutRNNBuffer,
)
from relive.compat.apexrl.utils import TensorLeafSpec, space_to_spec
from relive.compat.forwarding import forward, names_of

__all__ = [
    "DistillationBuffer",
    "MultiAgentRolloutBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "RolloutRNNBuffer",
    "TensorLeafSpec",
    "space_to_spec",
]

forward("apexrl", again=("agent", "algorithms"))

__getattr__ = names_of("apexrl")
