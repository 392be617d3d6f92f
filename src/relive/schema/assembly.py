"""Assembly of a batch: a TensorDict from flat leaves, and checks of a caller's `out`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.schema.checks import check_device_available, check_positive_int
from relive.schema.conversion import as_device
from relive.schema.fields import Field, Path, Schema

MemoryRange = tuple[int, int]
"""Addresses of the first byte and one past the last byte."""

_MAX_ROWS = 2**31 - 1

_constructor: Any = None
"""Constructor of TensorDict; None before `import_tensordict`."""


def import_tensordict() -> Callable[..., lazy.TensorDict]:
    """Import tensordict. Call it before taking a lock or drawing rows: it takes seconds and may fail."""
    global _constructor  # noqa: PLW0603
    # `_new_unsafe` skips the check of every leaf's batch size, which takes 4 µs and cannot fail here.
    _constructor = getattr(lazy.TensorDict, "_new_unsafe", _construct_checked)
    return _constructor


def _construct_checked(
    *, source: dict[str, Any], batch_size: torch.Size, device: torch.device | None, nested: bool
) -> lazy.TensorDict:
    return lazy.TensorDict(source, batch_size=batch_size, device=device)


def make_assembler(paths: Sequence[Path]) -> Callable[[Sequence[torch.Tensor], torch.Size], lazy.TensorDict]:
    """Return a function that assembles batches of these paths faster than `assemble_batch`."""
    if sum(map(len, paths)) > len(paths):
        return lambda leaves, batch_size: assemble_batch(dict(zip(paths, leaves, strict=True)), batch_size)
    names = [path[0] for path in paths]
    # `zip(strict=True)` would double the time of this loop.
    return lambda leaves, batch_size: make_tensordict(dict(zip(names, leaves)), batch_size)  # noqa: B905


def assemble_batch(leaves: Mapping[Path, torch.Tensor], batch_size: torch.Size) -> lazy.TensorDict:
    """Make the TensorDict of `leaves`, nested if a path has several names."""
    if sum(map(len, leaves)) == len(leaves):
        return make_tensordict({path[0]: leaf for path, leaf in leaves.items()}, batch_size)
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return _nest_leaves(tree, batch_size)


def assemble_field(
    schema: Schema, name: str, leaves: Sequence[torch.Tensor], batch_size: torch.Size
) -> torch.Tensor | lazy.TensorDict:
    """Return the tensor of a field, or the TensorDict of a nested field."""
    if isinstance(schema.trees[name], Field):
        return leaves[0]
    paths = [schema.paths[i][1:] for i in schema.leaf_indices[name]]
    return assemble_batch(dict(zip(paths, leaves, strict=True)), batch_size)


def _nest_leaves(tree: dict[str, Any], batch_size: torch.Size) -> lazy.TensorDict:
    for name, value in tree.items():
        if type(value) is dict:
            tree[name] = _nest_leaves(value, batch_size)
    return make_tensordict(tree, batch_size)


def make_tensordict(
    tree: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None
) -> lazy.TensorDict:
    """Make a TensorDict without verification: all values must have this batch size, and this device if not None."""
    return (_constructor or import_tensordict())(source=tree, batch_size=batch_size, device=device, nested=False)


def copy_leaves_into(out: lazy.TensorDict, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
    """Copy leaves into the caller's tensors, which must have the same keys, shapes and dtypes."""
    layouts = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves.items()}
    targets = check_targets(out, layouts, next(iter(leaves.values())).device)
    copy_tensor_pairs(zip(targets, leaves.values(), strict=True))
    return out


# Inference mode may write both inference tensors and normal tensors.
@torch.inference_mode()
def copy_tensor_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each pair (target, source)."""
    for target, source in pairs:
        target.copy_(source)


def check_targets(
    out: lazy.TensorDict,
    layouts: Mapping[Path, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    buffer_ranges: Iterable[MemoryRange] = (),
) -> list[torch.Tensor]:
    """Return the tensors of `out` in the order of `layouts`; raise if keys, shapes, dtypes or the device differ.

    Also raise if two tensors overlap, or if a tensor overlaps the memory `buffer_ranges` of the buffer.
    """
    remedy = "Pass an earlier batch as out=."
    leaves = _leaves_by_path(out)
    if leaves.keys() != layouts.keys():
        expected, got = (sorted(".".join(path) for path in paths) for paths in (layouts, leaves))
        raise SchemaError(explain("out", f"the fields {expected}", got, remedy))
    if any(leaf is not other for leaf, other in zip(leaves.values(), out.values(True, True), strict=True)):
        got, remedy = f"a {type(out).__name__}", "Pass out.contiguous()."
        raise SchemaError(explain("out", "a TensorDict of tensors", got, remedy))
    for path, (shape, dtype) in layouts.items():
        target = leaves[path]
        is_plain = target.is_contiguous() and not target.requires_grad
        if target.shape != shape or target.dtype != dtype or not is_plain or target.device != device:
            got = f"{target.dtype} of shape {tuple(target.shape)} and strides {target.stride()} on {target.device}"
            got += ", with a gradient" if target.requires_grad else ""
            expected = f"contiguous {dtype} of shape {shape} on {device}, without a gradient"
            raise SchemaError(explain(f"out.{'.'.join(path)}", expected, got, remedy))
    _refuse_overlaps(leaves, buffer_ranges)
    return [leaves[path] for path in layouts]


def refuse_shared_memory(out: lazy.TensorDict, buffer_ranges: Iterable[MemoryRange]) -> None:
    """Raise if two leaves of `out` overlap, or if a leaf overlaps the memory `buffer_ranges` of the buffer."""
    leaves = {path: leaf for path, leaf in _leaves_by_path(out).items() if isinstance(leaf, torch.Tensor)}
    _refuse_overlaps(leaves, buffer_ranges)


def _leaves_by_path(out: lazy.TensorDict) -> dict[Path, Any]:
    """Return the leaves of a caller's TensorDict by path; raise for other objects."""
    if not isinstance(out, lazy.TensorDictBase):
        remedy = "Pass an earlier batch as out=."
        raise SchemaError(explain("out", "a TensorDict", type(out).__name__, remedy))
    return {key if isinstance(key, tuple) else (key,): leaf for key, leaf in out.items(True, True)}


def _refuse_overlaps(targets: Mapping[Path, torch.Tensor], buffer_ranges: Iterable[MemoryRange]) -> None:
    overlap = _find_overlap(tuple(map(memory_range, targets.values())), tuple(buffer_ranges))
    if overlap is None:
        return
    remedy = "Pass an earlier batch as out=."
    first, second = (".".join([*targets][i]) if i < len(targets) else None for i in overlap)
    if first is None or second is None:
        where = f"out.{first or second}"
        raise SchemaError(explain(where, "memory outside the buffer", "memory of the buffer", remedy))
    got = f"{first} and {second} in the same memory"
    raise SchemaError(explain("out", "leaves with memory of their own", got, remedy))


# A training loop passes the same tensors to every call, so results are cached.
@functools.lru_cache(maxsize=64)
def _find_overlap(targets: tuple[MemoryRange, ...], buffer_ranges: tuple[MemoryRange, ...]) -> tuple[int, int] | None:
    """Return the positions in `targets + buffer_ranges` of two overlapping ranges; the first or second is a target."""
    ranges = targets + buffer_ranges
    # Only neighbours in the order of addresses are compared: if any two ranges overlap, two neighbours do.
    order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
    for first, second in pairwise(order):
        if ranges[first][1] > ranges[second][0] and min(first, second) < len(targets):
            return first, second
    return None


def memory_range(tensor: torch.Tensor) -> MemoryRange:
    """Return the addresses of the first byte and one past the last byte of a contiguous tensor."""
    start = 0 if tensor.device.type == "meta" else tensor.data_ptr()
    return (start, start + tensor.nbytes) if start else (0, 0)


def check_destination(device: torch.device | str | None, out: lazy.TensorDict | None = None) -> torch.device | None:
    """Return the device to move a batch to, or None; raise if the machine lacks it, or if `out` is passed too.

    Also import tensordict, which must happen before the lock is taken and rows are drawn.
    """
    if _constructor is None:
        import_tensordict()
    if device is None:
        return None
    if out is not None:
        remedy = "Move the filled batch yourself."
        raise SchemaError(explain("out", "no device= together with out=", repr(device), remedy))
    target = as_device(device)
    check_device_available(target)
    return target


def check_batch_size(where: str, batch_size: object) -> int:
    """Return `batch_size` as an int; raise if it is not positive or too large."""
    if type(batch_size) is int and 0 < batch_size <= _MAX_ROWS:
        return batch_size
    return check_positive_int(where, batch_size, _MAX_ROWS)


def to_device(batch: lazy.TensorDict, device: torch.device) -> lazy.TensorDict:
    """Move a batch to `device`. Copies to the CPU are synchronous: the caller could read the batch too early."""
    return batch.to(device, non_blocking=device.type != "cpu")
