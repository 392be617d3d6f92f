"""The columns of a rollout in the forms that others want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.fields.batch import assemble, selected
from relive.fields.schema import Carry, Path
from relive.kernels.reader import Following, T
from relive.kernels.sequence_reader import Carried
from relive.rollout.hidden_states import SparseCarries
from relive.rollout.storage import Storage


class Columns:
    """What every step of a rollout has `[num_rows, N, …]`: its fields, and what is attached to them."""

    def __init__(self, storage: Storage, carries: SparseCarries, num_rows: int) -> None:
        self._storage, self._schema, self._carries = storage, storage.schema, carries
        self._num_rows, self._num_envs = num_rows, storage.columns[0].shape[1]
        fields = zip(self._schema.paths, self._schema.fields, strict=True)
        self._carried = [path for path, field in fields if isinstance(field, Carry)]
        self.attached: dict[Path, torch.Tensor] = {}
        """Always this very dict. An optional field that was attached is its stored column."""
        self.missing: frozenset[str] = frozenset()
        """The optional fields that the steps do not give."""

    @property
    def given(self) -> list[str]:
        """The fields that the steps give."""
        return [name for name in self._schema.names if name not in self.missing]

    @property
    def absent(self) -> frozenset[str]:
        """The optional fields that neither the steps gave nor anybody attached."""
        return self.missing.difference(path[0] for path in self.attached)

    def attach(self, columns: Mapping[Path, torch.Tensor], steps: int) -> None:
        """Let these [steps, N, …] be of the first steps, in place of what was attached under their names."""
        names = {path[0] for path in columns}
        for path in [path for path in self.attached if path[0] in names]:
            del self.attached[path]
        stored = self._stored()
        for path, tensor in columns.items():
            if path in stored:
                stored[path][:steps] = tensor.clone()  # it may be of the same memory
                self.attached[path] = stored[path]
                continue
            rest = tensor.new_zeros((self._num_rows - steps, *tensor.shape[1:]))
            self.attached[path] = torch.cat([tensor, rest])

    def leaves(self) -> dict[Path, torch.Tensor]:
        """What every step has."""
        sparse = {self._schema.paths[column] for column in self._carries.columns}
        return {path: leaf for path, leaf in self._present().items() if path not in sparse}

    def _present(self) -> dict[Path, torch.Tensor]:
        """What is stored and was given, and what is attached."""
        absent = self.absent
        return {path: leaf for path, leaf in self._stored().items() if path[0] not in absent} | self.attached

    def _stored(self) -> dict[Path, torch.Tensor]:
        return dict(zip(self._schema.paths, self._storage.columns, strict=True))

    def row(self, name: str, row: int) -> list[torch.Tensor]:
        """Copies of the leaves that one row has of a field, as a caller passes them."""
        storage, schema = self._storage, self._schema
        return [
            storage.columns[i][row].reshape((*storage.lead, *schema.fields[i].shape)).clone()
            for i in schema.columns[name]
        ]

    def selected(self, fields: Iterable[str | Path] | None) -> dict[Path, torch.Tensor]:
        """What minibatches read: what `fields` names of the leaves and of "index", t·N + n."""
        index = torch.arange(self._num_rows * self._num_envs, device=self._storage.device).view(self._num_rows, -1)
        return self._selected({**self.leaves(), ("index",): index}, fields)

    def _selected(
        self, leaves: dict[Path, torch.Tensor], fields: Iterable[str | Path] | None
    ) -> dict[Path, torch.Tensor]:
        """`selected`, with what to do about a field that was not given."""
        chosen = None if fields is None else [(field,) if isinstance(field, str) else tuple(field) for field in fields]
        for path in chosen or ():
            if path[0] in self.absent:
                raise SchemaError(absence_of(path[0]))
        return selected(leaves, chosen)

    def of_sequences(self, fields: Iterable[str | Path] | None) -> tuple[dict[Path, torch.Tensor], dict[Path, Carried]]:
        """What is read at every step of a sequence, and at its first one."""
        chosen = self._selected(self._present(), fields)
        carried = {path: Carried(chosen.pop(path), 2, None) for path in self._carried if path in chosen}
        for column in self._carries.columns:
            if self._schema.paths[column] in carried:
                carried[self._schema.paths[column]] = self._carries.kept(column)
        return chosen, carried

    def following(self, columns: list[torch.Tensor], make: Callable[[], T]) -> Following[T]:
        """A reader of some columns that finds them again when they have moved."""
        return Following(make, columns, lambda: self._storage.is_exposed)

    def shared(self, steps: int, mask: torch.Tensor) -> TensorDict:
        """The first steps as a TensorDict `[T, N]` of the same memory, with their mask."""
        return self._first(steps, {**self.leaves(), ("mask",): mask})

    def memory(self, steps: int) -> TensorDict:
        """The first rows of every column as a TensorDict `[T, N]`, whether their fields were given or not."""
        absent = {path: leaf for path, leaf in self._stored().items() if path[0] in self.absent}
        return self._first(steps, {**self.leaves(), **absent})

    def _first(self, steps: int, columns: Mapping[Path, torch.Tensor]) -> TensorDict:
        self._storage.is_exposed = True
        leaves = {path: column[:steps] for path, column in columns.items()}
        if not self._storage.lead:
            leaves = {path: leaf.squeeze(1) for path, leaf in leaves.items()}
        return assemble(leaves, torch.Size((steps, *self._storage.lead)))

    def env_major(self, steps: int, *, attached: bool = True) -> TensorDict:
        """The first steps and the row after them as a TensorDict `[N, T + 1]` of the same memory."""
        self._storage.is_exposed = True
        columns = self.leaves() if attached else self._stored()
        leaves = {path: column[: steps + 1].transpose(0, 1) for path, column in columns.items()}
        return assemble(leaves, torch.Size((self._num_envs, steps + 1)))

    @property
    def nbytes(self) -> int:
        """What they keep, in bytes."""
        return sum(t.numel() * t.element_size() for t in {**self._stored(), **self.attached}.values())


def absence_of(name: str) -> str:
    """What an error says of an optional field that is not there."""
    remedy = f"Pass {name}= to every add, or attach({name}=…) afterwards."
    return explain(name, "a field that the steps gave", "none", remedy)
