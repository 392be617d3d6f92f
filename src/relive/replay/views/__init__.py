"""Views: descriptions of what is read around a row. Any view works with any sampler."""

from relive.replay.views.hindsight import Hindsight
from relive.replay.views.n_step import NStep
from relive.replay.views.sequence import Sequence
from relive.replay.views.transition import Transition
from relive.replay.views.view import View
from relive.replay.views.window import Window

__all__ = ["Hindsight", "NStep", "Sequence", "Transition", "View", "Window"]
