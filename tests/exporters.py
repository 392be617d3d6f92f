"""Objects that export the buffer protocol in every way that Python allows, and in some that it forbids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


class _Slot(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int), ("function", ctypes.c_void_p))


class _Spec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("basicsize", ctypes.c_int),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_Slot)),
    )


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
def _get(exporter: Any, view: Any, flags: int) -> int:
    return exporter._export(view.contents)


@ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.POINTER(_Buffer))
def _release(exporter: Any, view: Any) -> None:
    exporter._count_release(view.contents)


_GET_BUFFER, _RELEASE_BUFFER, _BASE_TYPE = 1, 2, 1 << 10  # Py_bf_getbuffer, Py_bf_releasebuffer, Py_TPFLAGS_BASETYPE
_from_spec = ctypes.pythonapi.PyType_FromSpec
_from_spec.restype, _from_spec.argtypes = ctypes.py_object, [ctypes.POINTER(_Spec)]
_alive: list[Any] = []


def _base(*slots: tuple[int, Any]) -> Any:
    """Return a type that exports buffers through the given slots, like a type written in C."""
    functions = [_Slot(number, ctypes.cast(function, ctypes.c_void_p)) for number, function in slots]
    spec = _Spec(b"tests.exporters.Base", object.__basicsize__, 0, _BASE_TYPE, (_Slot * (len(slots) + 1))(*functions))
    _alive.append(spec)
    return _from_spec(ctypes.byref(spec))


_Releasing: Any = _base((_GET_BUFFER, _get), (_RELEASE_BUFFER, _release))
_Plain: Any = _base((_GET_BUFFER, _get))


class _Exports:
    """Exports `data`. `strides=None` violates the protocol. `during` is called while a buffer is requested."""

    def __init__(
        self,
        data: bytes,
        kind: str,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        offset: int = 0,
        indirect: bool = False,
        during: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self.data, self.kind, self.itemsize, self.shape, self.strides = data, kind.encode(), itemsize, shape, strides
        self.offset, self.indirect, self.during, self.after = offset, indirect, during, after
        self.taken = self.released = 0
        self._kept: list[Any] = []

    def _export(self, view: _Buffer) -> int:
        self.during()
        memory = ctypes.create_string_buffer(b"\0" * self.offset + self.data, self.offset + len(self.data) + 1)
        numbers = ctypes.c_ssize_t * len(self.shape)
        shape = numbers(*self.shape)
        strides = None if self.strides is None else numbers(*self.strides)
        self._kept.append((memory, shape, strides))
        view.buf = ctypes.addressof(memory) + self.offset
        view.obj = id(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        view.len, view.itemsize, view.readonly, view.ndim = len(self.data), self.itemsize, 1, len(self.shape)
        view.format = self.kind
        view.shape = shape
        view.strides = strides
        view.suboffsets = numbers(*self.shape) if self.indirect else None
        view.internal = None
        self.taken += 1
        return 0

    def _count_release(self, view: _Buffer) -> None:
        self.released += 1
        if self.taken == self.released:  # nothing may read this memory any more
            for memory, _, _ in self._kept:
                ctypes.memset(memory, 0xEE, len(memory))
        self.after()


class Exporter(_Exports, _Releasing):
    """An exporter of new memory per request, overwritten after the last release; `after` is called at each release."""


class Lasting(_Exports, _Plain):
    """An exporter that is not notified of releases, for buffers that numpy drops during an error."""


def c_strides(itemsize: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in bytes of a contiguous array."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
