"""n-step returns: the sum of the rewards of several steps, and the state after the last of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relive.replay.read_plan import ReadPlan, row_plan
from relive.schema.checks import positive
from relive.schema.checks import share as require_share
from relive.schema.fields import Schema
from relive.schema.vocabulary import suggests_init_keywords


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

    def plan(self, schema: Schema) -> ReadPlan:
        return row_plan(schema, self.n, float(self.gamma))
