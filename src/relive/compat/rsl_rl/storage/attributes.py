"""rsl_rl's attributes of a storage: the memory of the core under its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from relive.errors import SchemaError, explain
from relive.rollout.buffer import RolloutBuffer

PARAMS = "distribution_params_"
"""The core's names of distribution parameters begin with it; a number follows."""
STATES = ("hidden_state_a_", "hidden_state_c_")
"""The same of hidden states, of the actor and of the critic."""
_ALWAYS = {"actions": "action", "rewards": "reward"}
_BY_TYPE = {
    "rl": {"values": "value", "actions_log_prob": "log_prob", "advantages": "advantages", "returns": "returns"},
    "distillation": {"privileged_actions": "privileged_actions"},
}


def memory_of(core: RolloutBuffer, training_type: str) -> dict[str, Any]:
    """The core's memory by rsl_rl's attributes."""
    columns = core.columns
    names = {**_ALWAYS, **_BY_TYPE.get(training_type, {})}
    memory = {
        "observations": TensorDict(dict(columns["obs"].items()), columns.batch_size, device=core.device),
        **{name: columns[field] for name, field in names.items()},
        "dones": columns["terminated"].view(torch.uint8).unsqueeze(-1),
    }
    if training_type == "rl":
        memory["distribution_params"] = tuple(parts_of(columns, PARAMS)) or None
    for name, prefix in zip(("saved_hidden_state_a", "saved_hidden_state_c"), STATES, strict=True):
        memory[name] = [part.transpose(1, 2) for part in parts_of(columns, prefix)] or None
    return memory


def follow(old: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new memory, in the old tensors where there were some: whoever holds one of them holds the memory still."""
    for name, memory in old.items():
        if isinstance(memory, torch.Tensor):
            new[name] = memory.set_(new[name])
        elif isinstance(memory, TensorDictBase):
            for key, leaf in new[name].items():
                memory.get(key).set_(leaf)
            new[name] = memory
    return new


def parts_of(rows: TensorDict, prefix: str) -> list[torch.Tensor]:
    """The fields whose names are this prefix and a number, in order."""
    return [rows[f"{prefix}{i}"] for i in range(sum(str(name).startswith(prefix) for name in rows.keys()))]


def overwrite(where: str, memory: Any, value: Any) -> None:
    """Copy `value` into the memory, if it has just its form."""
    if value is memory:
        return
    if isinstance(memory, TensorDictBase | tuple | list):
        mine, theirs = _children(memory), _children(value)
        if mine.keys() != theirs.keys():
            raise SchemaError(explain(where, f"the parts {list(mine)}", list(theirs), "Assign exactly these parts."))
        for key, part in mine.items():
            overwrite(f"{where}.{key}", part, theirs[key])
        return
    if memory is None:
        remedy = "The first step that has it makes room for it."
        raise SchemaError(explain(where, "no assignment before the first step", type(value).__name__, remedy))
    if not isinstance(value, torch.Tensor) or value.shape != memory.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise SchemaError(explain(where, f"a tensor of shape {tuple(memory.shape)}", got, "Assign every step."))
    memory.copy_(value.detach())


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    return dict(value.items()) if hasattr(value, "items") else {}
