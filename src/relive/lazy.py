"""Names whose modules are imported when the name is first used, as in the annotation `lazy.TensorDict`.

tensordict imports torch's compiler, which takes half of relive's import time. A process that only adds steps needs
neither tensordict nor the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["Handle", "JsonNode", "Sampler", "TensorDict", "TensorDictBase"]

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

    from relive.concurrent.processes import Handle
    from relive.replay.samplers import Sampler
    from relive.storage.codec import JsonNode
else:
    _MODULES = {
        "TensorDict": "tensordict",
        "TensorDictBase": "tensordict",
        "Handle": "relive.concurrent.processes",
        "JsonNode": "relive.storage.codec",
        "Sampler": "relive.replay.samplers",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # The imported module may make constant tensors, which must be on the CPU whatever the default device is.
        with torch.device("cpu"):
            globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value
