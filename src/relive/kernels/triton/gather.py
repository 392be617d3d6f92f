"""Reading many items out of many columns in one launch: a minibatch of a rollout, whatever its fields are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relive.kernels.triton.read import OWN, RowReader, Source
from relive.kernels.triton.words import MOST_COLUMNS, Frames, Leaf, Rings


class TritonGather:
    """A `Reader` of contiguous columns whose first `lead` axes count items."""

    def __init__(self, columns: Sequence[torch.Tensor], lead: int) -> None:
        items = [column.flatten(0, lead - 1) for column in columns]
        self._forms = [(item.shape[1:], item.dtype, item.device) for item in items]
        self._some = [i for i, item in enumerate(items) if item.numel()]
        """The columns that have any bytes."""
        leaves = [Leaf.of(items[i].unsqueeze(1), Frames(), MOST_COLUMNS) for i in self._some]
        self._reader = RowReader(_rings_of(items[0]), [Source(leaf, OWN.value) for leaf in leaves])

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        count = stop - start
        out = [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype, device in self._forms]
        self._read(index, start, stop, out)
        return out

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        whole = [target if target.is_contiguous() else torch.empty_like(target).contiguous() for target in out]
        self._read(index, start, stop, whole)
        for target, found in zip(out, whole, strict=True):
            if found is not target:
                target.copy_(found)

    def _read(self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor]) -> None:
        if stop > start and self._some:
            rows = index[start:stop].contiguous()
            self._reader.read(rows, [out[i] for i in self._some])  # an index of -1 gives zeros


def _rings_of(column: torch.Tensor) -> Rings:
    """Items in no order: where a kernel looks for the state of rings, it finds something that it does not read."""
    numbers, flags = (torch.empty(1, dtype=dtype, device=column.device) for dtype in (torch.int64, torch.uint8))
    return Rings(flags, flags, numbers, flags, flags, numbers, numbers, len(column), 1, len(column))
