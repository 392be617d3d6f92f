"""The replay service: one replay buffer in several processes of a Ray cluster."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np
import torch

from relive import lazy
from relive.distributed.client import (
    ClientReader,
    PushStream,
    ShardCalls,
    find_actor,
    require_compatible_service,
    start_actors,
)
from relive.distributed.protocol import (
    Checkpoint,
    ServicePlan,
    ShardDraw,
    ShardTotals,
    as_shared_array,
    concatenate_parts,
    pack_block,
)
from relive.errors import NotReadyError, SchemaError, explain, find_call_site, worker_call_site
from relive.kernels.priority import importance_weights
from relive.replay.ids import PADDING_ID, flatten_ids, flatten_mutable_fields
from relive.replay.samplers import Prioritized, Sampler, Uniform
from relive.replay.views import View
from relive.schema.assembly import assemble_batch, check_batch_size, check_destination, to_device
from relive.schema.autoreset import parse_autoreset_mode, read_transition
from relive.schema.checks import check_keys, check_nonempty, check_positive_int
from relive.schema.conversion import as_tensor, convert_env_ids
from relive.schema.fields import Declaration, Schema, caller_shape


def draw_shares(
    random: np.random.Generator, num_batches: int, batch_size: int, totals: list[ShardTotals]
) -> np.ndarray:
    """Draw the number of rows that each shard contributes to each of `num_batches` batches [S, num_batches]."""
    check_nonempty("sample", sum(shard.rows for shard in totals), "transition")
    mantissas, exponents = np.array([shard.mass for shard in totals]).T
    mass = np.ldexp(mantissas, (exponents - exponents[mantissas > 0].max(initial=-2000)).astype(np.int64))
    if not mass.any():
        remedy = "Update at least one priority to more than 0, or use eps > 0."
        raise NotReadyError(explain("sample", "a row of positive priority", "only zeros", remedy))
    return random.multinomial(batch_size, mass / mass.sum(), num_batches).T


def compute_weights(
    sampler: Prioritized, draws: list[ShardDraw], totals: list[ShardTotals], num_drawn: int
) -> torch.Tensor:
    """Return importance weights [B], (smallest mass / mass_i)^beta, of a batch that `num_drawn` drawn rows precede.

    Shards count drawn rows, not calls; `num_drawn` divided by the batch size is the number of calls for a schedule.
    """
    masses = torch.from_numpy(np.concatenate([draw.masses for draw in draws if draw.masses is not None]))
    smallest = float(masses.min())
    if sampler.normalize == "global":
        smallest = min(smallest, *(shard.smallest_mass for shard in totals))
    return importance_weights(masses, smallest, sampler.compute_beta(num_drawn, num_drawn // len(masses)))


class Writer:
    """Collects steps of some environments and sends them to a service in blocks; `ReplayService.writer` makes one.

    A full block is sent by the call that adds the next step, so that a call that raises has not added its step and may
    be repeated. The end of a `with` block sends the remaining steps and waits until the service has stored them.

    Args:
        service: the service.
        envs: environments of this writer [k].
        block: number of steps that are sent together.
    """

    def __init__(self, service: ReplayService, envs: torch.Tensor, block: int) -> None:
        self._service, self._envs, self._num_steps = service, envs, 0
        self._schema: Schema = service.plan.schema
        self._autoreset = parse_autoreset_mode(service.plan.autoreset)
        shapes = [
            (check_positive_int("block", block), len(envs), *caller_shape(field)) for field in self._schema.fields
        ]
        self._leaves = [
            torch.empty(shape, dtype=field.dtype, device="cpu")
            for shape, field in zip(shapes, self._schema.fields, strict=True)
        ]
        self._next_leaves = [torch.empty_like(self._leaves[i]) for i in self._schema.leaf_indices["obs"]]

    def add(
        self, obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any, next_obs: Any, **extra: Any
    ) -> None:
        """Add one step of every environment of this writer."""
        self._store_step((obs, action, reward, terminated, truncated), self._schema.flatten("obs", next_obs), extra)

    def add_step(self, obs: Any, action: Any, step: tuple[Any, Any, Any, Any, Mapping[str, Any]], **extra: Any) -> None:
        """Add one step of a Gymnasium environment: `step = env.step(action)`, after the observation `obs`."""
        leading_shape = (len(self._envs),)
        next_leaves, *rest = read_transition(step, self._autoreset, self._schema, leading_shape, _HOST)
        self._store_step((obs, action, *rest), next_leaves, extra)

    def _store_step(self, values: tuple[Any, ...], next_leaves: tuple[Any, ...], extra: Mapping[str, Any]) -> None:
        schema = self._schema
        names = schema.names[len(values) :]
        check_keys("add", extra, names, "further fields")
        fields = zip(schema.names, (*values, *(extra[name] for name in names)), strict=True)
        leaves = [leaf for name, value in fields for leaf in schema.flatten(name, value)]
        convert, leading_shape = self._service.plan.convert, (len(self._envs),)
        converted = [convert(i, leaf, leading_shape) for i, leaf in enumerate(leaves)]
        converted_next_leaves = [
            convert(i, leaf, leading_shape, "next_")
            for i, leaf in zip(schema.leaf_indices["obs"], next_leaves, strict=True)
        ]
        if self._num_steps == len(self._leaves[0]):
            self._push_block()
        for block, leaf in zip((*self._leaves, *self._next_leaves), (*converted, *converted_next_leaves), strict=True):
            block[self._num_steps] = leaf
        self._num_steps += 1

    def cut(self) -> None:
        """Mark the current episodes as abandoned: the next observations start new episodes."""
        self._push_block()
        self._service.cut(self._envs)

    def flush(self) -> None:
        """Send the remaining steps, and wait until the service has stored them."""
        self._push_block()
        self._service.flush()

    def _push_block(self) -> None:
        count = self._num_steps
        if count:
            leaves, next_leaves = ([leaf[:count] for leaf in group] for group in (self._leaves, self._next_leaves))
            self._service._push_steps(leaves, next_leaves, self._envs)
            self._num_steps = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is None:
            self.flush()


_HOST = torch.device("cpu")
_TIMEOUT, _MAX_PENDING = 60.0, 16


class ReplayService:
    """A replay buffer that many processes of a Ray cluster write to and sample from.

    Its environments are divided among `num_shards` processes, each with a `ReplayBuffer`; all rows of an environment
    are in the same buffer. The service samples like one buffer: `index` identifies a row for the whole life of the
    service, and rows are drawn and weighted by their priority among all shards.

    With a `checkpoint`, the shards save themselves. A shard whose process dies restarts from its newest checkpoint, and
    clients send the lost rows again. Without a checkpoint, the service ends with the first shard that dies. A service
    lives until `close()`, or until this object or the job that made the service ends.

    Args:
        name: name by which other processes of the cluster find the service.
        capacity: number of rows in all shards together, a multiple of `num_envs`.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared like `obs`.
        num_shards: number of processes that store the rows.
        num_envs: number of environments of all writers together.
        reward: one environment's reward, declared like `obs`; one number by default.
        extra: further fields of a row, by name.
        sampler: the sampler, `Uniform(…)` by default or `Prioritized(…)`.
        autoreset: how the vector environments reset: "NEXT_STEP", "SAME_STEP" or "DISABLED".
        checkpoint: folder of the checkpoints, or a `Checkpoint` with the folder and the interval.
        seed: seed of the draws; None takes one from the system.
        timeout: maximum seconds that a call waits. A ShardUnavailable contains the shard that did not answer, and
            whether trying again may help.
        max_pending: maximum number of blocks of a client that a shard has not confirmed.
        ray_options: options of the processes' actors (`num_cpus`, `resources`, `scheduling_strategy`, …).
    """

    def __init__(
        self, name: str, capacity: int, obs: Declaration, action: Declaration, *, num_shards: int = 1,
        num_envs: int = 1, reward: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        sampler: Sampler | None = None, autoreset: Any = None,
        checkpoint: Checkpoint | str | PathLike[str] | None = None, seed: int | None = None,
        timeout: float = _TIMEOUT, max_pending: int = _MAX_PENDING, ray_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        sampler = Uniform() if sampler is None else sampler
        plan = ServicePlan(
            capacity, obs, action, reward, extra or {}, num_envs, num_shards, sampler, autoreset, checkpoint, seed
        )
        actors = start_actors(name, plan, ray_options or {})
        self._attach_shards(plan, ShardCalls(name, actors, timeout), max_pending, plan.derive_seed(num_shards))
        try:
            self._calls.call_shards("describe_plan", self._calls.new_deadline())
        except BaseException:
            self._calls.kill_shards()
            raise

    @classmethod
    def connect(
        cls, name: str, *, seed: int | None = None, timeout: float = _TIMEOUT, max_pending: int = _MAX_PENDING,
        **expected: Any,
    ) -> ReplayService:  # fmt: skip
        """Return a client of the service `name`, which another process of the cluster has made.

        `expected` may repeat arguments of the service (`obs=`, `num_envs=`, …). An IncompatibleService is raised if one
        of these arguments differs from the service's, or the version of relive does.
        """
        first_shard = ShardCalls(name, [find_actor(name, 0)], timeout)
        deadline = first_shard.new_deadline()
        require_compatible_service(name, first_shard.call_shards("describe_plan", deadline)[0], expected)
        plan: ServicePlan = first_shard.call_shards("plan", deadline)[0]
        service = cls.__new__(cls)
        actors = [find_actor(name, shard) for shard in range(plan.num_shards)]
        service._attach_shards(plan, ShardCalls(name, actors, timeout), max_pending, seed)
        return service

    def _attach_shards(self, plan: ServicePlan, calls: ShardCalls, max_pending: int, seed: int | None) -> None:
        self.name, self.plan, self._calls = calls.service, plan, calls
        self._settings = {"timeout": calls.timeout, "max_pending": check_positive_int("max_pending", max_pending)}
        self._reader = ClientReader(calls, plan, seed)
        client = secrets.token_hex(16)
        self._streams = [PushStream(calls, shard, client, max_pending) for shard in range(plan.num_shards)]
        self._cut_envs: set[int] = set()
        """Environments whose next row starts a new episode."""
        self._push_lock = threading.RLock()
        """Lock of the streams and of `_cut_envs`."""
        self._random = np.random.default_rng(seed)
        self._random_lock = threading.Lock()

    def __reduce__(self) -> Any:
        return partial(ReplayService.connect, self.name, **self._settings), ()

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """Send a block of steps [T, k] in time order, with next_obs, of all environments or of `env_ids`.

        The call does not wait until the block is stored; a later call raises the shard's errors. A call that raises has
        sent nothing and may be repeated.
        """
        schema, names = self.plan.schema, (*self.plan.schema.names, "next_obs")
        check_keys("extend", batch, names, "fields")
        envs = self._convert_env_ids(env_ids)
        steps = len(as_tensor("terminated", batch["terminated"], _HOST).reshape(-1)) // len(envs)
        if not steps:
            raise SchemaError(explain("extend", "at least one step", 0, "Pass blocks of steps."))

        def convert(name: str, declared: str, prefix: str = "") -> list[torch.Tensor]:
            leaves = zip(schema.leaf_indices[declared], schema.flatten(declared, batch[name], name), strict=True)
            return [self.plan.convert(i, leaf, (steps, len(envs)), prefix) for i, leaf in leaves]

        leaves = [leaf for name in schema.names for leaf in convert(name, name)]
        self._push_steps(leaves, convert("next_obs", "obs", "next_"), envs)

    def _push_steps(self, leaves: list[torch.Tensor], next_leaves: list[torch.Tensor], envs: torch.Tensor) -> None:
        """Send converted leaves and next observations [T, k, …] of `envs` [k] to the shards of these environments."""
        ids = envs.numpy()
        owner = self.plan.find_shards(ids)
        with self._push_lock:
            shards = sorted(set(owner.tolist()))
            deadline = self._calls.new_deadline()
            for shard in shards:
                self._streams[shard].wait_for_room(deadline)
            for shard in shards:
                columns = torch.from_numpy(np.nonzero(owner == shard)[0])
                groups = [leaves, next_leaves]
                if len(columns) < len(ids):
                    groups = [[leaf[:, columns] for leaf in group] for group in groups]
                shard_envs = ids[columns.numpy()]
                cut_envs = np.array([env for env in shard_envs.tolist() if env in self._cut_envs], np.int64)
                self._cut_envs.difference_update(cut_envs.tolist())
                first = self.plan.envs_of_shard(shard).start
                self._streams[shard].push(shard_envs - first, pack_block(self.plan.schema, *groups), cut_envs - first)

    def writer(self, env_ids: Any = None, *, block: int = 64) -> Writer:
        """Return a writer that collects steps of all environments, or of `env_ids`, into blocks of `block` steps."""
        return Writer(self, self._convert_env_ids(env_ids), block)

    def cut(self, env_ids: Any = None) -> None:
        """Mark the current episodes as abandoned: the next observations start new episodes."""
        envs = self._convert_env_ids(env_ids)
        with self._push_lock:
            self._cut_envs.update(envs.tolist())

    def flush(self) -> None:
        """Wait until the shards have stored every row that this client has sent."""
        self._flush_streams(self._calls.new_deadline())

    def _flush_streams(self, deadline: float) -> None:
        with self._push_lock:
            for stream in self._streams:
                stream.flush(deadline)

    def clear(self) -> None:
        """Delete every row and priority. Ids continue."""
        deadline = self._calls.new_deadline()
        self._flush_streams(deadline)
        self._calls.call_shards("clear", deadline)

    def _convert_env_ids(self, env_ids: Any) -> torch.Tensor:
        return convert_env_ids(np.arange(self.plan.num_envs) if env_ids is None else env_ids, self.plan.num_envs, _HOST)

    def sample(
        self, batch_size: int, view: View | None = None, *, device: torch.device | str | None = None
    ) -> lazy.TensorDict:
        """Return a batch of `batch_size` rows that the sampler chooses among all shards, read by `view`.

        With several shards, a first round of calls reads each shard's share of the total priority, and a second round
        draws rows by these shares. If rows are written between the two rounds, the shares are slightly old: a shard
        whose share has grown from m to m' returns m/m' of the rows that it should.
        """
        return self._sample_batches(1, batch_size, view, device)[0]

    def batches(
        self, batch_size: int, view: View | None = None, *, ahead: int = 8, device: torch.device | str | None = None
    ) -> Generator[lazy.TensorDict, None, None]:
        """Yield batches of `sample` without end; one call requests `ahead` batches while earlier batches are used.

        A learner then seldom waits, and a batch costs a fraction of a call. A batch may have been drawn up to two times
        `ahead` batches earlier.
        """
        check_positive_int("ahead", ahead)
        with ThreadPoolExecutor(1, initializer=worker_call_site.set, initargs=(find_call_site(),)) as executor:
            next_batches = executor.submit(self._sample_batches, ahead, batch_size, view, device)
            while True:
                batches = next_batches.result()
                next_batches = executor.submit(self._sample_batches, ahead, batch_size, view, device)
                yield from batches

    def _sample_batches(
        self, num_batches: int, batch_size: int, view: View | None, device: torch.device | str | None
    ) -> list[lazy.TensorDict]:
        """Return `num_batches` batches, drawn in sequence."""
        check_batch_size("sample", batch_size)
        target = check_destination(device)
        deadline = self._calls.new_deadline()
        with self._push_lock:
            for stream in self._streams:
                stream.send_waiting_blocks(deadline)
        try:
            batches = self._draw_batches(num_batches, batch_size, view, deadline)
        except NotReadyError:
            if not self._num_pending:
                raise
            # Rows that this client has sent may complete the batch, so the second attempt waits until they are stored.
            self._flush_streams(deadline)
            batches = self._draw_batches(num_batches, batch_size, view, deadline)
        return batches if target is None else [to_device(batch, target) for batch in batches]

    def _draw_batches(
        self, num_batches: int, batch_size: int, view: View | None, deadline: float
    ) -> list[lazy.TensorDict]:
        totals: list[ShardTotals] = []
        shares = np.full((1, num_batches), batch_size)
        if self.plan.num_shards > 1:
            totals = list(self._reader.call_shards("totals", deadline).values())
            with self._random_lock:
                shares = draw_shares(self._random, num_batches, batch_size, totals)
        arguments = {shard: (counts.tolist(), view) for shard, counts in enumerate(shares) if counts.any()}
        answers: dict[int, list[ShardDraw | None]] = self._reader.call_shards("draw", deadline, arguments)
        batches: list[lazy.TensorDict] = []
        for shard_draws in zip(*answers.values(), strict=True):
            draws = [draw for draw in shard_draws if draw is not None]
            totals = totals or [draws[0].totals]
            leaves = {path: concatenate_parts([draw.leaves[path] for draw in draws]) for path in draws[0].leaves}
            if isinstance(self.plan.sampler, Prioritized):
                num_drawn = sum(shard.num_drawn for shard in totals) + batch_size * len(batches)
                leaves["weight",] = compute_weights(self.plan.sampler, draws, totals, num_drawn)
            batches.append(assemble_batch(leaves, torch.Size((batch_size,))))
        return batches

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of the rows `index` (of a batch); return how many overwritten rows were skipped.

        `index` may be the "step_index" [B, L] of sequences, with priorities of this shape. An id that was never issued
        is an IndexError of its shard; the other shards then update their rows.
        """
        sampler = self.plan.sampler
        if not isinstance(sampler, Prioritized):
            remedy = "Start the service with sampler=rl.Prioritized()."
            raise SchemaError(explain("update_priority", "a sampler with priorities", sampler, remedy))
        ids, leading_shape, is_id = _flatten_ids_without_padding(index)
        values = as_tensor("priority", _move_to_host(priority), _HOST)
        if len(leading_shape) == 2 and tuple(values.shape) == leading_shape:
            values = values.reshape(-1)[is_id]
        numbers = sampler.convert_priorities(values, len(ids))[0].numpy()
        owner = self.plan.find_shards(ids % self.plan.num_envs)
        # Every shard is called, because new rows get the largest priority that any shard has accepted.
        updates = {s: (ids[owner == s], numbers[owner == s]) for s in range(self.plan.num_shards)}
        deadline = self._calls.new_deadline()
        answers: dict[int, tuple[int, float]] = self._reader.call_shards("update", deadline, updates)
        max_priority = max(largest for _, largest in answers.values())
        outdated_shards = {shard: (max_priority,) for shard, (_, largest) in answers.items() if largest < max_priority}
        self._reader.call_shards("raise_largest_priority", deadline, outdated_shards)
        return sum(stale for stale, _ in answers.values())

    def write(self, index: Any, **fields: Any) -> int:
        """Write new values of `Mutable` fields into the rows `index` (of a batch); see `ReplayBuffer.write`.

        An id that was never issued is an IndexError of its shard; the other shards then write their rows. A shard that
        restarts from its checkpoint has the values that were saved there.
        """
        leaves = flatten_mutable_fields(self.plan.schema, fields)
        ids, leading_shape, is_id = _flatten_ids_without_padding(index)
        values = {}
        for i, leaf in leaves.items():
            value = self.plan.convert(i, _move_to_host(leaf), leading_shape)
            values[i] = as_shared_array(value.reshape(-1, *self.plan.schema.fields[i].shape))[is_id]
        owner = self.plan.find_shards(ids % self.plan.num_envs)
        writes = {int(s): (ids[owner == s], {i: x[owner == s] for i, x in values.items()}) for s in np.unique(owner)}
        return sum(self._reader.call_shards("write", self._calls.new_deadline(), writes).values())

    def __len__(self) -> int:
        """Return the number of stored transitions."""
        return sum(shard.rows for shard in self._reader.call_shards("totals", self._calls.new_deadline()).values())

    def save(self) -> list[int]:
        """Save every shard, with every row that this client has sent; return the number of each shard's checkpoint."""
        deadline = self._calls.new_deadline()
        self._flush_streams(deadline)
        numbers = self._calls.call_shards("save", deadline)
        self._flush_streams(deadline)
        return list(numbers.values())

    @property
    def _num_pending(self) -> int:
        """Number of this client's blocks that no shard has confirmed yet."""
        return sum(stream.num_pending for stream in self._streams)

    def stats(self) -> dict[str, Any]:
        """Return numbers of stored rows, of this client's pending blocks and lost rows, and of each shard.

        "in_place" is the number of shards whose memory this client reads directly. "sampled" of a shard counts only
        rows that were drawn by calls.
        """
        shards = list(self._calls.call_shards("stats", self._calls.new_deadline()).values())
        return {
            "rows": sum(shard["rows"] for shard in shards),
            "pending": self._num_pending,
            "lost": sum(stream.num_lost for stream in self._streams),
            "in_place": self._reader.num_local_shards,
            "shards": shards,
        }

    def close(self) -> None:
        """End the service for all clients; with a checkpoint, every shard is saved first."""
        try:
            if self.plan.checkpoint is not None:
                self.save()
        finally:
            self._calls.kill_shards()

    def __enter__(self) -> ReplayService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = self.plan
        fields = ", ".join(plan.schema.names)
        return f"ReplayService({self.name!r}, {plan.capacity} rows in {plan.num_shards} shards, fields=({fields}))"


def _move_to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _flatten_ids_without_padding(index: Any) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Return the ids in `index` [B] or [B, L] without padding, the shape of `index`, and a mask of the ids."""
    flat, leading_shape = flatten_ids(_move_to_host(index), _HOST)
    is_id = flat.numpy() != PADDING_ID if len(leading_shape) == 2 else np.ones(len(flat), np.bool_)
    return flat.numpy()[is_id], leading_shape, is_id
