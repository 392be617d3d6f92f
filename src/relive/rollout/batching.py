"""Minibatches and sequences of a rollout: the order of items in each epoch, and functions that read batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.kernels.reader import ItemReader, RebindingReader, copy_shuffled, draw_permutation, make_reader
from relive.kernels.sequences import (
    Layout,
    SequenceReader,
    SequenceSpec,
    StepFlags,
    find_sequences,
    make_sequence_reader,
)
from relive.rng import Randomness
from relive.rollout.storage import EpisodeFlags, Storage
from relive.schema.assembly import check_targets, make_assembler, memory_range, to_device
from relive.schema.checks import check_choice, check_positive_int
from relive.schema.fields import Carry, Path

ReadBatch = Callable[[torch.Tensor, int, int], "lazy.TensorDict"]
"""Function of (index, start, stop) that reads the batch of the items index[start:stop]."""


def iter_epochs(
    read: ReadBatch, items: torch.Tensor | int, batch_size: int, epochs: int, *, shuffle: bool, drop_last: bool,
    reads_into_out: bool, where: str, unit: str, random: Randomness, device: torch.device, lock: Any,
    check_items: Callable[[], None],
) -> Iterator[lazy.TensorDict]:  # fmt: skip
    """Return an iterator over batches of items. Each epoch reads every item once.

    Args:
        read: reads one batch.
        items: item numbers, int64 [n]; or the number n, for the items 0 to n − 1.
        batch_size: items per batch; the last batch of an epoch may have fewer.
        epochs: number of epochs.
        shuffle: whether each epoch has a new random order; False keeps the order of `items`.
        drop_last: whether to omit the last batch of an epoch if it has fewer items; too few items for a batch raise.
        reads_into_out: whether batches are read into the caller's `out`; every batch must then be full.
        where: name of the calling method, for messages.
        unit: name of the items, for messages.
        random: generator of the order.
        device: device of the order.
        lock: lock held while a batch is read.
        check_items: called before each batch is read; raises if items were overwritten.
    """
    total = items if isinstance(items, int) else len(items)
    if drop_last:
        if 0 < total < batch_size:
            remedy = "Add more, or pass a smaller batch_size."
            raise NotReadyError(explain(where, f"{batch_size} {unit}", total, remedy))
        total -= total % batch_size
    elif reads_into_out and total % batch_size:
        remedy = f"Pass drop_last=True, or a batch_size that divides the {unit}."
        raise SchemaError(explain("out", f"full batches of {batch_size} {unit}", f"{total} {unit}", remedy))

    def next_order() -> torch.Tensor:
        if isinstance(items, torch.Tensor):
            return copy_shuffled(items, random) if shuffle else items
        return draw_permutation(items, random, device) if shuffle else torch.arange(items, device=device)

    def batches() -> Iterator[lazy.TensorDict]:
        for _ in range(epochs):
            index = None
            for start in range(0, total, batch_size):
                with lock:
                    check_items()
                    index = next_order() if index is None else index
                    batch = read(index, start, min(start + batch_size, total))
                yield batch

    return batches()


def make_row_reader(
    storage: Storage, fields: Iterable[str | Path] | None
) -> tuple[RebindingReader[ItemReader], dict[Path, torch.Tensor]]:
    """Return a reader of the stored rows t·N + n, and the leaves [T + 1, N, …] that it reads, with "index"."""
    num_items = storage.require_steps("minibatches") * storage.num_envs
    rows = len(storage.tensors[0])
    index = torch.arange(rows * storage.num_envs, device=storage.device).view(rows, -1)
    leaves = storage.select_leaves({**storage.present_leaves(), ("index",): index}, fields)
    tensors = list(leaves.values())
    return RebindingReader(lambda: make_reader(tensors, 2, num_items), tensors, lambda: storage.is_exposed), leaves


def make_fresh_reader(
    source: RebindingReader[ItemReader] | RebindingReader[SequenceReader], paths: Iterable[Path], has_batch_axis: bool
) -> ReadBatch:
    """Return a function that reads batches into new tensors; `has_batch_axis` is whether their first axis is [B]."""
    assemble_batch = make_assembler(list(paths))

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        return assemble_batch(
            source.current_reader().take(index, start, stop), torch.Size((stop - start,) if has_batch_axis else ())
        )

    return read


def make_out_reader(
    out: lazy.TensorDict, source: RebindingReader[ItemReader], leaves: dict[Path, torch.Tensor], batch_size: int,
    own_tensors: list[torch.Tensor],
) -> ReadBatch:  # fmt: skip
    """Return a function that reads rows of leaves [T + 1, N, …] into `out`; raise if `out` overlaps `own_tensors`."""
    layouts = {path: ((batch_size, *leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}
    targets = check_targets(out, layouts, own_tensors[0].device, map(memory_range, own_tensors))

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        source.current_reader().take_into(index, start, stop, targets)
        return out

    return read


SequenceMode = Literal["chunked", "overlap", "every"]

_STRIDES_BY_MODE: dict[str, Callable[[int], int]] = {
    "chunked": lambda length: length,
    "overlap": lambda length: max(length // 2, 1),
    "every": lambda _: 1,
}
"""Steps between the starts of two sequences, by mode, as a function of the length."""


def parse_sequence_spec(
    length: int | None, mode: str, split_episodes: bool, keep_tail: bool, layout: str
) -> SequenceSpec:
    """Return the spec of sequences with these arguments of `RolloutBuffer.sequences`; raise if one is invalid."""
    check_choice("layout", layout, get_args(Layout))
    check_choice("mode", mode, _STRIDES_BY_MODE)
    stride = 1 if length is None else _STRIDES_BY_MODE[mode](check_positive_int("length", length))
    return SequenceSpec(length, stride, split_episodes, keep_tail)


def make_sequence_source(
    storage: Storage, flags: EpisodeFlags, spec: SequenceSpec, layout: Layout, fields: Iterable[str | Path] | None
) -> tuple[int, RebindingReader[SequenceReader], list[Path]]:
    """Return the number of sequences in the stored steps, their reader, and the paths of the leaves in its batches.

    `Carry` fields are read at the first step of each sequence only.
    """
    steps = storage.require_steps("sequences")
    step_leaves = storage.select_leaves(storage.present_leaves(), fields)
    declared_fields = zip(storage.schema.paths, storage.schema.fields, strict=True)
    carry_paths = [path for path, field in declared_fields if isinstance(field, Carry) and path in step_leaves]
    initial_leaves = {path: step_leaves.pop(path) for path in carry_paths}
    columns, initial_columns = list(step_leaves.values()), list(initial_leaves.values())
    tensors = [*columns, *initial_columns]
    step_flags = StepFlags(steps, flags.terminated, flags.truncated, flags.transition_mask(steps), flags.first_starts)
    index = find_sequences(step_flags, spec, tensors)
    length = spec.length or max(index.longest, 1)
    source = RebindingReader(
        lambda: make_sequence_reader(index, length, layout, columns, initial_columns),
        tensors,
        lambda: storage.is_exposed,
    )
    sizes = "batch_sizes" if layout == "packed" else "mask"
    return len(index), source, [*step_leaves, ("is_first",), (sizes,), ("index",), *initial_leaves]


def move_sequences(batch: lazy.TensorDict, device: torch.device) -> lazy.TensorDict:
    """Move a batch to `device`; "batch_sizes" of packed sequences stay on the host, where torch needs them."""
    sizes = batch.get("batch_sizes", None)
    device_batch = to_device(batch, device)
    return device_batch if sizes is None else device_batch.clear_device_().set("batch_sizes", sizes)
