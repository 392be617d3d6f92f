"""rsl_rl's on-policy runner with relive's storage."""

from __future__ import annotations

from typing import Any

import rsl_rl.runners

from relive.compat.rsl_rl.storage.rollout_storage import replace_storage


class OnPolicyRunner(rsl_rl.runners.OnPolicyRunner):
    """rsl_rl's runner with relive's storage in its algorithm."""

    def __init__(self, env: Any, train_cfg: dict, log_dir: str | None = None, device: str = "cpu") -> None:
        super().__init__(env, train_cfg, log_dir, device)
        self.alg.storage = replace_storage(self.alg.storage)
