"""The off-policy buffer: the newest transitions of every environment, drawn in any way and read in any form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from relive.errors import InvariantError, NotReadyError, SchemaError, explain, uniterable
from relive.fields.autoreset import parse_autoreset, refuse_reused, settings_of, true_next_obs, unpack_step
from relive.fields.batch import assemble, check_destination, check_size, fill, moved
from relive.fields.buffer_schemas import check_replay, replay_nbytes, replay_schema
from relive.fields.conversion import (
    Environments,
    alias,
    as_tensor,
    conform,
    dotted,
    light,
    refuse_reused_leaves,
    row_ids,
)
from relive.fields.display import buffer_card, size_told
from relive.fields.schema import DTYPES, Declaration, Field, Path, given_shape, positive
from relive.fields.vocabulary import answers, understands
from relive.locking import Closed, lock_for, mend_later
from relive.memory import Heap, Memory
from relive.randomness import Randomness, verify_state
from relive.replay.chains import of_stored, speak
from relive.replay.episodes import ordered, stored_slots
from relive.replay.invariants import check_seals, check_staged, check_storage
from relive.replay.samplers import Prioritized, Sampler, Uniform
from relive.replay.samplers.protocol import verify_draws
from relive.replay.storage import ReplayStorage
from relive.replay.views import NStep, Transition, View
from relive.replay.views.protocol import Leaves
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.statistics.observers import Observers

if TYPE_CHECKING:
    from relive.concurrent.processes import Handle

_NOTHING: Mapping[str, Any] = {}


@understands
class ReplayBuffer:
    """The newest `capacity` rows, each environment's column a ring of its own; every observation stored once.

    What was passed is what is sampled: when the observation of a step is, bit by bit, the one that the step before led
    to, nothing is copied; when it is not, the episode is cut there and the older row keeps its `next_obs`.
    `Stacked` observations must be given from an episode's start on, also after `clear()` and `cut()`: only then can
    their frames be told apart.

    Args:
        capacity: rows in all, a multiple of `num_envs`.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared likewise.
        num_envs: environments that write here. None is one environment without an environment axis.
        reward: one environment's reward, declared likewise; one number by default.
        extra: further fields of a row, by name.
        sampler: which rows `sample` draws: `Uniform()` by default.
        device: where the rows are stored: a torch device, or a `Memory` (pinned, shared, on disk).
        next_obs: "shared" stores each observation once; "stored" keeps an explicit copy of every next observation, for
            unordered data.
        autoreset: how the vector environment resets: "NEXT_STEP", "SAME_STEP" or "DISABLED". `add_step` needs it.
        stats: counts every transition; its metrics and reasons are the fields of these names, or come from the info
            that `add_step` gets.
        norm: running norms by field (or path to a leaf). Each takes in the values of its field from every transition.
        seed: seed of the draws; None takes one from the system.

    A critic that sees more than the policy: `obs={"policy": 4, "critic": 9}` gives both parts of `obs` and `next_obs`.
    Several agents are an axis (`reward=(A,)`) or a dict of agents (`reward={"fox": (), "hare": ()}`). `terminated` and
    `truncated` are the environment's: where agents end before it, keep who is alive in the observation, and an agent's
    target is reward + discount · (1 − terminated) · alive of next_obs · Q(next_obs).

    >>> replay = ReplayBuffer(100, obs=2, action=(), seed=0)
    >>> for step in range(3):
    ...     replay.add([step, 0.0], 0.5, 1.0, terminated=False, truncated=False, next_obs=[step + 1, 0.0])
    >>> batch = replay.sample(4)
    >>> bool((batch["next_obs"][:, 0] == batch["obs"][:, 0] + 1).all())
    True
    """

    @answers
    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def __init__(
        self,
        capacity: int,
        obs: Declaration,
        action: Declaration,
        *,
        num_envs: int | None = None,
        reward: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        sampler: Sampler | None = None,
        device: torch.device | str | Memory = "cpu",
        next_obs: Literal["shared", "stored"] = "shared",
        autoreset: AutoresetMode | str | None = None,
        stats: EpisodeStats | None = None,
        norm: Norms | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity = capacity = positive("capacity", capacity)
        self.num_envs = num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        memory = Memory.of(device)
        schema = replay_schema(obs, action, reward, extra or {})
        check_replay(capacity, self.num_envs, next_obs, schema)
        memory.require(replay_nbytes(schema, capacity, self.num_envs or 1, next_obs))
        self.device = torch.empty(0, device=memory.device).device
        self._schema = schema
        self._listeners = Observers(stats, norm, schema, self.num_envs, self.device)
        self._is_plain = schema.is_flat and not extra
        self._random = Randomness(seed)
        self.sampler = _instance("sampler", Uniform() if sampler is None else sampler, "start")
        self._next_obs = next_obs
        room = memory.open(self)
        self._storage = ReplayStorage(
            schema,
            capacity // (num_envs or 1),
            num_envs,
            room,
            keeps_next=next_obs == "stored",
            next_step=self.autoreset is AutoresetMode.NEXT_STEP,
            same_step=self.autoreset is AutoresetMode.SAME_STEP,
        )
        self._environments = Environments(self.num_envs, self.device)
        self._draws = self.sampler.start(self._storage, self._random)
        if self._draws.wants_touched:
            self._storage.keep_touched()
        self._staged: dict[str, tuple[torch.Tensor, ...]] = {}
        self._traffic = (room if room.outlives else Heap(torch.device("cpu"))).allocate("traffic", (2,), torch.int64)
        """How many steps and samples a RateLimit has let through."""
        self._lock = lock_for(self, room.lock(mend_later(self)))
        self._keeper = room.keeper
        if self._keeper is not None:
            self._keeper.settle(self, resumes=seed is None)

    @classmethod
    @answers
    def for_env(
        cls,
        env: Any,
        capacity: int,
        *,
        obs: Declaration | None = None,
        action: Declaration | None = None,
        reward: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        sampler: Sampler | None = None,
        device: torch.device | str | Memory = "cpu",
        next_obs: Literal["shared", "stored"] = "shared",
        autoreset: AutoresetMode | str | None = None,
        stats: EpisodeStats | None = None,
        norm: Norms | None = None,
        seed: int | None = None,
    ) -> ReplayBuffer:
        """A buffer for a Gymnasium environment: its spaces, its number of environments and how it resets.

        `obs`, `action` and `autoreset` replace what the environment says.
        """
        settings = settings_of(env, obs, action, autoreset)
        return cls(
            capacity,
            settings.obs,
            settings.action,
            num_envs=settings.num_envs,
            reward=reward,
            extra=extra,
            sampler=sampler,
            device=device,
            next_obs=next_obs,
            autoreset=settings.autoreset,
            stats=stats,
            norm=norm,
            seed=seed,
        )

    @staticmethod
    def estimate_bytes(
        capacity: int,
        obs: Declaration,
        action: Declaration,
        *,
        num_envs: int | None = None,
        reward: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        next_obs: Literal["shared", "stored"] = "shared",
    ) -> int:
        """What a buffer of this description will keep, before it is made."""
        return replay_nbytes(replay_schema(obs, action, reward, extra or {}), capacity, num_envs or 1, next_obs)

    @property
    def nbytes(self) -> int:
        """What this buffer keeps, in bytes (without the sampler's own)."""
        return self._storage.nbytes

    @property
    def stats(self) -> EpisodeStats | None:
        """The statistics that every transition is counted in."""
        return self._listeners.stats

    @property
    def norm(self) -> dict[str | Path, RunningNorm]:
        """The norms that take in every transition, by field or path."""
        return self._listeners.norm

    def _mend(self) -> None:
        """A process died that had the lock: make a buffer again of what it left."""
        self._storage.ring.mend()
        mended = getattr(self._draws, "mended", None)
        if mended is not None:
            mended()

    # Writing

    def add(
        self,
        obs: Any = None,
        action: Any = None,
        reward: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        next_obs: Any = None,
        *,
        env_ids: Any = None,
        **extra: Any,
    ) -> None:
        """Store one step of every environment, or of the environments `env_ids`."""
        with self._lock:
            values = (obs, action, reward, terminated, truncated)
            if self._is_plain and not (extra or self._staged):  # a call costs more than the copy of a small step
                doubt = self._write(values, (next_obs,), None if env_ids is None else self._envs(env_ids))
            else:
                nexts = self._schema.flatten("obs", next_obs)
                doubt = self._write(self._leaves(values, extra), nexts, self._envs(env_ids))
        if doubt is not None:
            speak(doubt)
            ReplayBuffer.add(self, obs, action, reward, terminated, truncated, next_obs, env_ids=env_ids, **extra)

    def add_step(
        self,
        obs: Any = None,
        action: Any = None,
        step: tuple[Any, Any, Any, Any, Mapping[str, Any]] | None = None,
        *,
        env_ids: Any = None,
        **extra: Any,
    ) -> None:
        """Store one step as Gymnasium gave it: `step = env.step(action)`, taken in the state `obs`.

        The true next observation of an episode that ended is found where the autoreset mode leaves it. With `env_ids`
        the step's arrays and info masks have a row for each of them.
        """
        with self._lock:
            envs = self._envs(env_ids)
            lead = self._storage.lead if envs is None else (len(envs),)
            if isinstance(step, tuple) and step and self.autoreset is AutoresetMode.SAME_STEP:
                refuse_reused(self._schema, obs, step[0])
            nexts, reward, terminated, truncated = true_next_obs(step, self.autoreset, self._schema, lead, self.device)
            info = unpack_step(step, self.autoreset)[4]
            leaves = self._leaves((obs, action, reward, terminated, truncated), extra)
            measured = self._listeners.measured(info, lead, self.autoreset)
            doubt = self._write(leaves, nexts, envs, measured=measured)
        if doubt is not None:
            speak(doubt)
            ReplayBuffer.add_step(self, obs, action, step, env_ids=env_ids, **extra)

    def stage(self, **fields: Any) -> None:
        """Copy some fields of the coming step now, before the environment overwrites them; `add` gives the others."""
        with self._lock:
            fresh: dict[str, tuple[torch.Tensor, ...]] = {}
            for name, value in fields.items():
                self._schema.require(name)
                if name in self._staged:
                    raise SchemaError(explain(name, "one value per step", "a second value", "Stage it once per step."))
                leaves = zip(self._schema.columns[name], self._schema.flatten(name, value), strict=True)
                fresh[name] = tuple(self._conform(i, leaf, self._storage.lead).clone() for i, leaf in leaves)
            self._staged |= fresh

    def extend(self, batch: Any, *, env_ids: Any = None) -> None:
        """Store a block: `[T, N]` (or `[T]`) steps in time order, or `[B]` unordered ones with next_obs="stored"."""
        with self._lock:
            envs = self._envs(env_ids)
            names = (*self._schema.names, "next_obs")
            given = set(batch.keys()) if hasattr(batch, "keys") else None
            if given != set(names):
                got = type(batch).__name__ if given is None else sorted(map(str, given))
                remedy = "Pass exactly the declared fields."
                raise SchemaError(explain("extend", f"the fields {sorted(names)}", got, remedy))
            if self._staged:
                raise SchemaError(
                    explain("extend", "no staged fields", sorted(self._staged), "Complete the step with add.")
                )
            leaves = tuple(leaf for name in self._schema.names for leaf in self._schema.flatten(name, batch[name]))
            shape = as_tensor("terminated", batch["terminated"], self.device).shape
            steps = shape[0] if shape else 0
            if steps == 0:
                raise SchemaError(explain("extend", "at least one step", 0, "Pass blocks of steps."))
            nexts = self._schema.flatten("obs", batch["next_obs"])
            # Of a block that is cut out of one array, the observations of one step are the next ones of another.
            pair = (tuple(leaves[i] for i in self._schema.columns["obs"]), nexts)
            refuse_reused_leaves(self._schema, *([_first_row(leaf) for leaf in group] for group in pair))
            doubt = self._write(leaves, nexts, envs, steps)
        if doubt is not None:
            speak(doubt)
            ReplayBuffer.extend(self, batch, env_ids=env_ids)

    def cut(self, env_ids: Any = None) -> None:
        """The current episodes were abandoned: the coming observation starts a new one."""
        with self._lock:
            envs = self._envs(env_ids)
            everything = torch.arange(self._storage.ring.num_envs, device=self.device)
            self._storage.cut(everything if envs is None else envs)
            self._listeners.restarted(env_ids)

    def clear(self) -> None:
        """Forget every row, priority and open episode; ids go on, and pending resets are remembered.

        Statistics are of the environments, not of what is stored: their running episodes go on. `cut()` ends these.
        """
        with self._lock:
            self._storage.clear()
            self._staged.clear()
            self._draws.cleared()
            self.commit()

    def commit(self) -> None:
        """Wait until everything is on the disk, where the data lives on one (device=Memory.disk(…)).

        What was committed is there after a loss of power. A process that is merely killed loses no step that was added.
        """
        with self._lock:
            if self._keeper is not None:
                self._keeper.commit()

    def close(self) -> None:
        """Commit, and be done with this buffer: every later use raises. Disk memory may then be opened by others."""
        if isinstance(self._lock, Closed):
            return
        with self._lock:
            if self._keeper is not None:
                self._keeper.close()
            self._lock = Closed()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint below the folder `path`, whole or not at all, and return its number.

        Only what is new since this buffer's last save there is written, and the newest `keep` checkpoints stay. What is
        saved is everything: rows, priorities, staged fields, open episodes, pending resets, statistics, norms and the
        generator. `relive.load(path)` goes on from it exactly.
        """
        from relive.checkpoint import save  # noqa: PLC0415 (checkpoints know every buffer)

        return save(self, path, keep=keep)

    def handle(self) -> Handle:
        """What `relive.connect` in another process takes to use this very buffer (device=Memory.shared()).

        Any number of processes may add, sample and update priorities. Each environment is written by one of them: pass
        its `env_ids`. A process that starts again after it was killed calls `cut(env_ids)` first.
        """
        from relive.concurrent.processes import handle_of  # noqa: PLC0415 (which knows this class)

        return handle_of(self)

    def _leaves(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        names = self._schema.names
        if extra or len(names) > len(values):
            for name in extra:
                self._schema.require(name)
            values += tuple(extra.get(name) for name in names[len(values) :])
        if self._staged:
            values = tuple(map(self._or_staged, names, values))
        elif self._schema.is_flat:
            return values
        return tuple(leaf for name, value in zip(names, values, strict=True) for leaf in self._flat(name, value))

    def _or_staged(self, name: str, value: Any) -> Any:
        if name not in self._staged:
            return value
        if value is not None:
            raise SchemaError(
                explain(name, "one value per step", "a second value", "It is staged already: leave it out.")
            )
        return None

    def _flat(self, name: str, value: Any) -> tuple[Any, ...]:
        return self._staged[name] if name in self._staged else self._schema.flatten(name, value)

    def _write(
        self,
        leaves: tuple[Any, ...],
        nexts: tuple[Any, ...],
        envs: torch.Tensor | None,
        steps: int | None = None,
        measured: Mapping[str, Any] = _NOTHING,
    ) -> str | None:
        """Write a step or a block; returns what looks like a mistake, once, and then has written nothing."""
        told = self._told(leaves, envs, steps) if self._listeners.columns else None
        if self._keeper is not None:
            self._keeper.expect(steps or 1)
        doubt = self._storage.write(leaves, nexts, envs, steps)
        if doubt is not None:
            return doubt
        if self._staged:
            self._staged.clear()
        if self._draws.wants_touched:
            self._draws.written()
        if told is not None:
            self._listeners.tell(*told, measured, None if envs is None else light(envs))
        return None

    def _told(
        self, leaves: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None
    ) -> tuple[dict[int, Any], Any]:
        """What the listeners hear of a write, checked before it: their columns [T, K, …], and which are transitions."""
        lead = self._storage.lead if envs is None else (len(envs),)
        lead = lead if steps is None else (steps, *lead)
        block: dict[int, Any] = {}
        for column in self._listeners.columns:
            leaf = self._conform(column, leaves[column], lead)
            block[column] = light(leaf.reshape(steps or 1, -1, *given_shape(self._schema.fields[column])))
        if not self._storage.next_step:
            return block, None
        resetting = self._storage.ring.resetting
        resets = [light(resetting.clone() if envs is None else resetting[envs])]
        ended = self._listeners.ended(block)
        for t in range(len(ended) - 1):
            resets.append(ended[t] & ~resets[-1])
        return block, ~(torch if isinstance(ended, torch.Tensor) else np).stack(resets)

    def _conform(self, column: int, leaf: Any, lead: tuple[int, ...]) -> torch.Tensor:
        field = self._schema.fields[column]
        whole = Field(given_shape(field), field.dtype)
        return conform(dotted(self._schema.paths[column]), whole, leaf, lead, self.device)

    def _envs(self, env_ids: Any) -> torch.Tensor | None:
        return None if env_ids is None else self._environments(env_ids)

    # Reading

    @answers
    def sample(
        self,
        batch_size: int,
        view: View | None = None,
        *,
        device: torch.device | str | None = None,
        out: TensorDict | None = None,
    ) -> TensorDict:
        """A batch of `batch_size` rows that the sampler chooses, read as `view` says; "index" names the rows.

        The batch is the caller's own. `out` is filled and returned instead of fresh tensors; `device` moves the batch,
        asynchronously where the memory allows it.
        """
        check_size("sample", batch_size)
        target = check_destination(device, out)
        if out is None and type(view) in _AT_ONCE:
            batch = self._sampled_at_once(batch_size, view)
            if batch is not None:
                return batch if target is None else moved(batch, target)
        if self._storage.has_neighbours and self._needs_no_lock(view, out):
            leaves = self._copied_beside_writers(batch_size)
            if leaves is not None:
                return _assembled(leaves) if target is None else moved(_assembled(leaves), target)
        with self._lock:
            chosen = self._chosen(view)
            self._require_rows()
            before = self._snapshot()
            try:
                leaves = self._drawn(batch_size, chosen)
                batch = _assembled(leaves) if out is None else fill(out, leaves)
            except BaseException:
                self._restore(before)
                raise
        return batch if target is None else moved(batch, target)

    def _sampled_at_once(self, batch_size: int, view: View | None) -> TensorDict | None:
        """Straight from the native core, where it can be: most of a small batch's time would be Python's."""
        storage = self._storage
        n, gamma = (view.most_steps(storage), view.gamma) if type(view) is NStep else (0, 0.0)
        if not storage.reads_at_once(n):
            return None
        with self._lock:
            if type(self.sampler) is Uniform:
                return storage.sample(batch_size, self._random, n, gamma)
            self._require_rows()
            room = storage.reserve(batch_size, n)
            drawn = self._draws.draw(batch_size)
            if len(drawn.slots) != batch_size:  # the rest of an epoch
                room = storage.reserve(len(drawn.slots), n)
            return storage.batch(room, drawn.slots, drawn.weight, n, gamma)

    def _require_rows(self) -> None:
        if not len(self._storage) if self.device.type == "cpu" else self._storage.is_empty:
            raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))

    def _needs_no_lock(self, view: View | None, out: TensorDict | None) -> bool:
        """Whether rows may be copied while others write: all that is read then is there as long as the row itself."""
        return (view is None or type(view) is Transition) and out is None and type(self.sampler) in _INDEPENDENT

    def _copied_beside_writers(self, batch_size: int) -> Leaves | None:
        """Rows that are chosen under the lock and copied without it; None if one was overwritten meanwhile."""
        room = self._storage.reserve(batch_size)
        with self._lock:
            self._require_rows()
            drawn = self._draws.draw(batch_size)
            ids = self._storage.ids(drawn.slots)  # now: what a slot holds a moment later may be half of a row
        leaves = self._storage.transitions(drawn.slots, room)
        with self._lock:
            if not self._storage.holds(drawn.slots, ids):
                return None
        leaves[("index",)] = ids
        if drawn.weight is not None:
            leaves[("weight",)] = drawn.weight
        return leaves

    def _snapshot(self) -> tuple[Any, Any]:
        return self._random.snapshot(), self._draws.snapshot()

    def _restore(self, before: tuple[Any, Any]) -> None:
        """The draws since have not happened."""
        self._random.restore(before[0])
        self._draws.restore(before[1])

    def _chosen(self, view: View | None) -> View:
        """The view that is meant, if these rows can be read so."""
        chosen: View = _TRANSITION if view is None else _instance("view", view, "read")
        check = getattr(chosen, "check", None)
        if check is not None:
            check(self._storage)
        return chosen

    def _drawn(self, batch_size: int, view: View) -> Leaves:
        drawn = self._draws.draw(batch_size)
        leaves = self._leaves_at(drawn.slots, view)
        if drawn.weight is not None:
            leaves[("weight",)] = drawn.weight
        return leaves

    @answers
    def update_priority(self, index: Any, priority: Any) -> int:
        """Give the rows `index` (of a batch) new priorities; returns how many were overwritten meanwhile, and skipped.

        When an index comes twice, the last priority counts. A buffer on another device than the CPU returns that number
        as a tensor there, which `int()` waits for.
        """
        with self._lock:
            update = getattr(self._draws, "update", None)
            if update is None:
                remedy = "Make the buffer with sampler=rl.Prioritized()."
                raise SchemaError(explain("update_priority", "a sampler with priorities", self.sampler, remedy))
            ids = row_ids(index, self.device)
            return update(self._storage.locate(ids), _tensor("priority", priority, self.device))

    @property
    def is_open(self) -> torch.Tensor:
        """Which environments are inside an episode [N]: the next step may go on from where the last one led."""
        with self._lock:
            return self._storage.ring.open.clone()

    def __getitem__(self, index: Any) -> TensorDict:
        """The transitions of the rows `index` [B], as `sample` would give them; of one number, its transition."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            return self[np.array([index])][0]
        return self.read(index)

    def __iter__(self, *_indices: Any) -> NoReturn:
        """Raises a TypeError that names what to loop over."""
        remedy = "Loop over replay.episodes(), read replay[replay.ids()], or draw batches with replay.sample."
        raise uniterable(self, remedy)

    __getitems__ = __iter__  # torch's DataLoader asks for a batch by it

    def read(self, index: Any, view: View | None = None) -> TensorDict:
        """The rows `index` [B] read as `view` says: what `sample` gives when the sampler has chosen them."""
        with self._lock:
            chosen = self._chosen(view)
            ids = row_ids(index, self.device)
            slots = self._storage.locate(ids)
            if (slots < 0).any():
                gone = int(ids[slots < 0][0])
                raise IndexError(explain("index", "stored rows", f"{gone}, which was overwritten", "Sample again."))
            before = self._random.snapshot()
            try:
                leaves = self._leaves_at(slots, chosen)
            except BaseException:
                self._random.restore(before)
                raise
            return _assembled(leaves)

    def _leaves_at(self, slots: torch.Tensor, view: View) -> Leaves:
        leaves = view.read(self._storage, slots, self._random)
        if ("index",) not in leaves:
            leaves[("index",)] = self._storage.ids(slots)
        return leaves

    def ids(self) -> torch.Tensor:
        """The "index" of every stored transition [len], oldest first: what `replay[…]` takes."""
        with self._lock:
            stored = stored_slots(self._storage)
            return self._storage.ids(stored).sort().values

    def episodes(self) -> Iterator[TensorDict]:
        """The stored transitions, episode by episode and oldest first, each a TensorDict `[T]` in time order.

        Each is read when it comes up: rows that were overwritten by then are left out.
        """
        with self._lock:
            pieces = ordered(self._storage).episodes()
        return filter(len, map(self._still_stored, pieces))

    def _still_stored(self, ids: torch.Tensor) -> TensorDict:
        with self._lock:
            slots = self._storage.locate(ids)
            return _assembled(self._storage.transitions(slots[slots >= 0]))

    @property
    def columns(self) -> TensorDict:
        """The whole memory as a TensorDict `[slots, num_envs]`, with "next_obs" where that is stored too.

        Row r of an environment is at slot r mod slots; what is not stored is zero, or an older row. For learning there
        is `sample`. What is shared with another process (`share_memory_`, a queue of torch.multiprocessing) is a copy.
        """
        with self._lock:
            storage = self._storage
            leaves = dict(zip(storage.schema.paths, storage.columns, strict=True))
            leaves |= dict(zip(storage.next_paths, storage.next_columns, strict=False))  # none where they are shared
            leaves = {path: alias(leaf) for path, leaf in leaves.items()}
            return assemble(leaves, torch.Size((storage.ring.slots, storage.ring.num_envs)))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, for `load_state_dict` of a buffer made alike; the tensors share its memory.

        What is shared with another process (`share_memory_`, a queue of torch.multiprocessing) is a copy.
        """
        with self._lock:
            return {
                "sampler": type(self.sampler).__name__,
                "storage": {name: alias(tensor) for name, tensor in self._storage.state_dict().items()},
                "draws": {name: alias(tensor) for name, tensor in self._draws.saved().items()},
                "random": self._random.snapshot(),
                "staged": dict(self._staged),
                "listeners": self._listeners.snapshot(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what a buffer made alike was: the same rows under the same ids, the same draws to come.

        Everything is verified before anything is replaced: a state that no such buffer can have is a SchemaError and
        changes nothing.
        """
        with self._lock:
            try:
                storage, staged = self._verified(state)
            except InvariantError as error:
                raise SchemaError(f"load_state_dict: {error}") from error
            vars(self).pop("_checkpoint", None)  # the next save must not continue from rows that are replaced
            with self._refilled():
                self._storage.load(storage)
                self._draws.resume(state["draws"])
                self._random.restore(state["random"])
                self._staged = staged
                self._listeners.restore(state["listeners"])

    def _verified(self, state: Any) -> tuple[ReplayStorage, dict[str, tuple[torch.Tensor, ...]]]:
        """The storage and the staged fields of a state, every part of which could be that of this buffer."""
        names = ("sampler", "storage", "draws", "random", "staged", "listeners")
        given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        if given != sorted(names):
            remedy = "Pass what state_dict() of a buffer gave."
            raise SchemaError(explain("load_state_dict", f"the parts {sorted(names)}", given, remedy))
        own = type(self.sampler).__name__
        if not isinstance(state["sampler"], str) or state["sampler"] != own:
            remedy = "Make the buffer with the sampler of the saved buffer."
            raise SchemaError(explain("load_state_dict", f"the state of {own}", state["sampler"], remedy))
        storage = self._storage.candidate(state["storage"])
        check_storage(storage, self.capacity)
        verify_draws(self.sampler, storage, state["draws"])
        verify_state(state["random"])
        self._listeners.verify(state["listeners"])
        return storage, self._copied_staged(state["staged"])

    def _copied_staged(self, staged: Any) -> dict[str, tuple[torch.Tensor, ...]]:
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        if not isinstance(staged, Mapping):
            remedy = "Pass what state_dict() of a buffer gave."
            raise SchemaError(explain("load_state_dict: staged", "a dict of fields", type(staged).__name__, remedy))
        for name, leaves in staged.items():
            self._schema.require(name)
            columns = self._schema.columns[name]
            if not isinstance(leaves, tuple | list) or len(leaves) != len(columns):
                got = f"{len(leaves)}" if isinstance(leaves, tuple | list) else type(leaves).__name__
                remedy = "Pass what state_dict() of a buffer gave."
                raise SchemaError(explain(f"load_state_dict: staged {name}", f"{len(columns)} tensors", got, remedy))
            pairs = zip(columns, leaves, strict=True)
            found[name] = tuple(self._conform(i, leaf, self._storage.lead).clone() for i, leaf in pairs)
        return found

    def _refilled(self) -> AbstractContextManager[None]:
        """Everything is replaced meanwhile."""
        return nullcontext() if self._keeper is None else self._keeper.refilled()

    def _in_order(self) -> AbstractContextManager[None]:
        """Rows are read from the first to the last meanwhile."""
        return nullcontext() if self._keeper is None else self._keeper.in_order()

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first thing that is wrong, and changes nothing.

        Where the data is on another device, this is where steps are reported that could not be refused there, and a
        `DataWarning` is issued. Of disk memory every row is read and compared with its checksum.
        """
        self._check_numbers()
        with self._lock, self._in_order():
            check_seals(self._storage)
        if not self._storage.chains.is_on and self.device.type != "meta":
            self._check_chains()

    def _check_chains(self) -> None:
        """Say what could not be counted while it was written."""
        with self._lock:
            chains = of_stored(self._storage)
        while (doubt := self._storage.chains.doubt(chains)) is not None:
            speak(doubt)

    def _check_numbers(self) -> None:
        with self._lock:
            check_storage(self._storage, self.capacity)
            check_staged(self._storage, self._staged)
            self._listeners.check()
            self._random.check()
            check = getattr(self._draws, "check", None)
            if check is not None and self.device.type != "meta":
                check()

    def __len__(self) -> int:
        """The number of stored transitions."""
        with self._lock:
            return len(self._storage)

    def __repr__(self) -> str:
        return (
            f"ReplayBuffer({len(self)} of {self.capacity} rows, num_envs={self.num_envs}, "
            f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "rows": f"{len(self):,} of {self.capacity:,}",
            "environments": self.num_envs,
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "sampler": self.sampler,
            "memory": f"{size_told(self.nbytes)} on {self.device}",
        }
        return buffer_card("ReplayBuffer", facts.items(), self._schema)


_TRANSITION = Transition()
_AT_ONCE = (type(None), Transition, NStep)
_INDEPENDENT = (Uniform, Prioritized)
"""Samplers whose batches have nothing to do with each other: one may be drawn and not used."""


def _instance(where: str, thing: Any, method: str) -> Any:
    if isinstance(thing, type):
        name = thing.__name__
        raise SchemaError(explain(where, f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if not hasattr(thing, method):
        raise SchemaError(
            explain(where, f"a {where} with a method {method}", repr(thing), f"Pass a {where} of relive.")
        )
    return thing


def _assembled(leaves: Leaves) -> TensorDict:
    return assemble(leaves, leaves[("index",)].shape)


def _tensor(where: str, value: Any, device: torch.device) -> torch.Tensor:
    plain = type(value) is torch.Tensor and value.dtype in DTYPES and value.layout == torch.strided
    if plain and value.device == device and not value.requires_grad:
        return value
    return as_tensor(where, value, device).to(device)


def _first_row(leaf: Any) -> Any:
    dense = isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return leaf[:1] if dense and leaf.ndim else None
