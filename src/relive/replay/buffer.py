"""The off-policy buffer: stores the newest transitions of every environment, and reads batches by sampler and view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive import lazy
from relive.checkpoint.snapshot import Rows, State, register_buffer
from relive.checkpoint.state_dict import StateDictMixin
from relive.errors import CorruptCheckpoint, IncompatibleCheckpoint, NotReadyError, SchemaError, explain, warn_user
from relive.kernels import complete
from relive.locking import ClosedLock, make_lock, make_recovery_callback
from relive.replay.backend import Backend
from relive.replay.config import (
    check_saved_sizes,
    make_backend,
    read_saved_arguments,
    refuse_observers_in_shared_memory,
)
from relive.replay.ids import (
    flatten_ids,
    flatten_mutable_fields,
    sort_rows_by_time,
    update_priorities,
    write_mutable_leaves,
)
from relive.replay.invariants import find_device_faults
from relive.replay.read_plan import INDEX, WEIGHT, LeafSpecs, Leaves
from relive.replay.recovery import RecoverableBuffer
from relive.replay.row_storage import RowStorage
from relive.replay.samplers import Sampler, Uniform
from relive.replay.samplers.registry import load_sampler_state, make_sampler_config
from relive.replay.samplers.sampler import require_sampler
from relive.replay.step_input import StepInput
from relive.replay.views import View
from relive.replay.views.view import BoundView
from relive.schema.assembly import (
    MemoryRange,
    assemble_batch,
    check_batch_size,
    check_destination,
    copy_leaves_into,
    import_tensordict,
    memory_range,
    to_device,
)
from relive.schema.autoreset import AutoresetModeChecker, parse_autoreset_mode, read_env_settings, warn_of_frame_stacks
from relive.schema.checks import check_positive_int
from relive.schema.conversion import as_tensor, convert_row_ids
from relive.schema.fields import (
    DTYPES,
    Declaration,
    Path,
    caller_shape,
    check_replay_settings,
    make_replay_schema,
    replay_nbytes,
)
from relive.schema.suggestions import suggests_keywords, suggests_methods
from relive.statistics import counting
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.statistics.observers import Observers
from relive.storage import LocalAllocator, Memory
from relive.storage.allocator import require_host_memory
from relive.storage.codec import JsonNode, SnapshotReader
from relive.storage.disk import reopen_disk_memory

_NO_MEASUREMENTS: Mapping[str, Any] = {}
"""The metrics and reasons of a step that was not added by `add_step`."""
_MAX_UNCHECKED_BYTES = 1 << 28
"""Batches up to this size are read without checking the free memory."""
_MAX_VIEWS = 64
"""Maximum number of cached readers of views."""


@register_buffer
@suggests_methods
class ReplayBuffer(StateDictMixin):
    """Stores the newest `capacity` rows, one ring per environment, and every observation once.

    Samples equal the values that were added. If a step's `obs` equals the previous `next_obs` bit by bit, both share
    one copy; if it differs, the episode is cut there and the older row keeps its own `next_obs`. `Stacked` observations
    must start at an episode's first step, also after `clear()` and `cut()`, because older frames are unknown.

    Args:
        capacity: total number of rows, a multiple of `num_envs`.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared like `obs`.
        num_envs: number of environments. None: one environment, without an environment axis.
        reward: one environment's reward, declared like `obs`; one number by default.
        extra: further fields of a row, by name.
        sampler: chooses the rows of a batch; `Uniform()` by default.
        device: where the rows are stored: a torch device, or a `Memory` (pinned, shared, on disk).
        next_obs: "shared" stores each observation once; "stored" keeps an explicit copy of every next observation, for
            unordered data.
        autoreset: how the vector environment resets: "NEXT_STEP", "SAME_STEP" or "DISABLED". `add_step` needs it.
        stats: episode statistics of every transition; metrics and reasons come from the fields of these names, or from
            the info passed to `add_step`.
        norm: running norms by field (or path to a leaf), updated with the values of every transition.
        seed: seed of the random draws; None takes one from the system.

    A critic that sees more than the policy: `obs={"policy": 4, "critic": 9}` gives both parts of `obs` and `next_obs`.
    Several agents are an axis (`reward=(A,)`) or a dict of agents (`reward={"fox": (), "hare": ()}`). `terminated` and
    `truncated` are the environment's: if agents end before it, store who is alive in the observation; an agent's
    target is reward + discount · (1 − terminated) · alive of next_obs · Q(next_obs).

    >>> replay = ReplayBuffer(100, obs=2, action=(), seed=0)
    >>> for step in range(3):
    ...     replay.add([step, 0.0], 0.5, 1.0, terminated=False, truncated=False, next_obs=[step + 1, 0.0])
    >>> batch = replay.sample(4)
    >>> bool((batch["next_obs"][:, 0] == batch["obs"][:, 0] + 1).all())
    True
    """

    @suggests_keywords
    # The tensors are made outside inference mode, because inference tensors could not be written later.
    @torch.inference_mode(False)
    def __init__(
        self, capacity: int, obs: Declaration, action: Declaration, *, num_envs: int | None = None,
        reward: Declaration = (), extra: Mapping[str, Declaration] | None = None, sampler: Sampler | None = None,
        device: torch.device | str | Memory = "cpu", next_obs: Literal["shared", "stored"] = "shared",
        autoreset: AutoresetMode | str | None = None, stats: EpisodeStats | None = None, norm: Norms | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.capacity = check_positive_int("capacity", capacity)
        self.num_envs = None if num_envs is None else check_positive_int("num_envs", num_envs)
        self.autoreset, memory = parse_autoreset_mode(autoreset), Memory.of(device)
        self._schema = schema = make_replay_schema(obs, action, reward, extra or {})
        check_replay_settings(self.capacity, self.num_envs, next_obs, schema)
        self.next_obs = next_obs
        envs = self.num_envs or 1
        memory.require_free_bytes(replay_nbytes(schema, self.capacity, envs, next_obs))
        self.device = torch.empty(0, device=memory.device).device
        refuse_observers_in_shared_memory(memory, stats, norm, SchemaError)
        self._observers = Observers(stats, norm, schema, self.num_envs, self.device)
        self.unbound_sampler = require_sampler(Uniform() if sampler is None else sampler)
        """The constructor's argument; files and copies of the buffer describe it."""
        self._declared = AutoresetModeChecker(self.autoreset)
        self._is_plain = schema.is_flat and not extra
        """Whether the buffer has neither nested nor extra fields."""
        allocator = memory.open(self)
        rows = RowStorage(
            schema, self.capacity // envs, self.num_envs, allocator, stores_next_obs=next_obs == "stored",
            autoreset=self.autoreset, has_stats=stats is not None,
        )  # fmt: skip
        self.storage: Backend = make_backend(rows)
        """The stored rows, and the kernels that write, draw and read rows."""
        counters = self._observers.native
        self._counts_natively = counters is not None and self.storage.attach_counters(counters)
        """Whether the native core updates the statistics when it writes rows."""
        self._counts_in_torch = bool(self._observers.observed_leaves) and not self._counts_natively
        self._random = self.storage.make_random(seed)
        self._input = StepInput(rows)
        self.sampler: Sampler = self.unbound_sampler.bind(self.storage, self._random)
        """The sampler of this buffer: a bound copy of the constructor's argument."""
        if self.sampler.follows_writes:
            self.storage.track_changes()
        self._is_uniform = isinstance(self.sampler, Uniform)
        self._max_row_bytes = 2 * self.nbytes // self.storage.num_slots + 64
        """Estimate of the bytes of one row in a batch: two observations and computed fields."""
        self._views: dict[View | None, BoundView] = {}
        """Cached readers of views."""
        self._follows_writes = self.sampler.follows_writes
        shared = allocator if allocator.persistent else LocalAllocator(torch.device("cpu"))
        self._traffic = shared.allocate("traffic", (2,), torch.int64)
        """Number of steps and of samples that a RateLimit has admitted."""
        self._num_admitted: int | None = None
        """Number of steps admitted by a RateLimit, including the current write; None without a RateLimit."""
        self._limit_closed = shared.allocate("closed", (1,), torch.bool)
        """Whether a RateLimit of this buffer was closed; not saved."""
        self._lock = make_lock(self, allocator.lock(make_recovery_callback(self)))
        self._allocator = allocator
        self._before_write = allocator.before_write if allocator.durable else None
        if allocator.durable:
            allocator.recover(RecoverableBuffer(self), resumes=seed is None)

    @classmethod
    @suggests_keywords
    def for_env(
        cls, env: Any, capacity: int, *, obs: Declaration | None = None, action: Declaration | None = None,
        reward: Declaration = (), extra: Mapping[str, Declaration] | None = None, sampler: Sampler | None = None,
        device: torch.device | str | Memory = "cpu", next_obs: Literal["shared", "stored"] = "shared",
        autoreset: AutoresetMode | str | None = None, stats: EpisodeStats | None = None, norm: Norms | None = None,
        seed: int | None = None,
    ) -> ReplayBuffer:  # fmt: skip
        """Make a buffer for a Gymnasium environment from its spaces, number of environments and autoreset mode.

        `obs`, `action` and `autoreset` override the environment's.
        """
        if obs is None:
            warn_of_frame_stacks(env)
        env_settings = read_env_settings(env, obs, action, autoreset)
        return cls(
            capacity, env_settings.obs, env_settings.action, num_envs=env_settings.num_envs, reward=reward, extra=extra,
            sampler=sampler, device=device, next_obs=next_obs, autoreset=env_settings.autoreset, stats=stats, norm=norm,
            seed=seed,
        )  # fmt: skip

    @staticmethod
    def estimate_bytes(
        capacity: int, obs: Declaration, action: Declaration, *, num_envs: int | None = None,
        reward: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        next_obs: Literal["shared", "stored"] = "shared",
    ) -> int:  # fmt: skip
        """Return the number of bytes of the rows of a buffer with these arguments."""
        return replay_nbytes(make_replay_schema(obs, action, reward, extra or {}), capacity, num_envs or 1, next_obs)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the rows, without the sampler's memory."""
        return self.storage.rows.nbytes

    @property
    def stats(self) -> EpisodeStats | None:
        """Episode statistics; None if the buffer has none."""
        return self._observers.stats

    @property
    def norm(self) -> dict[str | Path, RunningNorm]:
        """Running norms by field or path."""
        return self._observers.norm

    def _recover(self) -> None:
        """Restore a valid state after a process died while it held the lock."""
        self.storage.recover()
        self.sampler.on_recover()

    def add(
        self, obs: Any = None, action: Any = None, reward: Any = None, terminated: Any = None, truncated: Any = None,
        next_obs: Any = None, *, env_ids: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step of every environment, or of the environments `env_ids`."""
        if self.storage.warning is not None:
            self._issue_pending_warning()
        with self._lock:
            envs = None if env_ids is None else self._input.convert_env_ids(env_ids)
            values = (obs, action, reward, terminated, truncated)
            # Flattening takes longer than the copy of a small step, so plain values are written as they are.
            if self._is_plain and not (extra or self._input.staged):
                self._write(values, (next_obs,), envs)
            else:
                self._write(self._input.flatten_step(values, extra), self._input.flatten_next_obs(next_obs), envs)

    def add_step(
        self, obs: Any = None, action: Any = None, step: tuple[Any, Any, Any, Any, Mapping[str, Any]] | None = None, *,
        env_ids: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step of a Gymnasium environment: `step = env.step(action)`, after the observation `obs`.

        The true next observation at the end of an episode is looked up according to the autoreset mode. With `env_ids`,
        the step's arrays and info masks have one row per environment in `env_ids`.
        """
        if self.storage.warning is not None:
            self._issue_pending_warning()
        with self._lock:
            envs, mode = self._input.convert_env_ids(env_ids), self.autoreset
            leaves, next_leaves, info = self._input.flatten_gymnasium_step(obs, action, step, extra, mode, envs)
            if info and self._declared.is_watching:
                self._declared.check_info(info)
            measurements = self._observers.read_measurements(info, self.storage.rows.step_shape(envs), mode)
            self._write(leaves, next_leaves, envs, measurements=measurements)

    def stage(self, **fields: Any) -> None:
        """Copy some fields of the next step before the environment overwrites them; `add` passes the missing fields."""
        with self._lock:
            self._input.stage(fields)

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """Store steps `[T, N]` (or `[T]`) in time order, or, with next_obs="stored", unordered steps `[B]`."""
        if self.storage.warning is not None:
            self._issue_pending_warning()
        with self._lock:
            envs = self._input.convert_env_ids(env_ids)
            leaves, next_leaves, steps = self._input.flatten_block(batch)
            self._write(leaves, next_leaves, envs, steps)

    def cut(self, env_ids: Any = None) -> None:
        """Mark the current episodes as abandoned: the next observation starts a new episode."""
        with self._lock:
            envs = self._input.convert_env_ids(env_ids)
            self.storage.end_episodes(envs, partial(self._observers.drop_running_episodes, envs))

    def clear(self) -> None:
        """Delete every row, priority and open episode. Ids continue, and pending resets are kept.

        Statistics describe the environments, not the stored rows: their running episodes continue. `cut()` ends them.
        """
        with self._lock:
            complete(self._clear_rows)
            self.commit()

    def _clear_rows(self) -> None:
        self.storage.clear()
        self._input.staged.clear()
        self.sampler.on_clear()

    def commit(self) -> None:
        """Wait until everything is on the disk (device=Memory.disk(…)); does nothing in other memory.

        Committed rows survive a loss of power. If only the process is killed, no added step is lost.
        """
        with self._lock:
            self._allocator.commit()

    def close(self) -> None:
        """Commit and release the buffer: every later call raises. Disk memory can then be opened by another process."""
        if isinstance(self._lock, ClosedLock):
            return
        if self._allocator.is_open:
            with self._lock:
                self._allocator.close()
        self._lock = ClosedLock()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint below the folder `path`, whole or not at all, and return its number.

        Only rows added since this buffer's last save there are written, and the newest `keep` checkpoints stay. A
        checkpoint holds everything: rows, priorities, staged fields, open episodes, pending resets, statistics, norms
        and the generator. `relive.load(path)` continues exactly from it. Inputs that a device has skipped, for which
        `check` would raise, are a `DataWarning` here, after the checkpoint is written.
        """
        from relive.checkpoint.saving import save  # noqa: PLC0415 (checkpoints import every buffer)

        self._issue_pending_warning()
        number = save(self, path, keep=keep)
        with self._lock:
            faults = [*find_device_faults(self.storage.rows), *self.sampler.find_input_faults()]
        for fault in faults:
            warn_user(f"save: {fault}")
        return number

    def handle(self) -> lazy.Handle:
        """Return a handle for `relive.connect`, to use this buffer in another process (device=Memory.shared()).

        Any number of processes may add, sample and update priorities. Each environment is written by one process: pass
        its `env_ids`. A process that restarts after a crash calls `cut(env_ids)` first.
        """
        from relive.concurrent.processes import make_handle  # noqa: PLC0415 (imports this class)

        return make_handle(self)

    def _write(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None,
        steps: int | None = None, measurements: Mapping[str, Any] = _NO_MEASUREMENTS,
    ) -> None:  # fmt: skip
        """Write a step, or a block of `steps` steps. The caller holds the lock."""
        if self._before_write is not None:
            self._before_write(steps or 1)
        if self._counts_in_torch:
            with counting.lock:
                count = self._make_statistics_update(leaves, envs, steps, measurements)
                self.storage.write(leaves, next_leaves, envs, steps, partial(self._finish_write, count))
            return
        if self._counts_natively:
            self._observers.set_measurements(measurements)
        on_complete = self.sampler.after_write if self._follows_writes else None
        if self._input.staged or self._num_admitted is not None:
            on_complete = self._finish_write
        self.storage.write(leaves, next_leaves, envs, steps, on_complete)

    def _make_statistics_update(
        self, leaves: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None, measurements: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Compute how a write will change the statistics; see `Observers.make_update`."""
        rows = self.storage.rows
        lead = rows.step_shape(envs, steps)
        block = {
            i: rows.convert_leaf(i, leaves[i], lead).reshape(steps or 1, -1, *caller_shape(self._schema.fields[i]))
            for i in self._observers.observed_leaves
        }
        resetting = rows.ring.resetting if envs is None else rows.ring.resetting[envs]
        return self._observers.make_update(block, resetting.clone() if rows.next_step else None, measurements, envs)[0]

    def _finish_write(self, update_statistics: Callable[[], None] | None = None) -> None:
        """Complete a write after the rows are stored. Idempotent: a signal may make it run twice."""
        self._input.staged.clear()
        if self._num_admitted is not None:
            self._traffic.numpy()[0] = self._num_admitted
        if self._follows_writes:
            self.sampler.after_write()
        if update_statistics is not None:
            update_statistics()

    def _issue_pending_warning(self) -> None:
        """Issue the pending warning about earlier steps, if any. Methods call this before they change anything."""
        message, self.storage.warning = self.storage.warning, None
        if message is not None:
            warn_user(message)

    def sample(
        self, batch_size: int, view: View | None = None, *, device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict:  # fmt: skip
        """Return a batch of `batch_size` rows, chosen by the sampler and read by `view`; "index" holds their ids.

        The batch is a copy. If `out` is passed, it is filled and returned instead of new tensors. If an epoch has fewer
        rows left than `out`, the first rows of `out` are filled and returned. `device` moves the batch,
        asynchronously if the memory allows it.
        """
        check_batch_size("sample", batch_size)
        target = check_destination(device, out)
        if self.storage.warning is not None:
            self._issue_pending_warning()
        bound_view = self._bind_view(view)
        reader, is_plain = bound_view.reader, out is None and bound_view.finish is None
        if reader.copies_unlocked and is_plain and self.sampler.independent:
            # Rows are copied without the lock, for which other processes may wait, and verified afterwards.
            batch = reader.sample_unlocked(batch_size, self.sampler, self._lock)
            if batch is not None:
                return batch if target is None else to_device(batch, target)
        with self._lock:
            batch = reader.sample(batch_size, self._random) if is_plain and self._is_uniform else None
            if batch is None:
                batch = self._sample(batch_size, bound_view, out)
        return batch if target is None else to_device(batch, target)

    def _sample(self, count: int, view: BoundView, out: lazy.TensorDict | None) -> lazy.TensorDict:
        """Return a batch of rows. Memory is reserved first: only the `finish` of a view may fail after the draw."""
        self._require_rows(count, view)
        if out is not None:
            return self._sample_into(out, count, view)
        if view.finish is not None:
            leaves = view.read(*self.sampler.choose(count))
            return assemble_batch(leaves, leaves[INDEX].shape)
        reserved_batch = view.reader.reserve_batch(count)
        slots, weight = self.sampler.choose(count)
        # The sampler may choose fewer rows than requested at the end of an epoch, so they get memory of their own.
        if len(slots) != count:
            reserved_batch = view.reader.reserve_batch(len(slots))
        return view.reader.fill_batch(reserved_batch, slots, weight)

    def _sample_into(self, out: lazy.TensorDict, count: int, view: BoundView) -> lazy.TensorDict:
        """Read new rows into `out`, or into its first rows if an epoch ends; `out` is verified before the draw."""
        sampler = self.sampler
        weight_spec: LeafSpecs = {WEIGHT: ((count,), torch.float32)} if sampler.returns_weights else {}
        targets = view.check_out(out, count, weight_spec, self._memory_ranges())
        if view.finish is not None:
            leaves = view.read(*sampler.choose(count))
            return copy_leaves_into(out if len(leaves[INDEX]) == count else out[: len(leaves[INDEX])], leaves)
        slots = sampler.sample_into(count, targets[WEIGHT]) if sampler.returns_weights else sampler.choose(count)[0]
        if len(slots) != count:
            out, targets = out[: len(slots)], {path: target[: len(slots)] for path, target in targets.items()}
        view.reader.read_into(targets, slots)
        return out

    def _sample_leaves(self, count: int, view: BoundView) -> Leaves:
        """Return the leaves of a batch, for a Mixture. The caller holds the lock."""
        self._require_rows(count, view)
        return view.read(*self.sampler.choose(count))

    def _memory_ranges(self) -> list[MemoryRange]:
        """Return the addresses of the rows and of the sampler's arrays, which `out` must not overlap."""
        return [*self.storage.rows.memory_ranges, *map(memory_range, self.sampler.owned_arrays())]

    def _require_rows(self, count: int, view: BoundView) -> None:
        """Raise if no row is stored, or if the batch does not fit in memory."""
        if self.storage.may_be_empty:
            raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))
        nbytes = count * view.plan.max_steps_per_row * self._max_row_bytes
        if nbytes > _MAX_UNCHECKED_BYTES and self.device.type == "cpu":
            require_host_memory(nbytes, "sample", "Pass a smaller batch_size or shorter sequences.")

    def _bind_view(self, view: View | None) -> BoundView:
        """Return a view of this buffer; equal views are bound once."""
        try:
            return self._views[view]
        except KeyError:
            is_hashable = True
        except TypeError:
            is_hashable = False
        bound_view = BoundView(view, self.storage, self._random)
        if is_hashable:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[view] = bound_view
        return bound_view

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of the rows `index` (of a batch); returns how many overwritten rows were skipped.

        For all steps of sequences, pass "step_index" [B, L] and priorities of this shape; -1 is skipped. If an index
        occurs twice, the last priority is used. On other devices than the CPU the returned number is a tensor on the
        device; `int()` waits for it.
        """
        with self._lock:
            if not self.sampler.takes_priorities:
                remedy = "Make the buffer with sampler=rl.Prioritized()."
                raise SchemaError(explain("update_priority", "a sampler with priorities", self.sampler, remedy))
            return update_priorities(
                self.storage, self.sampler, index, _convert_tensor("priority", priority, self.device)
            )

    def write(self, index: Any, **fields: Any) -> int:
        """Overwrite `Mutable` fields of the rows `index` (of a batch).

        Returns how many rows were skipped because newer steps had overwritten them. For all steps of sequences, pass
        "step_index" [B, L] and values [B, L, …]; -1 is skipped. If an index occurs twice, the last value is used. An id
        that was never issued is an IndexError; a call that raises has written nothing. If the process is killed, each
        row has either its old or its new values, also in shared memory and on disk. On other devices than the CPU the
        returned number is a tensor on the device; `int()` waits for it.
        """
        with self._lock:
            if self._before_write is not None:
                self._before_write(0)
            leaves = flatten_mutable_fields(self._schema, fields)
            return write_mutable_leaves(self.storage, *flatten_ids(index, self.device), leaves)

    @property
    def is_open(self) -> torch.Tensor:
        """Mask [N] of the environments inside an episode, whose next step may continue from the last `next_obs`."""
        with self._lock:
            return self.storage.ring.open.clone()

    def __getitem__(self, index: Any) -> lazy.TensorDict:
        """Read the transitions of the rows `index` [B], or the transition of one int."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            return self[np.array([index])][0]
        if isinstance(index, slice | str):
            remedy = "Pass ids, such as replay.ids()[-10:]; a field of them is replay[ids][name]."
            raise SchemaError(explain("index", "ids of rows", repr(index), remedy))
        return self.read(index)

    _loop_over = "Loop over replay.episodes(), read replay[replay.ids()], or draw batches with replay.sample."

    def read(self, index: Any, view: View | None = None) -> lazy.TensorDict:
        """Read the rows `index` [B] by `view`, as `sample` reads the rows that the sampler chose."""
        import_tensordict()
        with self._lock:
            bound_view = self._bind_view(view)
            ids = convert_row_ids(index, self.device)
            slots = self.storage.locate(ids)
            # The test uses the minimum, because computing it takes half the time of `(slots < 0).any()`.
            if len(slots) and int(slots.min()) < 0:
                stale_id = int(ids[slots < 0][0])
                raise IndexError(explain("index", "stored rows", f"{stale_id}, which was overwritten", "Sample again."))
            leaves = bound_view.read(slots)
            return assemble_batch(leaves, leaves[INDEX].shape)

    def ids(self) -> torch.Tensor:
        """Return the "index" of every stored transition [len], oldest first; `replay[…]` accepts it."""
        with self._lock:
            return self.storage.ids(self.storage.stored()).sort().values

    def episodes(self) -> Iterator[lazy.TensorDict]:
        """Iterate over the stored episodes, oldest first, each a TensorDict `[T]` in time order.

        Each episode is read when the iterator reaches it, without rows that were overwritten meanwhile.
        """
        import_tensordict()
        with self._lock:
            ids, _, starts = sort_rows_by_time(self.storage)
            edges = [*starts.nonzero().squeeze(1).tolist(), len(ids)]

        def read_episode(ids: torch.Tensor) -> lazy.TensorDict:
            with self._lock:
                slots = self.storage.locate(ids)
                leaves = self._bind_view(None).read(slots[slots >= 0])
                return assemble_batch(leaves, leaves[INDEX].shape)

        return filter(len, (read_episode(ids[start:stop]) for start, stop in pairwise(edges)))

    @property
    def columns(self) -> lazy.TensorDict:
        """All slots as a TensorDict `[slots, num_envs]`, with "next_obs" if next observations are stored explicitly.

        Row r of an environment is at slot r mod slots; unused slots hold zeros or older rows. For learning, use
        `sample`. Sharing it with another process (`share_memory_`, a torch.multiprocessing queue) makes a copy.
        """
        import_tensordict()
        with self._lock:
            return assemble_batch(self.storage.rows.alias_leaves(), self.storage.ring.kind.shape)

    @classmethod
    @torch.inference_mode(False)
    def from_config(cls, config: JsonNode, saved: SnapshotReader, **changes: Any) -> ReplayBuffer:
        """Make an empty buffer from a saved config; `changes` (device, sampler) other than None override the config."""
        arguments = read_saved_arguments(config, saved, changes)
        check_saved_sizes(arguments, saved)
        replay = cls(**arguments)
        if replay._allocator.reopened:
            replay.close()
            remedy = "Load into an empty folder; relive.load(folder) reopens the buffer that is there."
            expected, got = "an empty folder for disk memory", "a folder that holds a buffer"
            raise IncompatibleCheckpoint(explain("device", expected, got, remedy))
        return replay

    @classmethod
    def from_disk(
        cls, root: PathLike[str], *, sampler: Sampler | None = None, only_reads: bool = False
    ) -> ReplayBuffer:
        """Open the buffer in a folder of disk memory with the settings of its last commit; see `relive.load`."""
        allocator = reopen_disk_memory(root, only_reads=only_reads)
        commit: Any = allocator.last_commit
        with allocator.closed_on_error():
            try:
                changes = {"device": allocator.memory, "sampler": sampler}
                return cls(**read_saved_arguments(commit.saved.config, commit.saved, changes))
            except SchemaError as error:
                text = f"{commit.name}: the description of the buffer is invalid. {error}"
                raise CorruptCheckpoint(text) from error

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON."""
        trees = self._schema.config()
        return {
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            **{name: trees.pop(name) for name in ("obs", "action", "reward")},
            "extra": {name: tree for name, tree in trees.items() if name not in ("terminated", "truncated")},
            "next_obs": self.next_obs,
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "device": str(self.device),
            "sampler": make_sampler_config(self.unbound_sampler),
            "listeners": self._observers.config(),
        }

    def state(self) -> State:
        """Return the state to save, without the rows; its tensors share memory with the buffer."""
        states = {name: component.state() for name, component in self.components.items()}
        memory = {"name": self._allocator.name}, {}
        rest = State.of_parts({"sampler": ({}, self.sampler.state()), **states, "memory": memory})
        rows = self.storage.rows.state()
        return State({**rows.values, **rest.values}, {**rows.arrays, **rest.arrays})

    @property
    def components(self) -> dict[str, Any]:
        """Components with a state of their own, by their names in files."""
        return {"random": self._random, "listeners": self._observers, "staged": self._input}

    def rows(self) -> Rows:
        """Return the rows to save: complete transitions without mutable fields, which no write modifies."""
        return self.storage.rows.rows_to_save()

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore the saved state, without the rows; raises a CorruptCheckpoint if it is invalid."""
        self.storage.rows.load_state(saved)
        self.storage.rebuild_caches()
        load_sampler_state(self.sampler, saved.part("sampler"), saved.config)
        self._random.load_state(saved.part("random"))
        self._observers.load_state(saved.part_without_values("listeners"))
        self._input.load_state(saved.part("staged"))

    def _replacing_contents(self) -> AbstractContextManager[None]:
        return self._allocator.replacing_contents()

    def _reading_in_order(self) -> AbstractContextManager[None]:
        return self._allocator.reading_in_order()

    def check(self) -> None:
        """Verify every invariant and raise an InvariantError for the first violation; changes nothing.

        On other devices than the CPU, `add` cannot refuse invalid steps without waiting, so `check` reports invalid
        steps and issues `DataWarning`s. In disk memory, every row is compared with its checksum.
        """
        self._issue_pending_warning()
        with self._lock, self._reading_in_order():
            self.check_state()
            self.storage.check_row_checksums()
            messages = list(self.storage.find_row_warnings())
        for message in messages:
            warn_user(message)

    def check_state(self) -> None:
        """Verify every invariant except the checksums of rows. The caller holds the lock."""
        self.storage.check()
        self._input.check()
        self._observers.check()
        self._random.check()
        if self.storage.rows.has_values:
            self.sampler.check()

    def __len__(self) -> int:
        """Return the number of stored transitions."""
        with self._lock:
            return len(self.storage)

    def __repr__(self) -> str:
        fields = f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r}"
        return f"ReplayBuffer({len(self)} of {self.capacity} rows, num_envs={self.num_envs}, {fields})"


def _convert_tensor(where: str, value: Any, device: torch.device) -> torch.Tensor:
    is_plain = type(value) is torch.Tensor and value.dtype in DTYPES and value.layout == torch.strided
    if is_plain and value.device == device and not value.requires_grad:
        return value
    return as_tensor(where, value, device).to(device)
