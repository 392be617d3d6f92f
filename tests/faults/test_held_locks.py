"""Locks of stopped processes and temporarily unreadable files: typed errors within the time limit."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive import locking
from relive.inspector.saved import verify
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import digest, equal, fingerprint
from tests.faults.checkpoint.disk import save_old_checkpoint
from tests.faults.processes import CONTEXT, apart

PATIENCE = 0.5


@contextmanager
def stopped(hold: Any, argument: Any) -> Iterator[None]:
    """Run a process that acquires a lock, and stop it."""
    here, there = CONTEXT.Pipe(duplex=False)
    process: Any = CONTEXT.Process(target=hold, args=(argument, there))
    process.start()
    assert here.poll(120)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.join()


def hold_folder(root: Path, told: Any) -> None:
    with FileOperations(root).hold_lock(exclusive=True):
        told.send("taken")
        time.sleep(600)


def hold_buffer(handle: Any, told: Any) -> None:
    with rl.connect(handle)._lock:
        told.send("taken")
        time.sleep(600)


def impatient(call: str, argument: Any) -> tuple[str, str, float]:
    """Run a call with a lock timeout of `PATIENCE`; return its error, message and duration."""
    locking.LOCK_SECONDS = PATIENCE
    buffer = rl.ReplayBuffer(8, 2, 1)
    calls: dict[str, Any] = {
        "load": lambda: rl.load(argument),
        "save": lambda: buffer.save(argument),
        "check": lambda: list(verify(argument)),
    }
    began = time.monotonic()
    try:
        calls[call]()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


@pytest.mark.parametrize("call", ["load", "save", "check"])
def test_calls_time_out_on_a_folder_locked_by_a_stopped_process(tmp_path: Path, call: str) -> None:
    old = save_old_checkpoint("uniform", tmp_path)
    with stopped(hold_folder, tmp_path):
        kind, said, seconds = apart(impatient, call, tmp_path, timeout=60)
        assert kind == "CheckpointError"
        assert f"expected the folder's lock within {PATIENCE:g} s, got it held by process " in said
        assert seconds < 30
    assert equal(digest(rl.load(tmp_path)), old)


def shared_calls(handle: Any) -> dict[str, tuple[str, str, float]]:
    """Call a shared buffer whose lock another process holds; return each call's error, message and duration."""
    locking.LOCK_SECONDS = PATIENCE
    row = (np.zeros(2), np.zeros(1), 0.0, False, False, np.zeros(2))
    replay = rl.connect(handle)
    found = {}
    for name, call in {
        "add": lambda: replay.add(*row),
        "sample": lambda: replay.sample(4),
        "update_priority": lambda: replay.update_priority([0], [1.0]),
        "len": lambda: len(replay),
    }.items():
        began = time.monotonic()
        try:
            call()
            found[name] = "nothing", "", 0.0
        except Exception as error:
            found[name] = type(error).__name__, str(error), time.monotonic() - began
    return found


def test_calls_time_out_on_a_shared_buffer_locked_by_a_stopped_process() -> None:
    replay = rl.ReplayBuffer(8, 2, 1, sampler=rl.Prioritized(), device=rl.Memory.shared(), seed=0)
    for _ in range(3):
        replay.add(np.zeros(2), np.zeros(1), 0.0, False, False, np.zeros(2))
    with stopped(hold_buffer, replay.handle()):
        found = apart(shared_calls, replay.handle(), timeout=60)
    for name, (kind, said, seconds) in found.items():
        assert kind == "TimeoutError", name
        assert "shared buffer: expected its lock within 0.5 s, got it held by another process (thread " in said
        assert seconds < 30
    assert len(replay) == 3  # the kernel released the lock of the killed process
    replay.check()


# Too many open files


def failing(number: int, folder: str) -> type[FileOperations]:
    """Return `FileOperations` that cannot open the files of the newest checkpoint."""

    class Failing(FileOperations):
        def open(self, name: str) -> int:
            if name.startswith(f"{folder}/00000002"):
                raise OSError(number, os.strerror(number))
            return super().open(name)

    return Failing


@pytest.mark.parametrize("folder", ["manifests", "state", "segments"])
@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "ESTALE"])
def test_files_that_cannot_be_opened_now_do_not_count_as_damaged(tmp_path: Path, folder: str, name: str) -> None:
    save_old_checkpoint("uniform", tmp_path)
    with pytest.raises(rl.CheckpointError, match="Nothing is known to be wrong with the file") as caught:
        rl.load(tmp_path, files=failing(getattr(errno, name), folder))
    assert type(caught.value) is rl.CheckpointError
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint and loaded number 1"):
        rl.load(tmp_path, files=failing(errno.EIO, folder))


def load_with_few_files(root: Path, more: int) -> str:
    """Load with a limit of `more` further open files; return the fingerprint of the buffer or the error."""
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + more, limit[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffer: Any = rl.load(root)
    except Exception as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return fingerprint(buffer)


def test_with_few_files_left_the_newest_checkpoint_loads_or_nothing_does(tmp_path: Path) -> None:
    save_old_checkpoint("uniform", tmp_path)
    found = {more: apart(load_with_few_files, tmp_path, more) for more in range(8)}
    first, newest = (fingerprint(rl.load(tmp_path, number=number)) for number in (1, 2))
    assert first != newest
    assert set(found.values()) == {"CheckpointError", newest}, found
