"""The off-policy buffer, and what samplers and views are made of."""

from relive.replay.buffer import ReplayBuffer
from relive.replay.mixture import Mixture
from relive.replay.samplers import Sampler
from relive.replay.store import Leaves, Reading, ReplayStore
from relive.replay.views import View

__all__ = ["Leaves", "Mixture", "Reading", "ReplayBuffer", "ReplayStore", "Sampler", "View"]
