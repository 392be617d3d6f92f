"""The newer `RolloutBuffer` at its path in releases 0.1.2 to 0.2.2."""

from relive.compat.embodichain.learning.rl.buffer.standard_buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]
