"""The input of a write: values that callers pass or stage, flattened to leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import State
from relive.errors import SchemaError, explain, verify
from relive.kernels.steps import StepFlattener
from relive.replay.row_storage import RowStorage
from relive.schema.autoreset import read_transition
from relive.schema.checks import check_keys
from relive.schema.conversion import EnvIdConverter, as_tensor, path_name
from relive.schema.fields import caller_shape
from relive.schema.invariants import verify_layout
from relive.storage.codec import SnapshotReader

_NO_FIELDS: dict[str, Any] = {}


class StepInput:
    """Flattens passed and staged values of a step to leaves in the schema's order, and stores the staged values."""

    def __init__(self, rows: RowStorage) -> None:
        self._rows, self._schema = rows, rows.schema
        self.staged: dict[str, tuple[torch.Tensor, ...]] = {}
        """Leaves of staged fields, by field."""
        names = self._schema.names
        self._flatten = StepFlattener(self._schema, names[:5], names[5:])
        self._flatten_next = StepFlattener(self._schema, ("obs",))
        self._block_names = {*names, "next_obs"}
        self._env_id_converter = EnvIdConverter(rows.leading_shape[0] if rows.leading_shape else None, rows.device)

    def convert_env_ids(self, env_ids: Any) -> torch.Tensor | None:
        """Return `env_ids` as a tensor of distinct ints below `num_envs`; None for all environments."""
        return None if env_ids is None else self._env_id_converter(env_ids)

    def stage(self, values: Mapping[str, Any]) -> None:
        schema, rows, staged = self._schema, self._rows, {}
        for name, value in values.items():
            schema.check_declared(name)
            if name in self.staged:
                raise SchemaError(explain(name, "one value per step", "a second value", "Stage it once per step."))
            leaves = zip(schema.leaf_indices[name], schema.flatten(name, value), strict=True)
            staged[name] = tuple(rows.convert_leaf(i, leaf, rows.leading_shape).clone() for i, leaf in leaves)
        self.staged |= staged

    def flatten_step(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        """Return the leaves of a step without `next_obs`, from its five fixed fields `values` and its extra fields."""
        if not self.staged:
            return self._flatten(values, extra)
        extra_leaves = self._flatten.flatten_by_field(values, extra, self.staged)
        return tuple(leaf for name in self._schema.names for leaf in self.staged.get(name) or extra_leaves[name])

    def flatten_next_obs(self, next_obs: Any) -> tuple[Any, ...]:
        return self._flatten_next((next_obs,), _NO_FIELDS)

    def flatten_gymnasium_step(
        self, obs: Any, action: Any, step: Any, extra: dict[str, Any], mode: AutoresetMode | None,
        envs: torch.Tensor | None,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Mapping[str, Any]]:  # fmt: skip
        """Return the leaves of a result of `env.step`, the leaves of its true next observation, and its info."""
        rows = self._rows
        shape = rows.step_shape(envs)
        next_leaves, reward, terminated, truncated = read_transition(step, mode, self._schema, shape, rows.device, obs)
        leaves = self.flatten_step((obs, action, reward, terminated, truncated), extra)
        return leaves, next_leaves, step[4]

    def flatten_block(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
        """Return the leaves of a block of steps, the leaves of its next observations, and its number of steps."""
        names = self._schema.names
        if type(batch) is not dict or batch.keys() != self._block_names:
            check_keys("extend", batch, self._block_names, "fields")
        if self.staged:
            raise SchemaError(explain("extend", "no staged fields", sorted(self.staged), "Complete the step with add."))
        leaves = self._flatten(tuple(batch[name] for name in names[:5]), {name: batch[name] for name in names[5:]})
        terminated = batch["terminated"]
        if type(terminated) is not torch.Tensor:
            terminated = as_tensor("terminated", terminated, self._rows.device)
        shape = terminated.shape
        if not shape or not shape[0]:
            raise SchemaError(explain("extend", "at least one step", 0, "Pass blocks of steps."))
        return leaves, self.flatten_next_obs(batch["next_obs"]), shape[0]

    def state(self) -> State:
        """Return the state to save: the staged fields."""
        arrays = {f"{name}.{i}": leaf for name, leaves in self.staged.items() for i, leaf in enumerate(leaves)}
        return State({"names": list(self.staged)}, arrays)

    @property
    def max_staged_bytes(self) -> int:
        """Number of bytes of all fields of one step of all environments."""
        sizes = (math.prod(caller_shape(field)) * field.dtype.itemsize for field in self._schema.fields)
        return self._rows.ring.num_envs * sum(sizes)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore saved staged fields."""
        rows, columns = self._rows, self._schema.leaf_indices
        arrays, staged = saved.read_all_arrays(self.max_staged_bytes), {}
        for node in saved.values.entry("names").items():
            name = node.text()
            if name not in columns:
                raise node.error("a declared field")
            leaves = [(i, arrays.pop(f"{name}.{number}", None)) for number, i in enumerate(columns[name])]
            staged[name] = tuple(rows.convert_leaf(i, leaf, rows.leading_shape) for i, leaf in leaves)
        if arrays:
            raise saved.array_node(min(arrays)).error("no other array than those of staged fields")
        self.staged = staged

    def check(self) -> None:
        """Verify that the staged leaves match the schema."""
        schema, rows = self._schema, self._rows
        for name, leaves in self.staged.items():
            verify(name in schema.names, "staged fields", f"declared fields ({', '.join(schema.names)})", name)
            for i, leaf in zip(schema.leaf_indices[name], leaves, strict=True):
                shape = (*rows.leading_shape, *caller_shape(schema.fields[i]))
                verify_layout(f"staged {path_name(schema.paths[i])}", leaf, shape, schema.fields[i].dtype, rows.device)
