"""New processes in milliseconds, forked from a server that has only imported modules."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import relive as rl
from tests.checkpoint.traffic import fingerprint

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.preloaded"])


def apart(work: Callable[..., Any], *arguments: Any, timeout: float = 120) -> Any:
    """Return `work(*arguments)` of a new process; an AssertionError names its error or exit code."""
    return started(work, *arguments, timeout=timeout)()


def started(work: Callable[..., Any], *arguments: Any, timeout: float = 120) -> Callable[[], Any]:
    """Start `work(*arguments)` in a new process; return a function that waits for the result."""
    here, there = CONTEXT.Pipe(duplex=False)
    process: Any = CONTEXT.Process(target=_answer, args=(there, work, arguments))
    process.start()
    there.close()

    def answer() -> Any:
        try:
            reply = here.recv() if here.poll(timeout) else None
        except EOFError:
            reply = None
        if reply is None:
            process.kill()
        process.join()
        assert reply is not None, f"{work.__name__}{arguments} ended with {process.exitcode}"
        value, error = reply
        assert error is None, f"in a process of its own: {error}"
        return value

    return answer


def _answer(there: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        there.send((work(*arguments), None))
    except BaseException:
        there.send((None, traceback.format_exc()))


def killed(target: Callable[..., None], *arguments: Any) -> bool:
    """Run a process to its end; return whether it was killed."""
    process: Any = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def loaded_apart(root: Path) -> str | None:
    """Return the fingerprint of a checkpoint loaded in a new process; None if there is none."""
    return apart(_fingerprint, root)


def _fingerprint(root: Path) -> str | None:
    try:
        return fingerprint(rl.load(root))
    except rl.NoCheckpoint:
        return None
