"""rl-buffer's `SumTree` under the path that it has it at."""

from relive.compat.rl_buffer.utils.sum_tree import SumTree

__all__ = ["SumTree"]
