"""What is read around a row: any view works with any sampler."""

from relive.views.hindsight import Hindsight
from relive.views.n_step import NStep
from relive.views.protocol import View
from relive.views.sequence import Sequence
from relive.views.transition import Transition

__all__ = ["Hindsight", "NStep", "Sequence", "Transition", "View"]
