"""Functions of rollouts at their path in releases 0.1.2 to 0.2.2."""

from relive.compat.embodichain.learning.rl.buffer.utils import iterate_minibatches, transition_view

__all__ = ["iterate_minibatches", "transition_view"]
