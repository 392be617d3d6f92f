"""The parts of a client: calls of the shards, a reader of their memory, and streams of blocks to them."""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

import relive
from relive.concurrent.processes import connect
from relive.distributed.protocol import (
    MemoryLocation,
    Push,
    PushAck,
    ServicePlan,
    StepBlock,
    describe_difference,
    to_plain_data,
)
from relive.distributed.shard import Shard, ShardReader
from relive.errors import IncompatibleService, SchemaError, ShardUnavailable, explain, warn_user

NAMESPACE = "relive"
"""The Ray namespace of all services, the same for all jobs of the cluster."""


def start_actors(service: str, plan: ServicePlan, options: Mapping[str, Any]) -> list[Any]:
    """Start one process per shard."""
    if not isinstance(service, str) or not service:
        raise SchemaError(explain("name", "a str that is not empty", repr(service), "Pass a name for the service."))
    settings = {
        "namespace": NAMESPACE,
        "max_restarts": 0 if plan.checkpoint is None else -1,
        "num_cpus": 0,
        "scheduling_strategy": "SPREAD",
        **options,
    }
    remote = ray.remote(Shard)
    actors: list[Any] = []
    try:
        for shard in range(plan.num_shards):
            actors.append(remote.options(name=f"{service}/{shard}", **settings).remote(plan, shard))
    except ValueError:
        for actor in actors:
            ray.kill(actor)
        remedy = "Connect to it with ReplayService.connect, close it, or choose another name."
        raise SchemaError(explain("name", "a name not in use", repr(service), remedy)) from None
    return actors


def find_actor(service: str, shard: int) -> Any:
    """Return the actor of a shard of a service; raises a ShardUnavailable if there is none."""
    try:
        return ray.get_actor(f"{service}/{shard}", namespace=NAMESPACE)
    except ValueError:
        remedy = "Start the service, or check its name; its driver may have ended."
        message = explain(f"shard {shard} of {service!r}", "a process in this cluster", "no such process", remedy)
        raise ShardUnavailable(message, retry=True) from None


def require_compatible_service(service: str, description: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if a service has another version of relive than its client, or other arguments than `expected`."""
    own_settings = {"relive": relive.__version__, **to_plain_data(expected)}
    difference_text = describe_difference(own_settings, {key: description.get(key) for key in own_settings})
    if difference_text:
        settings = "the settings of the client (client against service)"
        remedy = "Connect with the settings of the service, and with its version of relive."
        raise IncompatibleService(explain(f"service {service!r}", settings, difference_text, remedy))


_RETRY_PAUSE = 0.1
"""Seconds between two attempts to call a shard that is restarting."""


class CallInterrupted(Exception):
    """The process of a shard ended before it answered a call; the call may have been executed."""


class ShardCalls:
    """One client's calls to the shards of a service."""

    def __init__(self, service: str, actors: list[Any], timeout: float) -> None:
        self.service, self._actors, self.timeout = service, actors, timeout

    def new_deadline(self) -> float:
        """Return the time of `time.monotonic` at which a call that starts now must have ended."""
        return time.monotonic() + self.timeout

    def start_call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Start a call without waiting for its end; return a reference to the answer."""
        return getattr(self._actors[shard], method).remote(*arguments)

    def has_answer(self, ref: Any) -> bool:
        """Whether the answer of a call has arrived, so that `fetch_answer` would not wait."""
        return bool(ray.wait([ref], timeout=0)[0])

    def fetch_answer(self, shard: int, ref: Any, deadline: float) -> Any:
        """Wait for the answer of a call."""
        try:
            return ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError:
            raise self.timeout_error(shard) from None
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, Exception) else error) from None
        except ActorDiedError:
            got = "a process that has ended"
            remedy = "Start the service again: it was closed, or had no checkpoint to restart from."
            raise self._unavailable_error(shard, "a running process", got, remedy, retry=False) from None
        except RayError as error:
            # A shard that keeps dying interrupts every call, so the deadline must be checked here too.
            raise (CallInterrupted() if time.monotonic() < deadline else self.timeout_error(shard)) from error

    def call_shards(
        self, method: str, deadline: float, arguments: Mapping[int, tuple[Any, ...]] | None = None
    ) -> dict[int, Any]:
        """Call a method of several shards at once, and return their answers.

        `arguments` are the arguments by shard; None calls all shards without arguments. The method must be idempotent,
        because a shard that restarts is called again.
        """
        arguments = dict.fromkeys(range(len(self._actors)), ()) if arguments is None else arguments
        refs = {shard: self.start_call(shard, method, *arguments[shard]) for shard in arguments}
        return {
            shard: self._fetch_answer_with_retries(shard, ref, deadline, method, *arguments[shard])
            for shard, ref in refs.items()
        }

    def _fetch_answer_with_retries(self, shard: int, ref: Any, deadline: float, method: str, *arguments: Any) -> Any:
        while True:
            try:
                return self.fetch_answer(shard, ref, deadline)
            except CallInterrupted:
                time.sleep(_RETRY_PAUSE)
                ref = self.start_call(shard, method, *arguments)

    def timeout_error(self, shard: int) -> ShardUnavailable:
        """Return the error for a shard that has not answered in time."""
        remedy = "Try again; the shard may be starting or busy."
        return self._unavailable_error(shard, f"an answer within {self.timeout:g} s", "no answer", remedy, retry=True)

    def _unavailable_error(self, shard: int, expected: str, got: str, remedy: str, *, retry: bool) -> ShardUnavailable:
        where = f"shard {shard} of {self.service!r}"
        return ShardUnavailable(explain(where, expected, got, remedy), retry)

    def kill_shards(self) -> None:
        """Kill the processes of all shards without restart, and wait for their end."""
        for actor in self._actors:
            ray.kill(actor)
        deadline = self.new_deadline()
        for shard in range(len(self._actors)):
            # The wait for a shard ends once its process has ended, because calls then raise a ShardUnavailable.
            with suppress(ShardUnavailable):
                while time.monotonic() < deadline:
                    self._fetch_answer_with_retries(shard, self.start_call(shard, "plan"), deadline, "plan")
                    time.sleep(_RETRY_PAUSE)


_REOPEN_SECONDS = 5.0
"""Seconds after which a client tries again to open the memory of a shard."""


class ClientReader:
    """Reads a shard's memory directly if the shard is on this machine; calls read other shards.

    Only the memory of a running shard is read. If the shard's process has ended, a call waits for the restart, and the
    client opens the new memory. If the memory cannot be opened, because the process has just ended or runs on another
    machine, the client reads by calls and tries again later: the shard may have restarted on this machine.
    """

    may_read_in_place = True
    """Whether the memory of shards may be read directly; benchmarks set False to measure calls."""

    def __init__(self, calls: ShardCalls, plan: ServicePlan, seed: int | None) -> None:
        self._calls, self._plan, self._seed = calls, plan, seed
        self._local: dict[int, _LocalShard | None] = {}
        self._attempt_times: dict[int, float] = {}
        """Time of the last attempt to open each shard's memory."""

    def call_shards(
        self, method: str, deadline: float, arguments: Mapping[int, tuple[Any, ...]] | None = None
    ) -> dict[int, Any]:
        """Call a method of several shards, and return their answers; see `ShardCalls.call_shards`."""
        arguments = dict.fromkeys(range(self._plan.num_shards), ()) if arguments is None else arguments
        local_readers = {shard: self._find_local_reader(shard, deadline) for shard in arguments}
        remote = {shard: arguments[shard] for shard, reader in local_readers.items() if reader is None}
        answers = self._calls.call_shards(method, deadline, remote)
        for shard, reader in local_readers.items():
            if reader is None:
                continue
            with reader.lock.within(deadline - time.monotonic()) as is_locked:
                # The shard may hold the lock beyond the deadline, for example while it saves many rows.
                if not is_locked:
                    raise self._calls.timeout_error(shard)
                answers[shard] = getattr(reader, method)(*arguments[shard])
        return {shard: answers[shard] for shard in arguments}

    @property
    def num_local_shards(self) -> int:
        """Number of shards whose memory is open in this process."""
        return sum(local_shard is not None for local_shard in self._local.values())

    def _find_local_reader(self, shard: int, deadline: float) -> ShardReader | None:
        """Return a reader of the shard's memory; None if the memory cannot be opened in this process."""
        local_shard = self._local.get(shard)
        is_retry_due = (
            self.may_read_in_place and time.monotonic() - self._attempt_times.get(shard, -math.inf) > _REOPEN_SECONDS
        )
        if is_retry_due if local_shard is None else not local_shard.is_alive:
            location = self._calls.call_shards("memory_location", deadline, {shard: ()})[shard]
            local_shard = self._local[shard] = self._open_memory(location, shard)
            self._attempt_times[shard] = time.monotonic()
        return None if local_shard is None else local_shard.reader

    def _open_memory(self, location: MemoryLocation | None, shard: int) -> _LocalShard | None:
        if location is None or not hasattr(os, "pidfd_open"):
            return None
        key = [self._seed or 0, shard, location.ids.life]
        seed = None if self._seed is None else int(np.random.SeedSequence(key).generate_state(1)[0])
        # The memory may be on another machine or not accessible, which raises one of these errors: then calls read it.
        with suppress(ConnectionError, SchemaError, OSError):
            reader = ShardReader(self._plan, connect(location.handle, seed=seed), location.ids)
            return _LocalShard(location.process, reader)
        return None


class _LocalShard:
    """The process of a shard on this machine, and a reader of the shard's memory."""

    def __init__(self, process: int, reader: ShardReader) -> None:
        self.reader = reader
        self._process_fd = os.pidfd_open(process)
        weakref.finalize(self, os.close, self._process_fd)

    @property
    def is_alive(self) -> bool:
        # Every call makes a poll object, because threads cannot share one.
        poll = select.poll()
        poll.register(self._process_fd, select.POLLIN)
        return not poll.poll(0)


MAX_RESEND_BYTES = 64 << 20
"""Maximum bytes of confirmed blocks that a stream keeps, in case the shard restarts and needs the blocks again."""


class PushStream:
    """Sends blocks to one shard; waits only while `max_pending` blocks are unconfirmed.

    There is one call at a time. Blocks that are pushed during a call are sent together in the next call, so that a busy
    shard gets fewer and larger calls. A block is kept until a checkpoint contains it, or until newer blocks need the
    memory. After a restart, the shard gets the kept blocks that it lacks; other missing blocks are lost.
    """

    poll_seconds = 2e-3
    """Minimum seconds between two checks whether the answer has arrived. A check takes time, and blocks that arrive
    meanwhile are sent together."""

    def __init__(self, calls: ShardCalls, shard: int, client: str, max_pending: int) -> None:
        self._calls, self._shard, self._client, self._max_pending = calls, shard, client, max_pending
        self._position = 0
        """Number of rows in all blocks so far."""
        self._unsaved_pushes: deque[Push] = deque()
        """Blocks that the shard has confirmed, but that no checkpoint contains."""
        self._sent_pushes: list[Push] = []
        """Blocks of the current call, which was not answered yet."""
        self._waiting_pushes: list[Push] = []
        """Blocks for the next call."""
        self._answer: Any = None
        """Ray's reference to the answer of the current call."""
        self._check_time = 0.0
        """Time of the last check whether the answer has arrived."""
        self._envs: set[int] = set()
        self.num_lost = 0
        """Number of rows that restarts of the shard have lost for good."""

    @property
    def num_pending(self) -> int:
        """Number of blocks that the shard has not confirmed."""
        return len(self._sent_pushes) + len(self._waiting_pushes)

    def wait_for_room(self, deadline: float) -> None:
        """Wait until another block may be pushed. An error leaves the stream unchanged, and the caller can retry."""
        if self._is_push_answered():
            self._await_answer(deadline)
        while self.num_pending >= self._max_pending:
            self._await_answer(deadline)

    def send_waiting_blocks(self, deadline: float) -> None:
        """Send the waiting blocks if the current call was answered, instead of keeping them until the next push."""
        if self._waiting_pushes and self._is_push_answered():
            self._await_answer(deadline)

    def _is_push_answered(self) -> bool:
        now = time.monotonic()
        if not self._sent_pushes or now - self._check_time <= self.poll_seconds:
            return False
        self._check_time = now
        return self._calls.has_answer(self._answer)

    def push(self, envs: np.ndarray, block: StepBlock, cut_envs: np.ndarray) -> None:
        """Add a block to the stream; call `wait_for_room` first."""
        push = Push(self._position, envs, block, cut_envs)
        self._position = push.end_position
        self._envs.update(envs.tolist())
        self._waiting_pushes.append(push)
        self._send_waiting_pushes()

    def flush(self, deadline: float) -> None:
        """Wait until the shard has every pushed block, even if it restarted after confirming some."""
        self._await_all_answers(deadline)
        if self._unsaved_pushes:
            self._resend_missing_pushes(deadline)
            self._await_all_answers(deadline)

    def _await_all_answers(self, deadline: float) -> None:
        while self.num_pending:
            self._await_answer(deadline)

    def _send_waiting_pushes(self) -> None:
        if self._waiting_pushes and not self._sent_pushes:
            self._answer = self._calls.start_call(self._shard, "push", self._client, self._waiting_pushes)
            self._check_time = time.monotonic()
            self._sent_pushes, self._waiting_pushes = self._waiting_pushes, []

    def _await_answer(self, deadline: float) -> None:
        """Wait for the answer of the current call, and process it."""
        try:
            ack: PushAck = self._calls.fetch_answer(self._shard, self._answer, deadline)
        except CallInterrupted:
            return self._resend_missing_pushes(deadline)
        # The shard has fewer rows than were sent, because it has restarted: send the lost blocks again.
        if ack.num_stored < self._sent_pushes[-1].end_position:
            return self._resend_missing_pushes(deadline)
        self._unsaved_pushes.extend(self._sent_pushes)
        self._sent_pushes = []
        self._discard_saved_pushes(ack)
        self._send_waiting_pushes()
        for message in ack.warnings:
            warn_user(message)
        if ack.save_error is not None:
            consequence = "cannot write checkpoints, so that a restart loses newer rows."
            warn_user(f"shard {self._shard}: {consequence} {ack.save_error}", UserWarning)
        if ack.write_error is not None:
            raise ack.write_error

    def _resend_missing_pushes(self, deadline: float) -> None:
        """Send the shard the kept blocks that it lacks."""
        pushes = [*self._unsaved_pushes, *self._sent_pushes, *self._waiting_pushes]
        arguments = self._client, pushes[0].position, np.array(sorted(self._envs), np.int64)
        ack: PushAck = self._calls.call_shards("resume", deadline, {self._shard: arguments})[self._shard]
        self._unsaved_pushes = deque(push for push in pushes if push.end_position <= ack.num_stored)
        self._sent_pushes, self._waiting_pushes = [], [push for push in pushes if push.end_position > ack.num_stored]
        self._discard_saved_pushes(ack)
        self._send_waiting_pushes()
        if ack.num_lost:
            self.num_lost += ack.num_lost
            warn_user(f"shard {self._shard}: restarted, and lost {ack.num_lost} rows.", UserWarning)

    def _discard_saved_pushes(self, ack: PushAck) -> None:
        while self._unsaved_pushes and self._unsaved_pushes[0].end_position <= ack.num_saved:
            self._unsaved_pushes.popleft()
        nbytes = sum(push.block.nbytes for push in self._unsaved_pushes)
        while nbytes > MAX_RESEND_BYTES:
            nbytes -= self._unsaved_pushes.popleft().block.nbytes
