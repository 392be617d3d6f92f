"""How ApexRL says what an observation is, and how its arguments become the core's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from relive.errors import SchemaError, explain
from relive.fields.conversion import as_tensor
from relive.fields.schema import Field


@dataclass(frozen=True)
class TensorLeafSpec:
    """One tensor of a structured observation: its shape without the batch axes, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Spec: TypeAlias = "TensorLeafSpec | tuple[int, ...] | Mapping[str, Spec]"
"""A shape, a leaf with a dtype of its own, or a dict of these."""


def space_to_spec(space: spaces.Space[Any]) -> Spec:
    """The specification of a Gymnasium space; a number is a vector of length one, a Discrete one of int64.

    >>> space_to_spec(spaces.Dict({"goal": spaces.Discrete(4), "pose": spaces.Box(-1, 1, (3,))}))
    {'goal': TensorLeafSpec(shape=(1,), dtype=torch.int64), 'pose': TensorLeafSpec(shape=(3,), dtype=torch.float32)}
    """
    if isinstance(space, spaces.Dict):
        return {key: space_to_spec(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return TensorLeafSpec((1,), torch.int64)
    if space.shape is None or space.dtype is None:
        raise NotImplementedError(f"Unsupported observation space type: {type(space)}")
    return TensorLeafSpec(space.shape or (1,), Field((), space.dtype).dtype)


def declared(spec: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The core's declaration of a specification; `dtype` is that of leaves that do not say."""
    if isinstance(spec, Mapping):
        return {key: declared(part, dtype) for key, part in spec.items()}
    if hasattr(spec, "dtype"):
        return Field(spec.shape, spec.dtype)
    return Field(spec, dtype)


def written(spec: Any) -> Any:
    """The same specification in tuples and dicts only, which files can hold: a leaf with a dtype is (shape, dtype)."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return {key: written(part) for key, part in spec.items()}
    if hasattr(spec, "dtype"):
        return tuple(spec.shape), spec.dtype
    return tuple(spec)


def batch_size_of(spec: Any, observations: Any) -> int | None:
    """How many observations were given: the length of the axis in front of the specified ones, None without one."""
    while isinstance(spec, Mapping):
        if not hasattr(observations, "keys"):
            raise TypeError("Observation tree structures must match")
        if not observations.keys():
            raise ValueError("Observation tree does not contain tensor leaves")
        key = next(iter(spec))
        if key not in observations.keys():
            return None
        spec, observations = spec[key], observations[key]
    shape = np.shape(observations)
    return shape[0] if len(shape) > len(declared(spec).shape) else None


def placed(spec: Any, value: Any, device: torch.device) -> Any:
    """What a caller gave for a specification, with its tensors on `device`."""
    if value is None:
        return None
    if isinstance(spec, Mapping) != hasattr(value, "keys"):
        raise TypeError("Observation tree structures must match")
    if isinstance(spec, Mapping):
        return {key: placed(spec.get(key), part, device) for key, part in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def ended(dones: Any, device: torch.device) -> torch.Tensor:
    """ApexRL's dones, which are numbers, as the core's bools. On other devices than the host they are not looked at."""
    given = as_tensor("dones", placed(None, dones, device), device).to(device)
    flags = given != 0
    if device.type == "cpu" and not (flags == given).all():
        wrong = given[flags != given].flatten()[0].item()
        raise SchemaError(explain("dones", "zeros and ones", wrong, "Pass whether each episode ended."))
    return flags


def inferred(actions: Any, lead: int, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Field:
    """What actions are, of which the first were given with `lead` axes in front, where that is not known already.

    Like everywhere in this library float64 becomes float32 unless somebody asks for it.
    """
    given = actions if isinstance(actions, torch.Tensor) else as_tensor("actions", actions, torch.device("cpu"))
    found = torch.float32 if given.dtype == torch.float64 else given.dtype
    return Field(tuple(given.shape[lead:]) if shape is None else shape, dtype or found)
