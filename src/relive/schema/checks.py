"""Checks of arguments. Each returns the value, or raises a SchemaError with a remedy."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from relive.errors import NotReadyError, SchemaError, explain

_MAX_INT = (1 << 63) - 1
_T = TypeVar("_T")


def check_positive_int(where: str, value: object, max: float = _MAX_INT) -> int:
    """Return a positive int of at most `max`, by default below 2^63."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SchemaError(explain(where, "a positive int", repr(value), "Pass an int of at least 1."))
    if value > max:
        expected = "a positive int below 2^63" if max == _MAX_INT else f"at most {max}"
        raise SchemaError(explain(where, expected, _describe_int(int(value)), "Pass a smaller int."))
    return int(value)


def check_int(where: str, value: Any, *, min: int, remedy: str) -> int:
    """Return an int of at least `min`."""
    if isinstance(value, bool) or (not isinstance(value, int) and not isinstance(value, numbers.Integral)):
        raise SchemaError(explain(where, f"an int of at least {min}", type_name(value), remedy))
    if value < min:
        raise SchemaError(explain(where, f"an int of at least {min}", value, remedy))
    return int(value)


def check_number(where: str, value: Any) -> float:
    """Return a Python or numpy number as a float; tensors are refused, because reading one waits for its device."""
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and not isinstance(value, numbers.Real)):
        raise SchemaError(explain(where, "a number", type_name(value), "Pass a Python float."))
    try:
        return float(value)
    except OverflowError:
        got = "an int too large for a float"
        raise SchemaError(explain(where, "a number", got, "Pass a smaller number.")) from None


def check_fraction(where: str, value: Any, remedy: str = "Pass such a number.") -> float:
    """Return a number from 0 to 1."""
    result = check_number(where, value)
    if not 0 <= result <= 1:
        raise SchemaError(explain(where, "a number from 0 to 1", value, remedy))
    return result


def check_above_zero(where: str, value: Any, remedy: str = "Pass math.inf for no bound.") -> float:
    """Return a number above 0, possibly infinite."""
    result = check_number(where, value)
    if not result > 0:
        raise SchemaError(explain(where, "a number above 0", value, remedy))
    return result


def check_finite(where: str, value: Any, *, may_be_zero: bool = True) -> float:
    """Return a finite number of at least 0; 0 itself is refused without `may_be_zero`."""
    result = as_float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.inf
    if not 0 <= result < math.inf or (result == 0 and not may_be_zero):
        expected = f"a finite number {'of at least' if may_be_zero else 'above'} 0"
        raise SchemaError(explain(where, expected, repr(value), f"Pass {expected}."))
    return result


def as_float(value: Any) -> float:
    """Return a real number as a float; infinite if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_choice(where: str, value: _T, choices: Collection[str | None], remedy: str = "Pass one of them.") -> _T:
    """Return `value`; raise if it is not one of `choices`, which may include None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        *names, last = [repr(name) if name is None else json.dumps(name, ensure_ascii=False) for name in choices]
        raise SchemaError(explain(where, f"{', '.join(names)} or {last}", repr(value), remedy))
    return value


def check_none_without_argument(where: str, value: object, argument: str) -> None:
    """Raise if `value` is not None, for a buffer that was made without the constructor argument `argument`."""
    if value is not None:
        remedy = f"Make the buffer with {argument}=."
        raise SchemaError(explain(where, f"None without {argument}", type(value).__name__, remedy))


def check_keys(
    where: str, value: Any, names: Collection[str], noun: str = "keys",
    remedy: str = "Pass exactly the declared fields.",
) -> None:  # fmt: skip
    """Raise unless `value` is a mapping with exactly the keys `names`, which the message calls `noun`."""
    keys = value.keys() if hasattr(value, "keys") else None
    if keys is None or set(keys) != set(names):
        got = type_name(value) if keys is None else f"the {noun} {sorted(map(str, keys))}"
        raise SchemaError(explain(where, f"the {noun} {sorted(names)}", got, remedy))


def check_shape(where: str, tensor: torch.Tensor, shape: tuple[int, ...], remedy: str) -> None:
    """Raise if a tensor does not have the shape `shape`."""
    if tensor.shape != shape:
        raise SchemaError(explain(where, f"shape {tuple(shape)}", tuple(tensor.shape), remedy))


def check_device(where: str, tensor: torch.Tensor, device: torch.device, reason: str = "") -> None:
    """Raise if a tensor is not on `device`; the message has `reason` after the device."""
    if tensor.device != device:
        remedy = f"Call .to({str(device)!r})."
        raise SchemaError(explain(where, f"a tensor on {device}{reason}", tensor.device, remedy))


# The result is cached, because probing a device takes as long as reading a small batch.
@lru_cache(maxsize=64)
def check_device_available(device: torch.device | str, error_class: type[Exception] = SchemaError) -> None:
    """Raise an error of class `error_class` if torch cannot use `device` on this machine."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError) as error:
        got = f"{str(device)!r} ({str(error).partition(chr(10))[0]})"
        remedy = 'Pass a device= that torch can use here, such as "cpu".'
        raise error_class(explain("device", "a device of this machine", got, remedy)) from error


def check_dense(where: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor is sparse."""
    if tensor.layout != torch.strided:
        raise SchemaError(explain(where, "a dense tensor", tensor.layout, "Call .to_dense()."))


def check_nonempty(where: str, size: int, unit: str = "step", remedy: str = "Add steps first.") -> int:
    """Return `size`, a number of stored steps or other units; raise a NotReadyError if it is 0."""
    if not size:
        raise NotReadyError(explain(where, f"at least 1 stored {unit}", 0, remedy))
    return size


def type_name(value: object) -> str:
    """Return the name of a value's type, with its module unless it is built in."""
    if value is None:
        return "None"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _describe_int(value: int) -> str:
    """Return the digits of an int, or its number of bits if it is large."""
    return str(value) if value.bit_length() < 128 else f"an int of {value.bit_length()} bits"
