"""In which forms kernels are compiled, said beside each kernel: dtypes of its arguments and values of its constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One form of a kernel, as a launch would compile it."""

    kernel: Any
    """The function under `@triton.jit`."""
    name: str
    """The peculiarity of this form, for the table in the docs."""
    types: Mapping[str, Any]
    """The argument types in Triton's words ("*fp32", "i64"); a tuple of them for an argument that is a tuple."""
    constants: Mapping[str, Any]
    """The values of the arguments that are `tl.constexpr`."""
    options: Mapping[str, Any] = {}
    """Options of the launch beside its arguments: `num_warps`, `enable_fp_fusion`."""
    aligned: tuple[str, ...] = ()
    """Arguments that are addresses, or tuples of addresses, divisible by 16."""
