"""Rows in proportion to their priority, with the weights that make up for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from recollect.errors import NotReadyError, PriorityError, SchemaError, explain
from recollect.kernels.priority import priority_tree
from recollect.randomness import Randomness
from recollect.replay_storage import ReplayStorage, Touched
from recollect.ring import TRANSITION
from recollect.samplers.protocol import Drawn


@dataclass(frozen=True)
class Prioritized:
    """Draws row i with probability p_i / Σp, where p = (priority + eps)^alpha.

    weight_i = (M · P(i))^-beta, divided by the largest weight of the batch (`normalize="batch"`) or by the largest that
    any stored row could have (`"global"`), so that weights are in (0, 1]. `beta` is a number, or a function of how many
    rows were drawn so far. A new row gets the largest priority accepted so far, 1 at first. With `eps=0` a row of
    priority zero is never drawn. (Schaul et al., Prioritized Experience Replay, 2016.)
    """

    alpha: float = 0.6
    beta: float | Callable[[int], float] = 0.4
    eps: float = 1e-6
    normalize: Literal["batch", "global"] = "batch"

    def __post_init__(self) -> None:
        for name in ("alpha", "eps"):
            _check_rate(f"Prioritized.{name}", getattr(self, name))
        if not callable(self.beta):
            _check_rate("Prioritized.beta", self.beta)
        if self.normalize not in ("batch", "global"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Prioritized.normalize", '"batch" or "global"', repr(self.normalize), remedy))

    def start(self, storage: ReplayStorage, random: Randomness) -> _Draws:
        return _Draws(self, storage, random)


def _check_rate(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise SchemaError(explain(where, "a finite number of at least 0", repr(value), "Pass one."))


class _Draws:
    wants_touched = True

    def __init__(self, settings: Prioritized, storage: ReplayStorage, random: Randomness) -> None:
        self._settings, self._storage, self._random = settings, storage, random
        self._slots = storage.ring.slots * storage.ring.num_envs
        # One leaf more than there are slots: writes to it are writes to nowhere, and need no synchronisation.
        self._tree = priority_tree(self._slots + 1, storage.device)
        self._largest = torch.ones((), dtype=torch.float64, device=storage.device)
        """The largest priority accepted so far, as it was given."""
        self._draws = 0

    def draw(self, count: int) -> Drawn:
        drawn = self._tree.draw_with_priorities(count, self._random)
        if drawn is None:
            remedy = "Update some priority to more than 0, or use eps > 0."
            raise NotReadyError(explain("sample", "a row of positive priority", "none", remedy))
        slots, share = drawn
        beta = self._settings.beta
        beta = float(beta(self._draws)) if callable(beta) else beta
        _check_rate("Prioritized.beta", beta)
        self._draws += count
        smallest = self._tree.smallest() if self._settings.normalize == "global" else share.min()
        return Drawn(slots, (smallest / share).pow(beta).float())

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> None:
        """Set the priorities of slots; a slot of -1 is a row that is gone."""
        self._largest = torch.maximum(self._largest, priority.max()) if len(priority) else self._largest
        self._set(slots, self._mass(priority), slots >= 0)

    def written(self, touched: Touched) -> None:
        slots, changed = touched
        stored = self._storage.ring.kind_at(slots) == TRANSITION
        mass = torch.where(stored, self._mass(self._largest), 0.0)
        self._set(slots, mass, changed)

    def cleared(self) -> None:
        self._tree.set(torch.arange(self._slots, device=self._storage.device), 0.0)

    def _mass(self, priority: torch.Tensor) -> torch.Tensor:
        return (priority + self._settings.eps).pow(self._settings.alpha)

    def _set(self, slots: torch.Tensor, mass: torch.Tensor, where: torch.Tensor | None) -> None:
        if where is None:
            self._tree.set(slots, mass)
        else:
            self._tree.set(torch.where(where, slots, self._slots), torch.where(where, mass, 0.0))


def checked_priority(priority: torch.Tensor, count: int) -> torch.Tensor:
    """Priorities as float64 [count]; what is negative, infinite or not a number is refused."""
    if tuple(priority.shape) != (count,):
        remedy = "Pass a priority for each index."
        raise SchemaError(explain("priority", f"shape ({count},)", tuple(priority.shape), remedy))
    values = priority.to(torch.float64)
    if values.device.type == "cpu":
        bad = ~(torch.isfinite(values) & (values >= 0))
        if bad.any():
            at = int(bad.nonzero()[0])
            remedy = "Pass absolute errors; look where they come from."
            raise PriorityError(explain(f"priority[{at}]", "a finite number of at least 0", float(values[at]), remedy))
    return values
