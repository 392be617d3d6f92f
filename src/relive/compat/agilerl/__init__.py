"""AgileRL's buffers on relive's core, with AgileRL's modules, classes, arguments and containers.

    from relive.compat.agilerl.components.replay_buffer import PrioritizedReplayBuffer, ReplayBuffer
    from relive.compat.agilerl.components.rollout_buffer import RolloutBuffer

Where AgileRL is installed, relive's classes are subclasses of its own, so that its trainers recognise them.
`relive.compat.patch("agilerl")` lets its algorithms and trainers make them. Each class lists its differences
from AgileRL.
"""

from relive.compat.agilerl.components.data import MultiAgentTransition, ReplayDataset, Transition
from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from relive.compat.agilerl.components.rollout_buffer import RolloutBuffer
from relive.compat.agilerl.components.sampler import Sampler
from relive.compat.agilerl.components.segment_tree import MinSegmentTree, SumSegmentTree
from relive.compat.agilerl.typing import BPTTSequenceType

__all__ = [
    "BPTTSequenceType", "MinSegmentTree", "MultiAgentTransition", "MultiStepReplayBuffer", "PrioritizedReplayBuffer",
    "ReplayBuffer", "ReplayDataset", "RolloutBuffer", "Sampler", "SumSegmentTree", "Transition",
]  # fmt: skip
