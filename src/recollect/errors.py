"""What can go wrong, by kind. Every message says where, what was expected, what came, and what to do."""

from __future__ import annotations


class SchemaError(ValueError):
    """A shape, a dtype, a device, or a field that is missing or unknown."""


class NotReadyError(RuntimeError):
    """Too little data, or a step that must come first."""


class BufferFullError(RuntimeError):
    """No room for another step."""


class PriorityError(ValueError):
    """A priority that is negative, infinite or not a number."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not what was saved."""


class IncompatibleCheckpoint(CheckpointError):
    """A checkpoint of another kind of buffer, another schema or a newer format."""


class NoCheckpoint(CheckpointError):
    """A folder without any complete checkpoint."""


def explain(where: str, expected: object, got: object, remedy: str) -> str:
    """The one sentence pattern of all messages: `<where>: expected <what>, got <what>. <What to do>.`"""
    return f"{where}: expected {expected}, got {got}. {remedy}"
