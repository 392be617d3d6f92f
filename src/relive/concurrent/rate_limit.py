"""A limit on the ratio of samples to inserts: the faster side waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Literal

from relive import lazy
from relive.errors import ClosedError, SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.views import View
from relive.schema.assembly import check_batch_size, check_destination
from relive.schema.checks import check_finite, check_positive_int
from relive.schema.conversion import convert_env_ids
from relive.schema.suggestions import suggests_keywords

_MAX_RATIO = 1e9
"""Maximum ratio, up to which float64 is exact for 9 million inserts."""
_PAUSE_SECONDS = (0.0002, 0.005)
"""Seconds of the first and of the longest pause between two checks of the counts."""


class RateLimit:
    """A replay buffer whose writers and samplers wait for each other.

    samples = samples_per_insert · (inserts − min_size) ± tolerance. A side that is ahead by more than the tolerance
    waits. The limit counts rows, not calls: `sample(256)` counts as 256 samples.

    Threads share one RateLimit. Each process makes its own, with the same settings, around the same buffer in shared
    memory. The counts include all rows that a RateLimit has admitted since the buffer was made, also dummy steps.

    A learner calls `close()` when it stops: every waiting and later call, in any process, raises a ClosedError. A
    learner that is killed closes nothing: pass `timeout` if that may happen.

    Args:
        replay: the buffer.
        samples_per_insert: mean number of times that each transition is sampled.
        min_size: number of stored transitions before sampling begins.
        tolerance: number of samples by which either side may be ahead; by default the samples of `min_size`
            transitions or of one step of all environments, whichever is more.
        timeout: seconds that a call waits before it raises a TimeoutError with the reason; None waits without limit.

    >>> replay = ReplayBuffer(100, obs=1, action=(), seed=0)
    >>> limit = RateLimit(replay, samples_per_insert=4, min_size=2, tolerance=16, timeout=0.01)
    >>> for step in range(4):
    ...     limit.add([step], 0.0, 0.0, False, False, [step + 1])
    >>> len(limit.sample(16))
    16
    """

    @suggests_keywords
    def __init__(
        self, replay: ReplayBuffer, *, samples_per_insert: float, min_size: int = 1, tolerance: float | None = None,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.replay = replay
        self.samples_per_insert = check_finite("samples_per_insert", samples_per_insert, may_be_zero=False)
        if self.samples_per_insert > _MAX_RATIO:
            remedy = "Sample the buffer without a RateLimit."
            raise SchemaError(explain("samples_per_insert", f"at most {_MAX_RATIO:g}", samples_per_insert, remedy))
        self.min_size = check_positive_int("min_size", min_size)
        self._counts = replay._traffic.numpy()
        self._closed_flag = replay._limit_closed.numpy()
        self._max_rows = {"insert": replay.num_envs or 1, "sample": 1}
        """Largest number of rows of one call so far, by side of call."""
        default_tolerance = self.samples_per_insert * max(self.min_size, replay.num_envs or 1)
        self.tolerance = default_tolerance if tolerance is None else check_finite("tolerance", tolerance)
        self.timeout = None if timeout is None else check_finite("timeout", timeout)
        if self.min_size > replay.capacity:
            remedy = "Lower min_size; otherwise sampling would never begin."
            raise SchemaError(explain("min_size", f"at most the capacity {replay.capacity}", self.min_size, remedy))
        self._refuse_deadlock("insert", self._max_rows["insert"])

    @property
    def inserted(self) -> int:
        """Number of rows added through a RateLimit of this buffer."""
        return int(self._counts[0])

    @property
    def sampled(self) -> int:
        """Number of rows sampled through a RateLimit of this buffer."""
        return int(self._counts[1])

    def add(self, *args: Any, env_ids: Any = None, **fields: Any) -> None:
        """Wait while inserts are ahead of samples, then call `replay.add`."""
        self._wait_and_insert(partial(self.replay.add, *args, env_ids=env_ids, **fields), env_ids)

    def add_step(self, *args: Any, env_ids: Any = None, **fields: Any) -> None:
        """Wait while inserts are ahead of samples, then call `replay.add_step`."""
        self._wait_and_insert(partial(self.replay.add_step, *args, env_ids=env_ids, **fields), env_ids)

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """Wait while inserts are ahead of samples, then call `replay.extend`."""
        steps = len(batch["terminated"])
        self._wait_and_insert(partial(self.replay.extend, batch, env_ids=env_ids), env_ids, steps)

    def sample(
        self, batch_size: int, view: View | None = None, *, device: Any = None, out: lazy.TensorDict | None = None
    ) -> lazy.TensorDict:
        """Wait while samples are ahead of inserts, then return a batch of `replay.sample`."""
        check_batch_size("sample", batch_size)
        check_destination(device, out)
        sample = partial(self.replay.sample, batch_size, view, device=device, out=out)
        return self._wait_and_call("sample", batch_size, sample)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Call `replay.update_priority` without waiting."""
        self._require_open_limit("update_priority")
        return self.replay.update_priority(index, priority)

    def write(self, index: Any, **fields: Any) -> int:
        """Call `replay.write` without waiting."""
        self._require_open_limit("write")
        return self.replay.write(index, **fields)

    def close(self) -> None:
        """Make every waiting or later call through a RateLimit of this buffer, in any process, raise a ClosedError.

        The buffer stays open. A buffer loaded from a checkpoint has an open limit.
        """
        self._closed_flag[0] = True

    def _require_open_limit(self, where: str) -> None:
        if self._closed_flag[0]:
            remedy = "End this actor or learner, or use the buffer itself."
            raise ClosedError(explain(where, "a RateLimit that is open", "one after close()", remedy))

    def __len__(self) -> int:
        return len(self.replay)

    def __repr__(self) -> str:
        return (
            f"RateLimit(samples_per_insert={self.samples_per_insert:g}, min_size={self.min_size}, "
            f"tolerance={self.tolerance:g}; {self.inserted} inserts, {self.sampled} samples of {self.replay!r})"
        )

    def _wait_and_insert(self, write_rows: Callable[[], None], env_ids: Any, num_steps: int = 1) -> None:
        replay = self.replay
        envs = None if env_ids is None else convert_env_ids(env_ids, replay.num_envs, replay.device)
        self._wait_and_call("insert", num_steps * ((replay.num_envs or 1) if envs is None else len(envs)), write_rows)

    def _wait_and_call(self, side: Literal["insert", "sample"], num_rows: int, call: Callable[[], Any]) -> Any:
        self._require_open_limit(side)
        if num_rows > self._max_rows[side]:
            self._refuse_deadlock(side, num_rows)
            self._max_rows[side] = num_rows
        start, pause = time.monotonic(), _PAUSE_SECONDS[0]
        while True:
            with self.replay._lock:
                self._require_open_limit(side)
                reason = self.waits_for(side, num_rows)
                if reason is None:
                    return self._call_and_count(side, num_rows, call)
            waited_seconds = time.monotonic() - start
            if self.timeout is not None and waited_seconds >= self.timeout:
                raise TimeoutError(f"{side}: waited {waited_seconds:.3g} s. {reason}")
            time.sleep(min(pause, inf if self.timeout is None else self.timeout - waited_seconds))
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _call_and_count(self, side: Literal["insert", "sample"], num_rows: int, call: Callable[[], Any]) -> Any:
        """Make a call and count its rows; the caller holds the lock."""
        if side == "sample":
            result = call()
            self._counts[1] += num_rows
            return result
        try:
            # The write itself counts the rows, because a signal may interrupt right after the write.
            self.replay._num_admitted = self.inserted + num_rows
            return call()
        finally:
            self.replay._num_admitted = None

    def waits_for(self, kind: Literal["insert", "sample"], rows: int) -> str | None:
        """Return why a call of `rows` rows would wait now, as a sentence; None if it would not wait."""
        num_stored = len(self.replay)
        if kind == "sample" and num_stored < self.min_size:
            return f"Sampling begins with {self.min_size} stored transitions, and there are {num_stored}: add more."
        surplus = self.samples_per_insert * (self.inserted - self.min_size) - self.sampled
        counts = (
            f"{self.inserted} inserts and {self.sampled} samples, at {self.samples_per_insert:g} samples per insert "
            f"after the first {self.min_size}"
        )
        if kind == "insert" and surplus + self.samples_per_insert * rows > self.tolerance:
            # Inserts never wait before `min_size` rows are stored, because sampling cannot begin earlier.
            return None if num_stored < self.min_size else f"Inserts are ahead ({counts}): sample more."
        if kind == "sample" and surplus - rows < -self.tolerance:
            return f"Samples are ahead ({counts}): add more."
        return None

    def _refuse_deadlock(self, side: Literal["insert", "sample"], num_rows: int) -> None:
        """Raise if the tolerance is so small that an insert and a sample could wait for each other."""
        max_rows = self._max_rows | {side: num_rows}
        min_tolerance = (self.samples_per_insert * max_rows["insert"] + max_rows["sample"]) / 2
        if self.tolerance < min_tolerance:
            expected = (
                f"at least {min_tolerance:g} for {max_rows['insert']} inserts and {max_rows['sample']} samples at once"
            )
            remedy = (
                "Raise the tolerance or use smaller batches; otherwise both sides could wait for each other forever."
            )
            raise SchemaError(explain("tolerance", expected, f"{self.tolerance:g}", remedy))
