"""How rows are read an epoch at a time: in which order, into whose memory, and for how long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.fields.assembly import assembler, checked_targets
from relive.fields.conversion import overlaps
from relive.fields.schema import Path
from relive.kernels.reader import Following, Reader
from relive.kernels.sequence_reader import SequenceReader
from relive.kernels.shuffling import permutation, shuffled
from relive.randomness import Randomness
from relive.rollout.storage import Storage

Read = Callable[[torch.Tensor, int, int], "lazy.TensorDict"]
"""The batch of the items index[start:stop]."""


class Epochs(NamedTuple):
    """How often the first `total` items of an order are read, and how many at once."""

    repeats: int
    total: int
    batch_size: int

    @classmethod
    def of(
        cls, where: str, items: torch.Tensor | int, batch_size: int, repeats: int, drop_last: bool, expected: str,
        added: str = "steps",
    ) -> Epochs:  # fmt: skip
        """Epochs of all items (or of as many); with `drop_last` full batches only, at least one of them."""
        total = items if isinstance(items, int) else len(items)
        if drop_last and 0 < total < batch_size:
            raise NotReadyError(explain(where, expected, total, f"Add {added}, or pass a smaller batch_size."))
        return cls(repeats, total - total % batch_size if drop_last else total, batch_size)

    def require_full(self, items: str) -> None:
        """Refuse a last batch that is shorter than the others, which a batch of the caller's cannot be."""
        if self.total % self.batch_size:
            remedy = f"Pass drop_last=True, or a batch_size that divides the {items}."
            expected = f"full batches of {self.batch_size} {items}"
            raise SchemaError(explain("out", expected, f"{self.total} {items}", remedy))

    def batches(
        self, read: Read, order: Callable[[], Any], lock: Any, require: Callable[[], None]
    ) -> Iterator[lazy.TensorDict]:
        """Batch after batch, each read under the lock, unless `require` raises because its rows are gone."""
        index, size = None, self.batch_size
        for start in itertools.chain.from_iterable(itertools.repeat(range(0, self.total, size), self.repeats)):
            with lock:
                require()
                if index is None or start == 0:
                    index = order()
                batch = read(index, start, min(start + size, self.total))
            yield batch


def stays(storage: Storage) -> Callable[[], None]:
    """A function that raises once the steps that the storage has now are forgotten."""
    generation = storage.generation

    def require() -> None:
        if storage.generation != generation:
            got, remedy = "a cleared one", "Finish the epochs before clear()."
            raise NotReadyError(explain("batch", "the rollout that the epochs began with", got, remedy))

    return require


def order_of(rows: torch.Tensor | int, shuffle: bool, random: Randomness, device: torch.device) -> Callable[[], Any]:
    """Gives these rows, or all below a number, in the order of an epoch."""
    if isinstance(rows, int):
        return partial(permutation, rows, random, device) if shuffle else partial(torch.arange, rows, device=device)
    return partial(shuffled, rows, random) if shuffle else lambda: rows


def read_fresh(source: Following[Reader] | Following[SequenceReader], paths: list[Path], batched: bool) -> Read:
    """Reads batches into new tensors; `batched`: they have their first axis in common."""
    build, sizes = assembler(paths), {}

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        size = sizes.get(stop - start)
        if size is None:
            size = sizes[stop - start] = torch.Size((stop - start,) if batched else ())
        return build(source.found().take(index, start, stop), size)

    return read


def read_into(
    out: lazy.TensorDict,
    source: Following[Reader],
    leaves: dict[Path, torch.Tensor],
    device: torch.device,
    epochs: Epochs,
) -> Read:
    """Reads rows of leaves [T, N, …] into the caller's batch, again and again."""
    like = {path: ((epochs.batch_size, *leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}
    targets = checked_targets(out, like, device)
    if any(overlaps(target, leaf) for target in targets for leaf in leaves.values()):
        raise SchemaError(
            explain("out", "memory outside the rollout", "memory of the rollout", "Pass a batch as out=.")
        )
    epochs.require_full("transitions")

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        source.found().take_into(index, start, stop, targets)
        return out

    return read
