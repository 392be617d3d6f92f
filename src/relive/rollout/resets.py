"""Which rows of a rollout end an episode, start one, or only reset an environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.fields.buffer_schemas import FLAG
from relive.fields.conversion import conform
from relive.rollout.storage import Storage


class Resets:
    """What the flags of a rollout's rows mean, together with what its environments did before the first row."""

    def __init__(self, storage: Storage, num_envs: int, autoreset: AutoresetMode | None) -> None:
        self._storage, self.next_step = storage, autoreset is AutoresetMode.NEXT_STEP
        self.resetting = torch.zeros(num_envs, dtype=torch.bool, device=storage.device)
        """Which environments only reset in the rollout's first row [N]."""
        self.starting = torch.ones_like(self.resetting)
        """Which environments begin an episode with the rollout's first transition [N]."""

    def restarted(self) -> None:
        """All environments were reset: each begins an episode in the first row."""
        self.resetting.zero_()
        self.starting.fill_(True)

    def go_on(self, steps: int) -> None:
        """The next rollout begins behind these rows."""
        # One row further than what is stored: whether the coming one starts an episode, and whether it resets.
        self.starting.copy_(self.starts(steps + 1)[-1])
        if self.next_step:
            self.resetting.copy_(self.rows(steps + 1)[-1])

    def rows(self, steps: int) -> torch.Tensor:
        """Which of the first rows only reset [steps, N]: those after an end, which end nothing themselves."""
        ended = self.ended(slice(0, steps - 1))
        after = torch.cat([self.resetting.unsqueeze(0), ended])
        if after.device.type == "cpu" and not (after[:-1] & ended).any():
            return after
        # A reset row that carries a flag of its own: of several ends in a row every other one is a reset.
        place = torch.arange(steps, device=after.device).unsqueeze(1)
        return after & ((place - torch.where(after, -1, place).cummax(0).values) % 2 == 1)

    def starts(self, steps: int) -> torch.Tensor:
        """Which of the first rows start an episode [steps, N], as far as they are transitions."""
        before = self.rows(steps)[:-1] if self.next_step else self.ended(slice(0, steps - 1))
        return torch.cat([self.starting.unsqueeze(0), before])

    def mask(self, steps: int) -> torch.Tensor | None:
        """Which of the first rows are transitions [steps, N]; None where all are."""
        return ~self.rows(steps) if self.next_step else None

    def ended(self, rows: int | slice) -> torch.Tensor:
        """Where a row ends an episode, by its flags."""
        return self.flag("terminated")[rows] | self.flag("truncated")[rows]

    def flag(self, name: str) -> torch.Tensor:
        """The column "terminated" or "truncated" [T + 1, N]."""
        return self._storage.columns[self._storage.schema.columns[name][0]]

    def cut_off(self, row: int, terminated: Any, truncated: Any, staged: set[str]) -> list[int]:
        """The environments whose episode is truncated, and not terminated, by the step that is being added."""
        if "truncated" not in staged and isinstance(truncated, bool | np.bool_ | np.ndarray) and not np.any(truncated):
            return []
        given = {"terminated": terminated, "truncated": truncated}
        ended, cut = (
            self.flag(name)[row]
            if name in staged
            else conform(name, FLAG, flag, self._storage.lead, self._storage.device).view(-1)
            for name, flag in given.items()
        )
        return (cut & ~ended).nonzero().squeeze(1).tolist()
