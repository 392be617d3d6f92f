"""Steps of a rollout that look like a mistake, noticed before they are stored (`DataWarning`, each kind once).

*Cuts*: a step that follows another one starts elsewhere than `env.step` led to. *Restarts*: the first step of a rollout
starts elsewhere than the last step of the rollout before led to, without `clear(restarted=True)`.
*Memory*: an observation comes in the memory of the one before, with other numbers. All of the first steps are compared;
later only the first and the last step of a rollout, because a copy of every observation costs more than the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from relive.errors import explain, warn_user
from relive.rollout.storage import Storage
from relive.schema.conversion import numpy_view
from relive.schema.fields import DTYPES, Schema

_FEWEST_STEPS = 64
"""Steps that are compared before a warning of cuts."""
_MOST_IN_PLACE = 32
"""Observations whose address is compared with the address of the observation before."""


class Continuity:
    """Compares where each step starts with where the step before led, as far as the host has both observations."""

    def __init__(self, schema: Schema, num_steps: int, num_envs: int, mode: AutoresetMode | None) -> None:
        self._schema, self._num_envs, self._last = schema, num_envs, num_steps - 1
        self._dtypes = [DTYPES[schema.fields[i].dtype] for i in schema.leaf_indices["obs"]]
        self.compares_all = None not in self._dtypes
        """Every step is compared, until `_FEWEST_STEPS` were."""
        self.compared_rows = (0, self._last) if self.compares_all else ()
        """Rows of every rollout that are compared, until a restart was noticed."""
        self._next_obs: list[bytes] | None = None
        """The observation that the step before led to, leaf by leaf; None if it is unknown."""
        self._resets_outside = mode is AutoresetMode.DISABLED
        self._ended: Any = np.zeros(num_envs, bool)
        """The environments that the caller resets before the coming step [N]."""
        self._num_compared = self._num_cut = 0

    def forget(self) -> None:
        """The environments were reset, or other steps were loaded."""
        self._next_obs = None

    def look_at(self, row: int, obs: Any, step: tuple[Any, ...]) -> None:
        """Look at the step that becomes row `row`, before it is stored."""
        before, message = self._next_obs, None
        if before is not None and obs is not None and (row == 0 or self.compares_all):
            start = self._leaf_bytes(obs)
            message = None if start is None else self._compare(row == 0 and bool(self.compared_rows), start, before)
        self._next_obs = self._leaf_bytes(step[0]) if self.compares_all or row == self._last else None
        if self._resets_outside and self._next_obs is not None:
            flags: Any = [np.array(x) if isinstance(x, bool | np.bool_) else numpy_view(x) for x in step[2:4]]
            if any(flag is None or flag.size != self._num_envs for flag in flags):
                self._next_obs = None
            else:
                self._ended = np.logical_or(*flags).reshape(-1)
        if message is not None:
            warn_user(message)

    def _compare(self, is_first: bool, start: list[bytes], before: list[bytes]) -> str | None:
        num_cut = 0
        if start != before:  # as bytes, NaN equals itself
            same = np.ones(self._num_envs, bool)
            for leaf, leaf_before in zip(start, before, strict=True):
                if len(leaf) != len(leaf_before) or len(leaf) % self._num_envs:
                    return None
                rows = (np.frombuffer(x, np.uint8).reshape(self._num_envs, -1) for x in (leaf, leaf_before))
                same &= np.equal(*rows).all(1)
            num_cut = int((~(same | self._ended)).sum())
        if is_first and num_cut and 2 * self._num_cut <= self._num_compared:
            self.compared_rows = ()
            return _restarted(num_cut, self._num_envs)
        if self.compares_all and not is_first:
            self._num_compared += self._num_envs - int(self._ended.sum())
            self._num_cut += num_cut
            if self._num_compared >= _FEWEST_STEPS:
                self.compares_all = False
                return _cut(self._num_cut, self._num_compared) if 2 * self._num_cut > self._num_compared else None
        return None

    def _leaf_bytes(self, obs: Any) -> list[bytes] | None:
        """The bytes of an observation's leaves in their fields' dtypes; None if the host does not have them."""
        leaves: list[Any] = [numpy_view(leaf) for leaf in self._schema.flatten("obs", obs)]
        if any(leaf is None or not leaf.size or leaf.dtype.kind not in "biufc" for leaf in leaves):
            return None
        return [np.asarray(leaf, dtype).tobytes() for leaf, dtype in zip(leaves, self._dtypes, strict=True)]


class ReusedMemory:
    """Compares the address of an observation with the address of the observation before.

    A rollout sees no next observations: an environment that steps in place has then written the next observation where
    the stored one should have been.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._leaf = storage, storage.schema.leaf_indices["obs"][0]
        self.left = _MOST_IN_PLACE
        """Observations that are still to be compared."""
        self._last: Any = None
        """The first leaf of the observation before; while it is referenced, its address is not used again."""

    def look_at(self, row: int, obs: Any) -> None:
        """Look at the observation that becomes row `row`, before it is stored."""
        view = numpy_view(self._storage.schema.flatten("obs", obs)[0])
        last, self._last = self._last, view
        if view is None or last is None or not row or not view.size:
            return
        stored = numpy_view(self._storage.tensors[self._leaf][row - 1])
        if stored is None or stored.size != view.size:
            return
        if view.__array_interface__["data"][0] != last.__array_interface__["data"][0] or view.dtype != last.dtype:
            self.left -= 1
            return
        is_equal = np.array_equal(
            view.reshape(-1).astype(stored.dtype), stored.reshape(-1), equal_nan=view.dtype.kind == "f"
        )
        self.left = self.left - 1 if is_equal else 0
        if not self.left:
            self._last = None
        if not is_equal:
            warn_user(_in_place())


def _restarted(count: int, num_envs: int) -> str:
    remedy = (
        "Call clear(restarted=True) where env.reset() was called: otherwise statistics join two episodes, and under "
        "NEXT_STEP the first step of an environment that was about to reset is dropped."
    )
    got = f"{count} of {num_envs} environments that start elsewhere"
    return explain("obs", "a rollout that starts where the last one led", got, remedy)


def _cut(count: int, of: int) -> str:
    remedy = (
        "Assign obs = step[0] after add_step. Observations that are changed before they are added look the same: "
        "values are then not those of what the steps led to."
    )
    return explain("obs", "steps that start where the step before led", f"{count:,} of {of:,} that do not", remedy)


def _in_place() -> str:
    remedy = (
        "If the environment overwrites it, the next observation is stored: stage(obs=…) before the step, or copy it."
    )
    return explain("obs", "memory of its own for every step", "that of the step before, with other numbers", remedy)
