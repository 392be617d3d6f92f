"""Buffers as ordinary Python objects: `state_dict`, `copy.deepcopy` and `pickle`, all made of config, state and rows.

A pickle holds bytes of arrays and JSON, beside the class, the sampler and whatever a subclass has added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn

import numpy as np
import torch

from relive.checkpoint.snapshot import Rows, Snapshot, SnapshotReader, State
from relive.errors import CheckpointError, InvariantError, SchemaError, explain
from relive.kernels import complete
from relive.schema.conversion import with_own_storage
from relive.storage import Memory
from relive.storage.codec import DTYPES, Arrays, Node, arrays_in_memory, bytes_of, dtype_name, memory_of

_STATE_KEYS = ("arrays", "config", "rows", "values")
_VARIABLE_SETTINGS = ("device", "fields", "listeners", "sampler")
"""Settings that a state may have otherwise: whatever they change is verified in the state itself."""

Packed = dict[str, tuple[str, tuple[int, ...], np.ndarray]]
"""Arrays as dtypes, shapes and bytes: torch's own pickler would move their memory."""


class StateDictMixin:
    """Makes a buffer an ordinary Python object, for a class that is `savable` and has a lock `_lock`."""

    _lock: Any
    config: Callable[[], dict[str, Any]]
    state: Callable[[], State]
    load_state: Callable[[SnapshotReader], None]
    rows: Callable[[], Any]
    check: Callable[[], None]
    _checkpoints: dict[Any, Any]
    """The checkpoints that saves continue, by folder; not there before the first save."""
    _loop_over: str
    """A sentence that says how to loop instead."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, for `load_state_dict` of a buffer made alike; the tensors share its memory.

        What is shared with another process (`share_memory_`, a queue of torch.multiprocessing) is a copy.
        """
        with self._lock:
            state = Snapshot.of(self)
            rows = {name: with_own_storage(x) for name, x in state.columns.items()}
            arrays = {name: with_own_storage(x) for name, x in state.arrays.items()}
            return {"rows": rows, "arrays": arrays, "values": state.values, "config": state.config}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what a buffer made alike was: the same rows under the same ids, the same draws to come.

        Everything is verified before anything is replaced: a state that no such buffer can have is a SchemaError and
        changes nothing.
        """
        with self._lock, _as_schema_error():
            snapshot = _parse_state(state)
            _require_alike(self.config(), snapshot.config)
            trial = _build_buffer(snapshot, _buffer_class(self), self.config(), sampler=_settings(self).get("sampler"))
            trial.check()
            for root, base in vars(self).get("_checkpoints", {}).items():
                self._checkpoints[root] = base.without_rows()  # they are replaced
            with getattr(self, "_refilled", nullcontext)():
                complete(partial(_fill, snapshot, self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._lock:
            snapshot = _take_snapshot(self)
            new = memo[id(self)] = _build_buffer(snapshot, _buffer_class(self), snapshot.config, **_settings(self))
            own = _added_attributes(self)
        return _as_class(new, type(self), copy.deepcopy(own, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_spawning(self)
        with self._lock:
            snapshot = _take_snapshot(self)
            parts = snapshot.config, snapshot.values, pack(snapshot.arrays), pack(snapshot.columns)
            return _unpickled, (type(self), _buffer_class(self), _settings(self), *parts), _added_attributes(self)

    def __setstate__(self, own: dict[str, Any]) -> None:
        vars(self).update(own)

    def __iter__(self, *_indices: Any) -> NoReturn:
        """Raises a TypeError: a loop could mean the rows, the episodes or the batches."""
        expected, got = "a loop over the result of one of its methods", "a loop over the buffer"
        raise TypeError(explain(type(self).__name__, expected, got, self._loop_over))

    __getitems__ = __iter__  # torch's DataLoader asks for a batch by it


def _take_snapshot(buffer: Any) -> Snapshot:
    """The snapshot of a buffer in this process's own memory."""
    snapshot = Snapshot.of(buffer)
    memory = snapshot.values.get("memory", {}).get("name", "own")
    if memory in ("shared", "disk"):
        remedy = "Pass handle() to another process, or save() it." if memory == "shared" else "Call save()."
        expected = "a buffer in a process's own memory"
        raise TypeError(explain(f"copy of a {type(buffer).__name__}", expected, f"{memory} memory", remedy))
    return snapshot


def _parse_state(state: Any) -> Snapshot:
    """The snapshot that a caller says a state is."""
    names = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
    if names != list(_STATE_KEYS) or not all(isinstance(state[name], Mapping) for name in _STATE_KEYS):
        got = names if names != list(_STATE_KEYS) else [type(state[name]).__name__ for name in _STATE_KEYS]
        remedy = "Pass what state_dict() of a buffer gave."
        raise SchemaError(explain("load_state_dict", f"dicts of the parts {list(_STATE_KEYS)}", got, remedy))
    return _snapshot(*(state[name] for name in ("config", "values", "arrays", "rows")))


def _snapshot(config: dict[str, Any], values: dict[str, Any], arrays: Arrays, columns: Arrays) -> Snapshot:
    none = torch.zeros(0, dtype=torch.int64, device="cpu")  # which rows they are is known from the state
    return Snapshot(config, values, arrays, Rows(columns, none, none))


def _build_buffer(snapshot: Snapshot, kind: Any, config: dict[str, Any], **changes: Any) -> Any:
    """A buffer of this snapshot, made as `config` says."""
    new = kind.from_config(Node("config", config), snapshot.reader(), **changes)
    _fill(snapshot, new)
    return new


def _fill(snapshot: Snapshot, buffer: Any) -> None:
    """Replace everything that changes in a buffer."""
    saved = snapshot.reader()
    buffer.load_state(saved)
    saved.finish(type(buffer).__name__)
    rows = SnapshotReader(Node("rows", {}), arrays_in_memory("state", snapshot.columns))
    rows.copy_into(Snapshot.of(buffer).columns)
    rows.finish(f"{type(buffer).__name__}'s rows")


def _buffer_class(buffer: Any) -> Any:
    """The class that knows how a buffer is made from a config."""
    return next(kind for kind in type(buffer).__mro__ if "from_config" in vars(kind))


def _settings(buffer: Any) -> dict[str, Any]:
    """Settings that a config cannot describe: a sampler of the caller's own, and pinned memory."""
    found = {"sampler": buffer.settings.sampler} if hasattr(buffer, "sampler") else {}
    is_pinned = buffer.state().values.get("memory", {}).get("name") == "pinned"
    return found | ({"device": Memory.pinned()} if is_pinned else {})


def _added_attributes(buffer: Any) -> dict[str, Any]:
    """The attributes that a subclass, or somebody else, has added to those of the class itself."""
    saved = Snapshot.of(buffer).reader()
    plain = _buffer_class(buffer).from_config(saved.config, saved, **{**_settings(buffer), "device": "meta"})
    return {name: value for name, value in vars(buffer).items() if name not in vars(plain) and name != "_checkpoints"}


def _as_class(new: Any, kind: type, own: dict[str, Any]) -> Any:
    new.__class__ = kind
    vars(new).update(own)
    return new


def _unpickled(
    kind: type, maker: Any, settings: dict[str, Any], config: dict[str, Any], values: dict[str, Any], *parts: Packed
) -> Any:
    """The buffer that `StateDictMixin.__reduce_ex__` took apart."""
    arrays, rows = map(unpack, parts)
    new = _build_buffer(_snapshot(config, values, arrays, rows), maker, config, **settings)
    new.check()
    return _as_class(new, kind, {})


def pack(arrays: Arrays) -> Packed:
    """Arrays for a pickle."""
    return {name: (dtype_name(x.dtype), tuple(x.shape), _bytes(x)) for name, x in arrays.items()}


def unpack(arrays: Packed) -> Arrays:
    """The arrays that `pack` was other."""
    found = {name: torch.empty(shape, dtype=DTYPES[dtype], device="cpu") for name, (dtype, shape, _) in arrays.items()}
    for name, tensor in found.items():
        memory_of(tensor)[:] = arrays[name][2].data
    return found


def packed_state(buffer: StateDictMixin) -> dict[str, Any]:
    """The `state_dict` of a buffer, for the pickle of an object that has the buffer."""
    with buffer._lock:  # the tensors of the state are the memory itself
        state = buffer.state_dict()
        return {**state, "rows": pack(state["rows"]), "arrays": pack(state["arrays"])}


def load_packed_state(buffer: StateDictMixin, state: Mapping[str, Any]) -> None:
    """Load what `packed_state` gave."""
    buffer.load_state_dict({**state, "rows": unpack(state["rows"]), "arrays": unpack(state["arrays"])})


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(bytes_of(tensor), np.uint8).copy()


def _refuse_spawning(buffer: Any) -> None:
    if get_spawning_popen() is not None:
        name, remedy = type(buffer).__name__, "Pass handle() of a buffer in Memory.shared(), or save() it and load it."
        raise TypeError(explain(f"starting a process with a {name}", "a handle", "the buffer itself", remedy))


def _require_alike(own: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if name not in _VARIABLE_SETTINGS and other.get(name) != value:
            remedy = "Make the buffer with the settings of the saved buffer."
            raise SchemaError(explain(f"load_state_dict: {name}", value, other.get(name), remedy))


@contextmanager
def _as_schema_error() -> Iterator[None]:
    """Whatever is wrong with a state is a SchemaError."""
    try:
        yield
    except (CheckpointError, InvariantError) as error:
        raise SchemaError(f"load_state_dict: {error}") from error
