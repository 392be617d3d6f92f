"""Detection of environments that overwrite an observation with the next one before it is stored."""

from __future__ import annotations

from typing import Any

import torch

_MAX_CHECKS = 32
"""Number of comparisons per buffer. If all of them find no overwritten observation, later ones are not compared."""


class OverwrittenObs:
    """Finds the first batch of a replay buffer whose `obs` an environment has overwritten with `next_obs`.

    In an environment that does not move, `obs` also equals `next_obs`, and the `next_obs` of the previous batch. Only
    batches whose `obs` has the address of the previous `obs` are compared.
    """

    def __init__(self) -> None:
        self._checks_left = _MAX_CHECKS
        self._address = 0
        self._previous_next_obs: torch.Tensor | None = None

    def is_first_overwrite(self, obs: Any, next_obs: Any) -> bool:
        """Return True once: for the first batch in which most observations are overwritten."""
        if not self._checks_left or not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
            return False
        address = obs.data_ptr()
        is_reused, self._address = address == self._address, address
        is_overwritten = False
        if address == next_obs.data_ptr():
            is_overwritten = bool(address)
        elif not is_reused or not obs.is_cpu:
            # Only an `obs` at the previous address is compared, and only on the CPU: a GPU would have to be waited for.
            self._previous_next_obs = None
        else:
            previous, self._previous_next_obs = self._previous_next_obs, next_obs.clone()
            is_overwritten = previous is not None and _is_overwritten(obs, next_obs, previous)
            self._checks_left -= 1
        if is_overwritten:
            self._checks_left = 0
        return is_overwritten


class ReusedObs:
    """Detects environments that write every observation into the same memory.

    Their `obs` has the address of the previous `obs` but other values, so `add` may have stored the next observation.
    Only the first such step of a buffer is reported.
    """

    def __init__(self) -> None:
        self._checks_left = _MAX_CHECKS
        self._previous_obs: torch.Tensor | None = None
        """The previous `obs`. This reference keeps its memory alive, so that no new tensor gets its address."""

    def is_first_reuse(self, obs: Any, stored_obs: torch.Tensor | None) -> bool:
        """Return True once: for the first `obs` at the previous address whose values differ from `stored_obs`.

        `stored_obs` is the stored copy of the previous `obs`; None if no step is stored.
        """
        if not self._checks_left or not isinstance(obs, torch.Tensor):
            return False
        previous, self._previous_obs = self._previous_obs, obs
        if previous is None or stored_obs is None or previous.data_ptr() != obs.data_ptr() or not obs.is_cpu:
            return False
        is_overwritten = obs.shape == stored_obs.shape and not torch.equal(obs, stored_obs)
        self._checks_left = 0 if is_overwritten else self._checks_left - 1
        if not self._checks_left:
            self._previous_obs = None
        return is_overwritten

    def __getstate__(self) -> dict[str, Any]:
        return {"_checks_left": self._checks_left, "_previous_obs": None}


def _is_overwritten(obs: torch.Tensor, next_obs: torch.Tensor, old_next_obs: torch.Tensor) -> bool:
    """Whether at least half of the rows of `obs` equal those of `next_obs` and differ from those of `old_next_obs`."""
    if not obs.shape == next_obs.shape == old_next_obs.shape:
        return False
    rows, next_rows, previous_rows = (x.flatten(1) if x.ndim > 1 else x[None] for x in (obs, next_obs, old_next_obs))
    is_overwritten = (rows == next_rows).all(1) & (rows != previous_rows).any(1)
    return bool(2 * is_overwritten.sum() >= len(rows))
