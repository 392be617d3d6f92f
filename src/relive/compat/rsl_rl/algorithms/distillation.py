"""rsl_rl's distillation with relive's storage."""

from __future__ import annotations

from typing import Any

import rsl_rl.algorithms

from relive.compat.rsl_rl.storage.rollout_storage import replace_storage


class Distillation(rsl_rl.algorithms.Distillation):
    """rsl_rl's distillation algorithm; its constructor replaces rsl_rl's storage by relive's."""

    def __init__(self, student: Any, teacher: Any, storage: Any, *settings: Any, **named: Any) -> None:
        super().__init__(student, teacher, replace_storage(storage), *settings, **named)
