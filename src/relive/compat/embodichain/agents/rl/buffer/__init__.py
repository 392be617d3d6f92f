"""The older `RolloutBuffer`, which stores steps `[T, N]`.

Releases 0.1.2 to 0.2.2 had the newer buffer here and in `standard_buffer`; relive's is in `standard_buffer` only.
"""

from relive.compat.embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from relive.compat.embodichain.learning.rl.buffer.utils import iterate_minibatches, transition_view

__all__ = ["RolloutBuffer", "iterate_minibatches", "transition_view"]
