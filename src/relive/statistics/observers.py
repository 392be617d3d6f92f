"""The observers of a buffer, told of every step that it stores: statistics of episodes, and norms of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import SchemaError, explain
from relive.schema.autoreset import info_numbers
from relive.schema.conversion import path_name
from relive.schema.declarations import path_of
from relive.schema.fields import Field, Path, Schema, caller_shape
from relive.schema.invariants import require
from relive.schema.vocabulary import NAME
from relive.statistics.counting import claim, counters, hold
from relive.statistics.episodes import EpisodeStats, episodes_of, plan_steps
from relive.statistics.norm import Norms, RunningNorm, moments_of, plan_rows
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
        if norm is not None and not isinstance(norm, Mapping):
            given = f"RunningNorm({norm.shape})" if isinstance(norm, RunningNorm) else type(norm).__name__
            remedy = 'Pass the field that it is of: norm={"obs": rl.RunningNorm(shape)}.'
            raise SchemaError(explain("norm", "a dict of norms by field", given, remedy))
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
        for i in self.columns:
            if schema.fields[i].dtype.is_complex:
                where, remedy = (
                    f"stats, norm: {path_name(schema.paths[i])}",
                    "Declare its parts as fields of their own.",
                )
                raise SchemaError(explain(where, "a field of real numbers", schema.fields[i].dtype, remedy))
        self._asked: tuple[str, ...] = ()
        """Metrics and reasons that are no fields of the buffer but may be in the info of a step."""
        if stats is not None:
            if stats.num_envs != num_envs:
                remedy = f"Pass EpisodeStats({num_envs})."
                raise SchemaError(explain("stats", f"num_envs={num_envs}, as in the buffer", stats.num_envs, remedy))
            self._asked = tuple(name for name in (*stats.metrics, *stats.reasons) if name not in self._fields)
        if stats is not None:
            claim(stats, self)
        for one in self._counted:
            one.to(device)
        self.native = self._native_counters(schema) if listened else None
        """Counts the steps of the buffer natively; None where torch ops do."""

    @property
    def _counted(self) -> list[EpisodeStats | RunningNorm]:
        return [*(() if self.stats is None else (self.stats,)), *self._norms.values()]

    def _native_counters(self, schema: Schema) -> Any:
        """The native counters of everything that listens."""
        dtypes = [field.dtype for field in schema.fields]
        places = self._fields | {name: len(dtypes) + i for i, name in enumerate(self._asked)}
        episodes = None
        if self.stats is not None:
            metrics, reasons = ([places[name] for name in names] for names in (self.stats.metrics, self.stats.reasons))
            episodes = episodes_of(self.stats, self._rewards, metrics, reasons)
        moments = [moments_of(norm, column) for column, norm in self._norms.items()]
        native = counters(dtypes, self._num_envs or 1, self._flags, episodes, moments)
        for one in self._counted if native is not None else ():
            hold(one)
        return native

    def measured(
        self, info: Mapping[str, Any] | None, lead: tuple[int, ...], mode: AutoresetMode | None
    ) -> dict[str, torch.Tensor]:
        """The metrics and reasons that the info of a step has, as numbers [1, N], checked before anything is stored."""
        if not self._asked:
            return {}
        told = {name: info_numbers(info or {}, name, lead, self._device, mode) for name in self._asked}
        return {name: value.view(1, -1) for name, value in told.items() if value is not None}

    def measure(self, measured: Mapping[str, torch.Tensor]) -> None:
        """Let the native counters count these with the coming step."""
        if self._asked and self.native is not None:
            self.native.measure([kernels.buffer_of(measured.get(name)) for name in self._asked])

    def plan(
        self, block: Mapping[int, torch.Tensor], resetting: torch.Tensor | None, measured: Mapping[str, torch.Tensor],
        envs: torch.Tensor | None = None,
    ) -> tuple[Callable[[], None], torch.Tensor | None]:  # fmt: skip
        """A change that counts some steps by torch ops, and which environments only reset in the step after them.

        Steps are in time order: columns [T, K, …] of the environments `envs` (or of all), of which those that are
        `resetting` only reset in the first step. A field that the steps did not give is not in the block. `measured`
        belongs to a block of one step. Whoever plans holds `counting.lock` until the change is made; making it twice
        leads to the same.
        """
        mask = None
        if resetting is not None:
            ended = block[self._flags[0]] | block[self._flags[1]]
            resets = list(accumulate(ended, lambda resets, ends: ends & ~resets, initial=resetting))
            mask, resetting = ~torch.stack(resets[:-1]), resets[-1]
        changes: list[Callable[[], None]] = []
        if self.stats is not None:
            changes.append(plan_steps(self.stats, *self._steps(self.stats, block, mask, measured, envs)))
        changes += [plan_rows(norm, block[column], mask) for column, norm in self._norms.items() if column in block]

        def change() -> None:
            for each in changes:
                each()

        return change, resetting

    def _steps(
        self, stats: EpisodeStats, block: Mapping[int, torch.Tensor], mask: torch.Tensor | None,
        measured: Mapping[str, torch.Tensor], envs: torch.Tensor | None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:  # fmt: skip
        """The steps of a block as arguments of `EpisodeStats.plan`."""
        named = {name: block[column] for name, column in self._fields.items() if column in block}
        named.update(measured)
        named |= {name: named[name] != 0 for name in stats.reasons if name in named}
        rewards = (block[column].double() for column in self._rewards)
        named["reward"] = reduce(add, (reward.flatten(2).sum(2) if reward.ndim > 2 else reward for reward in rewards))
        if envs is None:
            return named, mask
        mask = torch.ones_like(named["terminated"]) if mask is None else mask
        return {name: self._whole(values, envs) for name, values in named.items()}, self._whole(mask, envs)

    def _whole(self, values: torch.Tensor, envs: torch.Tensor) -> torch.Tensor:
        """A column for every environment: zeros (in the mask: no transition) for those that the step is not about."""
        whole = values.new_zeros((len(values), self._num_envs or 1))
        whole[:, envs] = values
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
        for one in self._counted:
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
