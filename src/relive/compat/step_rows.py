"""Rollout steps that an adapter writes directly into the memory of a core rollout buffer.

Steps of other libraries have other fields than `RolloutBuffer.add`, and can be written in part or twice. One native
call writes a step to all tensors; reading `core` hands the written steps back to the buffer (`take_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from relive.checkpoint.state_dict import pack_arrays, unpack_arrays
from relive.compat.pickling import refuse_other_versions
from relive.compat.views import is_tree, list_named_leaves, map_tree
from relive.errors import SchemaError, explain
from relive.estimators import gae
from relive.kernels.steps import make_row_writer
from relive.rollout.buffer import RolloutBuffer
from relive.schema.checks import check_nonempty
from relive.schema.conversion import convert, make_misaligned_error
from relive.schema.fields import Field

SCORES = ("advantage", "return")
"""The core's names of the computed fields."""


class StepBuffer:
    """Base class of an adapter's buffer that stores its steps in `StepRows`."""

    _rows: StepRows

    @property
    def core(self) -> RolloutBuffer:
        """The relive buffer underneath, with the stored steps."""
        return self._rows.core

    @property
    def step(self) -> int:
        """Number of stored steps. Set it to 0 to start again, or to the number of rows written directly."""
        return self._rows.step

    @step.setter
    def step(self, step: int) -> None:
        self._rows.step = step

    def _get_memory(self, field: str) -> Any:
        return self._rows.get_memory(field)


class StepRows:
    """The memory of a core rollout buffer, written step by step.

    Args:
        make_core: function that makes the core. It must be picklable: a `functools.partial` of the core's class.
        fields: the core's names of the fields of a step.
        names: the names of fields in errors, if they differ from the core's.
        remedy: the advice of the error for a value that is None.
    """

    # Inference tensors could not be written later, so the memory is made outside inference mode.
    @torch.inference_mode(False)
    def __init__(
        self,
        make_core: Callable[[], RolloutBuffer],
        fields: Iterable[str],
        names: Mapping[str, str] | None = None,
        remedy: str | None = None,
    ) -> None:
        self.make_core, self._fields, self._names, self._remedy = make_core, tuple(fields), names or {}, remedy
        self._core = make_core()
        memory = self._core.columns
        self.tensors: dict[str, Any] = {str(name): memory[name] for name in memory.keys()}
        """The memory by field: tensors `[T, N, …]`, or TensorDicts of them. They may be written directly."""
        flat = memory.reshape(-1)
        self._flat: dict[str, Any] = {str(name): flat[name] for name in flat.keys()}
        """The memory as `[T · N, …]`, ordered by time, then environment."""
        self._leaves = [
            leaf for name in self._fields for leaf in list_named_leaves(self._names.get(name, name), self.tensors[name])
        ]
        self._leaf_rows = [(name, tensor[0]) for name, tensor in self._leaves]
        self._first_leaf = self._leaves[0][1].unbind(0)
        self.field_rows = [(name, self.tensors[name][0]) for name in self._fields]
        """The fields of a step, each with a row of its memory: values must have the row's shape and dtype."""
        self._set_writer()
        self._step = 0
        self._staged_leaves: set[int] = set()
        self.scores: dict[str, Any] = {}
        """Advantages and returns of the stored steps by the core's names: tensors `[T, N]`, or dicts of them."""
        self._are_steps_stored = True

    def _set_writer(self) -> None:
        """Make the writer for the current memory; `share_memory_` moves the memory of a tensor."""
        self._writer = make_row_writer([x for _, x in self._leaves], [False] * len(self._leaves), has_env_axis=True)

    @property
    def step(self) -> int:
        """Number of stored steps."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step <= self.num_steps:
            remedy = "Set it to 0 to start again, or to the number of rows written directly."
            raise SchemaError(explain("step", f"0 to {self.num_steps}", repr(step), remedy))
        self._step, self._are_steps_stored, self.scores = int(step), False, {}
        self._staged_leaves.clear()

    @property
    def num_steps(self) -> int:
        """Capacity in steps."""
        return self._core.num_steps

    @property
    def is_full(self) -> bool:
        """Whether every step is stored."""
        return self._step == self._core.num_steps

    def clear(self) -> None:
        """Remove the stored steps."""
        self._step, self._are_steps_stored, self.scores = 0, False, {}
        if self._staged_leaves:
            self._staged_leaves = set()

    @property
    def core(self) -> RolloutBuffer:
        """The core rollout buffer, with the stored steps and their scores."""
        if not self._are_steps_stored:
            self._core.take_back(self._step)
            self._are_steps_stored = True
        if self.scores and self._step:
            self._core.attach({name: map_tree(lambda x: x[: self._step], x) for name, x in self.scores.items()})
        return self._core

    def write_step(self, values: Sequence[Any]) -> None:
        """Store one step: one value per leaf of the fields, in order. A step that raises changes nothing."""
        if self._staged_leaves:
            repeated = [i for i in self._staged_leaves if values[i] is not None]
            self._refuse_second_values(repeated, "It is staged already: leave it out.")
            self._write_leaves([i for i in range(len(self._leaves)) if i not in self._staged_leaves], values)
            self._staged_leaves = set()
        else:
            if self._writer.have_moved():
                self._set_writer()
            step_values, last_misfit = list(values), -1
            misfit = self._writer.write(self._step, tuple(step_values), None)
            # `misfit` is the first leaf that does not fit; each round converts it and tries again, so `misfit` grows.
            while misfit > last_misfit:
                step_values[misfit] = self._fit_value(misfit, step_values[misfit])
                last_misfit, misfit = misfit, self._writer.write(self._step, tuple(step_values), None)
            if misfit >= 0:
                self._write_leaves(range(len(step_values)), step_values)
        self._step += 1
        self._are_steps_stored = False
        if self.scores:
            self.scores = {}

    def stage_values(self, values: Sequence[Any]) -> None:
        """Copy the values of the next step that are not None; `write_step` takes the missing values."""
        leaf_numbers = [i for i, value in enumerate(values) if value is not None]
        self._refuse_second_values(self._staged_leaves.intersection(leaf_numbers), "Stage it once per step.")
        self._write_leaves(leaf_numbers, values)
        self._staged_leaves.update(leaf_numbers)

    def _write_leaves(self, leaf_numbers: Sequence[int], values: Sequence[Any]) -> None:
        """Convert `values[i]` for every i in `leaf_numbers`, and write them to leaf i in the row of the next step."""
        if self._writer.have_moved():
            self._set_writer()
        fitting_values = tuple(self._fit_value(i, values[i]) for i in leaf_numbers)
        misfit = self._writer.write_converted(self._step, fitting_values, tuple(leaf_numbers))
        if misfit >= 0:
            raise make_misaligned_error(self._leaves[leaf_numbers[misfit]][0])

    def _fit_value(self, leaf_number: int, value: Any) -> torch.Tensor:
        """Convert a value to the shape, dtype and device of the leaf `leaf_number`."""
        name, row = self._leaf_rows[leaf_number]
        if value is None and self._remedy is not None:
            raise SchemaError(explain(name, "a tensor", None, self._remedy))
        return fit_value(name, value, row).contiguous()

    def _refuse_second_values(self, leaf_numbers: Iterable[int], remedy: str) -> None:
        for number in leaf_numbers:
            raise SchemaError(explain(self._leaves[number][0], "one value per step", "a second value", remedy))

    def read_newest_first_leaf(self) -> torch.Tensor | None:
        """Return the first leaf of the newest step; None without steps."""
        return self._first_leaf[self._step - 1] if self._step else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_scores(self, last_value: Any, ended: Any, *, gamma: float, lam: float) -> None:
        """Compute advantages and returns of the stored steps.

        `ended` [T, N] marks ends of episodes; `last_value` [N] belongs to the state after the last step. If rewards
        are dicts by agent, `last_value` and `ended` are dicts, too.
        """
        steps = check_nonempty("compute_returns_and_advantages", self._step)
        rewards, values = self.tensors["reward"], self.tensors["value"]

        def compute(where: str, last: Any, *rows: torch.Tensor) -> list[torch.Tensor]:
            reward, value, ends = (x[:steps] for x in rows)
            scores = compute_advantages_and_returns(
                reward, value, fit_value(where, last, value[0]), ends, gamma=gamma, lam=lam
            )
            return [pad(x, (0, 0, 0, self.num_steps - steps)) if steps < self.num_steps else x for x in scores]

        if is_tree(rewards):
            scores: Any = {
                agent: compute(f"last_values.{agent}", last_value[agent], reward, values[agent], ended[agent])
                for agent, reward in rewards.items()
            }
        else:
            scores = compute("last_values", last_value, rewards, values, ended)
        self.scores = {name: map_tree(itemgetter(i), scores) for i, name in enumerate(SCORES)}

    def get_memory(self, field: str) -> Any:
        """Return the memory of a field; None for an undeclared field.

        Advantages and returns are zero until they are computed or written.
        """
        if field not in SCORES:
            return self.tensors.get(field)
        if field not in self.scores:
            with torch.inference_mode(False):
                self.scores[field] = map_tree(torch.zeros_like, self.tensors["reward"])
        return self.scores[field]

    def get_flat_memory(self, field: str) -> Any:
        """Return `get_memory(field)` as `[T · N, …]`, ordered by time, then environment."""
        if field not in SCORES:
            return self._flat.get(field)
        return map_tree(torch.Tensor.flatten, self.get_memory(field))

    def copy_to_core(self, make_core: Callable[[], RolloutBuffer], fields: Iterable[str] | None = None) -> StepRows:
        """Copy the steps into the memory of a new core, which may have further fields."""
        rows = StepRows(make_core, self._fields if fields is None else fields, self._names, self._remedy)
        rows._copy_steps_from(_list_leaves(self.tensors), _list_leaves(self.scores), self._step, self._staged_leaves)
        return rows

    def _copy_steps_from(
        self, leaves: Mapping[str, torch.Tensor], scores: Mapping[str, torch.Tensor], step: int, staged: Iterable[int]
    ) -> None:
        self.step, self._staged_leaves = step, set(staged)
        for name in scores:
            self.get_memory(name.partition(".")[0])
        for target, source in ((self.tensors, leaves), (self.scores, scores)):
            memory = _list_leaves(target)
            for name, leaf in source.items():
                memory[name].copy_(leaf)

    def __reduce__(self) -> Any:
        settings = self.make_core, self._fields, self._names, self._remedy
        # Tensors are packed as numpy arrays, because torch would move their storage while a process is spawned.
        parts = (
            pack_arrays({name: x.cpu() for name, x in _list_leaves(tree).items()})
            for tree in (self.tensors, self.scores)
        )
        return _unpickle, (settings, *parts, self._step, self._staged_leaves)


@refuse_other_versions
def _unpickle(settings: tuple[Any, ...], leaves: Any, scores: Any, *content: Any) -> StepRows:
    rows = StepRows(*settings)
    rows._copy_steps_from(unpack_arrays(leaves), unpack_arrays(scores), *content)
    return rows


def _list_leaves(trees: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of fields by their dotted names."""
    return {path: leaf for name, tree in trees.items() for path, leaf in list_named_leaves(name, tree)}


def compute_advantages_and_returns(
    reward: torch.Tensor,
    value: torch.Tensor,
    last_value: torch.Tensor,
    ended: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns of steps `[T, N]` without truncations, followed by `last_value` `[N]`."""
    next_value = torch.cat([value[1:], last_value.unsqueeze(0)])
    return gae(reward, value, next_value, ended, torch.zeros_like(ended), gamma=gamma, lam=lam)


def fit_value(name: str, value: Any, row: torch.Tensor) -> torch.Tensor:
    """Convert `value` to a tensor with the shape, dtype and device of `row` [N, …]; errors name both shapes.

    Leading axes of length one may be missing or added: that broadcasts nothing.
    """
    shape = tuple(row.shape)
    if (
        type(value) is torch.Tensor
        and value.shape == shape
        and value.dtype is row.dtype
        and value.device == row.device
        and not value.requires_grad
    ):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().to(row.device)
    if (
        value is not None
        and np.shape(value) != shape
        and _trim_leading_ones(np.shape(value)) == _trim_leading_ones(shape)
    ):
        value = (value if isinstance(value, torch.Tensor) else np.asarray(value)).reshape(shape)
    return convert(name, Field(shape[1:], row.dtype), value, shape[:1], row.device)


def _trim_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Remove the leading axes of length one from a shape."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])
