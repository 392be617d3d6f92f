"""rsl_rl's `utils`: a configuration that names its algorithms means those with our storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rsl_rl.utils

from relive.compat.forwarding import names_of
from relive.compat.rsl_rl.algorithms import PPO, Distillation

_OURS: dict[Any, Any] = {kind.__base__: kind for kind in (PPO, Distillation)}


def resolve_callable(callable_or_name: Callable[..., Any] | str) -> Any:
    """What rsl_rl finds under a name; a callable is itself."""
    found = rsl_rl.utils.resolve_callable(callable_or_name)
    return _OURS.get(found, found) if isinstance(callable_or_name, str) else found


__getattr__ = names_of("rsl_rl.utils")
