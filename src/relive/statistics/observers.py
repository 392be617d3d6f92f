"""The observers of a buffer, told of every step that it stores: statistics of episodes, and norms of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import SchemaError, explain
from relive.fields.autoreset import info_numbers
from relive.fields.conversion import as_numpy_if_cpu, path_name
from relive.fields.declarations import path_of
from relive.fields.invariants import require
from relive.fields.schema import Field, Path, Schema, caller_shape
from relive.fields.vocabulary import NAME
from relive.statistics.episodes import EpisodeStats, plan_steps
from relive.statistics.norm import Norms, RunningNorm, plan_rows
from relive.storage.codec import Node

_STEP = ("reward", "terminated", "truncated")


class _ByField(dict["str | Path", RunningNorm]):
    """Norms by the keys they were given under; a name and the path of that one name mean the same field."""

    def __missing__(self, key: Any) -> RunningNorm:
        same = (key,) if isinstance(key, str) else key[0] if isinstance(key, tuple) and len(key) == 1 else key
        if same is key or same not in self:
            raise KeyError(key)
        return self[same]


class Observers:
    """The statistics and norms of one buffer. They are moved to its device, and told of valid transitions only."""

    def __init__(
        self,
        stats: EpisodeStats | None,
        norm: Norms | None,
        schema: Schema,
        num_envs: int | None,
        device: torch.device,
    ) -> None:
        self.stats: EpisodeStats | None = stats
        self.norm: dict[str | Path, RunningNorm] = _ByField((norm or {}).items())
        self._num_envs = num_envs
        self._device = device
        self._fields = _fields_of(stats, schema) if stats is not None else {}
        """Which columns the statistics read, by name."""
        self._rewards = schema.leaf_indices["reward"] if stats is not None else ()
        self._norms = _norms_of(self.norm, schema)
        self._flags = tuple(schema.leaf_indices[name][0] for name in ("terminated", "truncated"))
        listened = {*self._fields.values(), *self._rewards, *self._norms}
        self.columns = tuple(listened.union(self._flags)) if listened else ()
        """Which columns are to be told; none when nobody listens."""
        self._asked: tuple[str, ...] = ()
        """Metrics and reasons that are no fields of the buffer but may be in the info of a step."""
        if stats is not None:
            if stats.num_envs != num_envs:
                remedy = f"Pass EpisodeStats({num_envs})."
                raise SchemaError(explain("stats", f"num_envs={num_envs}, as in the buffer", stats.num_envs, remedy))
            self._asked = tuple(name for name in (*stats.metrics, *stats.reasons) if name not in self._fields)
            stats.to(device)
        for one in self._norms.values():
            one.to(device)

    def measured(
        self, info: Mapping[str, Any] | None, lead: tuple[int, ...], mode: AutoresetMode | None
    ) -> dict[str, Any]:
        """The metrics and reasons that the info of a step has, as numbers [1, N], checked before anything is stored."""
        told = {name: info_numbers(info or {}, name, lead, self._device, mode) for name in self._asked}
        return {name: as_numpy_if_cpu(value.view(1, -1)) for name, value in told.items() if value is not None}

    def plan(
        self, block: Mapping[int, Any], mask: Any, measured: Mapping[str, Any], envs: Any = None
    ) -> Callable[[], None]:
        """A function that tells all observers of some steps, once, however often it is called.

        Steps are in time order: columns [T, K, …] of the environments `envs` (or of all), transitions where `mask`.
        Everything is as `as_numpy_if_cpu` makes it. A field that the steps did not give is not in the block. `measured`
        belongs to a block of one step.
        """
        plans: list[Callable[[], None]] = []
        if self.stats is not None:
            plans.append(plan_steps(self.stats, self._steps(self.stats, block, mask, measured, envs)))
        plans += [plan_rows(norm, block[column], mask) for column, norm in self._norms.items() if column in block]

        def tell() -> None:
            for plan in plans:
                plan()

        return tell

    def _steps(
        self, stats: EpisodeStats, block: Mapping[int, Any], mask: Any, measured: Mapping[str, Any], envs: Any
    ) -> list[dict[str, Any]]:
        """The steps of a block as arguments of `EpisodeStats.update`."""
        named = {name: block[column] for name, column in self._fields.items() if column in block}
        named.update(measured)
        named["reward"] = _of_all_agents([block[column] for column in self._rewards])
        if mask is not None:
            named["mask"] = mask
        elif envs is not None:
            named["mask"] = named["terminated"] | True
        steps = []
        for t in range(len(named["reward"])):
            step = {name: self._whole(values[t], envs) for name, values in named.items()}
            metrics = {name: step[name] for name in stats.metrics if name in step}
            reasons = {name: step[name] != 0 for name in stats.reasons if name in step}
            flags = {name: step[name] for name in _STEP}
            steps.append({**flags, "mask": step.get("mask"), "metrics": metrics, "reasons": reasons})
        return steps

    def ended(self, block: Mapping[int, Any]) -> Any:
        """Which steps of a block end an episode [T, K], by their flags."""
        terminated, truncated = self._flags
        return block[terminated] | block[truncated]

    def _whole(self, values: Any, envs: Any) -> Any:
        """A row for every environment: zeros (in the mask: no transition) for those that the step is not about."""
        if self._num_envs is None:
            return values[0]
        if envs is None:
            return values
        count, is_tensor = self._num_envs, isinstance(values, torch.Tensor)
        whole = values.new_zeros(count) if is_tensor else np.zeros(count, values.dtype)
        whole[envs] = values
        return whole

    def config(self) -> dict[str, Any]:
        """How equal statistics and norms are made, as JSON."""
        norms = [[[path] if isinstance(path, str) else list(path), *norm.config()] for path, norm in self.norm.items()]
        return {"stats": None if self.stats is None else self.stats.config(), "norm": norms}

    def state(self) -> State:
        """What the steps have changed in all of them."""
        return State({}, State.of_parts({name: one.state() for name, one in self._parts().items()}).arrays)

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue counting from a saved state."""
        for name, one in self._parts().items():
            one.load_state(saved.part_without_values(name))

    def _parts(self) -> dict[str, EpisodeStats | RunningNorm]:
        """Each of them, by its name in a state."""
        stats: dict[str, EpisodeStats | RunningNorm] = {} if self.stats is None else {"stats": self.stats}
        return stats | {f"norm{i}": norm for i, norm in enumerate(self.norm.values())}

    def check(self) -> None:
        """Verify each of them, and that they are where the steps are."""
        for one in (*(() if self.stats is None else (self.stats,)), *self._norms.values()):
            require(one.device == self._device, type(one).__name__, f"device {self._device}", one.device)
            one.check()

    def restarted(self, env_ids: Any = None) -> None:
        """These environments (or all) begin anew: what they were doing is no episode."""
        if self.stats is not None:
            self.stats.cut(env_ids)


def observers_of(config: Node, saved: SnapshotReader, num_envs: int | None) -> dict[str, Any]:
    """The statistics and norms that `config` describes, as arguments of a buffer with this state.

    Each has its numbers in the state, or is not made: a size that is only claimed takes no memory.
    """
    stats = config.entry("stats").optional()
    norms = dict(_norm_of(node, saved, i) for i, node in enumerate(config.entry("norm").items()))
    return {"stats": None if stats is None else _stats_of(stats, saved, num_envs), "norm": norms}


def _stats_of(config: Node, saved: SnapshotReader, num_envs: int | None) -> EpisodeStats:
    window = config.entry("window").integer(1, 1 << 32)
    saved.require("stats.ring", (window + 1,))
    saved.require("stats.open", (None, num_envs or 1), only_lead=False)
    metrics, reasons = ([name.text() for name in config.entry(key).items()] for key in ("metrics", "reasons"))
    return EpisodeStats(num_envs, window, metrics, reasons)


def _norm_of(config: Node, saved: SnapshotReader, number: int) -> tuple[Path, RunningNorm]:
    path, shape, eps, clip = config.parts(4)
    saved.require(f"norm{number}.mean", shape.shape())
    bound = clip.optional()
    bounded = None if bound is None else bound.number()
    return path_of(path), RunningNorm(shape.shape(), eps=eps.number(), clip=bounded)


def _fields_of(stats: EpisodeStats, schema: Schema) -> dict[str, int]:
    if not isinstance(stats, EpisodeStats):
        raise SchemaError(explain("stats", "an EpisodeStats", repr(stats), "Pass rl.EpisodeStats(num_envs)."))
    found = {
        name: schema.leaf_indices[name]
        for name in (*_STEP[1:], *stats.metrics, *stats.reasons)
        if name in schema.leaf_indices
    }
    for name in (*stats.metrics, *stats.reasons):
        if not NAME.fullmatch(name):
            expected = f"names of metrics and reasons like {NAME.pattern}"
            raise SchemaError(explain("stats", expected, repr(name), "Rename it: checkpoints of the buffer hold it."))
        tree = schema.trees.get(name)
        if tree is not None and (not isinstance(tree, Field) or tree.shape or tree.dtype.is_complex):
            raise SchemaError(
                explain(f"stats: {name}", "a field of one real number", tree, "Rename the field or the metric.")
            )
    return {name: columns[0] for name, columns in found.items()}


def _of_all_agents(rewards: list[Any]) -> Any:
    """Rewards [T, K] of the rewards [T, K, …] of one agent or several."""
    if len(rewards) == 1 and rewards[0].ndim == 2:
        return rewards[0]
    # float64: agents may differ in dtype, and numpy does not have all of them.
    wide = (as_numpy_if_cpu(x.double()) if isinstance(x, torch.Tensor) else x.astype(np.float64) for x in rewards)
    return reduce(add, (x.reshape(*x.shape[:2], -1).sum(-1) for x in wide))


def _norms_of(norm: Norms, schema: Schema) -> dict[int, RunningNorm]:
    found: dict[int, RunningNorm] = {}
    for path, one in norm.items():
        column = _column_of(path, schema, one)
        if column in found:
            where = f"norm: {path_name(schema.paths[column])}"
            raise SchemaError(explain(where, "one norm", "two", "Remove one: a name and its path mean the same leaf."))
        found[column] = one
    return found


def _column_of(path: str | Path, schema: Schema, norm: RunningNorm) -> int:
    whole = (path,) if isinstance(path, str) else tuple(path)
    where = f"norm: {path_name(whole)}"
    if whole not in schema.paths:
        leaves = ", ".join(map(path_name, schema.paths))
        raise SchemaError(explain("norm", f"leaves ({leaves})", path_name(whole), "Pass one norm for each leaf."))
    if not isinstance(norm, RunningNorm):
        raise SchemaError(explain(where, "a RunningNorm", repr(norm), "Pass rl.RunningNorm(shape)."))
    column = schema.paths.index(whole)
    shape = caller_shape(schema.fields[column])
    if norm.shape != shape:
        raise SchemaError(explain(where, f"shape {shape}", norm.shape, f"Pass RunningNorm({shape})."))
    return column
