"""What a step has in each buffer, and the room that many of them take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from relive.errors import SchemaError, explain
from relive.fields.conversion import dotted
from relive.fields.schema import (
    Field,
    Path,
    Schema,
    Stacked,
    declare,
    declare_real,
    refuse_reserved,
    refuse_sparse,
    unstacked,
)

FLAG = Field((), torch.bool)

OPTIONAL = ("value", "log_prob")
"""Fields of a rollout that its steps may leave out, all of them alike."""

MADE_BY_ROLLOUT = ("mask", "index", "is_first", "batch_sizes")
"""What reading a rollout adds to a batch."""

_TAKEN = ("obs", "action", "reward", "terminated", "truncated", "step", "self")
_TAKEN_IN_ROLLOUT = (*_TAKEN, *MADE_BY_ROLLOUT, "value", "advantage", "return", "final_obs")
_TAKEN_IN_REPLAY = (*_TAKEN, "next_obs", "mask", "index", "weight", "discount", "train", "is_first", "env_ids")


def rollout_schema(obs: Any, action: Any, reward: Any, value: Any, extra: Mapping[str, Any]) -> Schema:
    """The fields of a rollout's steps: seven that it always has, and the extra ones behind them."""
    refuse_reserved(extra, _TAKEN_IN_ROLLOUT)
    rewards, values = declare_real("reward", reward), declare_real("value", value)
    extra_trees = {name: unstacked(declare(f"extra.{name}", tree)) for name, tree in extra.items()}
    log_prob = extra_trees.pop("log_prob", rewards)
    schema = Schema(
        {
            "obs": unstacked(declare("obs", obs)),
            "action": unstacked(declare("action", action)),
            "reward": rewards,
            "terminated": FLAG,
            "truncated": FLAG,
            "value": values,
            "log_prob": log_prob,
            **extra_trees,
        }
    )
    refuse_sparse(schema, "what is not extra", schema.names[:7])
    return schema


def agents_of(schema: Schema) -> list[tuple[Path, int, int]]:
    """Each agent's path, and its columns of reward and value; none where rewards and values do not correspond."""
    reward, value = ({schema.paths[i][1:]: i for i in schema.columns[name]} for name in ("reward", "value"))
    shapes = [{path: schema.fields[i].shape for path, i in columns.items()} for columns in (reward, value)]
    return [(path, reward[path], value[path]) for path in value] if shapes[0] == shapes[1] else []


def replay_schema(obs: Any, action: Any, reward: Any, extra: Mapping[str, Any]) -> Schema:
    """The fields of a replay buffer's rows: five that it always has, and the extra ones behind them."""
    refuse_reserved(extra, _TAKEN_IN_REPLAY)
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
    """Refuse rows that are no whole number an environment, and fields that cannot be kept in this way."""
    if capacity % (num_envs or 1):
        remedy = f"Pass {capacity - capacity % (num_envs or 1) or num_envs}."
        raise SchemaError(explain("capacity", f"a multiple of num_envs={num_envs}", capacity, remedy))
    if next_obs not in ("shared", "stored"):
        raise SchemaError(explain("next_obs", '"shared" or "stored"', repr(next_obs), "Pass one of them."))
    for i, field in enumerate(schema.fields):
        if isinstance(field, Stacked) and (next_obs == "stored" or i not in schema.columns["obs"]):
            remedy = 'Use Stacked for leaves of obs only, with next_obs="shared".'
            raise SchemaError(explain(dotted(schema.paths[i]), "a plain Field", "Stacked", remedy))
    refuse_sparse(schema, "a replay buffer")


def replay_nbytes(schema: Schema, capacity: int, num_envs: int, next_obs: str) -> int:
    """What the rows of a replay buffer take, in bytes."""
    rows = capacity // num_envs
    slots = (rows if next_obs == "stored" else rows + schema.deepest_stack) * num_envs
    sizes = [math.prod(field.shape) * field.dtype.itemsize for field in schema.fields]
    nexts = sum(sizes[i] for i in schema.columns["obs"]) if next_obs == "stored" else 0
    return slots * (sum(sizes) + nexts + 2) + num_envs * 26
