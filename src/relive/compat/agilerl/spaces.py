"""What AgileRL makes of spaces and of a step's values: float32, one row an environment, never a bare scalar."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from relive.errors import DataWarning, explain
from relive.schema.conversion import as_tensor
from relive.schema.fields import Field, Tree

_KNOWN = "Box, Discrete, MultiDiscrete or MultiBinary"


def observation_tree(space: spaces.Space[Any]) -> Tree:
    """The fields of an observation: a Dict is nested, a Discrete one number [1]."""
    if isinstance(space, spaces.Dict):
        return {key: observation_tree(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        raise AssertionError(explain("observation_space", "any space but a Tuple", space, "Use a Dict space."))
    if isinstance(space, spaces.Discrete):
        return Field(1)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return Field(space.shape)
    raise NotImplementedError(explain("observation_space", _KNOWN, space, "Wrap the environment."))


def num_actions(space: spaces.Space[Any]) -> int:
    """How many numbers an action is."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return torch.Size(space.shape).numel()
    raise NotImplementedError(explain("action_space", _KNOWN, space, "Wrap the environment."))


def by_env(where: str, value: Any, num_envs: int, device: torch.device, *shapes: tuple[int, ...]) -> Any:
    """`value` as `[num_envs, *shapes[0]]`, if it ends in one of `shapes` and has before that a row an environment.

    A lone number of one environment fills the shape, with a warning. Anything else comes back as it is, for the core to
    say what is wrong with it.
    """
    if isinstance(value, np.ndarray) and value.shape == (num_envs, *shapes[0]):
        return value
    tensor = tensor_on(where, value, device)
    for shape in shapes:
        lead = tensor.shape[: max(tensor.ndim - len(shape), 0)]
        if tensor.shape == (*lead, *shape) and lead.numel() == num_envs:
            return tensor.reshape(num_envs, *shapes[0])
    if tensor.numel() == num_envs == 1:
        remedy = "It fills them all, as in AgileRL; pass every number."
        warnings.warn(explain(where, f"shape {(1, *shapes[0])}", "one number", remedy), DataWarning, stacklevel=4)
        return tensor.reshape(()).expand(1, *shapes[0]).contiguous()
    return tensor


def tensor_on(where: str, value: Any, device: torch.device) -> torch.Tensor:
    """`value` as a tensor on `device`, wherever it was."""
    return as_tensor(where, value.to(device) if isinstance(value, torch.Tensor) else value, device).to(device)


def observation(where: str, space: spaces.Space[Any] | None, value: Any, num_envs: int, device: torch.device) -> Any:
    """An observation of all environments, each leaf `[num_envs, …]`."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) and not hasattr(value, "keys"):
            got, remedy = type(value).__name__, "Pass an array for each key."
            raise AssertionError(explain(where, f"a dict with {list(space.spaces)}", got, remedy))
        return {
            key: observation(f"{where}.{key}", space.spaces.get(key), part, num_envs, device)
            for key, part in value.items()
        }
    if isinstance(space, spaces.Discrete):
        return by_env(where, value, num_envs, device, (1,), ())
    return value if space is None else by_env(where, value, num_envs, device, space.shape or ())
