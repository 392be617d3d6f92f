"""The observers of a buffer: episode statistics and running norms, updated with every step that it stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import State
from relive.errors import SchemaError, explain, verify
from relive.schema.autoreset import read_info_numbers
from relive.schema.conversion import path_name
from relive.schema.fields import Field, Path, Schema, caller_shape, parse_path
from relive.schema.suggestions import NAME_PATTERN
from relive.statistics.counting import claim_for_buffer, make_counters
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.storage.codec import JsonNode, SnapshotReader

if TYPE_CHECKING:
    from relive.kernels._native import Counters


class _NormsByField(dict["str | Path", RunningNorm]):
    """Norms by the keys of the caller; a name and the path `(name,)` are equivalent keys."""

    def __missing__(self, key: Any) -> RunningNorm:
        equivalent_key = (key,) if isinstance(key, str) else key[0] if isinstance(key, tuple) and len(key) == 1 else key
        if equivalent_key is key or equivalent_key not in self:
            raise KeyError(key)
        return self[equivalent_key]


class Observers:
    """Episode statistics and norms of one buffer, on its device; dummy steps are not counted."""

    def __init__(
        self, stats: EpisodeStats | None, norm: Norms | None, schema: Schema, num_envs: int | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        if norm is not None and not isinstance(norm, Mapping):
            got = f"RunningNorm({norm.shape})" if isinstance(norm, RunningNorm) else type(norm).__name__
            remedy = 'Pass the field that it is of: norm={"obs": rl.RunningNorm(shape)}.'
            raise SchemaError(explain("norm", "a dict of norms by field", got, remedy))
        self.stats: EpisodeStats | None = stats
        self.norm: dict[str | Path, RunningNorm] = _NormsByField((norm or {}).items())
        self._num_envs, self._device = num_envs, device
        self._field_leaves = {} if stats is None else _find_stats_leaves(stats, schema)
        """Leaf number of each field that the statistics read, except rewards."""
        self._reward_leaves = () if stats is None else schema.leaf_indices["reward"]
        self._norms = _norms_by_leaf(self.norm, schema)
        self._flag_leaves = tuple(schema.leaf_indices[name][0] for name in ("terminated", "truncated"))
        observed_leaves = {*self._field_leaves.values(), *self._reward_leaves, *self._norms}
        self.observed_leaves = tuple(observed_leaves.union(self._flag_leaves)) if observed_leaves else ()
        """Leaf numbers that are counted; empty without statistics and norms."""
        self._info_names: tuple[str, ...] = ()
        """Metrics and reasons that are no fields of the buffer and are read from the info of a step."""
        if stats is not None:
            if stats.num_envs != num_envs:
                remedy = f"Pass EpisodeStats({num_envs})."
                raise SchemaError(explain("stats", f"num_envs={num_envs}, as in the buffer", stats.num_envs, remedy))
            self._info_names = tuple(
                name for name in (*stats.metrics, *stats.reasons) if name not in self._field_leaves
            )
            claim_for_buffer(stats, self)
        for part in self._parts_by_name().values():
            part.to(device)
        self.native = self._make_native_counters(schema) if observed_leaves else None
        """Native counters of the buffer's steps; None if torch ops are used."""

    def _make_native_counters(self, schema: Schema) -> Counters | None:
        dtypes = [field.dtype for field in schema.fields]
        leaves = self._field_leaves | {name: len(dtypes) + i for i, name in enumerate(self._info_names)}
        episodes = None
        if self.stats is not None:
            metrics, reasons = ([leaves[name] for name in names] for names in (self.stats.metrics, self.stats.reasons))
            episodes = self.stats, self._reward_leaves, metrics, reasons
        norms = [(norm, leaf) for leaf, norm in self._norms.items()]
        native = make_counters(dtypes, self._num_envs or 1, self._flag_leaves, episodes, norms)
        for part in self._parts_by_name().values() if native is not None else ():
            part._is_bound = True
        return native

    def read_measurements(
        self, info: Mapping[str, Any] | None, leading_shape: tuple[int, ...], mode: AutoresetMode | None
    ) -> dict[str, torch.Tensor]:
        """Return the metrics and reasons in the info of a step as numbers [1, N]; raise if they are malformed."""
        if not self._info_names:
            return {}
        numbers = {
            name: read_info_numbers(info or {}, name, leading_shape, self._device, mode) for name in self._info_names
        }
        return {name: value.view(1, -1) for name, value in numbers.items() if value is not None}

    def set_measurements(self, measurements: Mapping[str, torch.Tensor]) -> None:
        """Pass metrics and reasons of the next step to the native counters."""
        if self._info_names and self.native is not None:
            self.native.measure([measurements.get(name) for name in self._info_names])

    def make_update(
        self, block: Mapping[int, torch.Tensor], first_resets: torch.Tensor | None,
        measurements: Mapping[str, torch.Tensor], envs: torch.Tensor | None = None,
    ) -> tuple[Callable[[], None], torch.Tensor | None]:  # fmt: skip
        """Return a function that counts a block of steps with torch ops, and a mask of environments that reset next.

        `block` has the columns [T, K, …] of the environments `envs`, or of all environments, by leaf number; fields
        that the steps omit are missing. `first_resets` [K] is a mask of environments whose first row is a dummy step.
        Only a block of one step has measurements. The caller holds `counting.lock` until it has called the function,
        which is idempotent.
        """
        mask = None
        if first_resets is not None:
            ended = block[self._flag_leaves[0]] | block[self._flag_leaves[1]]
            resets = list(accumulate(ended, lambda resets, ends: ends & ~resets, initial=first_resets))
            mask, first_resets = ~torch.stack(resets[:-1]), resets[-1]
        stats, changes = self.stats, []
        if stats is not None:
            changes.append(stats._make_update(*self._select_steps(stats, block, mask, measurements, envs)))
        changes += [norm._make_update(block[leaf], mask) for leaf, norm in self._norms.items() if leaf in block]

        def change() -> None:
            for count in changes:
                count()

        return change, first_resets

    def _select_steps(
        self, stats: EpisodeStats, block: Mapping[int, torch.Tensor], mask: torch.Tensor | None,
        measurements: Mapping[str, torch.Tensor], envs: torch.Tensor | None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:  # fmt: skip
        """Return the fields and the mask of a block for `EpisodeStats._make_update`, with a column per environment."""
        steps = {name: block[leaf] for name, leaf in self._field_leaves.items() if leaf in block}
        steps.update(measurements)
        steps |= {name: steps[name] != 0 for name in stats.reasons if name in steps}
        rewards = (block[leaf].double() for leaf in self._reward_leaves)
        steps["reward"] = reduce(add, (reward.flatten(2).sum(2) if reward.ndim > 2 else reward for reward in rewards))
        if envs is None:
            return steps, mask

        def spread_to_all_envs(values: torch.Tensor) -> torch.Tensor:
            all_envs = values.new_zeros((len(values), self._num_envs or 1))
            all_envs[:, envs] = values
            return all_envs

        mask = torch.ones_like(steps["terminated"]) if mask is None else mask
        return {name: spread_to_all_envs(values) for name, values in steps.items()}, spread_to_all_envs(mask)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments of the statistics and of all norms, as JSON."""
        norms = [[[path] if isinstance(path, str) else list(path), *norm.config()] for path, norm in self.norm.items()]
        return {"stats": None if self.stats is None else self.stats.config(), "norm": norms}

    def state(self) -> State:
        """Return the tensors of the statistics and all norms."""
        return State({}, State.of_parts({name: part.state() for name, part in self._parts_by_name().items()}).arrays)

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue counting from a saved state."""
        for name, part in self._parts_by_name().items():
            part.load_state(saved.part_without_values(name))

    def _parts_by_name(self) -> dict[str, EpisodeStats | RunningNorm]:
        """Return the statistics and norms by their names in a saved state."""
        stats: dict[str, EpisodeStats | RunningNorm] = {} if self.stats is None else {"stats": self.stats}
        return stats | {f"norm{i}": norm for i, norm in enumerate(self.norm.values())}

    def check(self) -> None:
        """Verify the statistics and norms, and that they are on the buffer's device."""
        for part in self._parts_by_name().values():
            verify(part.device == self._device, type(part).__name__, f"device {self._device}", part.device)
            part.check()

    def drop_running_episodes(self, env_ids: Any = None) -> None:
        """Drop the running episodes of environments that were reset; of all if `env_ids` is None."""
        if self.stats is not None:
            self.stats.cut(env_ids)


def read_saved_observers(config: JsonNode, saved: SnapshotReader, num_envs: int | None) -> dict[str, Any]:
    """Return the constructor arguments `stats` and `norm` of a saved buffer.

    Sizes are compared with the saved arrays first: an untrusted size must not allocate memory.
    """
    norms: dict[Path, RunningNorm] = {}
    for i, node in enumerate(config.entry("norm").items()):
        path, shape, eps, clip = node.exact_items(4)
        saved.require_array(f"norm{i}.mean", shape.shape(), only_leading=True)
        max_value = clip.none_if_null()
        norms[parse_path(path)] = RunningNorm(
            shape.shape(), eps=eps.number(), clip=None if max_value is None else max_value.number()
        )
    node = config.entry("stats").none_if_null()
    if node is None:
        return {"stats": None, "norm": norms}
    window = node.entry("window").integer(1, 1 << 32)
    saved.require_array("stats.ring", (window + 1,), only_leading=True)
    saved.require_array("stats.open", (None, num_envs or 1))
    metrics, reasons = ([name.text() for name in node.entry(key).items()] for key in ("metrics", "reasons"))
    return {"stats": EpisodeStats(num_envs, window, metrics, reasons), "norm": norms}


def _find_stats_leaves(stats: EpisodeStats, schema: Schema) -> dict[str, int]:
    """Return the leaf numbers of the flags, and of fields that are metrics or reasons."""
    if not isinstance(stats, EpisodeStats):
        raise SchemaError(explain("stats", "an EpisodeStats", repr(stats), "Pass rl.EpisodeStats(num_envs)."))
    for name in (*stats.metrics, *stats.reasons):
        if not NAME_PATTERN.fullmatch(name):
            expected = f"names of metrics and reasons like {NAME_PATTERN.pattern}"
            raise SchemaError(explain("stats", expected, repr(name), "Rename it: checkpoints of the buffer hold it."))
        tree = schema.trees.get(name)
        if tree is not None and (not isinstance(tree, Field) or tree.shape or tree.dtype.is_complex):
            remedy = "Rename the field or the metric."
            raise SchemaError(explain(f"stats: {name}", "a field of one real number", tree, remedy))
    names = ("terminated", "truncated", *stats.metrics, *stats.reasons)
    return {name: schema.leaf_indices[name][0] for name in names if name in schema.leaf_indices}


def _norms_by_leaf(norms: Mapping[str | Path, RunningNorm], schema: Schema) -> dict[int, RunningNorm]:
    """Return the norms by leaf number; raise if one does not fit its leaf."""
    norms_by_leaf: dict[int, RunningNorm] = {}
    for key, norm in norms.items():
        path = (key,) if isinstance(key, str) else tuple(key)
        where = f"norm: {path_name(path)}"
        if path not in schema.paths:
            leaves = ", ".join(map(path_name, schema.paths))
            raise SchemaError(explain("norm", f"leaves ({leaves})", path_name(path), "Pass one norm for each leaf."))
        if not isinstance(norm, RunningNorm):
            raise SchemaError(explain(where, "a RunningNorm", repr(norm), "Pass rl.RunningNorm(shape)."))
        leaf = schema.paths.index(path)
        shape = caller_shape(schema.fields[leaf])
        if schema.fields[leaf].dtype.is_complex:
            remedy = "Declare its parts as fields of their own."
            raise SchemaError(explain(where, "a field of real numbers", schema.fields[leaf].dtype, remedy))
        if norm.shape != shape:
            raise SchemaError(explain(where, f"shape {shape}", norm.shape, f"Pass RunningNorm({shape})."))
        if leaf in norms_by_leaf:
            raise SchemaError(explain(where, "one norm", "two", "Remove one: a name and its path mean the same leaf."))
        norms_by_leaf[leaf] = norm
    return norms_by_leaf
