"""What is true of a rollout buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gymnasium.vector import AutoresetMode

from relive.fields.conversion import dotted
from relive.fields.invariants import (
    require,
    require_addresses,
    require_all,
    require_flags,
    require_form,
    same_bits,
)
from relive.fields.schema import is_sparse

if TYPE_CHECKING:
    from relive.rollout.buffer import RolloutBuffer


def check_rollout(rollout: RolloutBuffer) -> None:
    """The stored steps are some, and everything that is kept beside them is of these steps."""
    _check_form(rollout)
    _check_steps(rollout)
    _check_attached(rollout)
    steps = rollout._num_stored
    cut = rollout._resets.flag("truncated")[:steps] & ~rollout._resets.flag("terminated")[:steps]
    rollout._finals.check(cut)
    valid = torch.ones((steps + 1, len(rollout._resets.resetting)), dtype=torch.bool, device=rollout.device)
    if rollout.autoreset is AutoresetMode.NEXT_STEP and rollout.device.type != "meta":
        valid = ~rollout._resets.rows(steps + 1)
    rollout._carries.check(rollout._resets.ended(slice(0, steps)), valid)
    _check_listened(rollout, valid)


def _check_form(rollout: RolloutBuffer) -> None:
    storage, schema, envs = rollout._storage, rollout._schema, rollout.num_envs or 1
    for path, field, column in zip(schema.paths, schema.fields, storage.columns, strict=True):
        rows = 1 if is_sparse(field) else rollout.num_steps + 1
        require_form(dotted(path), column, (rows, envs, *field.shape), field.dtype, rollout.device)
    if not storage.is_exposed:  # then columns may move, and are followed
        require_addresses(schema.paths, storage.columns, storage._addresses)
    for name, flags in (("resetting", rollout._resets.resetting), ("starting", rollout._resets.starting)):
        require_form(name, flags, (envs,), torch.bool, rollout.device)


def _check_steps(rollout: RolloutBuffer) -> None:
    steps, staged = rollout._num_stored, rollout._staged
    require(0 <= steps <= rollout.num_steps, "num_stored", f"0 to {rollout.num_steps} steps", steps)
    gives = {"value": rollout._gives_value, "log_prob": rollout._gives_log_prob}
    missing = {name for name, given in gives.items() if not given}
    require(rollout._columns.missing == missing, "missing fields", sorted(missing), sorted(rollout._columns.missing))
    require(not steps or not staged & missing, "staged fields", f"none of {sorted(missing)}", sorted(staged))
    names = rollout._schema.names
    require(staged <= set(names), "staged fields", f"declared fields ({', '.join(names)})", sorted(staged))
    require(
        not staged or steps < rollout.num_steps, "staged fields", "no staged fields in a full rollout", sorted(staged)
    )
    if rollout.device.type == "meta":  # which has no values to look at
        return
    ends = {name: rollout._resets.flag(name)[:steps] for name in ("terminated", "truncated")}
    for name, flags in {**ends, "resetting": rollout._resets.resetting, "starting": rollout._resets.starting}.items():
        require_flags(name, flags)
    may_reset = rollout.autoreset is AutoresetMode.NEXT_STEP
    require_all(
        ~rollout._resets.resetting | may_reset,
        "resetting",
        "False unless autoreset=NEXT_STEP",
        rollout._resets.resetting,
    )


def _check_attached(rollout: RolloutBuffer) -> None:
    """What is attached has the rows of the rollout; behind the stored ones are zeros, and the last value."""
    steps, columns, schema = rollout._num_stored, rollout._storage.columns, rollout._schema
    lead = (rollout.num_steps + 1, rollout.num_envs or 1)
    own = dict(zip(schema.paths, columns, strict=True))
    for path, column in rollout._attached.items():
        require(path[0] not in rollout._columns.given, dotted(path), "a name that no field has", "the name of a field")
        if path in own:
            require(column is own[path], dotted(path), "the memory of the field", "other memory")
            continue
        require_form(dotted(path), column, (*lead, *column.shape[2:]), column.dtype, rollout.device)
        if rollout.device.type != "meta":
            require_all(column[steps:] == 0, dotted(path), f"zeros after step {steps - 1}", column[steps:])
    if rollout._last is None or rollout._staged or rollout.device.type == "meta":
        return
    for name, leaves in zip(("value", "obs"), rollout._last, strict=True):
        for i, leaf in zip(schema.columns[name], leaves or (), strict=False):
            found = columns[i][steps]
            require(same_bits(leaf, found), f"last_{dotted(schema.paths[i])}", leaf.tolist(), found.tolist())


def _check_listened(rollout: RolloutBuffer, valid: torch.Tensor) -> None:
    """Those who are told of steps know which environments only reset in the coming row."""
    if rollout._listeners.columns and rollout.autoreset is AutoresetMode.NEXT_STEP and valid.device.type != "meta":
        coming = torch.as_tensor(rollout._coming, device=valid.device)
        require_all(coming == ~valid[-1:], "coming resets", "the resets that the stored flags announce", coming)
