"""Checks of the estimators' arguments: tensors of one shape on one device, and bool flags.

The native core accepts arguments that fit exactly. All other arguments are checked and cast here. Nothing is broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relive.errors import SchemaError, explain
from relive.schema.checks import check_dense, check_device, type_name
from relive.schema.fields import DTYPES


def align_inputs(
    values: Mapping[str, Any], flags: Mapping[str, Any], mask: Any = None, *, cast: bool = True
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return the values in one float dtype and without gradients, and the flags and the mask in the same shape.

    The first value determines shape and device. The dtype is float64 if a value has it, otherwise float32. With
    `cast=False` values keep their dtypes: a kernel that reads mixed dtypes saves one launch per value.
    """
    first_name, first_value = next(iter(values.items()))
    _check_tensor(first_name, first_value)
    if first_value.ndim == 0:
        raise SchemaError(explain(first_name, "shape [T], [T, N] or [T, N, …]", "()", "Add the time axis in front."))
    dtype = torch.float32
    for name, value in values.items():
        _check_tensor(name, value)
        _check_same_shape_and_device(name, value, first_name, first_value)
        if value.is_complex():
            raise SchemaError(explain(name, "real numbers", value.dtype, "Pass its real part."))
        # torch does not compute with float8 and quantized dtypes, so these dtypes are refused.
        if value.dtype not in DTYPES:
            raise SchemaError(explain(name, "numbers or bools", value.dtype, "Convert it with .float()."))
        if cast:
            dtype = torch.promote_types(dtype, value.dtype)
    return (
        [_detach(value).to(dtype) if cast else _detach(value) for value in values.values()],
        [_align_flag(name, flag, first_name, first_value) for name, flag in flags.items()],
        None if mask is None else _align_flag("mask", mask, first_name, first_value),
    )


def check_same_shape(name: str, tensor: Tensor, first_name: str, shape: torch.Size) -> None:
    """Raise if a tensor does not have `shape`, the shape of the argument `first_name`."""
    if tensor.shape != shape:
        got, expected = tuple(tensor.shape), tuple(shape)
        raise SchemaError(explain(name, f"shape {expected} to match {first_name}", got, _shape_remedy(got, expected)))


def _align_flag(name: str, flag: Any, first_name: str, first_value: Tensor) -> Tensor:
    """Return a flag in the shape of `first_value`; a flag [T, N] is expanded to every agent of its environment."""
    _check_tensor(name, flag)
    if flag.dtype != torch.bool:
        raise SchemaError(explain(name, "dtype torch.bool", flag.dtype, "Compare it, as in flag != 0."))
    if 2 <= flag.ndim < first_value.ndim and flag.shape == first_value.shape[: flag.ndim]:
        check_device(name, flag, first_value.device, f" to match {first_name}")
        return flag.reshape(*flag.shape, *(1,) * (first_value.ndim - flag.ndim)).expand(first_value.shape)
    _check_same_shape_and_device(name, flag, first_name, first_value)
    return flag


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        got, remedy = type_name(value), "Convert it with torch.as_tensor."
        if isinstance(value, np.ndarray) and any(stride < 0 for stride in value.strides):
            got, remedy = f"{got} with negative strides", "Copy it first: torch.as_tensor(array.copy())."
        raise SchemaError(explain(name, "a torch.Tensor", got, remedy))
    check_dense(name, value)


def _check_same_shape_and_device(name: str, value: Tensor, first_name: str, first_value: Tensor) -> None:
    check_same_shape(name, value, first_name, first_value.shape)
    check_device(name, value, first_value.device, f" to match {first_name}")


def _shape_remedy(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if got == (*expected, 1):
        return "Squeeze the last axis."
    if (*got, 1) == expected:
        return "Unsqueeze the last axis."
    if len(expected) > 1 and got == (expected[1], expected[0], *expected[2:]):
        return "Transpose it: time comes first."
    return "Nothing is broadcast: pass the expected shape."


def _detach(value: Tensor) -> Tensor:
    """Return the tensor without a gradient, and with a lazy negation applied."""
    return (value.detach() if value.requires_grad else value).resolve_neg()
