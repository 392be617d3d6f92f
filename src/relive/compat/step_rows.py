"""Steps that an adapter writes into the memory of a rollout buffer itself, as a collector does that it is lent to.

Its steps have other fields than the buffer's, and may be written in part or again. So a step is written here, by one
call for all tensors, and the buffer is told of the steps when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.compat.views import is_tree
from relive.errors import SchemaError, explain
from relive.estimators import gae
from relive.kernels.row_writer import RowWriter, row_writer
from relive.rollout.buffer import RolloutBuffer
from relive.schema.checks import nonempty
from relive.schema.conversion import convert, misaligned_error
from relive.schema.fields import Field

SCORES = ("advantage", "return")
"""What is computed after the rollout."""


class Rows:
    """Tensors `[T, N, …]` by the names that errors use, written row by row.

    Args:
        tensors: the memory.
        remedy: what an error says to do where a value is None, if there is something better than to pass it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], remedy: str | None = None) -> None:
        self._leaves, self._remedy = list(tensors.items()), remedy
        self._writer = self._bound()

    def _bound(self) -> RowWriter:
        return row_writer([tensor for _, tensor in self._leaves], [False] * len(self._leaves), has_env_axis=True)

    def write(self, step: int, values: Sequence[Any]) -> None:
        """Copy a value into the row of each tensor; if one does not fit, no row changes."""
        if self._writer.have_moved():  # somebody has made the tensors shared ones
            self._writer = self._bound()
        given, last = list(values), -1
        misfit = self._writer.write(step, tuple(given), None)
        while misfit > last:  # leaves are read in order
            given[misfit] = self.fitted(misfit, given[misfit])
            misfit, last = self._writer.write(step, tuple(given), None), misfit
        if misfit >= 0:
            self.write_fitted(step, [self.fitted(place, value) for place, value in enumerate(given)])

    def write_fitted(self, step: int, values: Sequence[torch.Tensor], which: tuple[int, ...] | None = None) -> None:
        """Copy values that were fitted into the rows of the tensors, or of the tensors `which`."""
        misfit = self._writer.put(step, tuple(values), which)
        if misfit >= 0:
            raise misaligned_error(self._leaves[misfit if which is None else which[misfit]][0])

    def fitted(self, place: int, value: Any) -> torch.Tensor:
        """A value as the tensor at this place takes it."""
        name, tensor = self._leaves[place]
        if value is None and self._remedy is not None:
            raise SchemaError(explain(name, "a tensor", None, self._remedy))
        if (
            type(value) is torch.Tensor
            and value.shape == tensor.shape[1:]
            and value.dtype is tensor.dtype
            and value.device == tensor.device
            and not value.requires_grad
        ):
            return value.contiguous()
        return fitted(name, value, tensor[0]).contiguous()


class Stepped:
    """A buffer of another library whose steps are `StepRows`."""

    _rows: StepRows

    @property
    def core(self) -> RolloutBuffer:
        """The relive buffer underneath, with the steps that are stored now."""
        return self._rows.core

    @property
    def step(self) -> int:
        """How many steps are stored. Set it to 0 to start again, or to the number of rows written directly."""
        return self._rows.step

    @step.setter
    def step(self, step: int) -> None:
        self._rows.step = step

    def _memory_of(self, field: str) -> Any:
        return self._rows.view(field)


class StepRows:
    """The memory of the rollout buffer that `make` makes, written step by step; `fields` are those that a step gives.

    `make` must survive pickling: a `functools.partial` of the buffer's class.
    """

    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def __init__(self, make: Callable[[], RolloutBuffer], fields: Iterable[str]) -> None:
        self.make, self._fields = make, tuple(fields)
        self._core = make()
        memory = self._core.columns
        self.tensors: dict[str, Any] = {str(name): memory[name] for name in memory.keys()}
        """The memory by field: tensors `[T, N, …]`, or TensorDicts of them. Writing into them is writing steps."""
        self.flat: dict[str, Any] = {name: flattened(tensor) for name, tensor in self.tensors.items()}
        """The same memory as `[T · N, …]`, in the order of time, then environment."""
        leaves = [leaf for name in self._fields for leaf in named_leaves(name, self.tensors[name])]
        self._names, self._first = [name for name, _ in leaves], leaves[0][1].unbind(0)
        self._rows = Rows(dict(leaves))
        self._step = 0
        self._staged: set[int] = set()
        self.scores: dict[str, Any] = {}
        """What was computed from the stored steps, by its name in the core: tensors `[T, N]`, or dicts of them."""
        self._is_told = True

    @property
    def step(self) -> int:
        """How many steps are stored."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step <= self.num_steps:
            remedy = "Set it to 0 to start again, or to the number of rows written directly."
            raise SchemaError(explain("step", f"0 to {self.num_steps}", repr(step), remedy))
        self._step = int(step)
        self._staged.clear()
        self.scores = {}
        self._is_told = False

    @property
    def num_steps(self) -> int:
        """How many steps fit."""
        return self._core.num_steps

    @property
    def is_full(self) -> bool:
        """Whether no step more fits."""
        return self._step == self._core.num_steps

    def clear(self) -> None:
        """Forget the stored steps."""
        self._step, self._is_told, self.scores = 0, False, {}
        if self._staged:
            self._staged = set()

    @property
    def core(self) -> RolloutBuffer:
        """The buffer itself, which now has the stored steps and what was computed from them."""
        if not self._is_told:
            self._core.take_back(self._step)
            self._is_told = True
        if self.scores and self._step:
            self._core.attach({name: cut(score, self._step) for name, score in self.scores.items()})
        return self._core

    def write(self, values: Sequence[Any]) -> None:
        """Store one step: a value for each leaf of the fields, in order. A step that does not fit changes nothing."""
        if self._staged:
            self._complete(values)
        else:
            self._rows.write(self._step, values)
        self._step += 1
        self._is_told = False
        if self.scores:
            self.scores = {}

    def before(self) -> torch.Tensor | None:
        """The first leaf of the last stored step; None if there is none."""
        return self._first[self._step - 1] if self._step else None

    def stage(self, values: Sequence[Any]) -> None:
        """Copy what is known of the coming step; the values that are None come with `write`."""
        known = [i for i, value in enumerate(values) if value is not None]
        for i in known:
            if i in self._staged:
                raise _second(self._names[i], "Stage it once per step.")
        self._rows.write_fitted(self._step, [self._rows.fitted(i, values[i]) for i in known], tuple(known))
        self._staged.update(known)

    def _complete(self, values: Sequence[Any]) -> None:
        """Write what is not staged of a step."""
        for i in self._staged:
            if values[i] is not None:
                raise _second(self._names[i], "It is staged already: leave it out.")
        coming = tuple(i for i in range(len(self._names)) if i not in self._staged)
        self._rows.write_fitted(self._step, [self._rows.fitted(i, values[i]) for i in coming], coming)
        self._staged.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def score(self, last_value: Any, ended: torch.Tensor, *, gamma: float, lam: float) -> None:
        """Compute advantages and returns of the stored steps, which `ended` [T, N] cuts; `last_value` follows them."""
        steps = nonempty("compute_returns_and_advantages", self._step)
        reward, value = self.tensors["reward"][:steps], self.tensors["value"][:steps]
        last = fitted("last_values", last_value, value[0])
        next_value = torch.cat([value[1:], last.unsqueeze(0)])
        found = gae(reward, value, next_value, ended[:steps], torch.zeros_like(ended[:steps]), gamma=gamma, lam=lam)
        self.scores = {name: self.whole(x) for name, x in zip(SCORES, found, strict=True)}

    def whole(self, score: torch.Tensor) -> torch.Tensor:
        """A tensor of the stored steps with zeros for the others: `[T, N]`."""
        missing = self.num_steps - len(score)
        return torch.cat([score, score.new_zeros(missing, *score.shape[1:])]) if missing else score

    def view(self, field: str) -> Any:
        """The memory of a field, or None; scores can be read and written at any time and are zeros at first."""
        if field in SCORES and field not in self.scores:
            self.scores[field] = self._zeros()
        return self.scores[field] if field in SCORES else self.tensors.get(field)

    @torch.inference_mode(False)
    def _zeros(self) -> Any:
        reward = self.tensors["reward"]
        return {k: torch.zeros_like(x) for k, x in reward.items()} if is_tree(reward) else torch.zeros_like(reward)

    def moved(self, make: Callable[[], RolloutBuffer]) -> StepRows:
        """The same steps in the memory of another buffer of the same fields."""
        rows = StepRows(make, self._fields)
        rows._fill({"tensors": self.tensors, "step": self._step, "scores": self.scores, "staged": self._staged})
        return rows

    def _fill(self, state: Mapping[str, Any]) -> None:
        for name, tensor in state["tensors"].items():
            overwrite(self.tensors[name], tensor)
        self.step = state["step"]
        self._staged = set(state["staged"])
        there = self._core.device
        self.scores = {
            name: {k: x.to(there) for k, x in score.items()} if isinstance(score, dict) else score.to(there)
            for name, score in state["scores"].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        state = {"tensors": self.tensors, "step": self._step, "scores": self.scores, "staged": self._staged}
        return {"make": self.make, "fields": self._fields, **state}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["make"], state["fields"])
        self._fill(state)


def fitted(name: str, value: Any, place: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor that `place` [N, …] takes as it is; errors name both shapes.

    Axes of length one in front make no difference: nothing is broadcast by them.
    """
    shape = tuple(place.shape)
    if isinstance(value, torch.Tensor):
        value = value.detach().to(place.device)
    if value is not None and np.shape(value) != shape and _core_of(np.shape(value)) == _core_of(shape):
        value = (value if isinstance(value, torch.Tensor) else np.asarray(value)).reshape(shape)
    return convert(name, Field(shape[1:], place.dtype), value, shape[:1], place.device)


def _core_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the axes of length one in front."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


def named_leaves(name: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree with their dotted names."""
    if not is_tree(tree):
        return [(name, tree)]
    return [leaf for key, part in tree.items() for leaf in named_leaves(f"{name}.{key}", part)]


def flattened(tree: Any) -> Any:
    """A view with the axes of time and environments as one."""
    return tree.reshape(-1) if isinstance(tree, TensorDict) else tree.flatten(0, 1)


def cut(score: Any, steps: int) -> Any:
    """The first steps of a score."""
    return {k: x[:steps] for k, x in score.items()} if isinstance(score, Mapping) else score[:steps]


def overwrite(place: Any, value: Any) -> None:
    """Copy a tensor or tree of tensors into memory of its form."""
    if is_tree(place):
        for key, part in place.items():
            overwrite(part, value[key])
    else:
        place.copy_(value)


def _second(name: str, remedy: str) -> SchemaError:
    return SchemaError(explain(name, "one value per step", "a second value", remedy))
