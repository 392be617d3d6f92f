"""The off-policy buffer, and the base classes of samplers and views."""

from relive.replay.backend import Backend
from relive.replay.buffer import ReplayBuffer
from relive.replay.mixture import Mixture
from relive.replay.read_plan import Leaves, ReadPlan
from relive.replay.samplers import Sampler
from relive.replay.views import View

__all__ = ["Backend", "Leaves", "Mixture", "ReadPlan", "ReplayBuffer", "Sampler", "View"]
