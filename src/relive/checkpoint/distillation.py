"""A distillation buffer in the words of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from relive.checkpoint.contents import (
    Contents,
    Read,
    Rows,
    declared,
    describe,
    device_of,
    random_state,
    restore_random,
)
from relive.distillation import DistillationBuffer
from relive.fields.schema import Schema
from relive.memory.saved import MOST_OF_ROUNDS


def contents(buffer: DistillationBuffer) -> Contents:
    """Take a distillation buffer apart."""
    trees = {name: describe(tree) for name, tree in buffer._schema.trees.items()}
    config = {"capacity": buffer.capacity, "fields": trees, "device": str(buffer.device)}
    found = Contents("DistillationBuffer", config)
    ring = buffer._ring
    values = {"head": ring.head, "floor": ring.floor, "known": bool(buffer._columns)}
    found.take("ring", (values, {"starts": torch.tensor(buffer._starts)}))
    found.take("random", random_state(buffer._random))
    found.rows = rows(buffer)
    return found


def columns(buffer: DistillationBuffer) -> dict[str, torch.Tensor]:
    """What a row consists of."""
    return {f"column{i}": column.unsqueeze(1) for i, column in enumerate(buffer._columns)}


def rows(buffer: DistillationBuffer) -> Rows | None:
    """Its rows, as those of one environment."""
    if not buffer._columns:
        return None
    return Rows(columns(buffer), torch.tensor([buffer._ring.oldest]), torch.tensor([buffer._ring.head]))


def make(read: Read, options: dict[str, Any]) -> DistillationBuffer:
    """An empty buffer as the one that was saved, but for what `options` change."""
    config = read.config
    trees = {name: declared(tree) for name, tree in config.entry("fields").entries().items()}
    if "obs" not in trees:
        raise config.entry("fields").wrong("an entry 'obs'")
    obs, action = trees.pop("obs"), trees.pop("action", None)
    capacity = options.get("capacity") or config.entry("capacity").integer(1, 1 << 50)
    device = options.get("device") or device_of(config.entry("device"))
    buffer = DistillationBuffer(capacity, obs, action, extra=trees, device=device)
    if read.values.entry("ring").entry("known").flag() and not buffer._columns:
        buffer._allocate(Schema(buffer._schema.trees))
    return buffer


def restore(buffer: DistillationBuffer, read: Read, *, same_device: bool) -> torch.Tensor:
    """Fill everything but the rows; returns the rows [N] that the next save goes on from."""
    node = read.values.entry("ring")
    ring = buffer._ring
    ring.head = node.entry("head").integer()
    ring.floor = node.entry("floor").integer(0, ring.head)
    starts = read.shaped("ring.starts", (range(1, MOST_OF_ROUNDS),), torch.int64)
    if starts[0] != 0 or bool((starts.diff() < 0).any()) or int(starts[-1]) > ring.head:
        raise read.at("ring.starts", starts.tolist()).wrong(f"rising rows from 0 to the head {ring.head}")
    buffer._set_rounds(starts.tolist())
    restore_random(buffer._random, read.part("random"), devices=same_device)
    return torch.tensor([ring.head])
