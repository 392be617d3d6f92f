"""EmbodiChain's shared rollout, under its module path."""

from relive.compat.embodichain.learning.rl.buffer.standard_buffer import RolloutBuffer
from relive.compat.embodichain.learning.rl.buffer.utils import iterate_minibatches, transition_view

__all__ = ["RolloutBuffer", "iterate_minibatches", "transition_view"]
