"""Where releases 0.1.2 to 0.2.2 had the newer `RolloutBuffer`."""

from relive.compat.embodichain.learning.rl.buffer.standard_buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]
