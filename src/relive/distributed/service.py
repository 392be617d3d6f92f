"""The client's side of a replay service: one memory, wherever its shards are."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

import relive
from relive.distributed.block import joined, pack
from relive.distributed.calls import NAMESPACE, Calls, actor_name
from relive.distributed.near import Reader
from relive.distributed.plan import Checkpoint, Plan, difference, in_words
from relive.distributed.reading import Draw, Standing
from relive.distributed.shard import Shard
from relive.distributed.stream import Stream
from relive.distributed.writer import Writer
from relive.errors import IncompatibleService, NotReadyError, SchemaError, ShardUnavailable, explain
from relive.fields.batch import assemble, check_destination, check_size, moved
from relive.fields.conversion import as_tensor, environments, row_ids
from relive.fields.schema import Declaration, positive
from relive.kernels.priority import weights
from relive.replay.samplers import Prioritized, Sampler, Uniform
from relive.replay.views import View

_HOST = torch.device("cpu")
_TIMEOUT, _MAX_PENDING = 60.0, 16


class ReplayService:
    """A replay buffer that many processes of a Ray cluster write to and sample from.

    Its environments are divided among `num_shards` processes, an environment's rows always in one of them; each keeps a
    `ReplayBuffer`. What comes out is what one buffer would give: `index` names a row for the whole life of the service,
    and prioritized rows are drawn in proportion to their priority among all shards, with weights from all of them.

    With a `checkpoint` the shards save themselves, and one whose process dies starts again from its newest checkpoint;
    clients send again what it has lost. Without, a shard that dies is gone, and so is the service. It lives as long as
    the job that has made it and this object, or until `close()`.

    Args:
        name: what other processes of the cluster find it by.
        capacity: rows in all shards together, a multiple of `num_envs`.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared likewise.
        num_shards: processes that keep the rows.
        num_envs: environments that write here, in all processes together.
        reward: one environment's reward, declared likewise; one number by default.
        extra: further fields of a row, by name.
        sampler: which rows `sample` draws: `Uniform()` by default.
        autoreset: how the vector environments reset: "NEXT_STEP", "SAME_STEP" or "DISABLED".
        checkpoint: where and how often the shards save themselves: a path, or a `Checkpoint`.
        seed: seed of the draws; None takes one from the system.
        timeout: seconds that a call waits at most. ShardUnavailable says which shard did not answer, and whether trying
            again may help.
        max_pending: blocks that a client has under way to a shard at most.
        ray_options: options of the processes' actors (`num_cpus`, `resources`, `scheduling_strategy`, …).
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        obs: Declaration,
        action: Declaration,
        *,
        num_shards: int = 1,
        num_envs: int = 1,
        reward: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        sampler: Sampler | None = None,
        autoreset: Any = None,
        checkpoint: Checkpoint | str | PathLike[str] | None = None,
        seed: int | None = None,
        timeout: float = _TIMEOUT,
        max_pending: int = _MAX_PENDING,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        sampler = Uniform() if sampler is None else sampler
        plan = Plan(
            capacity, obs, action, reward, extra or {}, num_envs, num_shards, sampler, autoreset, checkpoint, seed
        )
        actors = _start(name, plan, ray_options or {})
        self._connect(name, plan, actors, timeout, max_pending, plan.seed_of(num_shards))
        try:
            self._calls.ask_all("hello", self._calls.deadline())
        except BaseException:
            self._calls.end()
            raise

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        seed: int | None = None,
        timeout: float = _TIMEOUT,
        max_pending: int = _MAX_PENDING,
        **expected: Any,
    ) -> ReplayService:
        """The service of that name, which another process of the cluster has made.

        `expected` may repeat arguments that it was made with (`obs=`, `num_envs=`, …): an IncompatibleService says what
        is different, also if it runs another version of relive.
        """
        first = Calls(name, [_actor(name, 0)], timeout)
        deadline = first.deadline()
        _require_same(name, first.ask_all("hello", deadline)[0], expected)
        plan: Plan = first.ask_all("plan", deadline)[0]
        service = cls.__new__(cls)
        actors = [_actor(name, shard) for shard in range(plan.num_shards)]
        service._connect(name, plan, actors, timeout, max_pending, seed)
        return service

    def _connect(
        self, name: str, plan: Plan, actors: list[Any], timeout: float, max_pending: int, seed: int | None
    ) -> None:
        self.name, self.plan = name, plan
        self._settings = {"timeout": timeout, "max_pending": positive("max_pending", max_pending)}
        self._calls = Calls(name, actors, timeout)
        self._reader = Reader(self._calls, plan, seed)
        self._random = np.random.default_rng(seed)
        client = secrets.token_hex(16)
        self._streams = [Stream(self._calls, shard, client, max_pending) for shard in range(plan.num_shards)]
        self._cut: set[int] = set()
        """Environments whose coming rows start an episode."""
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return _reconnect, (self.name, self._settings)

    # Writing

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """Send a block of steps `[T, k]` in time order, with next_obs, of all environments or of `env_ids`.

        It returns when the block is under way; an error of the shard comes from a later call. What raises here
        was not sent, and may be sent again.
        """
        schema, names = self.plan.schema, (*self.plan.schema.names, "next_obs")
        given = set(batch.keys()) if hasattr(batch, "keys") else None
        if given != set(names):
            got = type(batch).__name__ if given is None else sorted(map(str, given))
            raise SchemaError(
                explain("extend", f"the fields {sorted(names)}", got, "Pass exactly the declared fields.")
            )
        envs = self._envs(env_ids)
        steps = len(as_tensor("terminated", batch["terminated"], _HOST).reshape(-1)) // len(envs)
        if not steps:
            raise SchemaError(explain("extend", "at least one step", 0, "Pass blocks of steps."))

        def fit(name: str, declared: str, prefix: str = "") -> list[torch.Tensor]:
            leaves = zip(schema.columns[declared], schema.flatten(declared, batch[name], name), strict=True)
            return [self.plan.fit(i, leaf, (steps, len(envs)), prefix) for i, leaf in leaves]

        leaves = [leaf for name in schema.names for leaf in fit(name, name)]
        self._push(leaves, fit("next_obs", "obs", "next_"), envs)

    def _push(self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], envs: torch.Tensor) -> None:
        """Send leaves [T, k, …] that fit, each environment's to its shard."""
        ids = envs.numpy()
        owner = self.plan.shard_of(ids)
        with self._lock:
            shards = sorted(set(owner.tolist()))
            deadline = self._calls.deadline()
            for shard in shards:
                self._streams[shard].make_room(deadline)
            for shard in shards:
                mine = torch.from_numpy(np.nonzero(owner == shard)[0])
                parts = [leaves, nexts]
                if len(mine) < len(ids):
                    parts = [[leaf[:, mine] for leaf in part] for part in parts]
                own = ids[mine.numpy()]
                cut = np.array([env for env in own.tolist() if env in self._cut], np.int64)
                self._cut.difference_update(cut.tolist())
                first = self.plan.envs(shard).start
                self._streams[shard].push(own - first, pack(self.plan.schema, *parts), cut - first)

    def writer(self, env_ids: Any = None, *, block: int = 64) -> Writer:
        """Takes the steps of all environments, or of `env_ids`, one by one, and sends them in blocks of `block`."""
        return Writer(self, self._envs(env_ids), block)

    def cut(self, env_ids: Any = None) -> None:
        """The current episodes were abandoned: the coming observations start new ones."""
        with self._lock:
            self._cut.update(self._envs(env_ids).tolist())

    def flush(self) -> None:
        """Wait until the shards have everything that this client has sent."""
        self._flush(self._calls.deadline())

    def _flush(self, deadline: float) -> None:
        with self._lock:
            for stream in self._streams:
                stream.flush(deadline)

    def clear(self) -> None:
        """Forget every row and priority; ids go on."""
        deadline = self._calls.deadline()
        self._flush(deadline)
        self._calls.ask_all("clear", deadline)

    def _envs(self, env_ids: Any) -> torch.Tensor:
        return environments(np.arange(self.plan.num_envs) if env_ids is None else env_ids, self.plan.num_envs, _HOST)

    # Reading

    def sample(
        self, batch_size: int, view: View | None = None, *, device: torch.device | str | None = None
    ) -> TensorDict:
        """A batch of `batch_size` rows that the sampler chooses among all shards, read as `view` says.

        With several shards each is asked for its part of the whole, and then for as many rows as fall to it. If others
        write between these two, rows are drawn by what each shard is then and by the shares that were: a shard whose
        part has grown from m to m' of the whole gives m/m' of the rows it would.
        """
        return self._drawn(1, batch_size, view, device)[0]

    def batches(
        self,
        batch_size: int,
        view: View | None = None,
        *,
        ahead: int = 8,
        device: torch.device | str | None = None,
    ) -> Generator[TensorDict, None, None]:
        """Batches as `sample` gives them, without end; `ahead` of them are asked for at once, while others are used.

        So a learner seldom waits, and a call to a shard costs a fraction as much. It learns from what was stored, with
        the priorities that there were, up to two times `ahead` batches before.
        """
        positive("ahead", ahead)
        with ThreadPoolExecutor(1) as asking:
            coming = asking.submit(self._drawn, ahead, batch_size, view, device)
            while True:
                ready = coming.result()
                coming = asking.submit(self._drawn, ahead, batch_size, view, device)
                yield from ready

    def _drawn(
        self, count: int, batch_size: int, view: View | None, device: torch.device | str | None
    ) -> list[TensorDict]:
        """So many batches, one drawn after the other."""
        check_size("sample", batch_size)
        target = check_destination(device)
        deadline = self._calls.deadline()
        with self._lock:
            for stream in self._streams:
                stream.go_on(deadline)
        try:
            batches = self._drawn_now(count, batch_size, view, deadline)
        except NotReadyError:
            if not any(stream.pending for stream in self._streams):
                raise
            self._flush(deadline)  # there may be enough once our own rows are there
            batches = self._drawn_now(count, batch_size, view, deadline)
        return batches if target is None else [moved(batch, target) for batch in batches]

    def _drawn_now(self, count: int, batch_size: int, view: View | None, deadline: float) -> list[TensorDict]:
        standings: list[Standing] = []
        shares = np.full((1, count), batch_size)
        if self.plan.num_shards > 1:
            standings = self._reader.ask_all("standing", deadline)
            shares = self._random_shares(count, batch_size, standings)
        asked = {shard: (each.tolist(), view) for shard, each in enumerate(shares) if each.any()}
        answers: dict[int, list[Draw | None]] = self._reader.ask("draw", asked, deadline)
        batches: list[TensorDict] = []
        for parts in zip(*answers.values(), strict=True):
            draws = [draw for draw in parts if draw is not None]
            standings = standings or [draws[0].standing]
            leaves = {path: joined([draw.leaves[path] for draw in draws]) for path in draws[0].leaves}
            if isinstance(self.plan.sampler, Prioritized):
                before = sum(standing.drawn for standing in standings) + batch_size * len(batches)
                leaves["weight",] = _weights(self.plan.sampler, draws, standings, before)
            batches.append(assemble(leaves, torch.Size((batch_size,))))
        return batches

    def _random_shares(self, count: int, batch_size: int, standings: list[Standing]) -> np.ndarray:
        """How many of the rows of each batch are of each shard [S, count], if each row is drawn on its own."""
        if not sum(standing.rows for standing in standings):
            raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))
        mantissas, exponents = np.array([standing.mass for standing in standings]).T
        mass = np.ldexp(mantissas, (exponents - exponents[mantissas > 0].max(initial=-2000)).astype(np.int64))
        if not mass.any():
            remedy = "Update at least one priority to more than 0, or use eps > 0."
            raise NotReadyError(explain("sample", "a row of positive priority", "only zeros", remedy))
        with self._lock:
            return self._random.multinomial(batch_size, mass / mass.sum(), count).T

    def update_priority(self, index: Any, priority: Any) -> int:
        """Give the rows `index` (of a batch) new priorities; returns how many were gone meanwhile, and skipped.

        An id that was never given is an IndexError of its shard; the rows of other shards are updated then.
        """
        sampler = self.plan.sampler
        if not isinstance(sampler, Prioritized):
            remedy = "Start the service with sampler=rl.Prioritized()."
            raise SchemaError(explain("update_priority", "a sampler with priorities", sampler, remedy))
        ids = row_ids(index.cpu() if isinstance(index, torch.Tensor) else index, _HOST).numpy()
        values = as_tensor("priority", priority.cpu() if isinstance(priority, torch.Tensor) else priority, _HOST)
        numbers = sampler.accept(values, len(ids))[0].numpy()
        owner = self.plan.shard_of(ids % self.plan.num_envs)
        # All are asked: new rows get the largest priority that any has accepted.
        parts = {s: (ids[owner == s], numbers[owner == s]) for s in range(self.plan.num_shards)}
        deadline = self._calls.deadline()
        answers: dict[int, tuple[int, float]] = self._reader.ask("update", parts, deadline)
        most = max(largest for _, largest in answers.values())
        behind = {shard: (most,) for shard, (_, largest) in answers.items() if largest < most}
        self._reader.ask("expect", behind, deadline)
        return sum(stale for stale, _ in answers.values())

    def __len__(self) -> int:
        """The number of stored transitions."""
        return sum(standing.rows for standing in self._reader.ask_all("standing", self._calls.deadline()))

    # The whole

    def save(self) -> list[int]:
        """Save every shard, with all that this client has sent; returns the numbers of their checkpoints."""
        deadline = self._calls.deadline()
        self._flush(deadline)
        numbers = self._calls.ask_all("save", deadline)
        self._flush(deadline)
        return numbers

    def stats(self) -> dict[str, Any]:
        """How full it is, how each shard is, what of this client is under way or was lost, and how many shards it reads
        in place; `sampled` of a shard are rows that it was called for."""
        shards = self._calls.ask_all("stats", self._calls.deadline())
        with self._lock:
            client = {name: sum(getattr(stream, name) for stream in self._streams) for name in ("pending", "lost")}
        return {
            "rows": sum(shard["rows"] for shard in shards),
            **client,
            "in_place": self._reader.in_place,
            "shards": shards,
        }

    def close(self) -> None:
        """End the service for everybody; with a checkpoint, everything is saved first."""
        try:
            if self.plan.checkpoint is not None:
                self.save()
        finally:
            self._calls.end()

    def __enter__(self) -> ReplayService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = self.plan
        fields = ", ".join(plan.schema.names)
        return f"ReplayService({self.name!r}, {plan.capacity} rows in {plan.num_shards} shards, fields=({fields}))"


def _start(name: str, plan: Plan, options: Mapping[str, Any]) -> list[Any]:
    """Start the processes of a service."""
    if not isinstance(name, str) or not name:
        raise SchemaError(explain("name", "a str that is not empty", repr(name), "Pass a name for the service."))
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
            actors.append(remote.options(name=actor_name(name, shard), **settings).remote(plan, shard))
    except ValueError:
        for actor in actors:
            ray.kill(actor)
        remedy = "Connect to it with ReplayService.connect, close it, or choose another name."
        raise SchemaError(explain("name", "a name not in use", repr(name), remedy)) from None
    return actors


def _actor(name: str, shard: int) -> Any:
    try:
        return ray.get_actor(actor_name(name, shard), namespace=NAMESPACE)
    except ValueError:
        remedy = "Start the service, or check its name; its driver may have ended."
        where = f"shard {shard} of {name!r}"
        raise ShardUnavailable(
            explain(where, "a process in this cluster", "no such process", remedy), retry=True
        ) from None


def _reconnect(name: str, settings: dict[str, Any]) -> ReplayService:
    return ReplayService.connect(name, **settings)


def _require_same(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The handshake: the same version, and whatever else the client cares to say."""
    wanted = {"relive": relive.__version__, **in_words(expected)}
    differs = difference(wanted, {key: found.get(key) for key in wanted})
    if differs:
        where = f"service {name!r}"
        remedy = "Connect with the settings of the service, and with its version of relive."
        raise IncompatibleService(
            explain(where, "the settings of the client (client against service)", differs, remedy)
        )


def _weights(sampler: Prioritized, draws: list[Draw], standings: list[Standing], before: int) -> torch.Tensor:
    """weight_i = (M · P(i))^-beta over the largest: (smallest mass / mass_i)^beta, whatever shard a row is of."""
    masses = torch.from_numpy(np.concatenate([draw.masses for draw in draws if draw.masses is not None]))
    smallest = float(masses.min())
    if sampler.normalize == "global":
        smallest = min(smallest, *(standing.smallest for standing in standings))
    return weights(masses, smallest, sampler.beta_after(before))
