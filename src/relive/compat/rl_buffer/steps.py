"""How arguments of rl-buffer's `add` become those of the core: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from relive.compat.step_rows import fitted
from relive.compat.views import is_tree
from relive.errors import SchemaError, explain
from relive.schema.checks import same_keys
from relive.schema.conversion import overlaps
from relive.schema.fields import Field

_TENSOR: Any = torch.Tensor


def declared(shape: Any, dtype: Any) -> Any:
    """The core's declaration of a shape, or of a dict of shapes; of a dict the dtype may be a dict too."""
    if isinstance(shape, Mapping):
        each = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shape, dtype)
        return {key: declared(part, each[key]) for key, part in shape.items()}
    return Field(shape, dtype)


def placed(name: str, value: Any, place: Any) -> Any:
    """A value, or a dict of them, as tensors that fit a row `place` [N, …] of the memory."""
    fits = type(value) is type(place) is _TENSOR and value.shape == place.shape
    if fits and value.dtype is place.dtype and value.device == place.device and not value.requires_grad:
        return value
    if not is_tree(place):
        return fitted(name, value, place)
    same_keys(name, value, place.keys())
    return {key: placed(f"{name}.{key}", value[key], place[key]) for key in place.keys()}


def flags(value: Any) -> Any:
    """Numbers or bools as bools: everything but zero is true."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype is torch.bool else value != 0
    return np.asarray(value) != 0


def refuse_shared(obs: Any, next_obs: Any) -> None:
    """An observation and its next one in the same memory are one: the environment has overwritten the first."""
    if is_tree(obs):
        for key in obs.keys():
            refuse_shared(obs[key], next_obs[key])
    elif abs(obs.data_ptr() - next_obs.data_ptr()) < obs.nbytes and overlaps(obs, next_obs):
        remedy = "The environment reuses its array: pass copies."
        raise SchemaError(explain("next_obs", "memory apart from obs", "memory shared with obs", remedy))
