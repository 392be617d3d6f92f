"""Assembly of a batch: a TensorDict from flat leaves, and checks of a caller's `out`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.schema.checks import check_available, check_positive_int
from relive.schema.conversion import as_device
from relive.schema.fields import Field, Path, Schema

MemoryRange = tuple[int, int]
"""Addresses of the first byte and one past the last byte."""

_MAX_ROWS = 2**31 - 1

_constructor: Any = None
"""Constructor of TensorDict; None before `import_tensordict`."""


def import_tensordict() -> Any:
    """Import tensordict. Call it before taking a lock or drawing rows: it takes seconds and may fail."""
    global _constructor  # noqa: PLW0603
    # The public constructor checks every leaf's batch size again (4 µs); our leaves always have it.
    _constructor = getattr(lazy.TensorDict, "_new_unsafe", _construct_checked)
    return _constructor


def _construct_checked(
    *, source: dict[str, Any], batch_size: torch.Size, device: torch.device | None, nested: bool
) -> Any:
    return lazy.TensorDict(source, batch_size=batch_size, device=device)


def assembler(paths: Sequence[Path]) -> Callable[[Sequence[torch.Tensor], torch.Size], lazy.TensorDict]:
    """Return a function that assembles batches of these paths faster than `assemble`."""
    if sum(map(len, paths)) > len(paths):
        return lambda leaves, batch_size: assemble(dict(zip(paths, leaves, strict=True)), batch_size)
    names = [path[0] for path in paths]
    # Without strict=, which would double the time of this loop.
    return lambda leaves, batch_size: make_tensordict(dict(zip(names, leaves)), batch_size)  # noqa: B905


def assemble(leaves: Mapping[Path, torch.Tensor], batch_size: torch.Size) -> lazy.TensorDict:
    """Make the TensorDict of `leaves`, nested if a path has several names."""
    if sum(map(len, leaves)) == len(leaves):
        return make_tensordict({path[0]: leaf for path, leaf in leaves.items()}, batch_size)
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return _tensordict(tree, batch_size)


def field_value(schema: Schema, name: str, leaves: Sequence[torch.Tensor], batch_size: torch.Size) -> Any:
    """Return the value of one field: its tensor, or a TensorDict for a nested field."""
    if isinstance(schema.trees[name], Field):
        return leaves[0]
    paths = [schema.paths[i][1:] for i in schema.leaf_indices[name]]
    return assemble(dict(zip(paths, leaves, strict=True)), batch_size)


def _tensordict(tree: dict[str, Any], batch_size: torch.Size) -> lazy.TensorDict:
    for name, value in tree.items():
        if type(value) is dict:
            tree[name] = _tensordict(value, batch_size)
    return make_tensordict(tree, batch_size)


def make_tensordict(
    tree: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None
) -> lazy.TensorDict:
    """Make a TensorDict without verification: all values must have this batch size, and this device if not None."""
    return (_constructor or import_tensordict())(source=tree, batch_size=batch_size, device=device, nested=False)


def select_leaves(leaves: dict[Path, torch.Tensor], fields: Iterable[str | Path] | None) -> dict[Path, torch.Tensor]:
    """Select leaves by the names or paths `fields`; all leaves if None."""
    if fields is None:
        return leaves
    paths = {(field,) if isinstance(field, str) else tuple(field) for field in fields}
    chosen = {
        path: leaf
        for path, leaf in leaves.items()
        if path in paths or any(path[:depth] in paths for depth in range(1, len(path)))
    }
    for head in paths - leaves.keys():
        if not any(path[: len(head)] == head for path in leaves):
            names = ", ".join(sorted({path[0] for path in leaves}))
            raise SchemaError(explain("fields", f"stored fields ({names})", ".".join(head), "Name only stored fields."))
    return chosen


def copy_into(out: lazy.TensorDict, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
    """Copy leaves into the caller's tensors, which must have the same keys, shapes and dtypes."""
    like = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves.items()}
    targets = check_targets(out, like, next(iter(leaves.values())).device)
    copy_leaves(zip(targets, leaves.values(), strict=True))
    return out


@torch.inference_mode()  # inference mode may write both inference tensors and normal ones
def copy_leaves(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy pairs (target, source)."""
    for target, leaf in pairs:
        target.copy_(leaf)


def check_targets(
    out: lazy.TensorDict,
    like: Mapping[Path, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    own: Iterable[MemoryRange] = (),
) -> list[torch.Tensor]:
    """Return the tensors of `out` in the order of `like`; raise if keys, shapes, dtypes or the device differ.

    Also raise if two tensors overlap, or if one overlaps the memory `own` of the buffer that fills them.
    """
    remedy = "Pass an earlier batch as out=."
    leaves = _leaves(out)
    if leaves.keys() != like.keys():
        expected, got = (sorted(".".join(path) for path in paths) for paths in (like, leaves))
        raise SchemaError(explain("out", f"the fields {expected}", got, remedy))
    if any(
        leaf is not iterated_leaf for leaf, iterated_leaf in zip(leaves.values(), out.values(True, True), strict=True)
    ):
        got, remedy = f"a {type(out).__name__}", "Pass out.contiguous()."
        raise SchemaError(explain("out", "a TensorDict of tensors", got, remedy))
    for path, (shape, dtype) in like.items():
        target = leaves[path]
        plain = target.is_contiguous() and not target.requires_grad
        if target.shape != shape or target.dtype != dtype or not plain or target.device != device:
            got = f"{target.dtype} of shape {tuple(target.shape)} and strides {target.stride()} on {target.device}"
            got += ", with a gradient" if target.requires_grad else ""
            expected = f"contiguous {dtype} of shape {shape} on {device}, without a gradient"
            raise SchemaError(explain(f"out.{'.'.join(path)}", expected, got, remedy))
    _refuse_overlaps(leaves, own)
    return [leaves[path] for path in like]


def refuse_shared_memory(out: lazy.TensorDict, own: Iterable[MemoryRange]) -> None:
    """Raise if leaves of `out` overlap each other or the memory `own` of the buffer that fills them."""
    _refuse_overlaps({path: leaf for path, leaf in _leaves(out).items() if isinstance(leaf, torch.Tensor)}, own)


def _leaves(out: lazy.TensorDict) -> dict[Path, Any]:
    """Return the leaves of a caller's TensorDict by path; raises for other objects."""
    if not isinstance(out, lazy.TensorDictBase):
        remedy = "Pass an earlier batch as out=."
        raise SchemaError(explain("out", "a TensorDict", type(out).__name__, remedy))
    return {key if isinstance(key, tuple) else (key,): leaf for key, leaf in out.items(True, True)}


def _refuse_overlaps(targets: Mapping[Path, torch.Tensor], own: Iterable[MemoryRange]) -> None:
    overlap = _find_overlap(tuple(map(memory_range, targets.values())), tuple(own))
    if overlap is None:
        return
    remedy = "Pass an earlier batch as out=."
    first, second = (".".join([*targets][i]) if i < len(targets) else None for i in overlap)
    if first is None or second is None:
        where = f"out.{first or second}"
        raise SchemaError(explain(where, "memory outside the buffer", "memory of the buffer", remedy))
    got = f"{first} and {second} in the same memory"
    raise SchemaError(explain("out", "leaves with memory of their own", got, remedy))


@functools.lru_cache(maxsize=64)  # cached: a training loop passes the same tensors again and again
def _find_overlap(targets: tuple[MemoryRange, ...], own: tuple[MemoryRange, ...]) -> tuple[int, int] | None:
    """Return the positions in `targets + own` of two ranges that overlap, at least one of them a target."""
    ranges = targets + own
    # Sorted by address: if any two ranges overlap, two neighbours do.
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

    Called first for every batch, before the lock and the draw; also imports tensordict.
    """
    if _constructor is None:
        import_tensordict()
    if device is not None and out is not None:
        raise SchemaError(
            explain("out", "no device= together with out=", repr(device), "Move the filled batch yourself.")
        )
    if device is None:
        return None
    target = as_device(device)
    check_available(target)
    return target


def check_batch_size(where: str, batch_size: object) -> int:
    """Return `batch_size` as an int; raise if it is not positive or too large."""
    if type(batch_size) is int and 0 < batch_size <= _MAX_ROWS:
        return batch_size
    return check_positive_int(where, batch_size, _MAX_ROWS)


def to_device(batch: lazy.TensorDict, device: torch.device) -> lazy.TensorDict:
    """Move a batch to `device`, asynchronously except to the CPU, which could read it too early."""
    return batch.to(device, non_blocking=device.type != "cpu")
