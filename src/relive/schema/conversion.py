"""Conversion of a caller's values to tensors of their field's shape and dtype.

The native core copies values that fit exactly without this module. All other values (lists, other dtypes, strided
memory) are converted here, for every buffer; later code checks nothing again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from relive.errors import SchemaError, explain
from relive.schema.checks import check_dense, check_device
from relive.schema.fields import DTYPES, Field, Path, Schema, caller_field, dtype_name

_HOST = torch.device("cpu")
_COMMON_DTYPES = {np.dtype(kind) for kind in (np.float32, np.float64, np.bool_)}
"""Common dtypes of arrays, which torch reads without further checks."""


def convert(
    where: str,
    field: Field,
    value: Any,
    leading_shape: tuple[int, ...],
    device: torch.device,
    rows: list[int] | None = None,
    *,
    unit: str = "environments",
    overflowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert `value` to a plain contiguous tensor [*leading_shape, *field.shape] of the field's dtype.

    Tensors must be on `device`; arrays and numbers are moved to it. `rows` selects rows of the first axis. Finite
    numbers that become infinite are refused on the CPU, and counted in `overflowed` on other devices.
    """
    if value is None:
        raise SchemaError(explain(where, "a value", None, "Pass the field or stage it."))
    if rows is None and is_converted(field, value, (*leading_shape, *field.shape), device):
        return normalize_bools(value)
    tensor = as_tensor(where, value, device)
    _check_shape(where, tuple(tensor.shape), (*leading_shape, *field.shape), leading_shape, unit)
    if rows is not None:
        tensor = tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]
    return _cast(where, tensor, field.dtype, overflowed).contiguous().to(device)


def convert_leaves(
    schema: Schema, name: str, value: Any, leading_shape: tuple[int, ...], device: torch.device,
    rows: list[int] | None = None, *, prefix: str = "", unit: str = "environments",
) -> list[torch.Tensor]:  # fmt: skip
    """Flatten and convert a value of the field `name`; errors put `prefix` before the field's name."""
    converted = []
    for i, leaf in zip(schema.leaf_indices[name], schema.flatten(name, value, prefix + name), strict=True):
        where, field = prefix + path_name(schema.paths[i]), caller_field(schema.fields[i])
        converted.append(convert(where, field, leaf, leading_shape, device, rows, unit=unit))
    return converted


def as_tensor(where: str, value: Any, device: torch.device) -> torch.Tensor:
    """Return `value` as a plain tensor of the same dtype and shape, on `device` if it is a tensor, else on the CPU."""
    tensor = _detach_tensor(where, value, device) if isinstance(value, torch.Tensor) else _read_host_value(where, value)
    return normalize_bools(tensor)


def normalize_bools(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the bytes 0 and 1 if it is bool: other bytes in memory viewed as bool mean True.

    Tensors on other devices are returned unchecked, because reading them would synchronise.
    """
    if tensor.dtype != torch.bool or tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    return tensor if int(tensor.numpy().view(np.uint8).max()) <= 1 else tensor.view(torch.uint8) != 0


_SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes by the unsigned dtypes of the same size, which torch cannot index."""


def as_indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor in a dtype of the same size that torch can index."""
    return tensor.view(_SIGNED_DTYPES[tensor.dtype]) if tensor.dtype in _SIGNED_DTYPES else tensor


def as_device(device: Any) -> torch.device:
    """Return the torch.device of an argument; raise a SchemaError if there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(explain("device", "a torch device", repr(device), 'Pass a device such as "cpu".')) from error


def convert_row_ids(index: Any, device: torch.device) -> torch.Tensor:
    """Return the row ids `index` [B] as int64 on `device`."""
    ids = index
    is_plain = type(index) is torch.Tensor and index.layout == torch.strided
    if not is_plain or index.device != device or index.requires_grad:
        ids = as_tensor("index", index, device).to(device)
    if ids.ndim != 1 or ids.dtype != torch.int64:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise SchemaError(explain("index", "a vector of int64", got, "Pass batch['index']."))
    # An empty tensor is replaced, because the native core rejects the arbitrary strides that it may have.
    return ids.contiguous() if len(ids) else ids.new_empty(0)


def is_converted(field: Field, value: Any, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `value` needs no conversion."""
    return (
        type(value) is torch.Tensor
        and value.dtype == field.dtype
        and value.shape == shape
        and value.device == device
        and value.layout == torch.strided
        and value.is_contiguous()
        and not (value.requires_grad or value.is_neg() or value.is_conj())
    )


def _detach_tensor(where: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    check_dense(where, tensor)
    check_device(where, tensor, device)
    if tensor.dtype not in DTYPES:
        raise SchemaError(explain(where, "numbers or bools", tensor.dtype, "Convert it to a numeric or bool dtype."))
    return tensor.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)


def _read_host_value(where: str, value: Any) -> torch.Tensor:
    # Arrays that are contiguous, aligned and writeable (`carray`) need no conversion.
    if type(value) is np.ndarray and value.dtype in _COMMON_DTYPES and value.flags.carray:
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        raise SchemaError(explain(where, "one value", f"a dict of {', '.join(map(str, value))}", _dict_remedy(where)))
    try:
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    except Exception as error:
        raise SchemaError(explain(where, "an array", type(value).__name__, f"numpy cannot read it: {error}")) from error
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        remedy = "Convert it to a numeric or bool dtype."
        raise SchemaError(explain(where, "numbers or bools", f"dtype {array.dtype}", remedy))
    # Arrays in another byte order are swapped, and long doubles become float64.
    if array.dtype not in DTYPES.values():
        native_dtype = array.dtype.newbyteorder("=")
        array = array.astype(native_dtype if native_dtype in DTYPES.values() else np.float64)
    # numpy has several dtypes for one C type, and torch reads only the standard one.
    array = array.view(np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}"))
    # Read-only, reversed and unaligned arrays are copied: torch does not support them, and may crash.
    is_misaligned = array.__array_interface__["data"][0] % max(array.itemsize, 1)
    if is_misaligned or not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy(order="C")
    return torch.from_numpy(array)


def _dict_remedy(where: str) -> str:
    if where in ("terminated", "truncated"):
        return (
            f"{where} is the environment's: pass one flag, and keep which agents are alive in the observation or an "
            "extra field."
        )
    return "Declare the field as a dict of these names."


def convert_env_ids(env_ids: Any, num_envs: int | None, device: torch.device) -> torch.Tensor:
    """Return `env_ids`, distinct ints below `num_envs`, as int64 on `device`.

    The values of a tensor on another device are not checked, because reading them would synchronise.
    """
    if num_envs is None:
        remedy = "Leave env_ids out, or make the buffer with num_envs=."
        raise SchemaError(explain("env_ids", "None without num_envs", env_ids, remedy))
    source_device = _HOST if isinstance(env_ids, torch.Tensor) and env_ids.is_cpu else device
    env_tensor = as_tensor("env_ids", env_ids, source_device)
    if not env_tensor.is_cpu:
        if env_tensor.ndim != 1 or _dtype_rank(env_tensor.dtype) != 1:
            got = f"{env_tensor.dtype} of shape {tuple(env_tensor.shape)}"
            raise SchemaError(explain("env_ids", "a vector of distinct ints", got, "Pass each environment once."))
        return env_tensor.to(torch.int64).contiguous()
    ids = env_tensor.numpy()
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(set(ids.tolist())) != len(ids) or not len(ids):
        raise SchemaError(explain("env_ids", "a vector of distinct ints", env_ids, "Pass each environment once."))
    if ids.min() < 0 or ids.max() >= num_envs:
        raise IndexError(explain("env_ids", f"environments 0 to {num_envs - 1}", env_ids, "Number them from 0."))
    return torch.as_tensor(ids.astype(np.int64), device=device)


class EnvIdConverter:
    """Converter of `env_ids` with a cache: a repeated value takes 0.5 µs instead of 10 µs."""

    def __init__(self, num_envs: int | None, device: torch.device) -> None:
        self._num_envs, self._device = num_envs, device
        self._cache: dict[Any, torch.Tensor] = {}

    def __call__(self, env_ids: Any) -> torch.Tensor:
        key = _make_cache_key(env_ids)
        envs = self._cache.get(key)
        if envs is None:
            envs = convert_env_ids(env_ids, self._num_envs, self._device)
            if key is not None and len(self._cache) < _MAX_CACHED_KEYS:
                self._cache[key] = envs
        return envs


_MAX_CACHED_KEYS = 256


def _make_cache_key(env_ids: Any) -> Hashable:
    """Return a hashable key for `env_ids`; None if making the key would take longer than the conversion."""
    if type(env_ids) is torch.Tensor:
        env_ids = view_as_numpy(env_ids)
    if type(env_ids) is np.ndarray and len(env_ids.shape) == 1:
        return env_ids.dtype.char, env_ids.tobytes()
    # Lists with bools have no key: they equal lists of 0 and 1, but are not valid numbers of environments.
    return tuple(env_ids) if type(env_ids) is list and all(type(env) is int for env in env_ids) else None


def _check_shape(
    where: str, got: tuple[int, ...], expected: tuple[int, ...], leading_shape: tuple[int, ...], unit: str
) -> None:
    if got == expected:
        return
    if got == (*expected, 1):
        remedy = "Squeeze the last axis."
    elif got == (1, *expected):
        remedy = "Squeeze the first axis."
    elif leading_shape and got == expected[1:]:
        remedy = f"Pass a row for each of the {unit}."
    elif not leading_shape and got[1:] == expected:
        remedy = "Pass one environment's value, or declare num_envs."
    elif unit == "truncated steps":
        remedy = "Pass critic(rollout.final_obs)."
    else:
        remedy = "Pass the declared shape."
    suffix = f" for {leading_shape[0]} {unit}" if len(leading_shape) == 1 and leading_shape[0] != 1 else ""
    raise SchemaError(explain(where, f"shape {expected}{suffix}", got, remedy))


def _dtype_rank(dtype: torch.dtype) -> int:
    """Return the rank of a dtype: bool 0, integer 1, real 2, complex 3. Only casts to a lower rank lose meaning."""
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _cast(where: str, tensor: torch.Tensor, dtype: torch.dtype, overflowed: torch.Tensor | None) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    source, target = _dtype_rank(tensor.dtype), _dtype_rank(dtype)
    if source > target:
        remedy = "Pass bools, such as x != 0." if target == 0 else "Declare the field with that dtype, or convert it."
        raise SchemaError(explain(where, dtype_name(dtype), dtype_name(tensor.dtype), remedy))
    if target == 1:
        _check_integers_fit(where, tensor, dtype)
    converted = tensor.to(dtype)
    if target >= 2 and tensor.device.type != "meta" and _max_finite(dtype) < _max_finite(tensor.dtype):
        if _is_on_host(tensor):
            _check_numbers_fit(where, tensor, converted)
        elif overflowed is not None:
            overflowed += _find_overflows(tensor, converted).sum()
    return converted


def _is_on_host(tensor: torch.Tensor) -> bool:
    # Tests replace this function to simulate another device.
    return tensor.is_cpu


def _max_finite(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 1.0
    return float((torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype).max)


def _find_overflows(tensor: torch.Tensor, converted: torch.Tensor) -> torch.Tensor:
    """Return a mask of the finite numbers that became infinite."""
    infinite = converted.isinf()
    return infinite & tensor.isfinite() if tensor.is_floating_point() or tensor.is_complex() else infinite


def _check_numbers_fit(where: str, tensor: torch.Tensor, converted: torch.Tensor) -> None:
    # For few numbers, numpy is faster than torch.
    array = view_as_numpy(converted)
    if bool(converted.isfinite().all() if array is None else np.isfinite(array).all()):
        return
    is_overflow = _find_overflows(tensor, converted)
    if is_overflow.any():
        expected = f"finite numbers of at most {_max_finite(converted.dtype):.4g} ({dtype_name(converted.dtype)})"
        remedy = "Declare the field with a wider dtype, or look at what makes such numbers."
        raise SchemaError(explain(where, expected, tensor[is_overflow].view(-1)[0].item(), remedy))


def _check_integers_fit(where: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == torch.bool or not tensor.numel():
        return
    source, target = torch.iinfo(tensor.dtype), torch.iinfo(dtype)
    if target.min <= source.min and source.max <= target.max:
        return
    if tensor.device.type == "meta":
        got, remedy = f"{dtype_name(tensor.dtype)} without values", "Convert it first."
        raise SchemaError(explain(where, dtype_name(dtype), got, remedy))
    values = tensor.to(_HOST).numpy()
    smallest, largest = int(values.min()), int(values.max())
    if smallest < target.min or largest > target.max:
        expected = f"integers in [{target.min}, {target.max}] ({dtype_name(dtype)})"
        got = smallest if smallest == largest else f"[{smallest}, {largest}]"
        raise SchemaError(explain(where, expected, got, "Declare a wider dtype."))


def memory_overlaps(a: Any, b: Any) -> bool:
    """Whether two tensors or arrays share memory."""
    first, second = view_as_numpy(a), view_as_numpy(b)
    if first is None or second is None:
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and ranges_overlap(a, b)
    # The exact test is slow, so it runs only if the memory ranges overlap.
    return np.may_share_memory(first, second) and np.shares_memory(first, second)


_REUSED_REMEDY = "The environment reuses its array: stage(obs=…) before the step, or pass copies (also of constants)."


def refuse_reused_leaves(schema: Schema, obs: Sequence[Any], next_obs: Sequence[Any]) -> None:
    """Raise if `obs` and `next_obs` share memory: the environment has overwritten `obs`."""
    for i, *pair in zip(schema.leaf_indices["obs"], obs, next_obs, strict=True):
        if memory_overlaps(*pair):
            name = path_name(schema.paths[i])
            expected, got = f"memory apart from {name}", f"memory shared with {name}"
            raise SchemaError(explain(f"next_{name}", expected, got, _REUSED_REMEDY))


def make_misaligned_error(where: str) -> SchemaError:
    """Return the error for memory at an unaligned address."""
    return SchemaError(explain(where, "memory aligned to its dtype", "an odd address", "Pass a copy."))


def view_as_numpy(value: Any) -> np.ndarray | None:
    """View an array or a host tensor as an array; return None if numpy has no such view."""
    if isinstance(value, np.ndarray):
        return value
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
    if not is_plain or DTYPES.get(value.dtype) is None or value.is_neg() or value.is_conj():
        return None
    return (value.detach() if value.requires_grad else value).numpy()


def alias_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a host tensor with a separate torch storage, safe to hand to callers.

    `share_memory_` and torch.multiprocessing queues replace a tensor's storage and free the old one. With an alias, the
    native core's addresses stay valid.
    """
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return tensor
    # numpy lacks some of torch's dtypes, so the memory passes through numpy as bytes.
    as_bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(as_bytes).view(tensor.dtype).view(tensor.shape)


def as_numpy_if_cpu(tensor: torch.Tensor) -> Any:
    """Return a host tensor as an array, which is faster for few numbers; return other tensors unchanged."""
    view = view_as_numpy(tensor)
    return tensor if view is None else view


def ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory ranges from first to last byte of two tensors overlap."""
    if a.device != b.device or a.device.type == "meta" or a.layout != torch.strided or b.layout != torch.strided:
        return False
    (start_a, stop_a), (start_b, stop_b) = ((x.data_ptr(), x.data_ptr() + _spanned_bytes(x)) for x in (a, b))
    return start_a < stop_b and start_b < stop_a


def _spanned_bytes(x: torch.Tensor) -> int:
    last_offset = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (1 + last_offset) * x.element_size() if x.numel() else 0


def path_name(path: Path) -> str:
    """Return the name of a leaf in messages, such as `obs.camera`."""
    return ".".join(path)
