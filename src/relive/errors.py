"""What can go wrong, by kind. Every message says where, what was expected, what came, and what to do."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but tab and newline, and those that turn the direction of writing."""


class SchemaError(ValueError):
    """A shape, a dtype, a device, or a field that is missing or unknown."""


class NotReadyError(RuntimeError):
    """Too little data, or a step that must come first."""


class BufferFullError(RuntimeError):
    """No room for another step."""


class PriorityError(ValueError):
    """A priority that is negative, infinite or not a number."""


class CheckpointError(Exception):
    """A checkpoint that could not be written or read."""


class CorruptCheckpoint(CheckpointError):
    """Files that are not what was saved: cut off, changed, missing, or made by somebody else."""


class IncompatibleCheckpoint(CheckpointError):
    """A whole checkpoint that does not fit here: another format, or something that it cannot hold."""


class NoCheckpoint(CheckpointError):
    """Nothing was ever saved there."""


class ShardUnavailable(RuntimeError):
    """A shard of a replay service did not answer in time, or is gone; `retry` says whether trying again may help."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message, retry)
        self.retry = retry

    def __str__(self) -> str:
        return self.args[0]


class IncompatibleService(ValueError):
    """A replay service of another version, or of another description than its client expects."""


class InvariantError(RuntimeError):
    """A buffer is not what its own methods make of it: something else has changed it."""


class DataWarning(UserWarning):
    """Legal data that looks like a mistake."""


_TAMPERED = "Load a checkpoint, or make a new buffer: the memory was changed from outside the buffer."


def require(holds: object, where: str, expected: object, got: object, remedy: str = _TAMPERED) -> None:
    """Raise an InvariantError unless something holds."""
    if not holds:
        raise InvariantError(explain(where, expected, got, remedy))


def uniterable(buffer: object, remedy: str) -> TypeError:
    """What a loop over a buffer raises: of its rows, episodes and batches it cannot know which are meant."""
    return TypeError(explain(type(buffer).__name__, "a loop over what its methods give", "one over the buffer", remedy))


def explain(where: str, expected: object, got: object, remedy: str) -> str:
    """The one sentence pattern of all messages: `<where>: expected <what>, got <what>. <What to do>.`"""
    return shown(f"{where}: expected {expected}, got {got}. {remedy}")


def shown(text: str) -> str:
    """Text with its control characters as escapes: a terminal shows a name, and does not obey it."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
