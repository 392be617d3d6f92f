"""`FileOperations` that kill their process, fail, or record operations; and the disk after a power failure."""

from __future__ import annotations

import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import relive as rl
from relive.checkpoint.saving import save
from relive.storage.files import FOLDERS, FileOperations
from tests.checkpoint.traffic import KINDS, digest, equal

OPERATIONS = ("make_root", "create", "write", "sync", "rename", "sync_folder", "remove", "close")


def watch_files(operation: Callable[[str, int, tuple[Any, ...]], None]) -> type[FileOperations]:
    """Return `FileOperations` that call `operation(name, n, arguments)` before their n-th operation."""
    count = iter(range(1 << 30))

    def watched(name: str) -> Any:
        original = getattr(FileOperations, name)

        def call(self: FileOperations, *arguments: Any) -> Any:
            try:
                operation(name, next(count), (self, *arguments))
            except OSError:
                if name == "close":
                    original(self, *arguments)
                raise
            return original(self, *arguments)

        return call

    return type("Watched", (FileOperations,), {name: watched(name) for name in OPERATIONS})


def make_killing_files(point: int) -> type[FileOperations]:
    """Return `FileOperations` that kill their process at an operation; half of a write is done before."""

    def stop(name: str, n: int, arguments: tuple[Any, ...]) -> None:
        if n != point:
            return
        if name == "write":
            data = memoryview(arguments[2]).cast("B")
            os.write(arguments[1], data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    return watch_files(stop)


def save_old_checkpoint(kind: str, root: Path) -> Any:
    """Save a buffer with a history twice, the second time with new rows, and return its digest."""
    buffer = KINDS[kind].make()
    for n in range(17):
        KINDS[kind].act(buffer, n)
    buffer.save(root)
    for n in range(17, 23):
        KINDS[kind].act(buffer, n)
    buffer.save(root)
    return digest(buffer)


def load_and_change(kind: str, root: Path, steps: int = 1) -> Any:
    """Load the newest checkpoint and change the buffer a few times."""
    buffer = rl.load(root)
    for step in range(steps):
        change(kind, buffer, step)
    return buffer


def change(kind: str, buffer: Any, step: int) -> None:
    for n in range(23 + 4 * step, 27 + 4 * step):
        KINDS[kind].act(buffer, n)


def count_operations(kind: str, root: Path, copy: Path) -> list[str]:
    """Return the names of all file operations of the save that follows `save_old_checkpoint`."""
    names: list[str] = []
    shutil.copytree(root, copy)
    save(load_and_change(kind, copy), copy, files=watch_files(lambda name, *_: names.append(name)))
    shutil.rmtree(copy)
    return names


def load_digest(root: Path) -> Any:
    """Return the digest of the newest intact checkpoint; a warning about a skipped, damaged one is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return digest(rl.load(root))


def is_one_of(found: Any, *expected: Any) -> bool:
    """Whether a digest equals one of the candidates; None stands for no checkpoint."""
    return any(one is found if one is None or found is None else equal(found, one) for one in expected)


State = dict[str, dict[str, bytes]]
"""Contents of a disk: folder → file name → bytes."""


def read_state(root: Path) -> State:
    folders = {folder: root / folder for folder in FOLDERS} | {"": root}
    return {
        folder: {path.name: path.read_bytes() for path in at.iterdir() if path.is_file()}
        for folder, at in folders.items()
        if at.exists()
    }


class RecordedSave:
    """Records every file operation of a save as an entry of a log."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        open_files: dict[int, int] = {}

        def note(name: str, n: int, arguments: tuple[Any, ...]) -> None:
            _, *rest = arguments
            if name == "close":
                return
            if name in ("write", "sync"):
                rest[0] = open_files[rest[0]]
            if name == "write":
                rest[1] = bytes(rest[1])
            self.log.append((name, n, *rest))

        noted = watch_files(note)

        def create(files: FileOperations, name: str) -> int:
            file = noted.create(files, name)
            # The log names a file by the number of the operation that created it.
            open_files[file] = self.log[-1][1]
            return file

        self.files: type[FileOperations] = type("Recording", (noted,), {"create": create})


def after_power_loss(start: State, log: list[tuple[Any, ...]], rng: random.Random) -> State:
    """Return a possible state of the disk when the power fails after the operations of `log`.

    Unsynchronised bytes are complete, missing, partial or zero. Each file name in an unsynchronised folder exists or
    not, independently of other names.
    """
    data: dict[int, bytes] = {}
    safe: dict[int, int] = {}
    everywhere = ("", *FOLDERS)
    names: dict[str, dict[str, Any]] = {folder: dict(start.get(folder, {})) for folder in everywhere}
    durable: dict[str, dict[str, Any]] = {folder: dict(start.get(folder, {})) for folder in everywhere}
    pending: dict[str, list[tuple[str, Any]]] = {folder: [] for folder in everywhere}
    safe_folders, made = {"", *start}, set[str]()
    for name, n, *rest in log:
        if name == "make_root":
            made |= set(FOLDERS)
        elif name == "create":
            folder, base = _split(rest[0])
            data[n], safe[n] = b"", 0
            names[folder][base] = n
            pending[folder].append((base, n))
        elif name == "write":
            data[rest[0]] += rest[1]
        elif name == "sync":
            safe[rest[0]] = len(data[rest[0]])
        elif name == "rename":
            (source, old), (target, new) = _split(rest[0]), _split(rest[1])
            inode = names[source].pop(old)
            names[target][new] = inode
            pending[source].append((old, None))
            pending[target].append((new, inode))
        elif name == "remove":
            folder, base = _split(rest[0])
            names[folder].pop(base, None)
            pending[folder].append((base, None))
        elif name == "sync_folder":
            for base, inode in pending[rest[0]]:
                _apply(durable[rest[0]], base, inode)
            pending[rest[0]] = []
            safe_folders |= made if not rest[0] else set()
    chance = rng.choice((0.0, 0.5, 1.0, rng.random()))
    for folder, changes in pending.items():
        for base, inode in changes:
            if rng.random() < chance:
                _apply(durable[folder], base, inode)
    there = safe_folders | {folder for folder in made if rng.random() < chance}
    kept = {inode: _tear_bytes(data[inode], safe[inode], rng) for inode in data}
    return {
        folder: {base: kept[x] if isinstance(x, int) else x for base, x in found.items()}
        for folder, found in durable.items()
        if folder in there
    }


def _split(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    return folder, base


def _apply(found: dict[str, Any], base: str, inode: Any) -> None:
    if inode is None:
        found.pop(base, None)
    else:
        found[base] = inode


def _tear_bytes(data: bytes, safe: int, rng: random.Random) -> bytes:
    rest = data[safe:]
    cut = rng.randrange(len(rest) + 1)
    return data[:safe] + rng.choice((rest, b"", rest[:cut], bytes(len(rest)), rest[:cut] + bytes(len(rest) - cut)))


def write_state(state: State, root: Path) -> None:
    """Write a state to a real folder, over the files of an earlier one; existing folders are reused."""
    root.mkdir(exist_ok=True)
    for folder in FOLDERS:
        if folder not in state:
            shutil.rmtree(root / folder, ignore_errors=True)
    for folder, files in state.items():
        at = root / folder
        at.mkdir(exist_ok=True)
        for path in at.iterdir():
            if path.is_file() and path.name not in files:
                path.unlink()
        for name, data in files.items():
            (at / name).write_bytes(data)
