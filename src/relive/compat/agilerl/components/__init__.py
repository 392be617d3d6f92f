"""AgileRL's `components`: replay buffers here, the other buffers and their helpers in modules of AgileRL's names."""

from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

__all__ = ["MultiStepReplayBuffer", "PrioritizedReplayBuffer", "ReplayBuffer"]
