"""AgileRL's `components`: replay buffers here, the other buffers and their helpers in modules of AgileRL's names."""

from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from relive.compat.forwarding import names_of

__all__ = ["MultiStepReplayBuffer", "PrioritizedReplayBuffer", "ReplayBuffer"]

__getattr__ = names_of("agilerl.components")
