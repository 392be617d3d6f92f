"""The lock of device memory makes the stream of its holder wait for the stream of the last holder. Needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from relive.storage import LocalAllocator
from relive.storage.allocator import make_stream_lock

DEVICE = torch.device("cuda:1")


class Stream:
    """A stream that records the streams it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


class Streams:
    """Replaces the functions of torch.cuda for the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.is_capturing, self._device = Stream(), False, torch.device("cuda:0")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", self._captures)
        monkeypatch.setattr(torch.cuda, "device", self._on)

    def _captures(self) -> bool:
        return self.is_capturing and self._device == DEVICE

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device
        yield
        self._device = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def hold(lock: Any) -> None:
    with lock, lock:
        pass


def test_another_stream_waits_for_the_last_one_and_the_same_does_not(streams: Streams) -> None:
    lock, first, second = make_stream_lock(DEVICE), streams.current, Stream()
    for _ in range(2):
        hold(lock)
    streams.current = second
    for _ in range(2):
        hold(lock)
    streams.current = first
    hold(lock)
    assert (first.waits, second.waits) == ([second], [first])


def test_a_stream_that_captures_a_graph_waits_for_nobody_and_nobody_for_it(streams: Streams) -> None:
    lock, first = make_stream_lock(DEVICE), streams.current
    hold(lock)
    streams.current, streams.is_capturing = Stream(), True
    hold(lock)
    assert streams.current.waits == []
    streams.current, streams.is_capturing = Stream(), False
    hold(lock)
    assert streams.current.waits == [first]


def test_a_failure_gives_the_lock_back(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = make_stream_lock(DEVICE)
    with monkeypatch.context() as failing:
        failing.setattr(torch.cuda, "current_stream", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hold(lock)
    worker = threading.Thread(target=hold, args=(lock,), daemon=True)
    worker.start()
    worker.join(10)
    assert not worker.is_alive()


def test_memory_of_cuda_has_such_a_lock() -> None:
    assert type(LocalAllocator(DEVICE).lock(lambda: None)) is type(make_stream_lock(DEVICE))
    assert type(LocalAllocator(torch.device("cpu")).lock(lambda: None)) is type(threading.RLock())
