"""ApexRL's functions for observations (tensors, or dicts or TensorDicts of tensors) and their specifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from gymnasium import spaces
from tensordict import TensorDict

from relive.compat.views import is_tree
from relive.errors import explain
from relive.schema.fields import Field

__all__ = [
    "TensorDict", "TensorLeafSpec", "actor_space_from_observation_space", "allocate_observation_storage",
    "clone_observation", "critic_space_from_observation_space", "flatten_observation", "flatten_time_env_observation",
    "observation_batch_size", "observation_index", "observation_set_index", "observation_to_device",
    "observation_to_tensor", "space_to_spec", "spec_numel", "split_actor_critic_observations", "stack_observations",
    "zeros_like_observation",
]  # fmt: skip

Observation: TypeAlias = torch.Tensor | TensorDict
"""A tensor, or a TensorDict of observations."""


@dataclass(frozen=True)
class TensorLeafSpec:
    """One tensor of a structured observation: its shape without the batch axes, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Spec: TypeAlias = "TensorLeafSpec | tuple[int, ...] | Mapping[str, Spec]"
"""A shape, a shape with a dtype, or a dict of specifications."""
ObservationSpec = Spec
"""ApexRL's name of `Spec`."""


def space_to_spec(space: spaces.Space[Any]) -> Spec:
    """Return the specification of a Gymnasium space; scalars have shape (1,), and a Discrete space has dtype int64.

    >>> space_to_spec(spaces.Dict({"goal": spaces.Discrete(4), "pose": spaces.Box(-1, 1, (3,))}))
    {'goal': TensorLeafSpec(shape=(1,), dtype=torch.int64), 'pose': TensorLeafSpec(shape=(3,), dtype=torch.float32)}
    """
    if isinstance(space, spaces.Dict):
        return {key: space_to_spec(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return TensorLeafSpec((1,), torch.int64)
    if space.shape is None or space.dtype is None:
        remedy = "Flatten the space, or declare a specification yourself."
        raise NotImplementedError(
            explain("observation space", "a space of arrays or a Dict", type(space).__name__, remedy)
        )
    return TensorLeafSpec(space.shape or (1,), Field((), space.dtype).dtype)


def spec_numel(spec: Any) -> int:
    """Count the numbers in one observation of this specification.

    >>> spec_numel({"camera": (2, 3), "pose": TensorLeafSpec((4,), torch.float32), "time": ()})
    11
    """
    if isinstance(spec, Mapping):
        return sum(map(spec_numel, spec.values()))
    return math.prod(getattr(spec, "shape", spec))


def actor_space_from_observation_space(obs_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the policy's part of a space: its key "obs", or the whole space if it has no such key."""
    if isinstance(obs_space, spaces.Dict) and "obs" in obs_space.spaces:
        return obs_space.spaces["obs"]
    return obs_space


def critic_space_from_observation_space(obs_space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the critic's part of a space: its key "privileged_obs" or "critic_obs"; None without them."""
    parts = obs_space.spaces if isinstance(obs_space, spaces.Dict) else {}
    return parts.get("privileged_obs", parts.get("critic_obs"))


def split_actor_critic_observations(observation: Any) -> tuple[Any, Any]:
    """Split an observation into the policy's part and the critic's part, which may be None."""
    if not is_tree(observation) or "obs" not in observation.keys():
        return observation, None
    parts = dict(observation.items())
    privileged = parts.get("privileged_obs")
    return parts["obs"], parts.get("critic_obs") if privileged is None else privileged


def infer_batch_size(value: Any) -> tuple[int, ...] | None:
    """Return the length of the first axis of the first tensor, as a tuple; None if there is no tensor."""
    first = _find_first_tensor(value)
    return None if first is None else (int(first.shape[0]),)


def observation_batch_size(value: Any) -> int:
    """Return the length of the first axis of the first tensor."""
    size = infer_batch_size(value)
    if size is None:
        raise ValueError(explain("observation", "at least one tensor", value, "Pass a tensor or a dict of some."))
    return size[0]


def observation_to_tensor(observation: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Convert arrays to tensors on `device` and dicts to TensorDicts; only floats are cast to `dtype`.

    Of a tuple, such as the result of `env.reset()`, the first entry is converted. A tensor on `device` is not copied:
    an environment that writes its next observation into the same memory changes it.
    """
    if isinstance(observation, tuple):
        observation = observation[0]
    if is_tree(observation):
        return _map_observation(lambda part: observation_to_tensor(part, device, dtype), observation)
    if not isinstance(observation, torch.Tensor):
        return torch.as_tensor(observation, device=device, dtype=dtype)
    return observation_to_device(observation, device, dtype)


def observation_to_device(observation: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Move an observation to `device`; only floats are cast to `dtype`. None stays None."""

    def to_target(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, dtype if tensor.is_floating_point() else None)

    return _map_observation(to_target, observation)


def stack_observations(observations: list[Any]) -> Any:
    """Stack observations of the same structure along a new first axis."""
    first = observations[0]
    if not is_tree(first):
        return torch.stack(observations)
    size = (len(observations), *(getattr(first, "batch_size", None) or ()))
    parts = {key: stack_observations([observation[key] for observation in observations]) for key in first.keys()}
    return TensorDict(parts, size)


def zeros_like_observation(observation: Any) -> Any:
    """Return zeros in the structure of an observation."""
    return _map_observation(torch.zeros_like, observation)


def clone_observation(observation: Any) -> Any:
    """Copy an observation."""
    return _map_observation(torch.clone, observation)


def observation_index(observation: Any, index: Any) -> Any:
    """Index every tensor of an observation."""
    return _map_observation(lambda tensor: tensor[index], observation, ())


def observation_set_index(destination: Any, index: Any, value: Any) -> None:
    """Write the observation `value` into the rows `index` of `destination`."""
    if not is_tree(destination):
        destination[index] = value
        return
    if not is_tree(value):
        got, remedy = type(value).__name__, "Pass the structure of the destination."
        raise TypeError(explain("value", f"a dict with {sorted(destination.keys())}", got, remedy))
    for key in destination.keys():
        observation_set_index(destination[key], index, value[key])


def flatten_time_env_observation(observation: Any) -> Any:
    """Flatten `[T, N, …]` to `[T · N, …]`."""
    if not is_tree(observation):
        return observation.flatten(0, 1)
    parts = {key: flatten_time_env_observation(part) for key, part in observation.items()}
    return TensorDict(parts, infer_batch_size(next(iter(parts.values()), None)))


def flatten_observation(observation: Any) -> torch.Tensor:
    """Concatenate all numbers of an observation `[B, …]` to float32 vectors `[B, D]`."""
    if not is_tree(observation):
        observation = observation.float()
        return observation.reshape(1, 1) if observation.ndim == 0 else observation.reshape(len(observation), -1)
    parts = [flatten_observation(part) for part in observation.values()]
    if not parts:
        raise ValueError(explain("observation", "at least one tensor", "an empty TensorDict", "Fill it first."))
    return torch.cat(parts, dim=-1)


def allocate_observation_storage(
    prefix_shape: tuple[int, ...], spec: Any, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Any:
    """Allocate zeros `[*prefix_shape, …]` for a specification; leaves without a dtype get `dtype`."""
    if isinstance(spec, Mapping):
        parts = {key: allocate_observation_storage(prefix_shape, part, device, dtype) for key, part in spec.items()}
        return TensorDict(parts, prefix_shape)
    if hasattr(spec, "dtype"):
        return torch.zeros((*prefix_shape, *spec.shape), dtype=spec.dtype, device=device)
    return torch.zeros((*prefix_shape, *spec), dtype=dtype, device=device)


def _map_observation(function: Callable[[Any], Any], tree: Any, batch_size: Sequence[int] | None = None) -> Any:
    """Apply a function to each leaf. Dicts become TensorDicts, with their own batch size if `batch_size` is None."""
    if not is_tree(tree):
        return function(tree)
    parts = {key: _map_observation(function, part, batch_size) for key, part in tree.items()}
    return TensorDict(parts, getattr(tree, "batch_size", ()) if batch_size is None else batch_size)


def _find_first_tensor(value: Any) -> Any:
    """Return the first tensor or array of a tree; None if the tree has none."""
    if not is_tree(value):
        return value
    return next((tensor for tensor in map(_find_first_tensor, value.values()) if tensor is not None), None)
