"""Warnings about observations that look like a mistake: one `DataWarning` per kind, before the step is stored.

*Cuts*: a step does not start at the observation that the previous `env.step` returned. *Restarts*: the first step of a
rollout does not start at the observation that the last step of the previous rollout returned, without
`clear(restarted=True)`. *Memory*: an observation has the address of the previous observation, with other numbers.
After `_MIN_STEPS` comparisons only the first and last step of a rollout are compared, because copying an observation
costs more than storing it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from relive.errors import explain, warn_user
from relive.rollout.storage import Storage
from relive.schema.conversion import view_as_numpy
from relive.schema.fields import DTYPES, Schema

_MIN_STEPS = 64
"""Minimum number of compared steps before a warning about cuts."""
_MAX_OBS = 32
"""Number of observations whose addresses are compared."""


class ContinuityCheck:
    """Comparison of the observation of each step with the next observation of the previous step, on the host."""

    def __init__(self, schema: Schema, num_steps: int, num_envs: int, mode: AutoresetMode | None) -> None:
        self._schema, self._num_envs, self._last_row = schema, num_envs, num_steps - 1
        self._dtypes = [DTYPES[schema.fields[i].dtype] for i in schema.leaf_indices["obs"]]
        self.compares_all = None not in self._dtypes
        """Whether every step is compared; False after `_MIN_STEPS` comparisons."""
        self.compared_rows = (0, self._last_row) if self.compares_all else ()
        """Rows that are compared in every rollout; none after the warning about a restart."""
        self._next_obs: list[bytes] | None = None
        """Next observation of the previous step, as bytes per leaf; None if unknown."""
        self._caller_resets = mode is AutoresetMode.DISABLED
        self._reset_envs: Any = np.zeros(num_envs, bool)
        """Environments that the caller resets before the next step [N]."""
        self._num_compared = self._num_cuts = 0

    def forget_previous_obs(self) -> None:
        """Forget the previous observation, because environments were reset or another state was loaded."""
        self._next_obs = None

    def check_step(self, row: int, obs: Any, step: tuple[Any, ...]) -> None:
        """Warn if the step for row `row` does not start at the observation to which the previous step led."""
        expected, message = self._next_obs, None
        if expected is not None and obs is not None and (row == 0 or self.compares_all):
            start, is_first = self._read_leaf_bytes(obs), row == 0 and bool(self.compared_rows)
            message = None if start is None else self._compare_obs(is_first, start, expected)
        self._next_obs = self._read_leaf_bytes(step[0]) if self.compares_all or row == self._last_row else None
        if self._caller_resets and self._next_obs is not None:
            flags: Any = [np.array(x) if isinstance(x, bool | np.bool_) else view_as_numpy(x) for x in step[2:4]]
            if any(flag is None or flag.size != self._num_envs for flag in flags):
                self._next_obs = None
            else:
                self._reset_envs = np.logical_or(*flags).reshape(-1)
        if message is not None:
            warn_user(message)

    def _compare_obs(self, is_first: bool, obs_bytes: list[bytes], expected_bytes: list[bytes]) -> str | None:
        """Count the environments whose observation differs, and return a warning or None."""
        num_cuts = 0
        # Bytes are compared, so that NaN equals itself.
        if obs_bytes != expected_bytes:
            is_equal = np.ones(self._num_envs, bool)
            for leaf, previous_leaf in zip(obs_bytes, expected_bytes, strict=True):
                if len(leaf) != len(previous_leaf) or len(leaf) % self._num_envs:
                    return None
                rows = (np.frombuffer(x, np.uint8).reshape(self._num_envs, -1) for x in (leaf, previous_leaf))
                is_equal &= np.equal(*rows).all(1)
            num_cuts = int((~(is_equal | self._reset_envs)).sum())
        if is_first and num_cuts and 2 * self._num_cuts <= self._num_compared:
            self.compared_rows = ()
            remedy = (
                "Call clear(restarted=True) where env.reset() was called: otherwise statistics join two episodes, and "
                "under NEXT_STEP the first step of an environment that was about to reset is dropped."
            )
            got = f"{num_cuts} of {self._num_envs} environments that start elsewhere"
            return explain("obs", "a rollout that starts where the last one led", got, remedy)
        if self.compares_all and not is_first:
            self._num_compared += self._num_envs - int(self._reset_envs.sum())
            self._num_cuts += num_cuts
            if self._num_compared >= _MIN_STEPS:
                self.compares_all = False
                if 2 * self._num_cuts > self._num_compared:
                    remedy = (
                        "Assign obs = step[0] after add_step. If observations are changed before they are added, the "
                        "values of next observations are wrong."
                    )
                    got = f"{self._num_cuts:,} of {self._num_compared:,} that do not"
                    return explain("obs", "steps that start where the step before led", got, remedy)
        return None

    def _read_leaf_bytes(self, obs: Any) -> list[bytes] | None:
        """Return the bytes of an observation's leaves in the dtypes of their fields; None on another device."""
        leaves: list[Any] = [view_as_numpy(leaf) for leaf in self._schema.flatten("obs", obs)]
        if any(leaf is None or not leaf.size or leaf.dtype.kind not in "biufc" for leaf in leaves):
            return None
        return [np.asarray(leaf, dtype).tobytes() for leaf, dtype in zip(leaves, self._dtypes, strict=True)]


class ReusedMemoryCheck:
    """Comparison of the address of each observation with the address of the previous observation.

    An environment that reuses its array overwrites the observation before `add` stores it.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._leaf_index = storage, storage.schema.leaf_indices["obs"][0]
        self.num_remaining = _MAX_OBS
        """Number of observations still to compare."""
        self._previous_view: Any = None
        """First leaf of the previous observation; the reference prevents that its memory is freed and reused."""

    def check_obs(self, row: int, obs: Any) -> None:
        """Compare the observation that will become row `row`, and warn if it overwrote the previous observation."""
        view = view_as_numpy(self._storage.schema.flatten("obs", obs)[0])
        previous_view, self._previous_view = self._previous_view, view
        if view is None or previous_view is None or not row or not view.size:
            return
        stored_obs = view_as_numpy(self._storage.tensors[self._leaf_index][row - 1])
        if stored_obs is None or stored_obs.size != view.size:
            return
        if (
            view.__array_interface__["data"][0] != previous_view.__array_interface__["data"][0]
            or view.dtype != previous_view.dtype
        ):
            self.num_remaining -= 1
            return
        is_equal = np.array_equal(
            view.reshape(-1).astype(stored_obs.dtype), stored_obs.reshape(-1), equal_nan=view.dtype.kind == "f"
        )
        self.num_remaining = self.num_remaining - 1 if is_equal else 0
        if not self.num_remaining:
            self._previous_view = None
        if not is_equal:
            remedy = "If the environment overwrites it, call stage(obs=…) before the step, or pass a copy."
            got = "memory of the previous step, with other numbers"
            warn_user(explain("obs", "memory of its own for every step", got, remedy))
