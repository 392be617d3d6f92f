"""AgileRL's `components`: its replay buffers; other buffers and helpers are in modules with AgileRL's names."""

from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

__all__ = ["MultiStepReplayBuffer", "PrioritizedReplayBuffer", "ReplayBuffer"]
