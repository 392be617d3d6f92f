"""The on-policy buffer: a fixed number of steps of every environment, read in minibatches and then cleared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive import lazy
from relive.checkpoint.snapshot import State, register_buffer
from relive.checkpoint.state_dict import StateDictMixin
from relive.errors import BufferFullError, SchemaError, explain
from relive.kernels import complete
from relive.kernels.sequences import Layout
from relive.locking import make_lock
from relive.rng import Randomness
from relive.rollout.advantages import AdvantageEstimation, Bootstrap, FinalObservations, convert_attached_leaves
from relive.rollout.batching import (
    SequenceMode,
    iter_epochs,
    make_fresh_reader,
    make_out_reader,
    make_row_reader,
    make_sequence_source,
    move_sequences,
    parse_sequence_spec,
)
from relive.rollout.continuity import ContinuityCheck, ReusedMemoryCheck
from relive.rollout.storage import EpisodeFlags, FinalRows, Storage
from relive.schema.assembly import check_destination, import_tensordict, to_device
from relive.schema.autoreset import (
    AutoresetModeChecker,
    parse_autoreset_mode,
    read_env_settings,
    refuse_reused_obs,
    unpack_step,
)
from relive.schema.checks import check_positive_int, type_name
from relive.schema.fields import Declaration, Path, make_rollout_schema, parse_declaration, parse_device
from relive.schema.suggestions import suggests_keywords, suggests_methods
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.statistics.observers import Observers, read_saved_observers
from relive.storage import Memory
from relive.storage.allocator import require_host_memory
from relive.storage.codec import JsonNode, SnapshotReader

_NO_MEASUREMENTS: Mapping[str, Any] = {}
_DECLARED_FIELDS, _FLAG_FIELDS = ("obs", "action", "reward", "value"), ("terminated", "truncated")


@register_buffer
@suggests_methods
class RolloutBuffer(StateDictMixin):
    """Buffer of `num_steps` steps of `num_envs` environments, stored as `[num_steps + 1, num_envs, …]`.

    Everything at index t belongs to the action taken at t.

    Args:
        num_steps: steps per environment in one rollout.
        num_envs: number of environments that step together. None is one environment without an environment axis.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared likewise.
        reward: one environment's reward, declared likewise; one number by default.
        value: the critic's value of one observation, declared likewise; one number by default.
        extra: additional fields by name (recurrent states, an expert's action, …). A `log_prob` declared here replaces
            the default, which has the shape of the reward.
        autoreset: how the vector environment resets: "NEXT_STEP", "SAME_STEP" or "DISABLED". `add_step` needs it.
        device: where the rollout is stored: a torch device, or a `Memory`.
        stats: episode statistics, updated with every transition. Its metrics and reasons are read from the fields with
            these names, or from the info passed to `add_step`.
        norm: running norms by field, or by path to a leaf, updated with every transition; dummy steps are ignored.
        seed: seed of the shuffling; by default a seed from the system.

    >>> rollout = RolloutBuffer(num_steps=2, num_envs=None, obs=3, action=())
    >>> for step in range(2):
    ...     rollout.add([step, 0, 0], 0.5, 1.0, terminated=False, truncated=False, value=0.0)
    >>> rollout.compute_advantage(last_value=0.0, gamma=1.0, lam=1.0)
    >>> rollout["advantage"]
    tensor([2., 1.])

    If the critic sees more than the policy, `obs={"policy": 4, "critic": 9}` stores both parts, also of final
    observations; `extra={"privileged": 9}` stores a field of the steps only. `minibatches` reads a single part with
    `fields=[("obs", "critic"), "return"]`.

    Several agents are an axis (`reward=(A,), value=(A,)`) or a dict of agents; log_prob, advantages and returns have
    the structure of the rewards, and statistics count the sum over agents. `terminated` and `truncated` belong to the
    environment: the guide "On-policy" explains agents that end earlier.
    """

    @suggests_keywords
    # Tensors that are made in inference mode could not be written outside it.
    @torch.inference_mode(False)
    def __init__(
        self, num_steps: int, num_envs: int | None, obs: Declaration, action: Declaration, *,
        reward: Declaration = (), value: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None, device: torch.device | str | Memory = "cpu",
        stats: EpisodeStats | None = None, norm: Norms | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.num_steps = num_steps = check_positive_int("num_steps", num_steps)
        self.num_envs = num_envs = None if num_envs is None else check_positive_int("num_envs", num_envs)
        self.autoreset = parse_autoreset_mode(autoreset)
        self._schema = schema = make_rollout_schema(obs, action, reward, value, extra or {})
        self._storage = Storage(schema, num_steps + 1, num_envs, Memory.of(device))
        self.device = self._storage.device
        self._random = Randomness(seed)
        self._lock = make_lock(self)
        self._observers = Observers(stats, norm, schema, num_envs, self.device)
        self._flags = EpisodeFlags(self._storage, self.autoreset, self._observers)
        self._finals = FinalObservations(self._storage, self.autoreset)
        self._advantages = AdvantageEstimation(self._storage, self._flags)
        self._declared_mode = AutoresetModeChecker(self.autoreset)
        self._continuity = ContinuityCheck(schema, num_steps, self._storage.num_envs, self.autoreset)
        self._reused_memory = ReusedMemoryCheck(self._storage)

    @classmethod
    @suggests_keywords
    def for_env(
        cls, env: Any, num_steps: int, *, obs: Declaration | None = None, action: Declaration | None = None,
        reward: Declaration = (), value: Declaration = (), extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None, device: torch.device | str | Memory = "cpu",
        stats: EpisodeStats | None = None, norm: Norms | None = None, seed: int | None = None,
    ) -> RolloutBuffer:  # fmt: skip
        """Return a buffer for a Gymnasium environment, with its spaces, number of environments and autoreset mode.

        `obs`, `action` and `autoreset` override the environment's.
        """
        settings = read_env_settings(env, obs, action, autoreset)
        return cls(
            num_steps, settings.num_envs, settings.obs, settings.action, reward=reward, value=value, extra=extra,
            autoreset=settings.autoreset, device=device, stats=stats, norm=norm, seed=seed,
        )  # fmt: skip

    def add(
        self, obs: Any = None, action: Any = None, reward: Any = None, terminated: Any = None, truncated: Any = None,
        *, value: Any = None, log_prob: Any = None, final_obs: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step of every environment.

        `final_obs` [N, …] is the observation after the step, before a reset; it is read for truncated steps only.
        """
        with self._lock:
            row, finals = self._storage.num_stored, None
            if row == self.num_steps:
                raise _full_error(row)
            if self._reused_memory.num_remaining and obs is not None:
                self._reused_memory.check_obs(row, obs)
            if final_obs is not None:
                finals = self._finals.select_from_obs(row, final_obs, terminated, truncated)
            self._write_step(
                row, (obs, action, reward, terminated, truncated, value, log_prob), extra, finals, _NO_MEASUREMENTS
            )

    def add_step(
        self, obs: Any = None, action: Any = None, step: tuple[Any, Any, Any, Any, Mapping[str, Any]] | None = None,
        *, value: Any = None, log_prob: Any = None, **extra: Any,
    ) -> None:  # fmt: skip
        """Store one step as Gymnasium returns it: `step = env.step(action)`, taken at the observation `obs`.

        The final observation of a truncated episode is read from where the autoreset mode puts it.
        """
        step_values = unpack_step(step, self.autoreset)
        next_obs, reward, terminated, truncated, info = step_values
        with self._lock:
            row = self._storage.num_stored
            if row == self.num_steps:
                raise _full_error(row)
            refuse_reused_obs(self._schema, obs, next_obs)
            if info and self._declared_mode.is_watching:
                self._declared_mode.check_info(info)
            continuity = self._continuity
            if row in continuity.compared_rows or continuity.compares_all:
                continuity.check_step(row, obs, step_values)
            measurements = self._observers.read_measurements(info, self._storage.leading_shape, self.autoreset)
            finals = self._finals.select_from_step(row, step_values)
            values = obs, action, reward, terminated, truncated, value, log_prob
            self._write_step(row, values, extra, finals, measurements)

    def _write_step(
        self, row: int, values: tuple[Any, ...], extra: dict[str, Any], finals: FinalRows | None,
        measurements: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store a step with the final observations `finals`; an exception leaves the rollout unchanged."""
        storage = self._storage
        try:
            storage.write_step(row, values, extra)
            all_finals = None if finals is None else [*storage.finals, finals]
            if self._flags.is_observed:
                self._flags.count_rows(
                    row, 1, storage.lacks_optional, measurements, partial(storage.commit_row, row, all_finals)
                )
            else:
                storage.commit_row(row, all_finals)
        except BaseException:
            complete(self._advantages.last.restore_row)
            raise

    def stage(self, **fields: Any) -> None:
        """Copy fields of the next step before the environment overwrites them; pass the other fields to `add`."""
        with self._lock:
            if self.is_full:
                raise _full_error(self.num_steps)
            try:
                self._storage.stage(fields)
            except BaseException:
                complete(self._advantages.last.restore_row)
                raise

    def lend(self) -> lazy.TensorDict:
        """Return the whole memory as a TensorDict `[N, T + 1]`, for a collector that writes steps into it.

        Call `take_back` afterwards.
        """
        import_tensordict()
        with self._lock:
            return self._storage.view_env_major(self.num_steps, self._storage.declared_leaves())

    def take_back(self, num_steps: int | None = None) -> None:
        """Make the first `num_steps` rows, written through `lend()`, the stored steps; by default all rows.

        The steps have every field, and the row after the last step holds the last observation and value. Attached
        tensors are removed, and statistics count the new steps.
        """
        count = self.num_steps if num_steps is None else num_steps
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= self.num_steps:
            remedy = "Pass the number of rows that were written."
            raise SchemaError(explain("take_back", f"0 to {self.num_steps} steps", repr(count), remedy))
        count = int(count)
        with self._lock:
            storage = self._storage
            storage.clean_bools()
            # The last value is discarded, because the collector may have overwritten its row.
            self._advantages.last.set_leaves({})
            num_stored = storage.num_stored
            last = {name: storage.copy_row(name, count) for name in ("value", "obs")}

            def change() -> None:
                storage.take_back(count)
                self._flags.update_next_resets()
                self._advantages.last.set_leaves(last)

            self._flags.count_rows(num_stored, count - num_stored, (False, False), _NO_MEASUREMENTS, change)

    def clear(self, *, restarted: bool = False) -> None:
        """Remove the stored steps and attached tensors; pending resets of the environments are kept.

        Statistics are not cleared: running episodes continue in the next rollout.
        Pass `restarted=True` after `env.reset()` of all environments: no dummy step follows, and running episodes are
        dropped from the statistics.
        """
        with self._lock:
            starts, resets = self._flags.next_row_masks()
            if restarted:
                starts, resets = torch.ones_like(starts), torch.zeros_like(resets)

            def change() -> None:
                if restarted:
                    self._continuity.forget_previous_obs()
                    self._observers.drop_running_episodes()
                self._storage.clear()
                self._flags.begin_rollout(starts, resets)

            complete(change)

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint into the folder `path`, whole or not at all, and return its number.

        The newest `keep` checkpoints stay. Everything is saved: rows, attached tensors, staged fields, final
        observations, hidden states, pending resets, statistics, norms and the generator. `relive.load(path)` restores
        exactly this state.
        """
        from relive.checkpoint.saving import save  # noqa: PLC0415 (checkpoint imports every buffer)

        return save(self, path, keep=keep)

    @property
    def final_obs(self) -> Any:
        """Final observations [K, …] of truncated steps, in the order of t·N + n.

        Pass the critic's values of these observations to `compute_advantage` as `final_value`. Under NEXT_STEP K is 0:
        the row after an end holds the final observation.
        """
        import_tensordict()
        with self._lock:
            return self._finals.all_final_obs

    def compute_advantage(
        self, last_value: Any, *, last_obs: Any = None, final_value: Any = None, gamma: float = 0.99,
        lam: float = 0.95, bootstrap_truncated: Bootstrap = True,
    ) -> None:  # fmt: skip
        """Attach "advantage" and "return": generalised advantage estimation over the stored steps (see `gae`).

        `last_value` [N] is the value of the observation after the last step. `final_value` [K] is the value of
        `final_obs`. `bootstrap_truncated=False` treats truncated steps as terminated. `"own_value"` is for simulators
        that never reveal the final observation: the value of the step's own observation replaces an unknown next
        value, with a bias of the discounted difference of the two. With a dict of agents, `last_value` and
        `final_value` are dicts, and each agent's advantages are computed from its own rewards and values.
        """
        with self._lock:
            self._advantages.attach_targets(
                last_value, last_obs, final_value, bootstrap=bootstrap_truncated, gamma=gamma, lam=lam
            )

    def attach(self, by_name: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Add tensors `[T, N, …]`, or dicts of them, to every batch until `clear()`; they are copied.

        They may include a `value` or `log_prob` that was not passed to `add`. Adding another step removes them.
        """
        with self._lock:
            if by_name is not None and not hasattr(by_name, "items"):
                got, remedy = type_name(by_name), "Pass a dict, or keyword arguments."
                raise SchemaError(explain("attach", "a dict of tensors by name", got, remedy))
            trees = [*({} if by_name is None else by_name).items(), *fields.items()]
            complete(partial(self._storage.attach, convert_attached_leaves(trees, self._storage)))

    def minibatches(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False,
        fields: Iterable[str | Path] | None = None, device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> Iterator[lazy.TensorDict]:  # fmt: skip
        """Yield every transition once per epoch, in batches `[B]`; a batch does not share the buffer's memory.

        `fields` names the fields to read (all by default); `out` is filled and yielded instead of new tensors.
        "index" is t·N + n.
        """
        check_positive_int("batch_size", batch_size)
        check_positive_int("epochs", epochs)
        target = check_destination(device, out)
        with self._lock:
            source, leaves = make_row_reader(self._storage, fields)
            if out is None:
                read = make_fresh_reader(source, leaves, True)
            else:
                parts = (self._storage, self._flags, self._advantages.last)
                own_tensors = [tensor for part in parts for tensor in part.state().arrays.values()]
                read = make_out_reader(out, source, leaves, batch_size, own_tensors)
            batches = iter_epochs(
                read, self._flags.transition_rows(), batch_size, epochs, shuffle=shuffle, drop_last=drop_last,
                reads_into_out=out is not None, where="minibatches", unit="transitions", random=self._random,
                device=self.device, lock=self._lock, check_items=self._storage.make_clear_check(),
            )  # fmt: skip
        return batches if target is None else (to_device(batch, target) for batch in batches)

    def sequences(
        self, length: int | None = None, *, batch_size: int | None = None, mode: SequenceMode = "chunked",
        split_episodes: bool = True, keep_tail: bool = True, epochs: int = 1, shuffle: bool = True,
        drop_last: bool = False, layout: Layout = "batch_first", fields: Iterable[str | Path] | None = None,
        device: torch.device | str | None = None,
    ) -> Iterator[lazy.TensorDict]:  # fmt: skip
        """Yield sequences of `length` steps of one environment, for truncated back-propagation through time.

        `length=None` yields whole episodes. `mode` sets the start of sequences: "chunked" one after the other,
        "overlap" half a length apart, "every" at every step. Sequences stop at the end of an episode, unless
        `split_episodes=False`. Steps after the last full sequence become a shorter one, unless `keep_tail=False`; an
        episode shorter than `length` is always one sequence.

        A batch has batch size [B]: steps are [B, L, …], zero where "mask" [B, L] is False; "is_first" [B, L] is True at
        steps that start an episode; `Carry` fields [B, …] and "index" [B] (t·N + n) are read at the first step of each
        sequence. Without `shuffle`, sequences are sorted by environment, then time. `batch_size=None` is one batch of
        all sequences; `drop_last` keeps B constant. `layout="time_first"` returns steps as [L, B, …]; `"packed"`
        returns them without padding, for torch's `PackedSequence(batch["obs"], batch["batch_sizes"])`.
        """
        spec = parse_sequence_spec(length, mode, split_episodes, keep_tail, layout)
        target = check_destination(device)
        check_positive_int("epochs", epochs)
        with self._lock:
            count, source, paths = make_sequence_source(self._storage, self._flags, spec, layout, fields)
            size = max(count, 1) if batch_size is None else check_positive_int("batch_size", batch_size)
            steps = min(size, count) * (length or self.num_steps)
            row = self._storage.nbytes // (self.num_steps * self._storage.num_envs)
            require_host_memory(steps * (row + 16), "sequences", "Pass a smaller length or batch_size.")
            read = make_fresh_reader(source, paths, layout == "batch_first")
            batches = iter_epochs(
                read, count, size, epochs, shuffle=shuffle, drop_last=drop_last, reads_into_out=False,
                where="sequences", unit="sequences", random=self._random, device=self.device, lock=self._lock,
                check_items=self._storage.make_clear_check(),
            )  # fmt: skip
        return batches if target is None else (move_sequences(batch, target) for batch in batches)

    @property
    def data(self) -> lazy.TensorDict:
        """Stored steps as a TensorDict `[T, N]` that shares the buffer's memory, with "mask" and attached tensors."""
        import_tensordict()
        with self._lock:
            storage = self._storage
            steps = storage.require_steps("data")
            leaves = {**storage.present_leaves(), ("mask",): self._flags.full_transition_mask(steps)}
            return storage.view_time_major(steps, leaves)

    @property
    def columns(self) -> lazy.TensorDict:
        """Whole memory as a TensorDict `[num_steps, N]`, with attached tensors.

        It has every declared field, also optional fields that the steps do not have. Rows after the first `num_stored`
        are zeros or belong to an older rollout. Use `data` for learning.
        """
        import_tensordict()
        with self._lock:
            storage = self._storage
            return storage.view_time_major(self.num_steps, storage.declared_leaves() | storage.attached)

    def env_major(self) -> lazy.TensorDict:
        """Return the rollout as a TensorDict `[N, T + 1]` that shares the buffer's memory.

        The last row holds `last_obs` and `last_value` of `compute_advantage`, and zeros in the other fields; before
        `compute_advantage` all of it is zero.
        """
        import_tensordict()
        with self._lock:
            storage = self._storage
            steps = storage.require_complete_steps("env_major")
            if not self._advantages.last.current_leaves:
                storage.zero_row(steps)
            return storage.view_env_major(steps, storage.present_leaves())

    def __getitem__(self, name: str | Path) -> Any:
        """Return one field of the stored steps `[T, N, …]`; it shares the buffer's memory."""
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
        """Whether the rollout has this field or path; `value` and `log_prob` only if they were passed or attached."""
        path = name if isinstance(name, tuple) else (name,)
        with self._lock:
            leaves = (*self._storage.present_leaves(), ("mask",)) if self._storage.num_stored else ()
        return any(leaf[: len(path)] == path for leaf in leaves)

    _loop_over = "Loop over minibatches(batch_size) or sequences(length); rollout.data has the steps."

    @classmethod
    def from_config(cls, config: JsonNode, saved: SnapshotReader, **changes: Any) -> RolloutBuffer:
        """Return an empty buffer of this config, on another device if `changes` has one; see `relive.load`."""
        num_envs, autoreset = config.entry("num_envs").none_if_null(), config.entry("autoreset").none_if_null()
        envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
        arguments = {
            "num_steps": config.entry("num_steps").integer(1, 1 << 50),
            "num_envs": envs,
            **{name: parse_declaration(config.entry(name)) for name in _DECLARED_FIELDS},
            "extra": {name: parse_declaration(tree) for name, tree in config.entry("extra").entries().items()},
            "autoreset": None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)],
            "device": changes.get("device") or parse_device(config.entry("device")),
            **read_saved_observers(config.entry("listeners"), saved.part_without_values("listeners"), envs),
        }
        saved.require_columns({})
        schema = make_rollout_schema(*(arguments[name] for name in (*_DECLARED_FIELDS, "extra")))
        rows = arguments["num_steps"] + 1, arguments["num_envs"] or 1
        # Sizes are compared with the saved arrays first: an untrusted size must not allocate memory.
        for i, field in enumerate(schema.fields):
            saved.require_array(f"rows.column{i}", (*rows, *field.shape), field.dtype)
        return cls(**arguments)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON."""
        trees = self._schema.config()
        return {
            "num_steps": self.num_steps,
            "num_envs": self.num_envs,
            **{name: trees[name] for name in _DECLARED_FIELDS},
            "extra": {name: tree for name, tree in trees.items() if name not in (*_DECLARED_FIELDS, *_FLAG_FIELDS)},
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "device": str(self.device),
            "listeners": self._observers.config(),
        }

    def state(self) -> State:
        """Return the state to save, including the rows."""
        parts: dict[str, State] = {}
        for name, part in self._state_parts().items():
            if name == "random":
                # Format 1 requires this entry, which is always empty.
                parts["carries"] = State({}, {})
            parts[name] = part.state()
        return State.of_parts(parts)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; raise a CorruptCheckpoint if it is inconsistent."""
        self._continuity.forget_previous_obs()
        # Format 1 requires the entry "carries": `part` raises an error if it is missing.
        saved.part("carries")
        for name, part in self._state_parts().items():
            part.load_state(saved.part(name))

    def rows(self) -> None:
        """Return None: every row may still change, so `state` returns all rows."""

    def _state_parts(self) -> dict[str, Any]:
        """Return the parts of the rollout by their names in files, in the order of loading."""
        return {
            "rows": self._storage,
            "flags": self._flags,
            "finals": self._finals,
            "last": self._advantages.last,
            "random": self._random,
            "listeners": self._observers,
        }

    def check(self) -> None:
        """Verify every invariant; raise an InvariantError for the first violation. Nothing is changed."""
        with self._lock:
            for part in self._state_parts().values():
                part.check()

    def __len__(self) -> int:
        """Number of stored transitions, without dummy steps."""
        with self._lock:
            steps = self._storage.num_stored
            mask = self._flags.transition_mask(steps)
            return steps * self._storage.num_envs if mask is None else int(mask.sum())

    def __repr__(self) -> str:
        size = f"{self.num_stored} of {self.num_steps} steps, num_envs={self.num_envs}"
        return f"RolloutBuffer({size}, fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"

    @property
    def stats(self) -> EpisodeStats | None:
        """Episode statistics of the stored transitions; None without statistics."""
        return self._observers.stats

    @property
    def norm(self) -> dict[str | Path, RunningNorm]:
        """Running norms by field or path."""
        return self._observers.norm

    @property
    def nbytes(self) -> int:
        """Bytes of the steps and of attached tensors."""
        with self._lock:
            return self._storage.nbytes

    @property
    def num_stored(self) -> int:
        """Number of steps added since the start or the last `clear()`."""
        return self._storage.num_stored

    @property
    def is_full(self) -> bool:
        """Whether all `num_steps` steps are stored."""
        return self._storage.num_stored == self.num_steps


def _full_error(num_steps: int) -> BufferFullError:
    remedy = "Train on the rollout, then clear() it."
    return BufferFullError(explain("add", f"at most {num_steps} steps", num_steps + 1, remedy))
