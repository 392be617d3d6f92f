"""Samplers choose rows; views say what is read around them."""

from relive.replay.samplers.counted import Counted
from relive.replay.samplers.new_first import NewFirst
from relive.replay.samplers.prioritized import Prioritized, sequence_priority
from relive.replay.samplers.recent import Recent
from relive.replay.samplers.sampler import Sampler
from relive.replay.samplers.uniform import Uniform
from relive.replay.samplers.without_replacement import WithoutReplacement

__all__ = [
    "Counted",
    "NewFirst",
    "Prioritized",
    "Recent",
    "Sampler",
    "Uniform",
    "WithoutReplacement",
    "sequence_priority",
]
