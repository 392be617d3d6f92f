"""How often each row is sampled, kept near a ratio by letting the faster side wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from numbers import Real
from typing import Any, Literal

from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.fields.batch import check_size
from relive.fields.conversion import environments
from relive.fields.schema import positive
from relive.fields.vocabulary import answers
from relive.replay.buffer import ReplayBuffer
from relive.replay.views import View

_KINDS = ("insert", "sample")
_PAUSES = (0.0002, 0.005)
"""Seconds between two looks at what the other side has done: the first, and the longest."""


class RateLimit:
    """A replay buffer whose writers and samplers wait for each other.

    samples = samples_per_insert · (inserts − min_size) ± tolerance. Sampling waits whenever it is ahead by more than
    the tolerance; adding waits when it is ahead. Rows are counted, not calls: `sample(256)` are 256 samples.

    Threads share one RateLimit. Processes make one each, with the same settings, around the same buffer in shared
    memory. What goes through a RateLimit is counted since the buffer was made, steps that only reset too.

    Args:
        replay: the buffer.
        samples_per_insert: how often each transition is sampled on average.
        min_size: transitions that sampling waits for at first.
        tolerance: samples by which either side may be ahead; by default what `min_size` transitions, or one step of all
            environments, are worth.
        timeout: seconds after which whoever waits gets a TimeoutError that says for what; None waits for ever.

    >>> replay = ReplayBuffer(100, obs=1, action=(), seed=0)
    >>> limit = RateLimit(replay, samples_per_insert=4, min_size=2, tolerance=16, timeout=0.01)
    >>> for step in range(4):
    ...     limit.add([step], 0.0, 0.0, False, False, [step + 1])
    >>> len(limit.sample(16))
    16
    """

    @answers
    def __init__(
        self,
        replay: ReplayBuffer,
        *,
        samples_per_insert: float,
        min_size: int = 1,
        tolerance: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self.replay = replay
        self.samples_per_insert = _at_least("samples_per_insert", samples_per_insert, 0.0, strictly=True)
        self.min_size = positive("min_size", min_size)
        self._counts = replay._traffic.numpy()
        self._largest = {"insert": replay.num_envs or 1, "sample": 1}
        """The most rows that a call of each kind has had."""
        default = self.samples_per_insert * max(self.min_size, replay.num_envs or 1)
        self.tolerance = default if tolerance is None else _at_least("tolerance", tolerance, 0.0)
        self.timeout = None if timeout is None else _at_least("timeout", timeout, 0.0)
        if self.min_size > replay.capacity:
            remedy = "Lower min_size; otherwise sampling would never begin."
            raise SchemaError(explain("min_size", f"at most the capacity {replay.capacity}", self.min_size, remedy))
        self._refuse_deadlock("insert", self._largest["insert"])

    @property
    def inserted(self) -> int:
        """How many transitions were added."""
        return int(self._counts[0])

    @property
    def sampled(self) -> int:
        """How many rows were sampled."""
        return int(self._counts[1])

    def add(self, *args: Any, env_ids: Any = None, **fields: Any) -> None:
        """`replay.add`, when it is its turn."""
        self._insert(lambda: self.replay.add(*args, env_ids=env_ids, **fields), env_ids)

    def add_step(self, *args: Any, env_ids: Any = None, **fields: Any) -> None:
        """`replay.add_step`, when it is its turn."""
        self._insert(lambda: self.replay.add_step(*args, env_ids=env_ids, **fields), env_ids)

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """`replay.extend`, when it is its turn."""
        steps = len(batch["terminated"])
        self._insert(lambda: self.replay.extend(batch, env_ids=env_ids), env_ids, steps)

    def sample(
        self, batch_size: int, view: View | None = None, *, device: Any = None, out: TensorDict | None = None
    ) -> TensorDict:
        """`replay.sample`, when it is its turn."""
        check_size("sample", batch_size)
        take: Callable[[], TensorDict] = lambda: self.replay.sample(batch_size, view, device=device, out=out)  # noqa: E731
        return self._in_turn("sample", batch_size, take)

    def update_priority(self, index: Any, priority: Any) -> int:
        """`replay.update_priority`, at once."""
        return self.replay.update_priority(index, priority)

    def __len__(self) -> int:
        return len(self.replay)

    def __repr__(self) -> str:
        return (
            f"RateLimit(samples_per_insert={self.samples_per_insert:g}, min_size={self.min_size}, "
            f"tolerance={self.tolerance:g}; {self.inserted} inserts, {self.sampled} samples of {self.replay!r})"
        )

    def _insert(self, write: Callable[[], None], env_ids: Any, steps: int = 1) -> None:
        replay = self.replay
        envs = None if env_ids is None else environments(env_ids, replay.num_envs, replay.device)
        self._in_turn("insert", steps * ((replay.num_envs or 1) if envs is None else len(envs)), write)

    def _in_turn(self, kind: Literal["insert", "sample"], rows: int, call: Callable[[], Any]) -> Any:
        if rows > self._largest[kind]:
            self._refuse_deadlock(kind, rows)
            self._largest[kind] = rows
        start, pause = time.monotonic(), _PAUSES[0]
        while True:
            with self.replay._lock:
                reason = self.waits_for(kind, rows)
                if reason is None:
                    result = call()
                    self._counts[_KINDS.index(kind)] += rows
                    return result
            waited = time.monotonic() - start
            if self.timeout is not None and waited >= self.timeout:
                raise TimeoutError(f"{kind}: waited {waited:.3g} s. {reason}")
            time.sleep(min(pause, inf if self.timeout is None else self.timeout - waited))
            pause = min(2 * pause, _PAUSES[1])

    def waits_for(self, kind: Literal["insert", "sample"], rows: int) -> str | None:
        """What an insert or a sample of so many rows would have to wait for now, in a sentence; None: nothing."""
        stored = len(self.replay)
        if kind == "sample" and stored < self.min_size:
            return f"Sampling begins with {self.min_size} stored transitions, and there are {stored}: add more."
        ahead = self.samples_per_insert * (self.inserted - self.min_size) - self.sampled
        counts = (
            f"{self.inserted} inserts and {self.sampled} samples, at {self.samples_per_insert:g} samples per insert"
        )
        if kind == "insert" and ahead + self.samples_per_insert * rows > self.tolerance:
            # Until sampling may begin there is nobody to wait for.
            return None if stored < self.min_size else f"Inserts are ahead ({counts}): sample more."
        if kind == "sample" and ahead - rows < -self.tolerance:
            return f"Samples are ahead ({counts}): add more."
        return None

    def _refuse_deadlock(self, kind: Literal["insert", "sample"], rows: int) -> None:
        """Two calls that fit between the bounds only one at a time could each wait for the other."""
        largest = self._largest | {kind: rows}
        least = (self.samples_per_insert * largest["insert"] + largest["sample"]) / 2
        if self.tolerance < least:
            expected = f"at least {least:g} for {largest['insert']} inserts and {largest['sample']} samples at once"
            remedy = (
                "Raise the tolerance or use smaller batches; otherwise both sides could wait for each other forever."
            )
            raise SchemaError(explain("tolerance", expected, f"{self.tolerance:g}", remedy))


def _at_least(where: str, number: Any, least: float, *, strictly: bool = False) -> float:
    known = float(number) if isinstance(number, Real) and not isinstance(number, bool) else inf
    if not least <= known < inf or (strictly and known == least):
        expected = f"a finite number {'above' if strictly else 'of at least'} {least:g}"
        raise SchemaError(explain(where, expected, repr(number), "Pass such a number."))
    return known
