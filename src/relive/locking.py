"""Locks of buffers, and changes that a signal cannot leave half done.

Python runs signal handlers between the instructions of Python functions: when a function begins, at backward jumps and
after calls. An exception of a handler (Ctrl-C) is raised there. A native call is therefore atomic, and a lock whose
`__enter__` and `__exit__` are native is always released.
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


def _read_seconds(name: str, default: float) -> float:
    """Read a positive number of seconds from an environment variable; warn and return `default` for another value."""
    text = os.environ.get(name, str(default))
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    remedy = f"Unset it, or set it to a number; {default:g} is used."
    warnings.warn(explain(name, "a positive number of seconds", repr(text), remedy), stacklevel=2)
    return default


LOCK_SECONDS = _read_seconds("RELIVE_LOCK_SECONDS", 600.0)
"""Maximum seconds that a call waits for another process to unlock a folder or a shared buffer."""

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
"""All objects with a lock. In a forked child their locks are replaced by a `_ForkedLock`."""


class _ForkedLock:
    """Lock of a buffer in a forked child: raises, because the child has only a copy of the buffer."""

    def __enter__(self) -> NoReturn:
        raise RuntimeError(
            "buffer: expected use in the process that made it, got use in a forked child. "
            "Make the buffer in the child, or start processes with the 'spawn' method."
        )

    def __exit__(self, *_: object) -> None: ...

    def within(self, seconds: float) -> _ForkedLock:
        return self


class ClosedLock:
    """Lock of a closed buffer: raises a ClosedError."""

    def __enter__(self) -> NoReturn:
        remedy = "Make a new buffer, or relive.load() the saved one."
        raise ClosedError(explain("buffer", "use before close()", "use after it", remedy))

    def __exit__(self, *_: object) -> None: ...


class GuardedLock:
    """Re-entrant lock that calls `guard` when it is acquired.

    Python version of `kernels.make_guarded_lock`; a signal can interrupt its methods, but not the methods of the native
    lock.
    """

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
    """Call `change`. If a signal handler raises during the call, repeat the call and then raise the exception.

    `change` must be idempotent: it assigns values that were computed before. The native version completes the change
    under any number of signals, this Python version under two.
    """
    try:
        change()
    except BaseException:
        try:
            change()
        except BaseException:
            change()
        raise


def make_lock(owner: Any, lock: Any = None) -> Any:
    """Return `lock`, or a new re-entrant lock, for the attribute `_lock` of `owner`. In a forked child it raises."""
    _owners.add(owner)
    return threading.RLock() if lock is None else lock


def make_recovery_callback(owner: Any) -> Callable[[], None]:
    """Return a function that calls `owner._recover` while `owner` exists, without keeping it alive."""
    reference = weakref.ref(owner)

    def recover() -> None:
        buffer = reference()
        if buffer is not None:
            buffer._recover()

    return recover


def permit_forked_copy(owner: Any) -> None:
    """Permit a forked child to use its copy of `owner`, whose changes the parent does not see.

    No thread of the parent may have used `owner` during the fork.
    """
    if isinstance(owner._lock, _ForkedLock):
        owner._lock = threading.RLock()


def _replace_locks_in_child() -> None:
    for owner in _owners:
        owner._lock = _ForkedLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks_in_child)
