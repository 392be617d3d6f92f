"""ApexRL's buffers on our core: its constructors, names, containers and errors, without its mistakes about learning.

`core` of each is the relive buffer underneath.
"""

from relive.compat.apexrl.distillation import DistillationBuffer
from relive.compat.apexrl.multi_agent import MultiAgentRolloutBuffer
from relive.compat.apexrl.recurrent import RolloutRNNBuffer
from relive.compat.apexrl.replay import ReplayBuffer
from relive.compat.apexrl.rollout import RolloutBuffer
from relive.compat.apexrl.specs import TensorLeafSpec, space_to_spec

__all__ = [
    "DistillationBuffer",
    "MultiAgentRolloutBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "RolloutRNNBuffer",
    "TensorLeafSpec",
    "space_to_spec",
]
