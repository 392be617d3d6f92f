"""EmbodiChain's shared rollout, under the path that it has it at."""

from relive.compat.embodichain.learning.rl.buffer.standard_buffer import RolloutBuffer
from relive.compat.embodichain.learning.rl.buffer.utils import iterate_minibatches, transition_view

__all__ = ["RolloutBuffer", "iterate_minibatches", "transition_view"]
