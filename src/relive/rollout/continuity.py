"""Steps of a rollout that look like a mistake, noticed before they are stored (`DataWarning`, each kind once).

*Cuts*: a step that follows another one starts elsewhere than `env.step` led to. *Restarts*: so does the first step of a
rollout, though the environments go on. *Memory*: an observation comes in the memory of the one before, with other
numbers. Only the first steps are looked at, and of later rollouts the first and the last one: a copy of every
observation would cost more than the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from relive.errors import explain
from relive.schema.conversion import numpy_view
from relive.schema.fields import DTYPES, Schema

FEWEST_STEPS = 64
"""Steps that are seen before anything is said of cuts."""
_MOST_IN_PLACE = 32
"""Observations in memory that is used again, after which the writer is trusted."""


class Continuity:
    """Whether steps start where the ones before led. It looks at the host's memory only, and copies what it keeps."""

    def __init__(self, schema: Schema, num_envs: int, mode: AutoresetMode | None) -> None:
        self._schema, self._num_envs = schema, num_envs
        dtypes = [DTYPES[schema.fields[i].dtype] for i in schema.leaf_indices["obs"]]
        self._dtypes = None if None in dtypes else dtypes
        self._keeps_final = mode is AutoresetMode.DISABLED
        """An environment that ended is reset from outside: its next step starts anew."""
        self._led_to: list[np.ndarray] | None = None
        self._ended: Any = np.zeros(num_envs, bool)
        """The environments whose next step may start anew [N]."""
        self._followed = self._cut = 0
        self.is_watching = True
        """The first steps are all looked at."""
        self._may_restart = True

    def forget(self) -> None:
        """The environments were reset, or other steps were loaded."""
        self._led_to = None

    def message(self, row: int, last: int, obs: Any, step: tuple[Any, ...]) -> str | None:
        """Look at the step that becomes row `row` of rows 0 to `last`; returns a warning that was not given yet."""
        is_first = row == 0 and self._may_restart
        if not (self.is_watching or is_first or row == last):
            return None
        before, ended, self._led_to = self._led_to, self._ended, None
        found = None
        if before is not None and (self.is_watching or is_first) and obs is not None:
            starts = self._arrays(obs)
            if starts is not None:
                found = self._compared(is_first, starts, before, ended)
        if self.is_watching or row == last:
            self._keep(step)
        return found

    def _keep(self, step: tuple[Any, ...]) -> None:
        self._led_to = self._arrays(step[0])
        if not self._keeps_final:
            return
        flags: Any = [np.array(x) if isinstance(x, bool | np.bool_) else numpy_view(x) for x in step[2:4]]
        if any(flag is None or flag.size != self._num_envs for flag in flags):
            self._led_to = None
            return
        self._ended = np.logical_or(*flags).reshape(-1)

    def _compared(self, is_first: bool, starts: list[np.ndarray], before: list[np.ndarray], ended: Any) -> str | None:
        joined = np.ones(self._num_envs, bool)
        for start, led in zip(starts, before, strict=True):
            if start.shape != led.shape:
                return None
            # Bits: NaN equals itself.
            same = start.reshape(self._num_envs, -1).view(np.uint8) == led.reshape(self._num_envs, -1).view(np.uint8)
            joined &= same.all(1)
        apart = int((~joined & ~ended).sum())
        if is_first and apart and 2 * self._cut <= self._followed:
            self._may_restart = False
            return _restarted(apart, self._num_envs)
        if self.is_watching and not is_first:
            self._followed += int((~ended).sum())
            self._cut += apart
            if self._followed >= FEWEST_STEPS:
                self.is_watching = False
                return _cut(self._cut, self._followed) if 2 * self._cut > self._followed else None
        return None

    def _arrays(self, obs: Any) -> list[np.ndarray] | None:
        """Copies of an observation's leaves in their fields' dtypes; None if the host does not have them."""
        if self._dtypes is None:
            return None
        leaves = [numpy_view(leaf) for leaf in self._schema.flatten("obs", obs)]
        if any(leaf is None or not leaf.size or leaf.dtype.kind not in "biufc" for leaf in leaves):
            return None
        return [np.array(leaf, dtype=dtype, order="C") for leaf, dtype in zip(leaves, self._dtypes, strict=True)]


class ReusedMemory:
    """Whether an observation comes in the memory of the one before, with other numbers.

    A rollout sees no next observations: an environment that steps in place has then written the next observation where
    the stored one should have been.
    """

    def __init__(self) -> None:
        self.left = _MOST_IN_PLACE
        self._last: Any = None
        """Kept, so that nothing else is at its address."""

    def message(self, obs: Sequence[Any], stored: Any) -> str | None:
        """Look at the leaves of an observation; `stored` is the first one's array of the step before."""
        view = numpy_view(obs[0])
        last, self._last = self._last, view
        if view is None or last is None or stored is None or not view.size or view.size != stored.size:
            return None
        if view.__array_interface__["data"][0] != last.__array_interface__["data"][0] or view.dtype != last.dtype:
            self.left -= 1
            return None
        changed = not np.array_equal(
            view.reshape(-1).astype(stored.dtype), stored.reshape(-1), equal_nan=view.dtype.kind == "f"
        )
        self.left = 0 if changed else self.left - 1
        if not self.left:
            self._last = None
        return _in_place() if changed else None

    def forget(self) -> None:
        """Other steps are stored now."""
        self._last = None


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
