"""Exceptions from a signal handler at every point where Python runs signal handlers inside a call.

CPython checks for signals when a function begins, at backward jumps and after calls. A trace function makes a signal
pending right before an instruction; the interpreter itself then delivers it where it would deliver any other one.
"""

from __future__ import annotations

import _thread
import opcode
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LOOKS = tuple(
    number
    for name, number in opcode.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "FOR_ITER", "SEND", "INSTRUMENTED"))
)
"""Instructions after which CPython delivers signals."""


class Interrupt(KeyboardInterrupt):
    """Raised by the signal handler."""


@contextmanager
def handler(signum: int = signal.SIGUSR1) -> Iterator[None]:
    """Install a signal handler that raises `Interrupt`."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signum, interrupt)
    try:
        yield
    finally:
        signal.signal(signum, before)


class _Tracer:
    """Counts the events of a call; makes a signal pending at one of them."""

    def __init__(self, target: int | None) -> None:
        self.target, self.count = target, 0
        self.points: list[int] = []
        """Events right after which CPython checks for signals."""
        self._codes: dict[Any, bytes] = {}

    def _looks(self, frame: FrameType) -> bool:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code
        return code[frame.f_lasti] in _LOOKS

    def begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.count and self.points[-1:] != [self.count - 1]:
            self.points.append(self.count - 1)  # a function begins right after that event
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.local(frame, event, arg)

    def local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and self._looks(frame):
            self.points.append(self.count)
        if self.count == self.target:
            sys.settrace(None)
            # `map` instead of a call, after which the handler would run here.
            (_,) = map(_thread.interrupt_main, (signal.SIGUSR1,))
            return None
        self.count += 1
        return self.local


def _is_interrupted(call: Callable[[], Any], tracer: _Tracer) -> bool:
    """Whether a call was interrupted."""
    before = sys.gettrace()
    try:
        sys.settrace(tracer.begin)
        call()
        sys.settrace(None)
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def points(call: Callable[[], Any]) -> list[int]:
    """Run a call; return the points at which a signal can interrupt it."""
    tracer = _Tracer(None)
    _is_interrupted(call, tracer)
    return tracer.points


def interrupted(call: Callable[[], Any], point: int) -> bool:
    """Run a call with a signal at one of its `points`; return whether it was interrupted."""
    return _is_interrupted(call, _Tracer(point))


class _Worker:
    """A thread that acquires locks."""

    def __init__(self) -> None:
        self.locks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.locks.get():
                self.taken.put(None)


_workers: list[_Worker] = []


def is_free(lock: Any, seconds: float) -> bool:
    """Whether another thread can acquire a lock within some seconds."""
    worker = _workers.pop() if _workers else _Worker()
    worker.locks.put(lock)
    try:
        worker.taken.get(timeout=seconds)
    except queue.Empty:
        return False
    _workers.append(worker)
    return True
