"""n-step returns: the sum of the rewards of several steps, and the state after the last of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from relive.fields.schema import positive, require_share
from relive.fields.vocabulary import suggests_init_keywords
from relive.kernels.torch_ops import n_step_sums
from relive.randomness import Randomness
from relive.replay.composed import ENDS
from relive.replay.store import Leaves, Reading, ReplayStore
from relive.replay.views.protocol import require_order


@suggests_init_keywords
@dataclass(frozen=True)
class NStep:
    """reward = Σ_{i<k} γ^i r[t+i], next_obs after k steps, discount = γ^k, where k = min(n, steps that there are).

    A window ends where its episode ends or at the newest row, so that the last n−1 rows of an episode are read too;
    `terminated` and `truncated` are those of its last step. The learner's target is
    reward + discount · (1 − terminated) · Q(next_obs).

    Args:
        n: steps to sum, at least 1.
        gamma: discount γ in [0, 1].
    """

    n: int
    gamma: float

    def __post_init__(self) -> None:
        positive("NStep.n", self.n, math.inf)
        require_share("NStep.gamma", self.gamma)

    @cached_property
    def fused(self) -> Reading:
        """The store sums the rewards while it reads."""
        return Reading(self.n, self.gamma)

    def check(self, store: ReplayStore) -> None:
        """Refuse a buffer whose rows are in no order."""
        require_order(store, self)

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        return store.n_steps(slots, self.n, self.gamma)

    def windows(self, store: ReplayStore, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, n] flat slots, -1 after an end; never more than the ring has."""
        return store.windows(slots, 0, min(self.n, store.memory.ring.slots))[0]

    def reduce(self, store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, n, …]; a step may have been made an end since."""
        mask = windows >= 0
        terminated = steps[("terminated",)] & mask
        is_over = (~mask | (terminated.long().cumsum(1) - terminated.long() > 0)).t()
        missing = is_over.sum(0)
        last = len(is_over) - 1 - missing
        rows = torch.arange(len(last), device=last.device)
        agents = [path for path in steps if path[0] == "reward"]
        sums, discount = n_step_sums([steps[path].transpose(0, 1) for path in agents], is_over, missing, self.gamma)
        at_last = (*ENDS, "next_obs")
        batch = {path: leaf[rows, last if path[0] in at_last else 0] for path, leaf in steps.items()}
        return batch | dict(zip(agents, sums, strict=True)) | {("discount",): discount}
