"""One lock per buffer, changes that a signal cannot leave half-done, and a clear error for a forked child.

Python runs signal handlers between the instructions of Python functions: when a function begins, at backward jumps and
after calls. An exception that a handler raises (Ctrl-C) comes there. So a native call is one change, and a lock whose
`__enter__` and `__exit__` are native cannot be lost.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from relive.errors import ClosedError, explain


def _seconds(name: str, default: float) -> float:
    """A positive number of an environment variable; of any other text a warning, and the number `default`."""
    text = os.environ.get(name, str(default))
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    remedy = f"Unset it, or set it to a number; {default:g} is used."
    warnings.warn(explain(name, "a positive number of seconds", repr(text), remedy), stacklevel=2)
    return default


LOCK_SECONDS = _seconds("RELIVE_LOCK_SECONDS", 600.0)
"""How long a call waits for a process that holds a folder or a shared buffer: longer than any save should take."""

_owners: weakref.WeakSet[Any] = weakref.WeakSet()


class _ForkedLock:
    """Replaces the lock of a buffer in a forked child, which has only a copy of its parent's buffer."""

    def __enter__(self) -> NoReturn:
        raise RuntimeError(
            "buffer: expected use in the process that made it, got use in a forked child. "
            "Make the buffer in the child, or start processes with the 'spawn' method."
        )

    def __exit__(self, *_: object) -> None: ...

    def within(self, seconds: float) -> _ForkedLock:
        return self


class ClosedLock:
    """Replaces the lock of a closed buffer."""

    def __enter__(self) -> NoReturn:
        remedy = "Make a new buffer, or relive.load() the saved one."
        raise ClosedError(explain("buffer", "use before close()", "use after it", remedy))

    def __exit__(self, *_: object) -> None: ...


class GuardedLock:
    """See `kernels.guarded_lock`; this twin of the native one can be lost to a signal while it is taken or left."""

    def __init__(self, guard: Callable[[], object]) -> None:
        self._lock, self._guard = threading.RLock(), guard

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._guard()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def complete(change: Callable[[], object]) -> None:
    """Call `change`, and call it again if an exception from a signal handler has interrupted it; then that is raised.

    All that it does are assignments of what was computed before, so that a second call leads to the same. The native
    twin withstands any number of signals, this one two.
    """
    try:
        change()
    except BaseException:
        try:
            change()
        except BaseException:
            change()
        raise


def lock_for(owner: Any, lock: Any = None) -> Any:
    """A re-entrant lock for `owner`, which keeps it as `_lock`; in a forked child that lock refuses to be taken."""
    _owners.add(owner)
    return threading.RLock() if lock is None else lock


def recovery_callback(owner: Any) -> Callable[[], None]:
    """A function that calls `owner._recover`, for the owner's lock: it does not keep the owner alive."""
    reference = weakref.ref(owner)

    def recover() -> None:
        buffer = reference()
        if buffer is not None:
            buffer._recover()

    return recover


def use_copy(owner: Any) -> None:
    """In a forked child: let it use its copy of `owner`, which no thread of its parent may have been using.

    Nothing that is written there reaches the parent.
    """
    if isinstance(owner._lock, _ForkedLock):
        owner._lock = threading.RLock()


def _refuse_forked() -> None:
    for owner in _owners:
        owner._lock = _ForkedLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_forked)
