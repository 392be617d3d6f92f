"""rl-buffer's `SumTree` under its module path."""

from relive.compat.rl_buffer.utils.sum_tree import SumTree

__all__ = ["SumTree"]
