"""ApexRL's buffers on our core: its constructors, names, containers and errors, without its mistakes about learning.

`core` of each is the recollect buffer underneath.
"""

from recollect.compat.apexrl.distillation import DistillationBuffer
from recollect.compat.apexrl.multi_agent import MultiAgentRolloutBuffer
from recollect.compat.apexrl.recurrent import RolloutRNNBuffer
from recollect.compat.apexrl.replay import ReplayBuffer
from recollect.compat.apexrl.rollout import RolloutBuffer
from recollect.compat.apexrl.specs import TensorLeafSpec, space_to_spec

__all__ = [
    "DistillationBuffer",
    "MultiAgentRolloutBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "RolloutRNNBuffer",
    "TensorLeafSpec",
    "space_to_spec",
]
