"""Several steps as one: the sum of their rewards, and the state after the last of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from relive.errors import SchemaError, explain
from relive.fields.schema import positive
from relive.fields.vocabulary import worded
from relive.randomness import Randomness
from relive.replay.ring import TRANSITION
from relive.replay.storage import ReplayStorage
from relive.replay.views.protocol import Leaves, named, named_next, require_order

_ENDS = ("terminated", "truncated")


@worded
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
        positive("NStep.n", self.n)
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, Real) or not 0 <= self.gamma <= 1:
            raise SchemaError(explain("NStep.gamma", "a number in [0, 1]", repr(self.gamma), "Pass such a number."))

    def check(self, storage: ReplayStorage) -> None:
        """Refuse a buffer whose rows are in no order."""
        require_order(storage, self)

    def most_steps(self, storage: ReplayStorage) -> int:
        """How many steps there can be in a window."""
        return min(self.n, storage.ring.slots)

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        batch = storage.n_steps(slots, self.most_steps(storage), self.gamma)
        return self._read_torch(storage, slots) if batch is None else batch

    def _read_torch(self, storage: ReplayStorage, slots: torch.Tensor) -> Leaves:
        agents = storage.schema.columns["reward"]
        rewards = [storage.columns[i].flatten(0, 1) for i in agents]
        sums, last, discount = self._summed_torch(storage, rewards, slots)
        ends = [storage.schema.columns[name][0] for name in _ENDS]
        batch = named(storage, storage.take(slots)) | named(storage, sums, agents)
        batch |= named(storage, storage.take(last, ends), ends)
        batch |= named_next(storage, storage.take_next(last))
        return batch | {("index",): storage.ids(slots), ("discount",): discount}

    def _summed_torch(
        self, storage: ReplayStorage, rewards: list[torch.Tensor], slots: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        ring, last = storage.ring, slots
        goes_on = torch.ones_like(slots, dtype=torch.bool)
        sums, discount = [reward[slots] for reward in rewards], torch.full_like(slots, self.gamma, dtype=torch.float64)
        for _ in range(1, self.most_steps(storage)):
            following = ring.after(last)
            goes_on = goes_on & (ring.kind_at(following) == TRANSITION)
            last = torch.where(goes_on, following, last)
            for i, reward in enumerate(rewards):
                wide = goes_on.view(-1, *(1,) * (reward.ndim - 1))
                more = (discount.view_as(wide) * reward[last]).to(reward.dtype)
                sums[i] = torch.where(wide, sums[i] + more, sums[i])
            discount = torch.where(goes_on, discount * self.gamma, discount)
        return sums, last, discount.float()

    def windows(self, storage: ReplayStorage, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, most steps] flat slots, -1 after an end."""
        return storage.windows(slots, 0, self.most_steps(storage))[0]

    def reduce(self, storage: ReplayStorage, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, most steps, …]; a step may have been made an end since."""
        mask = windows >= 0
        terminated = steps[("terminated",)] & mask
        goes_on = mask & (terminated.long().cumsum(1) - terminated.long() == 0)
        last = goes_on.long().sum(1) - 1
        rows = torch.arange(len(last), device=last.device)
        powers = torch.tensor(self.gamma, dtype=torch.float64, device=last.device) ** torch.arange(
            windows.shape[1], device=last.device
        )
        factors = goes_on * powers
        batch: Leaves = {}
        for path, leaf in steps.items():
            if path[0] == "reward":
                kept = factors.view(*goes_on.shape, *(1,) * (leaf.ndim - 2))
                batch[path] = torch.where(kept > 0, kept * leaf, 0.0).sum(1).to(leaf.dtype)
            else:
                at_last = path[0] == "next_obs" or path[0] in _ENDS
                batch[path] = leaf[rows, last if at_last else 0]
        batch[("discount",)] = (self.gamma ** (last + 1).double()).float()
        return batch
