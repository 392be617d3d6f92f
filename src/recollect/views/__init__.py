"""What is read around a row: any view works with any sampler."""

from recollect.views.hindsight import Hindsight
from recollect.views.n_step import NStep
from recollect.views.protocol import View
from recollect.views.sequence import Sequence
from recollect.views.transition import Transition

__all__ = ["Hindsight", "NStep", "Sequence", "Transition", "View"]
