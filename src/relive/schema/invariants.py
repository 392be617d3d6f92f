"""Checks of invariants, which raise an InvariantError with the expected and the actual value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from relive.errors import explain, verify
from relive.schema.conversion import path_name
from relive.schema.fields import Path


def to_host_array(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return the values as an array: numpy compares few numbers five to twenty times faster than torch."""
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values


def verify_elements(
    holds: torch.Tensor | np.ndarray, where: str, expected: object, got: torch.Tensor | np.ndarray
) -> None:
    """Raise unless `holds` is true everywhere; the error names the place and the value of the first violation."""
    holds = to_host_array(holds)
    if not holds.all():
        place = np.argwhere(~holds)[0].tolist()
        verify(False, f"{where}{place or ''}", expected, got[tuple(place)].item())


def verify_layout(
    where: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a tensor is contiguous and has this shape, dtype and device."""
    got = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
    expected = f"{dtype} of shape {tuple(shape)} on {device}"
    verify(got == expected, where, expected, got)
    verify(tensor.is_contiguous(), where, "contiguous memory", f"strides {tensor.stride()}")


def verify_flags(where: str, flags: torch.Tensor) -> None:
    """Raise unless every byte of a bool tensor is 0 or 1."""
    as_bytes = to_host_array(flags.view(torch.uint8))
    verify_elements(as_bytes <= 1, where, "a flag of 0 or 1", as_bytes)


def verify_addresses(paths: Iterable[Path], tensors: Iterable[torch.Tensor], addresses: Iterable[int]) -> None:
    """Raise unless every tensor is at the address that the native core uses."""
    for path, tensor, address in zip(paths, tensors, addresses, strict=True):
        actual_address = tensor.data_ptr()
        verify(
            actual_address == address,
            f"memory of {path_name(path)}",
            f"the address {address}, which the buffer writes to",
            actual_address,
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes."""
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def overflow_warnings(overflowed: torch.Tensor) -> Iterator[str]:
    """Yield a message if a device counted finite numbers that became infinite in their dtype."""
    count = 0 if overflowed.device.type == "meta" else int(overflowed)
    if count:
        remedy = "Declare the field with a wider dtype, or look at what makes such numbers."
        yield explain("fields", "numbers that fit their dtypes", f"{count:,} finite ones stored as infinite", remedy)
