"""ApexRL's helpers for observations that are tensors or dicts of tensors, under the path that it has them at."""

from relive.compat.apexrl.utils.observation import (
    TensorDict,
    TensorLeafSpec,
    actor_space_from_observation_space,
    allocate_observation_storage,
    clone_observation,
    critic_space_from_observation_space,
    flatten_observation,
    flatten_time_env_observation,
    observation_batch_size,
    observation_index,
    observation_set_index,
    observation_to_device,
    observation_to_tensor,
    space_to_spec,
    spec_numel,
    split_actor_critic_observations,
    stack_observations,
    zeros_like_observation,
)
from relive.compat.forwarding import names_of

__all__ = [
    "TensorDict",
    "TensorLeafSpec",
    "actor_space_from_observation_space",
    "allocate_observation_storage",
    "clone_observation",
    "critic_space_from_observation_space",
    "flatten_observation",
    "flatten_time_env_observation",
    "observation_batch_size",
    "observation_index",
    "observation_set_index",
    "observation_to_device",
    "observation_to_tensor",
    "space_to_spec",
    "spec_numel",
    "split_actor_critic_observations",
    "stack_observations",
    "zeros_like_observation",
]

__getattr__ = names_of("apexrl.utils")
