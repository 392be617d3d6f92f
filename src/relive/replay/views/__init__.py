"""Views describe the fields read around each row. Any view works with any sampler."""

from relive.replay.views.hindsight import Hindsight
from relive.replay.views.view import NStep, Sequence, Transition, View
from relive.replay.views.window import Window

__all__ = ["Hindsight", "NStep", "Sequence", "Transition", "View", "Window"]
