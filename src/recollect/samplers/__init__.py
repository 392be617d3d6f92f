"""Which rows: a sampler chooses, a view says what is read around what was chosen."""

from recollect.samplers.counted import Counted
from recollect.samplers.prioritized import Prioritized
from recollect.samplers.protocol import Drawn, Draws, Sampler
from recollect.samplers.uniform import Uniform
from recollect.samplers.without_replacement import WithoutReplacement

__all__ = ["Counted", "Drawn", "Draws", "Prioritized", "Sampler", "Uniform", "WithoutReplacement"]
