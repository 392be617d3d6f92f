"""`state_dict`, `copy.deepcopy` and `pickle` of buffers, built on their snapshots.

A pickle contains the arrays as bytes, JSON, the class, the sampler, and the attributes that a subclass has added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn

import numpy as np
import torch

from relive.checkpoint.snapshot import Snapshot, State
from relive.errors import CheckpointError, InvariantError, SchemaError, explain
from relive.kernels import complete
from relive.schema.conversion import alias_memory, normalize_bools
from relive.schema.fields import DTYPES_BY_NAME, dtype_name
from relive.storage import Memory
from relive.storage.codec import Arrays, JsonNode, SnapshotReader, tensor_bytes, writable_memory

_STATE_KEYS = ("arrays", "config", "rows", "values")
_ARRAY_PARTS = ("rows", "arrays")
_VARIABLE_SETTINGS = ("device", "fields", "listeners", "sampler")
"""Settings of a saved buffer that `load_state_dict` does not compare: it verifies the state itself."""

PackedArrays = dict[str, tuple[str, tuple[int, ...], np.ndarray]]
"""Dtype, shape and bytes of each array. A pickled tensor would be moved to shared memory by torch."""


class StateDictMixin:
    """Adds `state_dict`, `copy.deepcopy` and `pickle` to a class with the decorator `register_buffer` and a `_lock`."""

    _lock: Any
    config: Callable[[], dict[str, Any]]
    state: Callable[[], State]
    load_state: Callable[[SnapshotReader], None]
    rows: Callable[[], Any]
    check: Callable[[], None]
    _checkpoints: dict[Any, Any]
    """Checkpoints that the next saves continue, by folder; missing before the first save or load."""
    _loop_over: str
    """Remedy in the error for a loop over the buffer."""

    def _replacing_contents(self) -> AbstractContextManager[None]:
        """Return a context manager to hold while the contents are replaced."""
        return nullcontext()

    def _reading_in_order(self) -> AbstractContextManager[None]:
        """Return a context manager to hold while rows are read from the first to the last."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` of a buffer with equal settings. The tensors share its memory.

        Moving them to another process (`share_memory_`, a queue of torch.multiprocessing) copies them.
        """
        with self._lock:
            state = _state_parts(self)
            return state | {part: {name: alias_memory(x) for name, x in state[part].items()} for part in _ARRAY_PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a buffer with equal settings: the same rows and ids, the same future draws.

        The state is verified before anything is replaced. An invalid state raises a SchemaError and changes nothing.
        """
        with self._lock:
            try:
                _require_state_parts(state)
                config = self.config()
                for name, value in config.items():
                    other = state["config"].get(name)
                    if name not in _VARIABLE_SETTINGS and other != value:
                        remedy = "Make the buffer with the settings of the saved buffer."
                        raise SchemaError(explain(f"load_state_dict: {name}", value, other, remedy))
                sampler = _other_settings(self).get("sampler")
                _build_buffer(state, _base_class(self), config, sampler=sampler).check()
                for root, previous in vars(self).get("_checkpoints", {}).items():
                    # The next save must write all rows, because the rows of the previous save are replaced.
                    self._checkpoints[root] = previous.without_rows()
                with self._replacing_contents():
                    complete(partial(_restore_contents, self, state))
            except (CheckpointError, InvariantError) as error:
                raise SchemaError(f"load_state_dict: {error}") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._lock:
            state = _copyable_state_parts(self)
            new = memo[id(self)] = _build_buffer(state, _base_class(self), state["config"], **_other_settings(self))
            attributes = _added_attributes(self)
        new.__class__ = type(self)
        vars(new).update(copy.deepcopy(attributes, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        if get_spawning_popen() is not None:
            where = f"starting a process with a {type(self).__name__}"
            remedy = "Pass handle() of a buffer in Memory.shared(), or save() it and load it."
            raise TypeError(explain(where, "a handle", "the buffer itself", remedy))
        with self._lock:
            state = _copyable_state_parts(self)
            parts = state["config"], state["values"], pack_arrays(state["arrays"]), pack_arrays(state["rows"])
            return _unpickled, (type(self), _base_class(self), _other_settings(self), *parts), _added_attributes(self)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)

    def __iter__(self, *_indices: Any) -> NoReturn:
        """Raise a TypeError: a loop could mean rows, episodes or batches."""
        expected, got = "a loop over the result of one of its methods", "a loop over the buffer"
        raise TypeError(explain(type(self).__name__, expected, got, self._loop_over))

    # The DataLoader of torch calls `__getitems__` for a batch.
    __getitems__ = __iter__


def _state_parts(buffer: Any) -> dict[str, Any]:
    """Return the parts of a state dict, which share the memory of a buffer."""
    snapshot = Snapshot.of(buffer)
    return {"rows": snapshot.columns, "arrays": snapshot.arrays, "values": snapshot.values, "config": snapshot.config}


def _copyable_state_parts(buffer: Any) -> dict[str, Any]:
    """Return the parts of a state dict; raise for shared and disk memory, which cannot be copied."""
    state = _state_parts(buffer)
    memory = state["values"].get("memory", {}).get("name", "own")
    if memory in ("shared", "disk"):
        remedy = "Pass handle() to another process, or save() it." if memory == "shared" else "Call save()."
        expected = "a buffer in a process's own memory"
        raise TypeError(explain(f"copy of a {type(buffer).__name__}", expected, f"{memory} memory", remedy))
    return state


def _require_state_parts(state: Any) -> None:
    """Raise unless an untrusted state dict has all parts."""
    names = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
    if names != list(_STATE_KEYS) or not all(isinstance(state[name], Mapping) for name in _STATE_KEYS):
        got = names if names != list(_STATE_KEYS) else [type(state[name]).__name__ for name in _STATE_KEYS]
        remedy = "Pass the result of state_dict()."
        raise SchemaError(explain("load_state_dict", f"dicts of the parts {list(_STATE_KEYS)}", got, remedy))


def _build_buffer(state: Mapping[str, Any], kind: Any, config: dict[str, Any], **changes: Any) -> Any:
    """Make a buffer from `config` and fill it with a state."""
    new = kind.from_config(JsonNode("config", config), _make_reader(state), **changes)
    _restore_contents(new, state)
    return new


def _make_reader(state: Mapping[str, Any], part: str = "arrays") -> SnapshotReader:
    """Return a reader of copies of the tensors in a part of an untrusted state."""
    tensors: Mapping[str, Any] = state[part]
    for name, x in tensors.items():
        is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
        if not isinstance(name, str) or not is_plain:
            got = f"{x.layout} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise JsonNode(f"state: {name}", got).error("a dense tensor with values")

    def read(name: str) -> torch.Tensor:
        return normalize_bools(tensors[name].detach().clone(memory_format=torch.contiguous_format))

    specs = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    return SnapshotReader(
        "state", specs, read, JsonNode("values", state["values"]), JsonNode("config", state["config"])
    )


def _restore_contents(buffer: Any, state: Mapping[str, Any]) -> None:
    """Replace the state and the rows of a buffer."""
    saved = _make_reader(state)
    buffer.load_state(saved)
    saved.require_all_read(type(buffer).__name__)
    rows = _make_reader(state, "rows")
    rows.copy_arrays_into(_state_parts(buffer)["rows"])
    rows.require_all_read(f"{type(buffer).__name__}'s rows")


def _base_class(buffer: Any) -> type[Any]:
    """Return the class that defines `from_config`: the buffer may be of a subclass."""
    return next(kind for kind in type(buffer).__mro__ if "from_config" in vars(kind))


def _other_settings(buffer: Any) -> dict[str, Any]:
    """Return the settings that a config does not contain: a custom sampler, and pinned memory."""
    sampler = {"sampler": buffer.unbound_sampler} if hasattr(buffer, "sampler") else {}
    is_pinned = buffer.state().values.get("memory", {}).get("name") == "pinned"
    return sampler | ({"device": Memory.pinned()} if is_pinned else {})


def _added_attributes(buffer: Any) -> dict[str, Any]:
    """Return the attributes that a subclass or a caller has added to a buffer."""
    saved = _make_reader(_state_parts(buffer))
    plain = _base_class(buffer).from_config(saved.config, saved, **{**_other_settings(buffer), "device": "meta"})
    return {name: value for name, value in vars(buffer).items() if name not in vars(plain) and name != "_checkpoints"}


def _unpickled(
    kind: type,
    buffer_class: Any,
    settings: dict[str, Any],
    config: dict[str, Any],
    values: dict[str, Any],
    *parts: PackedArrays,
) -> Any:
    """Make a buffer from its pickle. Pickles refer to this function by its name."""
    arrays, rows = map(unpack_arrays, parts)
    state = {"config": config, "values": values, "arrays": arrays, "rows": rows}
    new = _build_buffer(state, buffer_class, config, **settings)
    new.check()
    new.__class__ = kind
    return new


def pack_arrays(arrays: Arrays) -> PackedArrays:
    """Convert arrays for a pickle."""
    return {
        name: (dtype_name(x.dtype), tuple(x.shape), np.frombuffer(tensor_bytes(x), np.uint8).copy())
        for name, x in arrays.items()
    }


def unpack_arrays(arrays: PackedArrays) -> Arrays:
    """Restore arrays, the inverse of `pack_arrays`."""
    tensors = {
        name: torch.empty(shape, dtype=DTYPES_BY_NAME[dtype], device="cpu")
        for name, (dtype, shape, _) in arrays.items()
    }
    for name, tensor in tensors.items():
        writable_memory(tensor)[:] = arrays[name][2].data
    return tensors


def pack_state(buffer: StateDictMixin) -> dict[str, Any]:
    """Return the `state_dict` of a buffer, for the pickle of an object that contains the buffer."""
    # The lock is held until the tensors are packed, because they share the memory of the buffer.
    with buffer._lock:
        state = _state_parts(buffer)
        return state | {part: pack_arrays(state[part]) for part in _ARRAY_PARTS}


def load_packed_state(buffer: StateDictMixin, state: Mapping[str, Any]) -> None:
    """Restore the result of `pack_state`."""
    buffer.load_state_dict({**state, **{part: unpack_arrays(state[part]) for part in _ARRAY_PARTS}})
