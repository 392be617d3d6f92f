"""Triton's interpreter in tests: without its emulation of overflows, and with the programs of a grid in any order.

The interpreter runs whole programs one after another. Running them in another order shows races between programs.
Storing the lanes of a program in another order shows races between stores to one address. Races between a store and a
load of another warp stay hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from relive import kernels

Result = TypeVar("Result")
Order = Callable[[int], Any]
"""Maps n to the numbers below n in some order."""


def interpreter() -> Any:
    """Return Triton's interpreter module. Skips the test without Triton, or if kernels are compiled for a GPU."""
    triton = pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter (TRITON_INTERPRET=1), which runs where there is no GPU")
    from triton.runtime import interpreter as module  # noqa: PLC0415 (after the skip)

    return module


@contextmanager
def quick_arithmetic() -> Iterator[None]:
    """Run the interpreter without checks for overflows, which takes a tenth of the time. A GPU lacks these checks too.

    Otherwise the interpreter checks integers, and numpy warns about floats.
    """
    module = interpreter()
    builder = module.interpreter_builder
    before, builder.options = builder.options, module.InterpreterOptions(sanitize_overflow=False)
    try:
        with np.errstate(all="ignore"), _patched_once(module):
            yield
    finally:
        builder.options = before


@contextmanager
def _patched_once(module: Any) -> Iterator[None]:
    """Patch Triton's language once per launch instead of once per function."""
    patch, done = module._patch_lang, set()

    def patch_once(function: Any) -> Any:
        names = function.__globals__.values()
        languages = {name for name in names if name is module.tl or name is module.tl.core} - done
        if not languages:
            return None
        is_outermost, scope = not done, patch(function)
        # Triton before 3.6 restores nothing after a function, so patching once is impossible.
        if scope is None:
            return None
        done.update(languages)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore()) if is_outermost else restore()
        return scope

    module._patch_lang = patch_once
    try:
        yield
    finally:
        module._patch_lang = patch


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton's kernels on host memory, as on a device."""
    with quick_arithmetic(), kernels.force("triton"):
        yield


@contextmanager
def programs_in_order(order: Order) -> Iterator[None]:
    """Run the programs of every grid, and the lanes of every store, in an order."""
    builder = interpreter().interpreter_builder
    turn: Iterator[tuple[int, int, int]] = iter(())

    def set_grid_dim(x: int, y: int, z: int) -> None:
        nonlocal turn
        type(builder).set_grid_dim(builder, x, y, z)
        places = list(itertools.product(range(x), range(y), range(z)))
        turn = iter([places[i] for i in order(len(places))])

    def set_grid_idx(*_: int) -> None:
        type(builder).set_grid_idx(builder, *next(turn))

    def create_masked_store(pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        # If several lanes store to one address, the value of the last lane in the order remains.
        lanes = list(order(pointers.data.size))
        moved = [
            type(each)(
                np.ascontiguousarray(np.broadcast_to(each.data, pointers.data.shape).reshape(-1)[lanes]), each.dtype
            )
            for each in (pointers, value, mask)
        ]
        return type(builder).create_masked_store(builder, *moved, *how)

    replaced = {"set_grid_dim": set_grid_dim, "set_grid_idx": set_grid_idx, "create_masked_store": create_masked_store}
    vars(builder).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            delattr(builder, name)


def orders(count: int) -> list[Order]:
    """Return `count` orders: the natural one, its reverse, and random ones."""
    return [range, lambda n: range(n - 1, -1, -1), *(partial(_shuffled, seed) for seed in range(count - 2))]


def _shuffled(seed: int, n: int) -> list[int]:
    return np.random.default_rng((seed, n)).permutation(n).tolist()


def in_every_order(run: Callable[[], Result], count: int = 4) -> Result:
    """Return what `run` returns. Fail if a bit of its tensors differs between `count` orders of the programs."""
    results = []
    for order in orders(count):
        with programs_in_order(order):
            results.append(run())
    first, *others = ([*_tensors(result)] for result in results)
    for other in others:
        assert len(first) == len(other)
        for a, b in zip(first, other, strict=True):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
            assert same, f"a race: the programs in one order gave {a}, in another {b}"
    return results[0]


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        yield from (tensor for value in result.values() for tensor in _tensors(value))
    elif isinstance(result, list | tuple):
        yield from (tensor for value in result for tensor in _tensors(value))
    else:
        yield torch.as_tensor(result)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
