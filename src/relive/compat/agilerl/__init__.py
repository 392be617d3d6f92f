"""AgileRL's buffers on our core: the same classes, arguments and containers.

    from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer
    from relive.compat.agilerl import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

What is done differently, because it was wrong, is said in each class.
"""

from relive.compat.agilerl.replay import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from relive.compat.agilerl.rollout import RolloutBuffer
from relive.compat.agilerl.sequences import BPTTSequenceType

__all__ = [
    "BPTTSequenceType",
    "MultiStepReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
]
