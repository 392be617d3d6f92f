"""Rows that never change once they are written, and their bytes in the order of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from relive.fields.conversion import bits_of
from relive.storage.codec import Array, Arrays, bytes_of, dtype_name

_BLOCK = 1 << 22
"""Bytes that are copied at once where memory cannot be written as it lies."""


@dataclass
class Rows:
    """Rows that never change once they are written: columns `[slots, N, …]`, row r of an environment at r mod slots.

    In memory are the rows `first[e]` to `stop[e]` of each environment e.
    """

    columns: Arrays
    first: torch.Tensor
    stop: torch.Tensor

    @property
    def slots(self) -> int:
        """How many rows of an environment there is room for."""
        return len(next(iter(self.columns.values())))

    def since(self, saved: torch.Tensor) -> Rows:
        """The rows from `saved[e]` on."""
        return Rows(self.columns, torch.minimum(torch.maximum(self.first, saved), self.stop), self.stop)

    def __len__(self) -> int:
        return int((self.stop - self.first).sum())

    @property
    def nbytes(self) -> int:
        """Of all their columns together."""
        return sum(len(self) * column[0, 0].nbytes for column in self.columns.values())

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a segment of them has: which rows, and their columns."""
        envs, count = len(self.first), len(self)
        bounds = tuple(Array(name, "int64", (envs,)) for name in ("first", "stop"))
        return bounds + tuple(
            Array(name, dtype_name(column.dtype), (count, *column.shape[2:])) for name, column in self.columns.items()
        )

    def parts(self) -> Iterator[memoryview]:
        """Their bytes, without a copy where the rows of all environments lie in one piece."""
        yield bytes_of(self.first)
        yield bytes_of(self.stop)
        pieces = self.pieces()
        for column in self.columns.values():
            flat = bits_of(column.flatten(0, 1))
            for piece in pieces:
                yield bytes_of(flat[piece])

    def pieces(self) -> list[Any]:
        """Where the rows lie in columns `[slots · N, …]`, in the order of a segment: by time if all environments have
        the same rows, else by environment."""
        envs, slots, step = len(self.first), self.slots, self.step
        if self.is_even:
            first, stop = int(self.first[0]), int(self.stop[0])
            edges = sorted({first, stop, *range(first - first % slots + slots, stop, slots)})
            runs = [(a % slots * envs, (b - a) * envs) for a, b in pairwise(edges)]
            return [slice(at + i, at + min(i + step, size)) for at, size in runs for i in range(0, size, step)]
        return list(self.places(slots).split(step))

    @property
    def step(self) -> int:
        """How many rows are copied at once."""
        widest = max(column[0, 0].nbytes for column in self.columns.values())
        return max(_BLOCK // max(widest, 1), 1)

    @property
    def is_even(self) -> bool:
        """All environments have the same rows."""
        return bool((self.first == self.first[0]).all() and (self.stop == self.stop[0]).all())

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the environment of each, in the order of a segment."""
        envs = torch.arange(len(self.first), device="cpu")
        if self.is_even:
            rows = torch.arange(int(self.first[0]), int(self.stop[0]), device="cpu")
            return rows.repeat_interleave(len(envs)), envs.repeat(len(rows))
        sizes = self.stop - self.first
        env = envs.repeat_interleave(sizes)
        return torch.arange(len(env), device="cpu") - (sizes.cumsum(0) - sizes - self.first)[env], env

    def places(self, slots: int) -> torch.Tensor:
        """Their flat slots in columns of `slots`."""
        row, env = self.numbers()
        return row % slots * len(self.first) + env
