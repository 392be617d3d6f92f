"""AgileRL's buffers on our core: the same classes, arguments and containers.

    from recollect.compat.agilerl import BPTTSequenceType, RolloutBuffer
    from recollect.compat.agilerl import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

What is done differently, because it was wrong, is said in each class.
"""

from recollect.compat.agilerl.replay import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from recollect.compat.agilerl.rollout import RolloutBuffer
from recollect.compat.agilerl.sequences import BPTTSequenceType

__all__ = [
    "BPTTSequenceType",
    "MultiStepReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
]
