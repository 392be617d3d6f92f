"""The arithmetic of rings inside kernels: `replay/ring.py` in Triton. Flat slots and rows are int64 throughout."""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(0)
TRANSITION = tl.constexpr(1)
FINAL = tl.constexpr(2)
PENDING = tl.constexpr(3)
HISTORY = tl.constexpr(4)


@triton.jit
def slot_of(row, env, slots, num_envs):
    """The flat slots of rows of at least 0."""
    return row % slots * num_envs + env


@triton.jit
def later(flat, steps, num_envs, size):
    """The flat slots of the rows so many steps later, less than a turn of the ring."""
    moved = flat + steps * num_envs
    return tl.where(moved >= size, moved - size, moved)


@triton.jit
def earlier(flat, steps, num_envs, size):
    """The flat slots of the rows so many steps earlier, less than a turn of the ring."""
    moved = flat - steps * num_envs
    return tl.where(moved < 0, moved + size, moved)


@triton.jit
def row_of(flat, head, is_open, slots, num_envs, where):
    """The rows that flat slots hold: of the newest S rows, the one that falls there."""
    env = flat % num_envs
    top = tl.load(head + env, where, other=0) - 1 + tl.load(is_open + env, where, other=0).to(tl.int64)
    behind = (top - flat // num_envs) % slots
    return top - tl.where(behind < 0, behind + slots, behind)
