"""Learning targets of a rollout: advantages and returns, final observations, the last value, and attached tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive import lazy
from relive.checkpoint.snapshot import State
from relive.errors import NotReadyError, SchemaError, explain, explain_infinite_rewards, verify, warn_user
from relive.estimators import gae
from relive.kernels import complete
from relive.rollout.storage import EpisodeFlags, FinalRows, Storage
from relive.schema.assembly import assemble_field
from relive.schema.autoreset import find_final_obs, flags_to_host
from relive.schema.conversion import as_tensor, convert, convert_leaves, path_name
from relive.schema.fields import DTYPES, ROLLOUT_BATCH_FIELDS, Field, Path, Schema, named_leaves
from relive.schema.invariants import same_bits, verify_layout
from relive.storage.codec import JsonNode, SnapshotReader

Bootstrap: TypeAlias = bool | Literal["own_value"]
"""Bootstrap value of a truncated step. True: V(final observation); False: 0; "own_value": V(the step's observation)."""


class AdvantageEstimation:
    """Generalised advantage estimation over the steps of a rollout, agent by agent."""

    def __init__(self, storage: Storage, flags: EpisodeFlags) -> None:
        self._storage, self._schema, self._flags = storage, storage.schema, flags
        self._agents = _match_agent_leaves(storage.schema)
        self.last = LastStep(storage)
        self._warnings = RewardWarnings(storage, flags)

    def attach_targets(
        self, last_value: Any, last_obs: Any, final_value: Any, *, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> None:
        """Attach advantages and returns to the stored steps; store the last value and observation in the next row."""
        storage, leading_shape = self._storage, self._storage.leading_shape
        steps = storage.require_complete_steps("compute_advantage")
        if "value" in storage.absent_fields:
            remedy = "Pass value= to every add, or attach(value=…) before."
            raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", "none", remedy))
        if not self._agents:
            reward, value = (self._schema.trees[name] for name in ("reward", "value"))
            remedy = "Pass value= to the buffer with the keys and shapes of reward=."
            raise SchemaError(explain("value", f"one value for each reward ({reward})", value, remedy))
        fields = {"value": last_value} if last_obs is None else {"value": last_value, "obs": last_obs}
        last = {
            name: [
                x.clone()
                for x in convert_leaves(self._schema, name, value, leading_shape, storage.device, prefix="last_")
            ]
            for name, value in fields.items()
        }
        targets = self._estimate_targets(steps, last["value"], final_value, _parse_bootstrap(bootstrap), gamma, lam)
        self._warnings.check_rewards(steps)

        def change() -> None:
            self.last.set_leaves(last)
            self.last.write_row()
            storage.attach(targets)

        complete(change)

    def _estimate_targets(
        self, num_steps: int, last_values: list[torch.Tensor], final_value: Any, bootstrap: Bootstrap, gamma: float,
        lam: float,
    ) -> dict[Path, torch.Tensor]:  # fmt: skip
        """Return advantages and returns [T, N, …] of the first T = `num_steps` rows.

        `last_values` [N, …] are the values of the observations after these rows.
        """
        flags = self._flags
        terminated, truncated = flags.terminated[:num_steps], flags.truncated[:num_steps]
        is_truncated = truncated & ~terminated
        positions, final_values = self._convert_final_values(final_value, bootstrap, is_truncated)
        uses_own_values = bootstrap == "own_value" and not flags.has_reset_rows
        ends = terminated if bootstrap else terminated | truncated
        mask = flags.transition_mask(num_steps)
        targets: dict[Path, torch.Tensor] = {}
        for i, (agent, reward, value) in enumerate(self._agents):
            values = self._storage.tensors[value][:num_steps]
            next_values = torch.cat([values[1:], last_values[i].view(1, *values.shape[1:])])
            if uses_own_values:
                value_mask = is_truncated.view(*is_truncated.shape, *(1,) * (values.ndim - 2))
                next_values = torch.where(value_mask, values, next_values)
            if positions is not None:
                next_values[positions] = final_values[i]
            rewards = self._storage.tensors[reward][:num_steps]
            advantage, return_ = gae(rewards, values, next_values, ends, truncated, gamma=gamma, lam=lam, mask=mask)
            targets |= {("advantage", *agent): advantage, ("return", *agent): return_}
        return targets

    def _convert_final_values(
        self, final_value: Any, bootstrap: Bootstrap, is_truncated: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[torch.Tensor]]:
        """Return the positions of the final values (steps, environments), or None, and the values as leaves."""
        positions = self._storage.final_positions
        if bootstrap is False and final_value is not None:
            remedy = "Leave out final_value= or bootstrap_truncated=False."
            got = type(final_value).__name__
            raise SchemaError(explain("final_value", "None with bootstrap_truncated=False", got, remedy))
        if bootstrap is True:
            if not self._flags.has_reset_rows and int(is_truncated.sum()) > len(positions):
                raise _unknown_final_error(is_truncated, positions)
            if final_value is None and positions:
                remedy = (
                    "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
                )
                raise NotReadyError(explain("final_value", f"values of {len(positions)} truncated steps", None, remedy))
        if final_value is None:
            return None, []
        device, leading_shape = self._storage.device, (len(positions),)
        values = convert_leaves(
            self._schema, "value", final_value, leading_shape, device, prefix="final_", unit="truncated steps"
        )
        return torch.tensor(positions, dtype=torch.int64, device=device).view(-1, 2).unbind(1), values


def _match_agent_leaves(schema: Schema) -> list[tuple[Path, int, int]]:
    """Return (path, reward leaf, value leaf) of each agent; empty if rewards and values do not correspond."""
    reward, value = ({schema.paths[i][1:]: i for i in schema.leaf_indices[name]} for name in ("reward", "value"))
    shapes = [{path: schema.fields[i].shape for path, i in leaves.items()} for leaves in (reward, value)]
    return [(path, reward[path], value[path]) for path in value] if shapes[0] == shapes[1] else []


def _parse_bootstrap(bootstrap: Any) -> Bootstrap:
    if isinstance(bootstrap, bool | np.bool_):
        return bool(bootstrap)
    if isinstance(bootstrap, str) and bootstrap == "own_value":
        return "own_value"
    expected = 'True, False or "own_value"'
    raise SchemaError(explain("bootstrap_truncated", expected, repr(bootstrap), "Pass one of them."))


def _unknown_final_error(is_truncated: torch.Tensor, positions: list[tuple[int, int]]) -> NotReadyError:
    """Return the error for the first truncated step whose final observation is unknown."""
    step, env = next((t, n) for t, n in is_truncated.nonzero().tolist() if (t, n) not in set(positions))
    remedy = (
        "Pass final_obs= to add, use add_step, or pass bootstrap_truncated=False to count it as an end; "
        'bootstrap_truncated="own_value" is for simulators that never reveal it.'
    )
    where = f"final_obs of step {step}, environment {env}"
    return NotReadyError(explain(where, "the observation that the truncated step led to", None, remedy))


_MIN_ENDS = 8
"""Minimum number of episode ends before a warning about the autoreset mode."""


class RewardWarnings:
    """Checks of rewards on the host, with one warning about infinite or NaN rewards and one about an autoreset mode."""

    def __init__(self, storage: Storage, flags: EpisodeFlags) -> None:
        self._storage, self._flags = storage, flags
        self._warns_of_infinity = storage.device.type == "cpu"
        self._warns_of_autoreset = self._warns_of_infinity and not flags.has_reset_rows
        self._num_ends = self._num_steps_within_episodes = self._num_rewards_within_episodes = 0
        """Numbers of steps after an end, of other steps, and of other steps with a nonzero reward."""

    def check_rewards(self, num_steps: int) -> None:
        """Warn if rewards of the first `num_steps` steps are infinite, or look as if dummy steps were among them."""
        if not (self._warns_of_infinity or self._warns_of_autoreset):
            return
        leaves = (self._storage.tensors[i][:num_steps] for i in self._storage.schema.leaf_indices["reward"])
        rewards = [(leaf.float() if DTYPES[leaf.dtype] is None else leaf).numpy() for leaf in leaves]
        num_infinite = sum(reward.size - np.count_nonzero(np.isfinite(reward)) for reward in rewards)
        if self._warns_of_infinity and num_infinite:
            self._warns_of_infinity = False
            warn_user(explain_infinite_rewards(num_infinite))
        if self._warns_of_autoreset and num_steps > 1 and self._look_like_reset_rows(rewards, num_steps):
            self._warns_of_autoreset = False
            remedy = "If the environment resets in the step after an end, declare autoreset=NEXT_STEP."
            got = f"a reward of 0 after all {self._num_ends} ends, and not elsewhere"
            warn_user(explain("autoreset", "steps after an end that are steps of new episodes", got, remedy))

    def _look_like_reset_rows(self, rewards: list[np.ndarray], num_steps: int) -> bool:
        """Whether every step after an end has reward 0 and is no end, while most other steps have a nonzero reward."""
        ended = self._flags.end_mask(slice(0, num_steps)).numpy()
        nonzero = [(x != 0).reshape(*ended.shape, -1).any(2) if x.ndim > 2 else x != 0 for x in rewards]
        has_reward = np.logical_or.reduce(nonzero)
        after_end = ended[:-1]
        if (after_end & (has_reward | ended)[1:]).any():
            self._warns_of_autoreset = False
            return False
        num_ends = np.count_nonzero(after_end)
        self._num_ends += num_ends
        self._num_steps_within_episodes += after_end.size - num_ends
        self._num_rewards_within_episodes += np.count_nonzero(has_reward[1:] & ~after_end)
        return self._num_ends >= _MIN_ENDS and 2 * self._num_rewards_within_episodes > self._num_steps_within_episodes


class FinalObservations:
    """Final observations of truncated steps, sorted by step and environment; empty under NEXT_STEP."""

    def __init__(self, storage: Storage, mode: AutoresetMode | None) -> None:
        self._storage, self._schema = storage, storage.schema
        self._has_reset_rows, self._is_same_step = mode is AutoresetMode.NEXT_STEP, mode is AutoresetMode.SAME_STEP
        self._fields = [storage.schema.fields[i] for i in storage.schema.leaf_indices["obs"]]

    def select_from_obs(self, row: int, final_obs: Any, terminated: Any, truncated: Any) -> FinalRows | None:
        """Select the rows of truncated environments from `final_obs` [N, …]; the shapes of all rows are checked."""
        if self._has_reset_rows:
            remedy = "Leave it out: the row after an end holds the final observation."
            raise SchemaError(explain("final_obs", "None under autoreset=NEXT_STEP", type(final_obs).__name__, remedy))
        return self._select_finals(row, self._find_truncated_envs(row, terminated, truncated), final_obs)

    def select_from_step(self, row: int, step: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> FinalRows | None:
        """Return the final observations in the result of `env.step`, from where the autoreset mode puts them."""
        if self._has_reset_rows:
            return None
        next_obs, _, terminated, truncated, info = step
        envs = self._find_truncated_envs(row, terminated, truncated)
        if not envs:
            return None
        return self._select_finals(row, envs, next_obs, info if self._is_same_step else None)

    def _find_truncated_envs(self, row: int, terminated: Any, truncated: Any) -> list[int]:
        """Return the environments that are truncated and not terminated at the step that becomes row `row`."""
        storage, flags = self._storage, {"terminated": terminated, "truncated": truncated}
        staged = {name: storage.flag(name)[row].view(storage.leading_shape) for name in flags if name in storage.staged}
        is_terminated, is_truncated = flags_to_host(flags | staged, storage.leading_shape, storage.device)
        return (is_truncated & ~is_terminated).nonzero()[0].tolist()

    def _select_finals(
        self, row: int, envs: list[int], obs: Any, info: Mapping[str, Any] | None = None
    ) -> FinalRows | None:
        """Copy the rows `envs` of the observation `obs` [N, …], or the final observations of `envs` in `info`."""
        leading_shape, device = self._storage.leading_shape, self._storage.device
        if info is None:
            leaves = convert_leaves(
                self._schema, "obs", obs, leading_shape, device, envs if leading_shape else None, prefix="final_"
            )
        else:
            envs, leaves = find_final_obs(info, envs, self._schema, leading_shape, device)
        if not envs:
            return None
        leaves = leaves if leading_shape else [leaf.unsqueeze(0).clone() for leaf in leaves]
        return FinalRows([(row, env) for env in envs], leaves)

    @property
    def all_final_obs(self) -> torch.Tensor | lazy.TensorDict:
        """All final observations: a tensor [K, …], or a TensorDict [K] if the observation is nested."""
        nothing = [
            torch.empty((0, *field.shape), dtype=field.dtype, device=self._storage.device) for field in self._fields
        ]
        leaves = list(map(torch.cat, zip(nothing, *(group.leaves for group in self._storage.finals), strict=True)))
        return assemble_field(self._schema, "obs", leaves, leaves[0].shape[:1])

    def state(self) -> State:
        """Return all final observations, with their positions."""
        leaves = map(torch.cat, zip(*(group.leaves for group in self._storage.finals), strict=True))
        positions = torch.tensor(self._storage.final_positions, dtype=torch.int64, device="cpu").view(-1, 2)
        return State({}, {"places": positions, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)}})

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; the storage must be restored first."""
        steps, num_envs = self._storage.num_stored, self._storage.num_envs
        positions = saved.read_array("places", (range(steps * num_envs + 1), 2), torch.int64).tolist()
        if not positions:
            return
        for step, env in positions:
            if not (0 <= step < steps and 0 <= env < num_envs):
                raise JsonNode("state: finals.places", [step, env]).error("a stored step and its environment")
        leaves = [
            saved.read_array(f"leaf{i}", (len(positions), *field.shape), field.dtype).to(self._storage.device)
            for i, field in enumerate(self._fields)
        ]
        self._storage.finals.append(FinalRows([(step, env) for step, env in positions], leaves))

    def check(self) -> None:
        """Verify that each final observation belongs to a truncated step, and that they are in order."""
        storage, leaf_indices = self._storage, self._schema.leaf_indices["obs"]
        for group in self._storage.finals:
            for i, field, leaf in zip(leaf_indices, self._fields, group.leaves, strict=True):
                where, shape = f"final_{path_name(self._schema.paths[i])}", (len(group.positions), *field.shape)
                verify_layout(where, leaf, shape, field.dtype, storage.device)
        positions = storage.final_positions
        is_sorted = positions == sorted(set(positions))
        verify(is_sorted, "final_obs", "one for each (step, environment), in order", positions)
        if not storage.has_values:
            return
        terminated, truncated = (storage.flag(name)[: storage.num_stored] for name in ("terminated", "truncated"))
        truncated_steps = set(map(tuple, (truncated & ~terminated).nonzero().tolist()))
        unexpected_positions = [position for position in positions if position not in truncated_steps]
        verify(not unexpected_positions, "final_obs", "(step, environment) of truncated steps", unexpected_positions)


class LastStep:
    """Value and observation after the last stored step, kept in the row that the next step overwrites."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.set_leaves({})

    def set_leaves(self, leaves: dict[str, list[torch.Tensor]]) -> None:
        """Set the leaves of the last "value", and of the last "obs" if it is known."""
        self._leaves, self._storage_age = leaves, self._storage.clear_and_step_counts

    @property
    def current_leaves(self) -> dict[str, list[torch.Tensor]]:
        """Leaves by field; empty if a step was stored or removed since `set_leaves`."""
        return self._leaves if self._storage_age == self._storage.clear_and_step_counts else {}

    def write_row(self) -> None:
        """Write the leaves to the row after the stored steps, and zero its other fields."""
        storage = self._storage
        storage.zero_row(storage.num_stored)
        for name, leaves in self.current_leaves.items():
            storage.write_row(storage.num_stored, tuple(leaves), storage.schema.leaf_indices[name])

    def restore_row(self) -> None:
        """Write the leaves again after a failed step overwrote them, unless fields of the next step are staged."""
        if self.current_leaves and not self._storage.staged:
            self.write_row()

    def state(self) -> State:
        """Return the leaves, and whether "value" and "obs" are known."""
        fields = self.current_leaves
        arrays = {f"{name}{i}": leaf for name, leaves in fields.items() for i, leaf in enumerate(leaves)}
        return State({name: name in fields for name in ("value", "obs")}, arrays)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; the storage must be restored first."""
        storage, schema = self._storage, self._storage.schema
        self.set_leaves({})
        for name in ("value", "obs"):
            if not saved.values.entry(name).flag():
                return
            fields = [schema.fields[i] for i in schema.leaf_indices[name]]
            self._leaves[name] = [
                saved.read_array(f"{name}{i}", (*storage.leading_shape, *field.shape), field.dtype).to(storage.device)
                for i, field in enumerate(fields)
            ]

    def check(self) -> None:
        """Verify that the row after the stored steps holds the leaves, unless fields of the next step are staged."""
        storage, schema = self._storage, self._storage.schema
        if storage.staged or not storage.has_values:
            return
        for name, leaves in self.current_leaves.items():
            for i, leaf in zip(schema.leaf_indices[name], leaves, strict=True):
                row = storage.tensors[i][storage.num_stored]
                verify(same_bits(leaf, row), f"last_{path_name(schema.paths[i])}", leaf.tolist(), row.tolist())


def convert_attached_leaves(named_trees: Iterable[tuple[Any, Any]], storage: Storage) -> dict[Path, torch.Tensor]:
    """Convert `named_trees`, pairs of a name and a value, to leaves [T, N, …] for `Storage.attach`.

    Raise if a name belongs to a field of the steps; the name of an optional field that the steps lack is allowed.
    """
    converted: dict[Path, torch.Tensor] = {}
    schema, device = storage.schema, storage.device
    leading_shape = (storage.require_steps("attach"), *storage.leading_shape)
    used_names = {*schema.names, *ROLLOUT_BATCH_FIELDS} - storage.omitted_fields
    for name, tree in named_trees:
        if not isinstance(name, str) or name in used_names:
            raise SchemaError(explain("attach", "an unused name", repr(name), "Attach it under another name."))
        used_names.add(name)
        if name in schema.leaf_indices:
            declared_leaves = zip(schema.leaf_indices[name], schema.flatten(name, tree), strict=True)
            leaves = [(schema.paths[i], schema.fields[i], leaf) for i, leaf in declared_leaves]
        else:
            tensors = ((path, as_tensor(path_name(path), x, device).to(device)) for path, x in named_leaves(name, tree))
            leaves = [(path, Field(tuple(x.shape[len(leading_shape) :]), x.dtype), x) for path, x in tensors]
        for path, field, leaf in leaves:
            tensor = convert(path_name(path), field, leaf, leading_shape, device)
            converted[path] = tensor if storage.leading_shape else tensor.unsqueeze(1)
    return converted
