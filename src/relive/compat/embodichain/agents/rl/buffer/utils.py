"""Functions for rollouts, at the module path that EmbodiChain 0.1.2 to 0.2.2 used."""

from relive.compat.embodichain.learning.rl.buffer.utils import iterate_minibatches, transition_view

__all__ = ["iterate_minibatches", "transition_view"]
