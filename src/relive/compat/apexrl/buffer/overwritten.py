"""Detection of environments that overwrite the observations they are stepped from."""

from __future__ import annotations

from typing import Any

import torch

from relive.schema.conversion import overlaps

_ENOUGH = 32
"""Batches in reused memory that are compared; after them the environment is trusted."""


class Overwritten:
    """Watches the batches of one writer: an environment that steps in place leaves `obs` equal to `next_obs`.

    Environments that stand still leave them equal too. The batch before tells them apart: its next observations are
    where this one should begin, unless the memory of `obs`, if it is that of the batch before, was written since.
    """

    def __init__(self) -> None:
        self._is_watching = True
        self._left = _ENOUGH
        self._address = 0
        self._led_to: torch.Tensor | None = None

    def is_news(self, obs: Any, next_obs: Any) -> bool:
        """Whether most observations of this batch are the next ones, for the first time."""
        if not self._is_watching or not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
            return False
        address = obs.data_ptr()
        is_reused, self._address = address == self._address, address
        found = False
        if address == next_obs.data_ptr():
            found = bool(address)
        elif not is_reused or obs.device.type != "cpu":  # elsewhere the comparison would wait for the device
            self._led_to = None
        else:
            before, self._led_to = self._led_to, next_obs.clone()
            found = before is not None and _is_next(obs, next_obs, before)
            self._left -= 1
        self._is_watching = not found and self._left > 0
        return found


class Reused:
    """Watches the steps of a rollout, which sees no next observations: whether one memory comes again, changed.

    An environment that steps in place has then written the next observation where the stored one should have been.
    """

    def __init__(self) -> None:
        self._left = _ENOUGH
        self._last: torch.Tensor | None = None
        """Kept, so that no other tensor is at its address."""

    def is_news(self, obs: Any, stored: torch.Tensor | None) -> bool:
        """Whether `obs` is in the memory of the step before and not as `stored` then; for the first time."""
        if not self._left or not isinstance(obs, torch.Tensor):
            return False
        last, self._last = self._last, obs
        if last is None or stored is None or last.data_ptr() != obs.data_ptr() or not obs.is_cpu:
            return False
        found = obs.shape == stored.shape and not torch.equal(obs, stored)
        self._left = 0 if found else self._left - 1
        if not self._left:
            self._last = None
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_left": self._left, "_last": None}


def _is_next(obs: torch.Tensor, next_obs: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether most rows are those of `next_obs`, and not those of `before`."""
    if not obs.shape == next_obs.shape == before.shape:
        return False
    rows, after, earlier = (x.flatten(1) if x.ndim > 1 else x.reshape(1, -1) for x in (obs, next_obs, before))
    found = (rows == after).all(1) & (rows != earlier).any(1)
    return bool(2 * found.sum() >= len(rows))


def share_bytes(obs: Any, next_obs: Any) -> bool:
    """Whether two observations have memory in common."""
    if not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
        return overlaps(obs, next_obs)
    distance = next_obs.data_ptr() - obs.data_ptr()
    reach = (obs if distance >= 0 else next_obs).nbytes
    return abs(distance) < reach and overlaps(obs, next_obs)
