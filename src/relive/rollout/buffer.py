"""The on-policy buffer: a fixed number of steps of every environment, read in minibatches and then cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive import lazy
from relive.checkpoint.snapshot import SnapshotReader, State, savable
from relive.checkpoint.state_dict import StateDictMixin
from relive.errors import BufferFullError, SchemaError, explain
from relive.kernels import complete
from relive.kernels.sequences import Layout
from relive.locking import lock_for
from relive.rng import Randomness
from relive.rollout.advantages import Advantages, Bootstrap, FinalObservations, StepFinals, attachable_leaves
from relive.rollout.batching import (
    Epochs,
    Mode,
    parse_cuts,
    read_fresh,
    read_into,
    row_reader,
    sequence_source,
    sequences_to_device,
)
from relive.rollout.continuity import Continuity, ReusedMemory
from relive.rollout.storage import EpisodeFlags, Storage
from relive.schema.assembly import check_destination, import_tensordict, to_device
from relive.schema.autoreset import DeclaredMode, parse_autoreset, refuse_reused_obs, settings_of, unpack_step
from relive.schema.buffer_schemas import OPTIONAL, rollout_schema
from relive.schema.checks import positive
from relive.schema.declarations import device_of, tree_of
from relive.schema.fields import Declaration, Path
from relive.schema.vocabulary import suggests_keywords, suggests_methods
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.statistics.observers import Observers, observers_of
from relive.storage import Memory
from relive.storage.allocator import require_memory
from relive.storage.codec import Node

_NOTHING: Mapping[str, Any] = {}
_DECLARED, _FLAGS = ("obs", "action", "reward", "value"), ("terminated", "truncated")


@savable
@suggests_methods
class RolloutBuffer(StateDictMixin):
    """`num_steps` steps of `num_envs` environments, stored once as `[num_steps + 1, num_envs, …]`.

    Everything at index t belongs to the action taken at t.

    Args:
        num_steps: steps of every environment in one rollout.
        num_envs: environments that are stepped together. None is one environment without an environment axis.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared likewise.
        reward: one environment's reward, declared likewise; one number by default.
        value: the critic's value of one observation, declared likewise; one number by default.
        extra: further fields by name (action masks, privileged observations, …). A `log_prob` declared here replaces
            the default, which has the reward's shape.
        autoreset: how the vector environment resets: "NEXT_STEP", "SAME_STEP" or "DISABLED". `add_step` needs it.
        device: where the rollout is stored: a torch device, or a `Memory`.
        stats: counts every transition; its metrics and reasons are the fields of these names, or come from the info
            that `add_step` gets.
        norm: running norms by field (or path to a leaf). Each takes in the values of its field in every transition, not
            in rows that only reset.
        seed: seed of the shuffling; None takes one from the system.

    >>> rollout = RolloutBuffer(num_steps=2, num_envs=None, obs=3, action=())
    >>> for step in range(2):
    ...     rollout.add([step, 0, 0], 0.5, 1.0, terminated=False, truncated=False, value=0.0)
    >>> rollout.compute_advantage(last_value=0.0, gamma=1.0, lam=1.0)
    >>> rollout["advantage"]
    tensor([2., 1.])

    A critic that sees more than the policy: `obs={"policy": 4, "critic": 9}` keeps both parts, also of final
    observations; `extra={"privileged": 9}` is for fields that only the stored steps need. `minibatches` reads one part
    alone with `fields=[("obs", "critic"), "return"]`.

    Several agents are an axis (`reward=(A,), value=(A,)`) or a dict of agents; log_prob, advantages and returns are as
    the rewards are, and statistics count the sum of all. `terminated` and `truncated` are the environment's: the guide
    "On-policy" explains agents that end before it.
    """

    @suggests_keywords
    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def __init__(
        self, num_steps: int, num_envs: int | None, obs: Declaration, action: Declaration, *,
        reward: Declaration = (), value: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None, device: torch.device | str | Memory = "cpu",
        stats: EpisodeStats | None = None, norm: Norms | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.num_steps = num_steps = positive("num_steps", num_steps)
        self.num_envs = num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        self._schema = schema = rollout_schema(obs, action, reward, value, extra or {})
        self._storage = Storage(schema, num_steps + 1, num_envs, Memory.of(device), OPTIONAL)
        self.device = self._storage.device
        self._random = Randomness(seed)
        self._lock = lock_for(self)
        self._observers = Observers(stats, norm, schema, num_envs, self.device)
        self._flags = EpisodeFlags(self._storage, self.autoreset, self._observers)
        self._finals = FinalObservations(self._storage, self.autoreset)
        self._advantages = Advantages(self._storage, self._flags, self._finals)
        self._declared = DeclaredMode(self.autoreset)
        self._continuity = Continuity(schema, num_steps, self._storage.num_envs, self.autoreset)
        self._reused_memory = ReusedMemory(self._storage)

    @classmethod
    @suggests_keywords
    def for_env(
        cls, env: Any, num_steps: int, *, obs: Declaration | None = None, action: Declaration | None = None,
        reward: Declaration = (), value: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None, device: torch.device | str | Memory = "cpu",
        stats: EpisodeStats | None = None, norm: Norms | None = None, seed: int | None = None,
    ) -> RolloutBuffer:  # fmt: skip
        """A buffer for a Gymnasium environment: its spaces, its number of environments and how it resets.

        `obs`, `action` and `autoreset` replace the environment's own.
        """
        settings = settings_of(env, obs, action, autoreset)
        return cls(
            num_steps, settings.num_envs, settings.obs, settings.action, reward=reward, value=value, extra=extra,
            autoreset=settings.autoreset, device=device, stats=stats, norm=norm, seed=seed,
        )  # fmt: skip

    # Writing

    def add(
        self, obs: Any = None, action: Any = None, reward: Any = None, terminated: Any = None, truncated: Any = None,
        *, value: Any = None, log_prob: Any = None, final_obs: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step of every environment.

        `final_obs` [N, …] is the state that truncated steps led to; only the rows of truncated steps are read.
        """
        with self._lock:
            row, finals = self._storage.num_stored, None
            if row == self.num_steps:
                raise _full(row)
            if self._reused_memory.left and obs is not None:
                self._reused_memory.look_at(row, obs)
            if final_obs is not None:
                finals = self._finals.of_add(row, final_obs, terminated, truncated)
            self._write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra, finals, _NOTHING)

    def add_step(
        self, obs: Any = None, action: Any = None, step: tuple[Any, Any, Any, Any, Mapping[str, Any]] | None = None,
        *, value: Any = None, log_prob: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step as Gymnasium returns it: `step = env.step(action)`, after the observation `obs`.

        The true final observation of a truncated episode is read where the environment's autoreset mode leaves it.
        """
        unpacked = unpack_step(step, self.autoreset)
        next_obs, reward, terminated, truncated, info = unpacked
        with self._lock:
            row = self._storage.num_stored
            if row == self.num_steps:
                raise _full(row)
            refuse_reused_obs(self._schema, obs, next_obs)
            if info and self._declared.is_watching:
                self._declared.look_at(info)
            continuity = self._continuity
            if row in continuity.compared_rows or continuity.compares_all:
                continuity.look_at(row, obs, unpacked)
            measured = self._observers.measured(info, self._storage.lead, self.autoreset)
            finals = self._finals.of_step(row, unpacked)
            self._write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra, finals, measured)

    def _write(
        self, row: int, values: tuple[Any, ...], extra: dict[str, Any], finals: StepFinals | None,
        measured: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Write a step, whole or not at all."""
        try:
            self._storage.write_step(row, values, extra)
            if finals is None and not self._flags.is_observed:
                self._storage.commit(row)
            else:
                steps = self._finals.steps if finals is None else [*self._finals.steps, finals]

                def change() -> None:
                    self._finals.steps = steps
                    self._storage.commit(row)

                self._flags.count(row, 1, self._storage.missing, measured, change)
        except BaseException:
            complete(self._advantages.last.write_again)
            raise

    def stage(self, **fields: Any) -> None:
        """Copy some fields of the coming step now, before the environment overwrites them; `add` gives the others."""
        with self._lock:
            if self.is_full:
                raise _full(self.num_steps)
            try:
                self._storage.stage(fields)
            except BaseException:
                complete(self._advantages.last.write_again)
                raise

    def lend(self) -> lazy.TensorDict:
        """All of the memory as a TensorDict `[N, T + 1]`, for a collector that writes steps there itself.

        `take_back` makes the rows that it wrote the stored steps.
        """
        import_tensordict()
        with self._lock:
            return self._storage.env_major(self.num_steps, self._storage.declared_leaves())

    def take_back(self, num_steps: int | None = None) -> None:
        """Make the first `num_steps` rows of the memory (all by default), written through `lend()`, the stored steps.

        Every field counts as given, and the row after them holds the last observation and value. Attached tensors are
        forgotten; statistics count the steps that were not stored before.
        """
        count = self.num_steps if num_steps is None else num_steps
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= self.num_steps:
            remedy = "Pass the number of rows that were written."
            raise SchemaError(explain("take_back", f"0 to {self.num_steps} steps", repr(count), remedy))
        count = int(count)
        with self._lock:
            storage = self._storage
            storage.clean_bools()
            self._advantages.last.keep({})  # the collector may have written a newer one
            stored = storage.num_stored
            last = {name: storage.row(name, count) for name in ("value", "obs")}

            def change() -> None:
                storage.take_back(count)
                self._finals.steps = []
                self._flags.take_back()
                self._advantages.last.keep(last)

            self._flags.count(stored, count - stored, frozenset(), _NOTHING, change)

    def clear(self, *, restarted: bool = False) -> None:
        """Forget the stored steps and attached tensors; the environments' pending resets are remembered.

        Statistics are not cleared: running episodes go on in the next rollout.
        `restarted=True` says that `env.reset()` was called on all of them since, so that no reset row is coming and the
        running episodes will not be finished.
        """
        with self._lock:
            starting, resetting = self._flags.coming()
            if restarted:
                starting, resetting = torch.ones_like(starting), torch.zeros_like(resetting)

            def change() -> None:
                if restarted:
                    self._continuity.forget()
                    self._observers.restarted()
                self._storage.clear()
                self._finals.steps = []
                self._flags.begin_next(starting, resetting)

            complete(change)

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint below the folder `path`, whole or not at all, and return its number.

        The newest `keep` checkpoints stay. Everything is saved: rows, attached tensors, staged fields, final
        observations, hidden states, pending resets, statistics, norms and the generator. `relive.load(path)` goes on
        from it exactly.
        """
        from relive.checkpoint.saving import save  # noqa: PLC0415 (checkpoints know every buffer)

        return save(self, path, keep=keep)

    # Targets

    @property
    def final_obs(self) -> Any:
        """The true final observations [K, …] of truncated steps whose next value is not in the buffer, by t·N + n.

        The critic's value of them is `final_value` of `compute_advantage`. Under NEXT_STEP there are none: the row
        after an end holds the final observation.
        """
        import_tensordict()
        with self._lock:
            return self._finals.obs

    def compute_advantage(
        self, last_value: Any, *, last_obs: Any = None, final_value: Any = None, gamma: float = 0.99,
        lam: float = 0.95, bootstrap_truncated: Bootstrap = True,
    ) -> None:  # fmt: skip
        """Attach "advantage" and "return": generalised advantage estimation over the stored steps (see `gae`).

        `last_value` [N] is the value of the observation after the last step. `final_value` [K] is the value of
        `final_obs`. `bootstrap_truncated=False` counts truncated steps as ends instead. `"own_value"` is for simulators
        that never reveal the final observation: where the next value is unknown, the value of the step's own
        observation stands for it. That is biased, by the discounted difference of the two values. With a dict of agents
        all of them are dicts, and every agent's advantages are estimated from its own rewards and values.
        """
        with self._lock:
            self._advantages.compute(
                last_value, last_obs, final_value, bootstrap=bootstrap_truncated, gamma=gamma, lam=lam
            )

    def attach(self, named: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Let further tensors `[T, N, …]`, or dicts of them, join every batch until `clear()`; they are copied.

        A `value` or `log_prob` that the steps did not give may be among them. Adding another step forgets them all.
        """
        with self._lock:
            trees = [*({} if named is None else named).items(), *fields.items()]
            complete(partial(self._storage.attach, attachable_leaves(trees, self._storage)))

    # Reading

    def minibatches(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False,
        fields: Iterable[str | Path] | None = None, device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> Iterator[lazy.TensorDict]:  # fmt: skip
        """Every valid transition once an epoch, in batches `[B]` of the caller's own memory.

        `fields` names the fields to read (all by default); `out` is filled and returned instead of fresh tensors.
        "index" is t·N + n.
        """
        positive("batch_size", batch_size)
        positive("epochs", epochs)
        target = check_destination(device, out)
        with self._lock:
            source, leaves = row_reader(self._storage, fields)
            rows = self._flags.transitions()
            plan = Epochs(rows, batch_size, epochs, shuffle=shuffle, random=self._random, device=self.device)
            if drop_last:
                plan.drop_last("minibatches", f"{batch_size} transitions")
            if out is None:
                read = read_fresh(source, leaves, True)
            else:
                read = read_into(out, source, leaves, batch_size, self.device)
                plan.require_full("transitions")
            batches = plan.batches(read, self._lock, self._check_not_cleared())
        return batches if target is None else (to_device(batch, target) for batch in batches)

    def _check_not_cleared(self) -> Callable[[], None]:
        return partial(self._storage.check_not_cleared, self._storage.generation)

    def sequences(
        self, length: int | None = None, *, batch_size: int | None = None, mode: Mode = "chunked",
        split_episodes: bool = True, keep_tail: bool = True, epochs: int = 1, shuffle: bool = True,
        drop_last: bool = False, layout: Layout = "batch_first", fields: Iterable[str | Path] | None = None,
        device: torch.device | str | None = None,
    ) -> Iterator[lazy.TensorDict]:  # fmt: skip
        """Runs of `length` steps of one environment, for truncated back-propagation through time.

        `length=None` takes whole episodes. `mode` says where sequences start: "chunked" one after the other, "overlap"
        half a length apart, "every" at all steps. Ends of episodes cut them, unless `split_episodes=False`. Steps that
        full sequences leave over become one shorter sequence, unless `keep_tail=False`; an episode shorter than
        `length` is always one sequence.

        A batch has batch size [B]: steps are [B, L, …], zero where "mask" [B, L] is False; "is_first" [B, L] says which
        steps start an episode; `Carry` fields [B, …] are those of each sequence's first step, whose t·N + n is "index"
        [B]. Unshuffled, sequences are in order of environments, then time. `batch_size=None` is one batch of all;
        `drop_last` keeps B constant. `layout="time_first"` gives steps as [L, B, …]; `"packed"` gives them without
        padding, so that `PackedSequence(batch["obs"], batch["batch_sizes"])` is an input of torch's recurrent networks.
        """
        cuts = parse_cuts(length, mode, split_episodes, keep_tail, layout)
        target = check_destination(device)
        positive("epochs", epochs)
        with self._lock:
            count, source, paths = sequence_source(self._storage, self._flags, cuts, layout, fields)
            size = max(count, 1) if batch_size is None else positive("batch_size", batch_size)
            steps = min(size, count) * (length or self.num_steps)
            row = self._storage.nbytes // (self.num_steps * self._storage.num_envs)
            require_memory(steps * (row + 16), "sequences", "Pass a smaller length or batch_size.")
            plan = Epochs(count, size, epochs, shuffle=shuffle, random=self._random, device=self.device)
            if drop_last:
                plan.drop_last("sequences", f"{size} or more sequences")
            read = read_fresh(source, paths, layout == "batch_first")  # other layouts have no axis [B] in front
            batches = plan.batches(read, self._lock, self._check_not_cleared())
        return batches if target is None else (sequences_to_device(batch, target) for batch in batches)

    @property
    def data(self) -> lazy.TensorDict:
        """The stored steps as a TensorDict `[T, N]` sharing the buffer's memory, with "mask" and attached tensors."""
        import_tensordict()
        with self._lock:
            storage = self._storage
            steps = storage.require_steps("data")
            return storage.time_major(steps, {**storage.leaves(), ("mask",): self._flags.whole_mask(steps)})

    @property
    def columns(self) -> lazy.TensorDict:
        """The whole memory as a TensorDict `[num_steps, N]`, with attached tensors.

        It has every declared field, also an optional one that the steps left out. After the `num_stored` first rows
        there are zeros, or an older rollout. For learning there is `data`.
        """
        import_tensordict()
        with self._lock:
            storage = self._storage
            return storage.time_major(self.num_steps, storage.declared_leaves() | storage.attached)

    def env_major(self) -> lazy.TensorDict:
        """The rollout as a TensorDict `[N, T + 1]` that shares the buffer's memory.

        The last slot holds `last_obs` and `last_value` of `compute_advantage`; its other fields are zero, and so are
        these before it.
        """
        import_tensordict()
        with self._lock:
            storage = self._storage
            steps = storage.require_complete_steps("env_major")
            if not self._advantages.last.leaves:
                storage.zero(steps)
            return storage.env_major(steps, storage.leaves())

    def __getitem__(self, name: str | Path) -> Any:
        """One field of the stored steps `[T, N, …]`, sharing the buffer's memory."""
        if not isinstance(name, str | tuple):
            remedy = "A step is rollout.data[t], a batch comes from minibatches."
            raise TypeError(explain("rollout[...]", "the name of a field", repr(name), remedy))
        data = self.data
        try:
            return data[name]
        except KeyError:
            first = name if isinstance(name, str) else name[0]
            expected = f"one of {', '.join(map(str, data.keys()))}"
            message = self._storage.explain_absence(first) if first not in data.keys() else None
            raise KeyError(message or explain("rollout", expected, repr(name), "See rollout.data.")) from None

    def __contains__(self, name: object) -> bool:
        """Whether there is such a field, or path to a leaf: a `value` or `log_prob` only if the steps gave it."""
        path = name if isinstance(name, tuple) else (name,)
        with self._lock:
            leaves = (*self._storage.leaves(), ("mask",)) if self._storage.num_stored else ()
        return any(leaf[: len(path)] == path for leaf in leaves)

    _loop_over = "Loop over minibatches(batch_size) or sequences(length); rollout.data has the steps."

    # State

    @classmethod
    def from_config(cls, config: Node, saved: SnapshotReader, **changes: Any) -> RolloutBuffer:
        """An empty buffer of this config, but for a change of device; see `relive.load`."""
        arguments = _arguments_of(config, saved, **changes)
        saved.require_columns({})
        schema = rollout_schema(*(arguments[name] for name in (*_DECLARED, "extra")))
        rows = arguments["num_steps"] + 1, arguments["num_envs"] or 1
        for i, field in enumerate(schema.fields):  # a size that is only claimed takes no memory
            saved.require_form(f"rows.column{i}", (*rows, *field.shape), field.dtype)
        return cls(**arguments)

    def config(self) -> dict[str, Any]:
        """The arguments of an equal, empty buffer, as JSON."""
        trees = self._schema.config()
        return {
            "num_steps": self.num_steps,
            "num_envs": self.num_envs,
            **{name: trees[name] for name in _DECLARED},
            "extra": {name: tree for name, tree in trees.items() if name not in (*_DECLARED, *_FLAGS)},
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "device": str(self.device),
            "listeners": self._observers.config(),
        }

    def state(self) -> State:
        """Everything that changes; all of it is saved every time."""
        parts: dict[str, State] = {}
        for name, part in self._parts().items():
            if name == "random":
                parts["carries"] = State({}, {})  # format 1 has this entry, which is always empty
            parts[name] = part.state()
        return State.of_parts(parts)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; raises a CorruptCheckpoint for a state that no rollout can have."""
        self._continuity.forget()
        for name, part in self._parts().items():
            part.load_state(saved.part(name))

    def rows(self) -> None:
        """Always None: rows may still change, so that `state` holds all of them."""

    def _parts(self) -> dict[str, Any]:
        """The parts of the rollout by their names in files, in the order of loading."""
        return {
            "rows": self._storage,
            "flags": self._flags,
            "finals": self._finals,
            "last": self._advantages.last,
            "random": self._random,
            "listeners": self._observers,
        }

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first thing that is wrong, and changes nothing."""
        with self._lock:
            for part in self._parts().values():
                part.check()

    def __len__(self) -> int:
        """The number of stored transitions; rows that only reset do not count."""
        with self._lock:
            steps = self._storage.num_stored
            mask = self._flags.mask(steps)
            return steps * self._storage.num_envs if mask is None else int(mask.sum())

    def __repr__(self) -> str:
        size = f"{self.num_stored} of {self.num_steps} steps, num_envs={self.num_envs}"
        return f"RolloutBuffer({size}, fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"

    @property
    def stats(self) -> EpisodeStats | None:
        """The statistics that every transition is counted in."""
        return self._observers.stats

    @property
    def norm(self) -> dict[str | Path, RunningNorm]:
        """The norms that take in every transition, by field or path."""
        return self._observers.norm

    @property
    def nbytes(self) -> int:
        """Bytes of the steps and of attached tensors."""
        with self._lock:
            return self._storage.nbytes

    @property
    def num_stored(self) -> int:
        """The number of steps added since the start or the last `clear()`."""
        return self._storage.num_stored

    @property
    def is_full(self) -> bool:
        """Whether all `num_steps` steps are stored."""
        return self._storage.num_stored == self.num_steps


def _full(num_steps: int) -> BufferFullError:
    remedy = "Train on the rollout, then clear() it."
    return BufferFullError(explain("add", f"at most {num_steps} steps", num_steps + 1, remedy))


def _arguments_of(config: Node, saved: SnapshotReader, *, device: Any = None, **_other: Any) -> dict[str, Any]:
    """The arguments of a saved rollout buffer."""
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    return {
        "num_steps": config.entry("num_steps").integer(1, 1 << 50),
        "num_envs": envs,
        **{name: tree_of(config.entry(name)) for name in _DECLARED},
        "extra": {name: tree_of(tree) for name, tree in config.entry("extra").entries().items()},
        "autoreset": None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)],
        "device": device or device_of(config.entry("device")),
        **observers_of(config.entry("listeners"), saved.part_without_values("listeners"), envs),
    }
