"""A buffer again, of one checkpoint: structure and sizes are verified before memory is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from relive.checkpoint.archive import Archive
from relive.checkpoint.manifest import Manifest, manifest_file
from relive.checkpoint.savable import KINDS
from relive.checkpoint.saving import Base, remember
from relive.checkpoint.segments import read_rows
from relive.errors import CorruptCheckpoint, IncompatibleCheckpoint, InvariantError, SchemaError, explain
from relive.fields.declarations import present
from relive.storage import Memory
from relive.storage.codec import Node, Stored
from relive.storage.snapshot import MOST_OF_NOTE, Saved

_OWN = {"name": "own"}
"""The memory of buffers that were saved before there was any other."""

Accept = Callable[[Any, Saved], None]
"""Takes a buffer and its saved state; a CheckpointError says that this is not what it should be."""


def restored(archive: Archive, manifest: Manifest, options: dict[str, Any], accept: Accept | None) -> Any:
    """The buffer that was saved, but for what `options` change; a warning says what they changed."""
    archive.require_files(manifest)
    where = manifest_file(manifest.number)
    if manifest.kind not in KINDS:
        remedy = "Load it with the version of relive that saved it."
        raise IncompatibleCheckpoint(explain(where, f"one of {', '.join(KINDS)}", manifest.kind, remedy))
    state = Stored(f"state/{manifest.state.name}", manifest.state.arrays, archive.fill("state", manifest.state))
    config = Node(f"{where}: config", manifest.config)
    saved = Saved(Node(f"{where}: values", manifest.values), state, config=config)
    if options["device"] is not None:
        present(Memory.of(options["device"]).device)
    try:
        buffer = _filled(archive, manifest, saved, options)
        if accept is not None:
            accept(buffer, saved)
    except MemoryError as error:
        text = f"{where}: the buffer does not fit into the memory of this machine. {error}"
        raise IncompatibleCheckpoint(text) from error
    except SchemaError as error:  # what a buffer refuses to be made of
        raise CorruptCheckpoint(f"{where}: the description of the buffer is invalid. {error}") from error
    except InvariantError as error:  # what a buffer never is
        raise CorruptCheckpoint(f"state/{manifest.state.name}: the contents are invalid. {error}") from error
    for change in _changes(manifest, buffer, names_memory=options["device"] is not None):
        warnings.warn(f"load: {change}", stacklevel=5)
    return buffer


def _filled(archive: Archive, manifest: Manifest, saved: Saved, options: dict[str, Any]) -> Any:
    """A buffer with its state and its rows, every invariant of which holds."""
    kind, config = KINDS[manifest.kind], saved.config
    saved.segments = {f"segments/{file.name}": file.arrays for file in manifest.segments}
    buffer = kind.from_config(config, saved, **options)
    saved.is_moved = str(buffer.device) != manifest.config.get("device")
    with getattr(buffer, "_refilled", nullcontext)():
        buffer.load_state(saved)
        if "note" in manifest.values:
            saved.part("note").tensors(MOST_OF_NOTE)
        saved.finish(manifest.kind)
        rows = buffer.rows()
        segments = read_rows(archive, manifest, rows)
    buffer.check()
    base = Base(manifest.lineage, manifest.number, segments, None if rows is None else rows.stop)
    # With another config its rows may lie elsewhere.
    remember(buffer, archive.root, base if buffer.config() == manifest.config else base.without_rows())
    return buffer


def _changes(manifest: Manifest, buffer: Any, *, names_memory: bool) -> list[str]:
    """How the buffer differs from the saved one; `names_memory`: the caller has said which memory it is to be in."""
    now, then = buffer.config(), manifest.config
    changes = []
    if "device" in then and then["device"] != now["device"]:
        became = f"device {then['device']} became {now['device']}"
        changes.append(f"{became}; draws will differ from those of the saved buffer.")
    after = buffer.state()[0].get("memory")
    if names_memory and after is not None:
        node = Node(f"{manifest_file(manifest.number)}: values: memory", manifest.values.get("memory", _OWN))
        before = node.entry("name").text()
        if before != after["name"]:
            changes.append(f"{before} memory became {after['name']} memory.")
    return changes
