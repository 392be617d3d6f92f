"""ApexRL's buffers under ApexRL's module paths."""

from relive.compat.apexrl.buffer.distillation_buffer import DistillationBuffer
from relive.compat.apexrl.buffer.multi_agent_rollout_buffer import MultiAgentRolloutBuffer
from relive.compat.apexrl.buffer.replay_buffer import ReplayBuffer
from relive.compat.apexrl.buffer.rollout_buffer import RolloutBuffer
from relive.compat.apexrl.buffer.rollout_rnn_buffer import RolloutRNNBuffer

__all__ = ["DistillationBuffer", "MultiAgentRolloutBuffer", "ReplayBuffer", "RolloutBuffer", "RolloutRNNBuffer"]
