"""The off-policy buffer, and what samplers and views are made of."""

from relive.replay.buffer import ReplayBuffer
from relive.replay.mixture import Mixture
from relive.replay.read_plan import ReadPlan
from relive.replay.samplers import Sampler
from relive.replay.store import Leaves, ReplayStore
from relive.replay.views import View

__all__ = ["Leaves", "Mixture", "ReadPlan", "ReplayBuffer", "ReplayStore", "Sampler", "View"]
