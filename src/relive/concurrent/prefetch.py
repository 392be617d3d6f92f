"""A thread that gathers batches while the learner computes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from relive import lazy
from relive.replay.views import Transition, View
from relive.schema.assembly import check_batch_size, check_destination
from relive.schema.checks import positive

_MOST_BATCHES = 1 << 16
"""Made ahead: more is a mistake that would only end with the memory."""


class Source(Protocol):
    """An object with `sample`: a replay buffer, or a wrapper around one."""

    def sample(self, batch_size: int, view: View | None = None, *, device: Any = None) -> lazy.TensorDict: ...


def prefetch(
    replay: Source,
    batch_size: int,
    view: View | None = None,
    depth: int = 2,
    device: torch.device | str | None = None,
) -> Prefetch:
    """An endless iterator over `replay.sample(batch_size, view, device=device)`, with up to `depth` batches made ahead.

    A separate thread samples the batches in the order of `sample`: with a seed, and if nothing is added meanwhile, they
    are the same. Added rows and updated priorities take effect `depth` batches later. An error of `sample` is raised
    in its turn; the next batch is then tried again.

    Args:
        replay: a `ReplayBuffer`, a `Mixture`, or a `RateLimit` around one.
        batch_size: the number of rows in a batch.
        view: what to read around each row; `Transition()` by default.
        depth: the number of batches made ahead, at least 1.
        device: the device to move batches to; None leaves them on the buffer's device.

    >>> from relive import ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), seed=0)
    >>> replay.add([0.0, 0.0], 0.5, 1.0, terminated=False, truncated=False, next_obs=[1.0, 0.0])
    >>> with prefetch(replay, 4) as batches:
    ...     for _, batch in zip(range(3), batches):
    ...         assert batch["obs"].shape == (4, 2)
    """
    check_batch_size("prefetch", batch_size)
    positive("depth", depth, _MOST_BATCHES)
    check_destination(device)
    return Prefetch(_BatchQueue(replay, batch_size, Transition() if view is None else view, device, int(depth)))


class _BatchQueue:
    """The queue of batches between the thread that samples them and the thread that takes them."""

    def __init__(self, source: Source, batch_size: int, view: View, device: Any, depth: int) -> None:
        self._source, self._batch_size, self._view, self._device = source, batch_size, view, device
        self._depth = depth
        self._made: deque[lazy.TensorDict | BaseException] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self.is_closed = False

    def take(self) -> lazy.TensorDict:
        with self._changed:
            if self.is_closed:
                raise StopIteration
            if self._worker is None and not self._made:
                work = partial(self._make, _current_stream())
                self._worker = threading.Thread(target=work, name="relive.prefetch", daemon=True)
                self._worker.start()
            self._changed.wait_for(lambda: self._made or self.is_closed)
            if not self._made:
                raise StopIteration
            made = self._made.popleft()
            self._changed.notify_all()
        if isinstance(made, BaseException):
            raise made
        return made

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{len(self._made)} of {self._depth} batches ready"
        return f"batch_size={self._batch_size}, view={self._view}; {state}, from {self._source!r}"

    def _make(self, stream: AbstractContextManager[Any]) -> None:
        going = True
        while going:
            try:
                with stream:
                    made = self._source.sample(self._batch_size, self._view, device=self._device)
            except BaseException as error:  # raised in the thread that takes it
                made, going = error, False
            with self._changed:
                self._made.append(made)
                if not going:
                    self._worker = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(self._made) < self._depth or self.is_closed)
                going = going and not self.is_closed

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._made.clear()
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()


def _current_stream() -> AbstractContextManager[Any]:
    """The stream of the thread that takes batches: what is launched there is done before the learner's next launch."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else nullcontext()


class Prefetch(Iterator["lazy.TensorDict"]):
    """An endless iterator over batches; its thread ends with `close()`, with a `with` block, or with the iterator."""

    def __init__(self, queue: _BatchQueue) -> None:
        self._queue = queue
        weakref.finalize(self, queue.close)

    def __next__(self) -> lazy.TensorDict:
        return self._queue.take()

    def __repr__(self) -> str:
        return f"Prefetch({self._queue!r})"

    def close(self) -> None:
        """End the thread, drop the batches that were made ahead, and end the iterator."""
        self._queue.close()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
