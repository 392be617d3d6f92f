"""Our storage in place of rsl_rl's."""

from __future__ import annotations

from typing import Any

import rsl_rl.storage

from relive.compat.rsl_rl.storage.rollout_storage import RolloutStorage


def ours(storage: Any) -> Any:
    """An empty storage of ours like an empty one of rsl_rl; one that is ours, or a user's subclass, is itself.

    rsl_rl's algorithms make their storage themselves and pass it to their constructor.
    """
    if type(storage) is not rsl_rl.storage.RolloutStorage:
        return storage
    return RolloutStorage(
        storage.training_type,
        storage.num_envs,
        storage.num_transitions_per_env,
        storage.observations[0],
        storage.actions_shape,
        storage.device,
    )
