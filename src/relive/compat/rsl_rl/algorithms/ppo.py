"""rsl_rl's PPO with relive's storage."""

from __future__ import annotations

from typing import Any

import rsl_rl.algorithms

from relive.compat.rsl_rl.storage.rollout_storage import replace_storage


class PPO(rsl_rl.algorithms.PPO):
    """rsl_rl's PPO; its constructor replaces rsl_rl's storage by relive's."""

    def __init__(self, actor: Any, critic: Any, storage: Any, *settings: Any, **named: Any) -> None:
        super().__init__(actor, critic, replace_storage(storage), *settings, **named)
