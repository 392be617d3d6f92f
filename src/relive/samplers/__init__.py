"""Which rows: a sampler chooses, a view says what is read around what was chosen."""

from relive.samplers.counted import Counted
from relive.samplers.prioritized import Prioritized
from relive.samplers.protocol import Drawn, Draws, Sampler
from relive.samplers.uniform import Uniform
from relive.samplers.without_replacement import WithoutReplacement

__all__ = ["Counted", "Drawn", "Draws", "Prioritized", "Sampler", "Uniform", "WithoutReplacement"]
