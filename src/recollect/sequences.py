"""Sequences of a rollout as a recurrent learner reads them: padded, time first, or packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDict

from recollect.batch import assemble, moved
from recollect.errors import SchemaError, explain
from recollect.kernels.reader import Reader
from recollect.kernels.sequence_index import Cuts, SequenceIndex
from recollect.schema import Path, positive

Mode = Literal["chunked", "overlap", "every"]
Layout = Literal["batch_first", "time_first", "packed"]

_STRIDES: dict[str, Callable[[int], int]] = {
    "chunked": lambda length: length,
    "overlap": lambda length: max(length // 2, 1),
    "every": lambda _: 1,
}
_LAYOUTS = ("batch_first", "time_first", "packed")


def cuts_of(length: int | None, mode: str, split_episodes: bool, keep_tail: bool) -> Cuts:
    """What the arguments of `sequences` ask for."""
    if mode not in _STRIDES:
        known = ", ".join(map(repr, _STRIDES))
        raise SchemaError(explain("mode", f"one of {known}", repr(mode), "Pass one of them."))
    stride = 1 if length is None else _STRIDES[mode](positive("length", length))
    return Cuts(length, stride, split_episodes, keep_tail)


def check_layout(layout: str) -> None:
    """Refuse an unknown layout."""
    if layout not in _LAYOUTS:
        known = ", ".join(map(repr, _LAYOUTS))
        raise SchemaError(explain("layout", f"one of {known}", repr(layout), "Pass one of them."))


@dataclass(frozen=True)
class SequenceReader:
    """Reads batches of sequences out of flat steps."""

    index: SequenceIndex
    length: int
    """What a padded sequence is long."""
    layout: str
    paths: Sequence[Path]
    steps: Reader
    """The leaves that every step has, named by `paths`."""
    carried_paths: Sequence[Path]
    carried: Callable[[torch.Tensor], list[torch.Tensor]]
    """The leaves that only a sequence's first step has, read by its row."""

    def read(self, which: torch.Tensor) -> TensorDict:
        """The batch of the sequences `which`."""
        return self._packed(which) if self.layout == "packed" else self._padded(which)

    def _padded(self, which: torch.Tensor) -> TensorDict:
        rows, mask, first = self.index.rows(which, self.length)
        batch_size = torch.Size(which.shape)
        if self.layout == "time_first":
            # What is [L, B] and what is [B] have no leading axis in common.
            rows, mask, batch_size = rows.t().contiguous(), mask.t().contiguous(), torch.Size(())
        leaves = self.steps.take(rows.view(-1), 0, rows.numel(), True, rows.shape[1])
        return self._batch(leaves, "mask", mask, first, batch_size)

    def _packed(self, which: torch.Tensor) -> TensorDict:
        which = which[self.index.count[which].argsort(descending=True, stable=True)]
        rows, mask, first = self.index.rows(which, self.length)
        flat = rows.t()[mask.t()]
        running = mask.sum(0).cpu()  # torch wants them there
        leaves = self.steps.take(flat, 0, len(flat))
        return self._batch(leaves, "batch_sizes", running[running > 0], first, torch.Size(()))

    def _batch(
        self, leaves: list[torch.Tensor], name: str, sizes: torch.Tensor, first: torch.Tensor, batch_size: torch.Size
    ) -> TensorDict:
        paths = [*self.paths, (name,), ("index",), *self.carried_paths]
        return assemble(paths, [*leaves, sizes, first, *self.carried(first)], batch_size)


def moved_sequences(batch: TensorDict, device: torch.device) -> TensorDict:
    """The batch on another device; torch wants the sizes of packed sequences on the host, wherever the steps are."""
    sizes = batch.get("batch_sizes", None)
    there = moved(batch, device)
    return there if sizes is None else there.clear_device_().set("batch_sizes", sizes)
