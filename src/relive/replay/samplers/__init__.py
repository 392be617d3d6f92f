"""Which rows: a sampler chooses, a view says what is read around what was chosen."""

from relive.replay.samplers.counted import Counted
from relive.replay.samplers.new_first import NewFirst
from relive.replay.samplers.prioritized import Linear, Prioritized
from relive.replay.samplers.protocol import Drawn, Draws, Sampler
from relive.replay.samplers.recent import Recent
from relive.replay.samplers.sequence_priority import sequence_priority
from relive.replay.samplers.uniform import Uniform
from relive.replay.samplers.without_replacement import WithoutReplacement

__all__ = [
    "Counted",
    "Drawn",
    "Draws",
    "Linear",
    "NewFirst",
    "Prioritized",
    "Recent",
    "Sampler",
    "Uniform",
    "WithoutReplacement",
    "sequence_priority",
]
