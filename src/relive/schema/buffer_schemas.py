"""The schemas of rollout and replay buffers, and the size of replay rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relive.errors import SchemaError, explain
from relive.schema.checks import check_choice
from relive.schema.conversion import path_name
from relive.schema.fields import (
    FLAG,
    Path,
    Schema,
    Stacked,
    declare,
    declare_real,
    declare_whole,
    refuse_mutable,
    refuse_reserved,
)

OPTIONAL = ("value", "log_prob")
"""Fields that the steps of a rollout may omit, if all steps omit them."""

MADE_BY_ROLLOUT = ("mask", "index", "is_first", "batch_sizes")
"""Fields that reading a rollout adds to a batch."""

_RESERVED = ("obs", "action", "reward", "terminated", "truncated", "step", "self")
_RESERVED_IN_ROLLOUT = (*_RESERVED, *MADE_BY_ROLLOUT, "value", "advantage", "return", "final_obs")
_RESERVED_IN_REPLAY = (*_RESERVED, "next_obs", "mask", "index", "weight", "discount", "train", "is_first", "env_ids")


def rollout_schema(obs: Any, action: Any, reward: Any, value: Any, extra: Mapping[str, Any]) -> Schema:
    """Make the schema of a rollout: seven fixed fields, then the extra fields."""
    refuse_reserved(extra, _RESERVED_IN_ROLLOUT)
    rewards, values = declare_real("reward", reward), declare_real("value", value)
    extra_trees = {name: declare_whole(f"extra.{name}", tree) for name, tree in extra.items()}
    log_prob = extra_trees.pop("log_prob", rewards)
    schema = Schema(
        {
            "obs": declare_whole("obs", obs),
            "action": declare_whole("action", action),
            "reward": rewards,
            "terminated": FLAG,
            "truncated": FLAG,
            "value": values,
            "log_prob": log_prob,
            **extra_trees,
        }
    )
    remedy = "Declare a plain field: rollout.attach gives the stored steps new fields."
    refuse_mutable(schema, schema.names, "a field that a rollout can store", remedy)
    return schema


def agent_leaves(schema: Schema) -> list[tuple[Path, int, int]]:
    """Return (path, reward leaf, value leaf) of each agent; empty if rewards and values do not correspond."""
    reward, value = ({schema.paths[i][1:]: i for i in schema.leaf_indices[name]} for name in ("reward", "value"))
    shapes = [{path: schema.fields[i].shape for path, i in leaves.items()} for leaves in (reward, value)]
    return [(path, reward[path], value[path]) for path in value] if shapes[0] == shapes[1] else []


def replay_schema(obs: Any, action: Any, reward: Any, extra: Mapping[str, Any]) -> Schema:
    """Make the schema of a replay buffer: five fixed fields, then the extra fields."""
    refuse_reserved(extra, _RESERVED_IN_REPLAY)
    return Schema(
        {
            "obs": declare("obs", obs),
            "action": declare("action", action),
            "reward": declare_real("reward", reward),
            "terminated": FLAG,
            "truncated": FLAG,
            **{name: declare(f"extra.{name}", declaration) for name, declaration in extra.items()},
        }
    )


def check_replay(capacity: int, num_envs: int | None, next_obs: object, schema: Schema) -> None:
    """Raise if capacity is not divisible by num_envs, or if a field cannot be stored in a replay buffer."""
    if capacity % (num_envs or 1):
        remedy = f"Pass {capacity - capacity % (num_envs or 1) or num_envs}."
        raise SchemaError(explain("capacity", f"a multiple of num_envs={num_envs}", capacity, remedy))
    check_choice("next_obs", next_obs, ("shared", "stored"))
    for i, field in enumerate(schema.fields):
        if isinstance(field, Stacked) and (next_obs == "stored" or i not in schema.leaf_indices["obs"]):
            remedy = 'Use Stacked for leaves of obs only, with next_obs="shared".'
            raise SchemaError(explain(path_name(schema.paths[i]), "a plain Field", "Stacked", remedy))
    remedy = (
        "Declare a plain field: an observation is the next observation of another row. Put what changes into extra."
    )
    refuse_mutable(schema, ("obs",), "an observation that never changes", remedy)


def replay_nbytes(schema: Schema, capacity: int, num_envs: int, next_obs: str) -> int:
    """Number of bytes of the rows of a replay buffer."""
    rows = capacity // num_envs
    slots = (rows if next_obs == "stored" else rows + schema.deepest_stack) * num_envs
    sizes = [math.prod(field.shape) * field.dtype.itemsize for field in schema.fields]
    nexts = sum(sizes[i] for i in schema.leaf_indices["obs"]) if next_obs == "stored" else 0
    return slots * (sum(sizes) + nexts + 2) + num_envs * 26
