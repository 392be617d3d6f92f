"""The state of rings for kernels, and slot arithmetic: `replay/ring.py` in Triton. Flat slots and rows are int64."""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

EMPTY = tl.constexpr(0)
TRANSITION = tl.constexpr(1)
FINAL = tl.constexpr(2)
PENDING = tl.constexpr(3)
HISTORY = tl.constexpr(4)


@dataclass(frozen=True)
class Rings:
    """State of the rings of all environments, flags as bytes: see `replay/ring.py`."""

    kind: torch.Tensor
    first: torch.Tensor
    head: torch.Tensor
    open: torch.Tensor
    resetting: torch.Tensor
    count: torch.Tensor
    floor: torch.Tensor
    slots: int
    num_envs: int
    alive: int

    @property
    def size(self) -> int:
        """Number of flat slots."""
        return self.slots * self.num_envs


@triton.jit
def slot_of(row, env, slots, num_envs):
    """Flat slots of non-negative rows."""
    return row % slots * num_envs + env


@triton.jit
def later(flat, steps, num_envs, size):
    """Flat slots `steps` rows later; `steps` is less than the number of slots."""
    moved = flat + steps * num_envs
    return tl.where(moved >= size, moved - size, moved)


@triton.jit
def earlier(flat, steps, num_envs, size):
    """Flat slots `steps` rows earlier; `steps` is less than the number of slots."""
    moved = flat - steps * num_envs
    return tl.where(moved < 0, moved + size, moved)


@triton.jit
def row_of(flat, head, is_open, slots, num_envs, where):
    """Rows stored at flat slots, among the newest S rows."""
    env = flat % num_envs
    top = tl.load(head + env, where, other=0) - 1 + tl.load(is_open + env, where, other=0).to(tl.int64)
    age = (top - flat // num_envs) % slots
    return top - tl.where(age < 0, age + slots, age)
