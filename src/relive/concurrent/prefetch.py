"""A thread that gathers batches while the learner computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from relive import lazy
from relive.errors import CallSite, find_call_site, worker_call_site
from relive.replay.views import Transition, View
from relive.schema.assembly import check_batch_size, check_destination
from relive.schema.checks import check_positive_int

_MAX_DEPTH = 1 << 16
"""Maximum depth; a larger number is a mistake that would fill the memory."""


class BatchSource(Protocol):
    """An object with `sample`: a replay buffer, or a wrapper around one."""

    def sample(self, batch_size: int, view: View | None = None, *, device: Any = None) -> lazy.TensorDict: ...


def prefetch(
    replay: BatchSource, batch_size: int, view: View | None = None, depth: int = 2,
    device: torch.device | str | None = None,
) -> Prefetch:  # fmt: skip
    """Return an endless iterator over `replay.sample(batch_size, view, device=device)`, up to `depth` batches ahead.

    A separate thread calls `sample`: with a seed, and if nothing is added meanwhile, the batches equal those of
    successive calls. Added rows and updated priorities take effect `depth` batches later. An error of `sample` is
    raised in place of its batch; the following call tries again.

    Args:
        replay: a `ReplayBuffer`, a `Mixture`, or a `RateLimit` around one.
        batch_size: number of rows in a batch.
        view: what to read around each row; `Transition()` by default.
        depth: number of batches that are sampled ahead, at least 1.
        device: device to move batches to; None leaves batches on the buffer's device.

    >>> from relive import ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), seed=0)
    >>> replay.add([0.0, 0.0], 0.5, 1.0, terminated=False, truncated=False, next_obs=[1.0, 0.0])
    >>> with prefetch(replay, 4) as batches:
    ...     for _, batch in zip(range(3), batches):
    ...         assert batch["obs"].shape == (4, 2)
    """
    check_batch_size("prefetch", batch_size)
    check_positive_int("depth", depth, _MAX_DEPTH)
    check_destination(device)
    return Prefetch(_BatchQueue(replay, batch_size, Transition() if view is None else view, device, int(depth)))


class _BatchQueue:
    """The queue of batches between the thread that samples batches and the threads that use them.

    A signal handler may raise inside any call here. Threads therefore wait only in native queues, without a Python
    lock, and each `pop_batch` permits one more batch before it waits, to replace a batch that an exception has lost.
    """

    def __init__(self, source: BatchSource, batch_size: int, view: View, device: Any, depth: int) -> None:
        self._source, self._batch_size, self._view, self._device = source, batch_size, view, device
        self._depth = depth
        self._batches: SimpleQueue[lazy.TensorDict | BaseException | None] = SimpleQueue()
        """Batches, or the error that ended the worker; after `close`, None wakes a waiting thread."""
        self._sampling_permits: SimpleQueue[None] = SimpleQueue()
        """One entry per batch that the worker may sample without waiting."""
        for _ in range(depth):
            self._sampling_permits.put(None)
        self._lock = threading.RLock()
        self._worker: threading.Thread | None = None
        self.is_closed = False

    def pop_batch(self) -> lazy.TensorDict:
        with self._lock:
            is_idle = self._worker is None or not self._worker.is_alive()
            if is_idle and self._batches.empty() and not self.is_closed:
                sample_ahead = partial(self._sample_ahead, _enter_current_stream(), find_call_site())
                self._worker = threading.Thread(target=sample_ahead, name="relive.prefetch", daemon=True)
                self._worker.start()
        self._sampling_permits.put(None)
        batch = None if self.is_closed else self._batches.get()
        if batch is None:
            # The end marker is put back, because other threads may wait for it in `get`.
            self._batches.put(None)
            raise StopIteration
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self._batches.qsize()} of {self._depth} batches ready"
        return f"batch_size={self._batch_size}, view={self._view}; {state}, from {self._source!r}"

    def _sample_ahead(self, stream: AbstractContextManager[Any], call_site: CallSite) -> None:
        worker_call_site.set(call_site)
        while True:
            self._sampling_permits.get()
            if self.is_closed:
                return
            try:
                with stream:
                    batch = self._source.sample(self._batch_size, self._view, device=self._device)
            except BaseException as error:
                # The error is queued like a batch, and raised in the thread that waits for the next batch.
                with self._lock:
                    self._worker = None
                    self._batches.put(error)
                return
            self._batches.put(batch)

    def close(self) -> None:
        self.is_closed = True
        with suppress(Empty):
            while True:
                self._batches.get_nowait()
        self._batches.put(None)
        self._sampling_permits.put(None)
        worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()


def _enter_current_stream() -> AbstractContextManager[Any]:
    """Return the current CUDA stream, so that the next launch of the calling thread follows the batches."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else nullcontext()


class Prefetch(Iterator["lazy.TensorDict"]):
    """An endless iterator over batches, whose thread ends with `close()`, with a `with` block, or with the iterator."""

    def __init__(self, queue: _BatchQueue) -> None:
        self._queue = queue
        weakref.finalize(self, queue.close)

    def __next__(self) -> lazy.TensorDict:
        return self._queue.pop_batch()

    def __repr__(self) -> str:
        return f"Prefetch({self._queue!r})"

    def close(self) -> None:
        """End the thread and the iterator, and drop the batches that were sampled ahead."""
        self._queue.close()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
