"""Reads untrusted files within memory limits, imports optional libraries, and writes datasets atomically."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

from relive.checkpoint.progress import show_progress
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.schema.fields import DTYPES

MAX_JSON_BYTES = 1 << 21
"""Maximum bytes of a JSON document, which takes up to 24 times as much memory when it is parsed."""

_SMALL_BUFFER_BYTES = 1 << 24
"""Bytes that a new buffer may have, however small the file is."""
_MAX_EXPANSION = 1000
"""Maximum ratio of the bytes of a larger new buffer to the bytes of the file. Deflate and videos come close to this
ratio; decompression bombs exceed it."""

_UNTRUSTED_REMEDY = "Do not read a dataset that you do not trust; write it anew."


def dataset_error(where: str, expected: str, got: object, remedy: str = _UNTRUSTED_REMEDY) -> SchemaError:
    """Return the error for a dataset that does not fit; the default remedy is for damaged and forged files."""
    return SchemaError(explain(where, expected, got, remedy))


@contextmanager
def convert_errors(where: str, expected: str) -> Iterator[None]:
    """Turn errors that a library raises for damaged bytes into a SchemaError that names the file.

    Wrap only calls of the library: other errors would be hidden.
    """
    try:
        yield
    except (SchemaError, ImportError):
        raise
    except FileNotFoundError as error:
        got = f"no file {error.filename or where}"
        raise dataset_error(where, expected, got, "Check the path, and that the dataset is complete.") from error
    except Exception as error:
        raise dataset_error(where, expected, f"{type(error).__name__}: {error}", "Copy it again.") from error


def import_extra(module: str, extra: str, title: str | None = None) -> ModuleType:
    """Import an optional library; if it is missing, raise an ImportError that names the extra of relive to install."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f'Run pip install ".[{extra}]" in a clone of relive.'
        raise ImportError(explain("relive.datasets", f"{title or module} to be installed", error, remedy)) from error


def compute_memory_limit(dataset_bytes: int) -> int:
    """Return the memory limit of a reader for a dataset of `dataset_bytes` bytes, without the buffer that it fills."""
    return (64 << 20) + 20 * dataset_bytes


def compute_decoding_limit(dataset_bytes: int) -> int:
    """Return the part of `compute_memory_limit` for decoding one chunk, one page, or the copies of a step."""
    return compute_memory_limit(dataset_bytes) * 3 // 8


def refuse_oversized_buffer(where: str, num_rows: int, row_bytes: int, file_bytes: int) -> None:
    """Raise if the new buffer for a file would be much larger than the file."""
    max_bytes = _SMALL_BUFFER_BYTES + _MAX_EXPANSION * file_bytes
    if num_rows * row_bytes > max_bytes:
        expected = f"steps of at most {max_bytes:,} bytes, {_MAX_EXPANSION:,} times the {file_bytes:,} of the file"
        remedy = "If you trust it, make a buffer of that size and pass it."
        raise dataset_error(where, expected, f"{num_rows * row_bytes:,} bytes in {num_rows:,} rows", remedy)


def parse_json(where: str, body: bytes, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse a JSON object; raise if the document is longer than `max_bytes`."""
    if len(body) > max_bytes:
        raise dataset_error(where, f"at most {max_bytes} bytes", "more")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise dataset_error(where, "JSON", error) from None
    if not isinstance(document, dict):
        raise dataset_error(where, "a JSON object", reprlib.repr(document))
    return document


def parse_sizes(where: str, value: Any, min_size: int = 0) -> tuple[int, ...]:
    """Parse the sizes of at most 16 axes, each at least `min_size`."""
    is_list = isinstance(value, list) and len(value) <= 16
    if not is_list or not all(type(size) is int and min_size <= size < 1 << 62 for size in value):
        raise dataset_error(where, f"a list of at most 16 sizes from {min_size} on", reprlib.repr(value))
    return tuple(value)


def require_time_order(name: str, replay: Any) -> None:
    """Raise unless `replay` stores the observations of an episode in order."""
    if type(replay) is not ReplayBuffer or replay.storage.stores_next_obs:
        remedy = 'Use a ReplayBuffer with next_obs="shared": only it stores the observations of an episode in order.'
        raise dataset_error(name, "a replay buffer in time order", repr(replay), remedy)


def refuse_nested_fields(name: str, fields: Mapping[str, Any], field_names: Iterable[str], remedy: str) -> None:
    """Raise if one of `field_names` has parts, which the format cannot store."""
    for field in field_names:
        if isinstance(fields[field], dict):
            raise dataset_error(name, f"one field in {field}", f"the fields {', '.join(fields[field])}", remedy)


def read_episode_arrays(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Yield each episode as nested dicts of arrays [T, …]; a terminal shows the progress of long writes."""
    for episode in show_progress(replay.episodes(), len(replay), "writing episodes", len):
        yield {name: _tensors_to_arrays(value) for name, value in episode.items() if name != "index"}


def _tensors_to_arrays(value: Any) -> Any:
    """Convert nested tensors to nested arrays; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: _tensors_to_arrays(part) for name, part in value.items()}


@contextmanager
def write_atomically(name: str, path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; afterwards the file or folder is moved to `path`, which must not exist."""
    path = Path(path)
    _require_absent(name, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".relive-", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        try:
            if unfinished.is_dir():
                unfinished.rename(path)
            else:
                # A link, unlike a rename, cannot replace a file that another process has made at `path` meanwhile.
                os.link(unfinished, path)
        except OSError:
            _require_absent(name, path)
            # The link failed although `path` is free, as on a file system without hard links, so the file is renamed.
            unfinished.rename(path)


def _require_absent(name: str, path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            explain(name, "a path that does not exist", repr(str(path)), "Delete it, or pass another.")
        )
