"""The border: whatever a caller passes becomes a tensor that fits its field exactly, or an error that says why not.

The native core copies exact fits without coming here. What it does not take (lists, other dtypes, strided memory) is
converted here, in one place for every buffer; inside, nothing is checked again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recollect.errors import SchemaError, explain
from recollect.schema import DTYPES, Field, Path

_HOST = torch.device("cpu")


def conform(
    where: str,
    field: Field,
    value: Any,
    lead: tuple[int, ...],
    device: torch.device,
    rows: list[int] | None = None,
) -> torch.Tensor:
    """`value` as a plain contiguous tensor of the field's dtype and of shape `lead + field.shape`.

    A tensor must be on `device`; arrays and numbers live on the host and are moved to it. With `rows` only these rows
    of the first axis are taken, and only they are cast.
    """
    if value is None:
        raise SchemaError(explain(where, "a value", "none", "Pass the field or stage it."))
    if rows is None and _fits(field, value, (*lead, *field.shape), device):
        return value
    tensor = as_tensor(where, value, device)
    _check_shape(where, tuple(tensor.shape), (*lead, *field.shape), lead)
    if rows is not None:
        tensor = tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]
    return _cast(where, tensor, field.dtype).contiguous().to(device)


def as_tensor(where: str, value: Any, device: torch.device) -> torch.Tensor:
    """`value` as a plain tensor of whatever dtype and shape it has: of `device`, or on the host."""
    return _from_torch(where, value, device) if isinstance(value, torch.Tensor) else _from_host(where, value)


def _fits(field: Field, value: Any, shape: tuple[int, ...], device: torch.device) -> bool:
    return (
        type(value) is torch.Tensor
        and value.dtype == field.dtype
        and value.shape == shape
        and value.device == device
        and value.layout == torch.strided
        and value.is_contiguous()
        and not (value.requires_grad or value.is_neg() or value.is_conj())
    )


def _from_torch(where: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise SchemaError(explain(where, "a dense tensor", tensor.layout, "Call .to_dense()."))
    if tensor.device != device:
        raise SchemaError(explain(where, f"a tensor on {device}", tensor.device, f"Call .to({str(device)!r})."))
    if tensor.dtype not in DTYPES:
        raise SchemaError(explain(where, "numbers or bools", tensor.dtype, "Convert it first."))
    return tensor.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)


def _from_host(where: str, value: Any) -> torch.Tensor:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise SchemaError(explain(where, "an array", type(value).__name__, f"It cannot be read: {error}")) from error
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        raise SchemaError(explain(where, "numbers or bools", f"dtype {array.dtype}", "Convert it first."))
    if array.dtype not in DTYPES.values():  # another byte order, or a long double
        native = array.dtype.newbyteorder("=")
        array = array.astype(native if native in DTYPES.values() else np.float64)
    if not array.flags.writeable or not array.flags.c_contiguous:  # torch has neither read-only nor reversed memory
        array = array.copy(order="C")
    return torch.from_numpy(array)


def _check_shape(where: str, got: tuple[int, ...], expected: tuple[int, ...], lead: tuple[int, ...]) -> None:
    if got == expected:
        return
    if got == (*expected, 1):
        remedy = "Squeeze the last axis."
    elif got == (1, *expected):
        remedy = "Squeeze the first axis."
    elif lead and got == expected[1:]:
        remedy = "Pass a row for each environment."
    elif not lead and got[1:] == expected:
        remedy = "Pass one environment's value, or declare num_envs."
    else:
        remedy = "Pass the declared shape."
    of = f" for {lead[0]} environments" if lead and lead[0] != 1 else ""
    raise SchemaError(explain(where, f"shape {expected}{of}", got, remedy))


def _kind(dtype: torch.dtype) -> int:
    """Bool 0, integer 1, real 2, complex 3: a cast upwards keeps the meaning, a cast downwards loses it."""
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _cast(where: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    have, want = _kind(tensor.dtype), _kind(dtype)
    if have > want:
        names = str(dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
        remedy = "Compare it to get bools." if want == 0 else "Declare the field with that dtype, or convert it."
        raise SchemaError(explain(where, *names, remedy))
    if want == 1:
        _check_integers_fit(where, tensor, dtype)
    return tensor.to(dtype)


def _check_integers_fit(where: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == torch.bool or tensor.device.type == "meta":
        return
    have, want = torch.iinfo(tensor.dtype), torch.iinfo(dtype)
    if want.min <= have.min and have.max <= want.max:
        return
    values = tensor.to(_HOST).numpy()
    smallest, largest = int(values.min()), int(values.max())
    if smallest < want.min or largest > want.max:
        expected = f"integers in [{want.min}, {want.max}] ({str(dtype).removeprefix('torch.')})"
        raise SchemaError(explain(where, expected, f"[{smallest}, {largest}]", "Declare a wider dtype."))


def overlaps(a: Any, b: Any) -> bool:
    """Whether two tensors or arrays have bytes in common."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)  # by their extents: as exact as it needs to be
    spans = [_span(x) for x in (a, b)]
    (start_a, stop_a), (start_b, stop_b) = spans
    return start_a < stop_b and start_b < stop_a


def _span(value: Any) -> tuple[int, int]:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta":
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), value.data_ptr() + (extent * value.element_size() if value.numel() else 0)
    if isinstance(value, np.ndarray):
        reach = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
        start = value.ctypes.data + sum(min(0, r) for r in reach)
        return start, value.ctypes.data + sum(max(0, r) for r in reach) + (value.itemsize if value.size else 0)
    return 0, 0


def dotted(path: Path) -> str:
    """A leaf's name in messages: `obs.camera`."""
    return ".".join(path)
