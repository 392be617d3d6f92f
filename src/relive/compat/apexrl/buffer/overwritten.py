"""Detection of environments that write the next observation into the memory of the current one."""

from __future__ import annotations

from typing import Any

import torch

from relive.schema.conversion import overlaps

_MAX_CHECKS = 32
"""Number of batches in reused memory to compare before the environment is trusted."""


class Overwritten:
    """Checks the batches of a replay buffer: an environment that steps in place makes `obs` equal to `next_obs`.

    In an environment that stands still both are equal, too, but then `obs` also equals the `next_obs` of the previous
    batch. Only batches whose `obs` has the address of the previous `obs` are compared.
    """

    def __init__(self) -> None:
        self._is_watching = True
        self._left = _MAX_CHECKS
        self._address = 0
        self._led_to: torch.Tensor | None = None

    def is_news(self, obs: Any, next_obs: Any) -> bool:
        """Return True once: for the first batch in which most observations were overwritten by the next ones."""
        if not self._is_watching or not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
            return False
        address = obs.data_ptr()
        is_reused, self._address = address == self._address, address
        is_overwritten = False
        if address == next_obs.data_ptr():
            is_overwritten = bool(address)
        elif not is_reused or obs.device.type != "cpu":  # on a device the comparison would synchronise
            self._led_to = None
        else:
            before, self._led_to = self._led_to, next_obs.clone()
            is_overwritten = before is not None and _is_next(obs, next_obs, before)
            self._left -= 1
        self._is_watching = not is_overwritten and self._left > 0
        return is_overwritten


class Reused:
    """Checks the steps of a rollout buffer: whether `obs` has the address of the previous `obs` and other numbers.

    An environment that steps in place has then overwritten the observation before `add` stored it.
    """

    def __init__(self) -> None:
        self._left = _MAX_CHECKS
        self._last: torch.Tensor | None = None
        """The previous `obs`; the reference keeps its address from being reused."""

    def is_news(self, obs: Any, stored: torch.Tensor | None) -> bool:
        """Return True once: for the first `obs` at the address of the previous one that differs from `stored`."""
        if not self._left or not isinstance(obs, torch.Tensor):
            return False
        last, self._last = self._last, obs
        if last is None or stored is None or last.data_ptr() != obs.data_ptr() or not obs.is_cpu:
            return False
        is_overwritten = obs.shape == stored.shape and not torch.equal(obs, stored)
        self._left = 0 if is_overwritten else self._left - 1
        if not self._left:
            self._last = None
        return is_overwritten

    def __getstate__(self) -> dict[str, Any]:
        return {"_left": self._left, "_last": None}


def _is_next(obs: torch.Tensor, next_obs: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether at least half of the rows equal those of `next_obs` and differ from those of `before`."""
    if not obs.shape == next_obs.shape == before.shape:
        return False
    rows, after, earlier = (x.flatten(1) if x.ndim > 1 else x.reshape(1, -1) for x in (obs, next_obs, before))
    is_overwritten = (rows == after).all(1) & (rows != earlier).any(1)
    return bool(2 * is_overwritten.sum() >= len(rows))


def share_bytes(obs: Any, next_obs: Any) -> bool:
    """Whether two observations share memory."""
    if not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
        return overlaps(obs, next_obs)
    distance = next_obs.data_ptr() - obs.data_ptr()
    reach = (obs if distance >= 0 else next_obs).nbytes
    return abs(distance) < reach and overlaps(obs, next_obs)
