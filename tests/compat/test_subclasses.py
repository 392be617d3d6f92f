"""Subclasses of the adapters' buffers, with arguments and attributes of their own, can be copied and pickled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from relive.compat import agilerl, apexrl, embodichain, rl_buffer

BOX = spaces.Box(-1, 1, (3,), np.float32)
BUFFERS: dict[type, tuple[Any, ...]] = {
    agilerl.ReplayBuffer: (8,),
    agilerl.PrioritizedReplayBuffer: (8,),
    agilerl.MultiStepReplayBuffer: (8,),
    agilerl.RolloutBuffer: (4, BOX, BOX),
    apexrl.DistillationBuffer: (8, (3,)),
    apexrl.ReplayBuffer: (8, (3,)),
    apexrl.RolloutBuffer: (2, 4, (3,)),
    embodichain.RolloutBuffer: (2, 4, 3, 1, "cpu"),
    embodichain.StepRolloutBuffer: (4, 2, 3, 1, "cpu"),
    rl_buffer.PrioritizedReplayBuffer: (4, 2, (3,), (1,), rl_buffer.StatsTracker(2)),
    rl_buffer.ReplayBuffer: (4, 2, (3,), (1,), rl_buffer.StatsTracker(2)),
    rl_buffer.RolloutBuffer: (4, 2, (3,), (1,), rl_buffer.StatsTracker(2)),
}


class Tagged:
    """Mixin whose constructor takes only a tag."""

    def __init__(self, tag: str) -> None:
        kind = type(self).__mro__[2]
        super().__init__(*BUFFERS[kind])
        self.tag = tag


KINDS = [type(f"Tagged{i}", (Tagged, kind), {"__module__": __name__}) for i, kind in enumerate(BUFFERS)]
# Pickle finds classes by their names in the module.
globals().update({kind.__name__: kind for kind in KINDS})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", KINDS, ids=[f"{kind.__module__.split('.')[2]}-{kind.__name__}" for kind in BUFFERS])
def test_a_copy_keeps_the_attributes_of_a_subclass(kind: Any, copied: Any) -> None:
    buffer = kind("mine")
    buffer.later = 7
    other = copied(buffer)
    assert (type(other), other.tag, other.later) == (kind, "mine", 7)
