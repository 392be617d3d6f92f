"""Exceptions of the package, and the pattern of their messages: where, expected, got, what to do."""

from __future__ import annotations

import re
import sys
import warnings
from contextvars import ContextVar
from typing import Any, NamedTuple

_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that change the direction of writing."""


class SchemaError(ValueError):
    """A shape, a dtype or a device does not fit, or a field is missing or unknown."""


class NotReadyError(RuntimeError):
    """Too little data is stored, or a step that must come first is missing."""


class BufferFullError(RuntimeError):
    """The buffer has no space for one more step."""


class ClosedError(RuntimeError):
    """A buffer or a rate limit is used after its `close()`."""


class PriorityError(ValueError):
    """A priority is negative, infinite or not a number."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read."""


class CorruptCheckpoint(CheckpointError):
    """Files differ from what was saved: they are cut off, changed, missing, or not written by relive."""


class IncompatibleCheckpoint(CheckpointError):
    """The checkpoint is intact but does not fit: its format is newer, or its buffer is not the expected one."""


class NoCheckpoint(CheckpointError):
    """The folder holds no checkpoint."""


class ShardUnavailable(RuntimeError):
    """A shard of a replay service did not answer in time, or is gone. `retry` is whether a later call may succeed."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message, retry)
        self.retry = retry

    def __str__(self) -> str:
        return self.args[0]


class IncompatibleService(ValueError):
    """A replay service has a different version, or different settings than its client expects."""


class InvariantError(RuntimeError):
    """A buffer violates an invariant: something other than its own methods has changed its memory."""


class DataWarning(UserWarning):
    """Data is legal but looks like a mistake."""


class CallSite(NamedTuple):
    """The line of a caller's code at which a warning is issued: the last arguments of `warnings.warn_explicit`."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any]


worker_call_site: ContextVar[CallSite | None] = ContextVar("worker_call_site", default=None)
"""Line of the caller's code for which a worker thread works; None in other threads."""


def find_call_site() -> CallSite:
    """Return the line that called this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "relive":
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""), registry)


def warn_user(message: str, category: type[Warning] = DataWarning) -> None:
    """Issue a warning at the line that called this library."""
    warnings.warn_explicit(message, category, *(worker_call_site.get() or find_call_site()))


_TAMPERED_REMEDY = "Load a checkpoint, or make a new buffer: the memory was changed from outside the buffer."


def verify(condition: object, where: str, expected: object, got: object) -> None:
    """Raise an InvariantError unless `condition` is true."""
    if not condition:
        raise InvariantError(explain(where, expected, got, _TAMPERED_REMEDY))


def explain(where: str, expected: object, got: object, remedy: str) -> str:
    """Return a message in the pattern of all errors: `<where>: expected <what>, got <what>. <What to do>.`"""
    return escape_controls(f"{where}: expected {expected}, got {got}. {remedy}")


def escape_controls(text: str) -> str:
    """Escape control characters, which a terminal would otherwise execute."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def explain_infinite_rewards(count: int) -> str:
    """Return the warning for infinite or NaN rewards."""
    remedy = "Everything that is learnt from them is no number either: look at the environment."
    return explain("reward", "finite numbers", f"infinite ones or NaN {count:,} times", remedy)
