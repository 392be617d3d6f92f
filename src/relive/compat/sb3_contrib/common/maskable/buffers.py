# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`MaskableRolloutBuffer` and `MaskableDictRolloutBuffer`: rollouts with the masks of legal actions."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from gymnasium import spaces

from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer
from relive.compat.views import make_memory_views
from relive.errors import explain

__all__ = [
    "MaskableDictRolloutBuffer",
    "MaskableDictRolloutBufferSamples",
    "MaskableRolloutBuffer",
    "MaskableRolloutBufferSamples",
]

contrib: Any = importlib.import_module("sb3_contrib.common.maskable.buffers")
MaskableRolloutBufferSamples = contrib.MaskableRolloutBufferSamples
MaskableDictRolloutBufferSamples = contrib.MaskableDictRolloutBufferSamples


class _MaskableBuffer(RolloutBuffer):
    """Base class of the rollout buffers with action masks."""

    (action_masks,) = make_memory_views("action_masks")
    _batch_types = (MaskableRolloutBufferSamples, MaskableDictRolloutBufferSamples)
    _attached_fields = RolloutBuffer._attached_fields | {"action_masks": "action_masks"}
    _casts_actions = False

    def _allocate_memory(self) -> None:
        self.mask_dims = _count_mask_flags(self.action_space)
        super()._allocate_memory()
        self._arrays["action_masks"] = np.ones((self.buffer_size, self.n_envs, self.mask_dims), np.float32)

    def reset(self) -> None:
        """Remove the stored steps and their masks."""
        super().reset()
        self._arrays["action_masks"].fill(1)

    def add(self, *args: Any, action_masks: np.ndarray | None = None, **kwargs: Any) -> None:
        """Store one step of every environment with the masks of legal actions."""
        row = self.pos
        super().add(*args, **kwargs)
        if action_masks is not None:
            self._arrays["action_masks"][row] = action_masks.reshape(self.n_envs, self.mask_dims)


class MaskableRolloutBuffer(_MaskableBuffer, contrib.MaskableRolloutBuffer):
    """Rollouts with `action_masks` `[buffer_size, n_envs, mask_dims]`, which are 1 for steps without a mask."""


class MaskableDictRolloutBuffer(_MaskableBuffer, DictRolloutBuffer, contrib.MaskableDictRolloutBuffer):
    """A `MaskableRolloutBuffer` for Dict observations only."""


def _count_mask_flags(space: spaces.Space[Any]) -> int:
    """Count the flags of a mask: one per possible value of each component of an action."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        if not isinstance(space.n, int):
            raise AssertionError(
                explain("action_space", "a MultiBinary of one axis", f"{list(space.n)}", "Flatten its actions.")
            )
        return 2 * space.n
    raise ValueError(f"Unsupported action space {type(space)}")
