"""Samplers choose the rows of batches."""

from relive.replay.samplers.counted import Counted
from relive.replay.samplers.new_first import NewFirst
from relive.replay.samplers.prioritized import Linear, Prioritized, sequence_priority
from relive.replay.samplers.sampler import Sampler
from relive.replay.samplers.uniform import Recent, Uniform, WithoutReplacement

__all__ = [
    "Counted",
    "Linear",
    "NewFirst",
    "Prioritized",
    "Recent",
    "Sampler",
    "Uniform",
    "WithoutReplacement",
    "sequence_priority",
]
