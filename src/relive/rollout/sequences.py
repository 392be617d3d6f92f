"""What `RolloutBuffer.sequences` may be asked for, and what becomes of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.fields.batch import moved
from relive.fields.schema import positive
from relive.kernels.sequence_index import Cuts
from relive.kernels.sequence_reader import Layout

Mode = Literal["chunked", "overlap", "every"]

_STRIDES: dict[str, Callable[[int], int]] = {
    "chunked": lambda length: length,
    "overlap": lambda length: max(length // 2, 1),
    "every": lambda _: 1,
}
_LAYOUTS = get_args(Layout)


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


def moved_sequences(batch: TensorDict, device: torch.device) -> TensorDict:
    """The batch on another device; torch wants the sizes of packed sequences on the host, wherever the steps are."""
    sizes = batch.get("batch_sizes", None)
    there = moved(batch, device)
    return there if sizes is None else there.clear_device_().set("batch_sizes", sizes)
